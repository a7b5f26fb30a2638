//! Guesses from the text itself: what followed the last tokens when they stood there before.
//!
//! A. Saxena, "Prompt Lookup Decoding" (2023).

use std::collections::HashMap;

use trellis_guest::Token;

/// Tokens that have to stand there twice before anything is guessed.
const N_MATCH_MIN: usize = 3;

/// All tokens so far, and where each run of three stood last.
pub(crate) struct Lookup {
    tokens: Vec<Token>,
    /// The place after the latest of these three tokens that something follows.
    after: HashMap<[Token; N_MATCH_MIN], usize>,
}

impl Lookup {
    pub(crate) fn new(tokens: Vec<Token>) -> Self {
        let mut lookup = Self { tokens: Vec::new(), after: HashMap::new() };
        lookup.extend(tokens);
        lookup
    }

    pub(crate) fn extend(&mut self, tokens: impl IntoIterator<Item = Token>) {
        for token in tokens {
            if let Some(&last) = self.tokens.last_chunk() {
                self.after.insert(last, self.tokens.len());
            }
            self.tokens.push(token);
        }
    }

    /// At most `n` tokens. The longer the match, the more is guessed: what is copied goes on, what repeats by chance ends
    /// soon.
    pub(crate) fn guess(&self, n: usize) -> Vec<Token> {
        let place = self.tokens.last_chunk().and_then(|last| self.after.get(last));
        let Some(&place) = place else { return Vec::new() };
        let before = self.tokens[..place].iter().rev().zip(self.tokens.iter().rev());
        let n_match = before.take_while(|(then, now)| then == now).count();
        let n_guess = n.min(n_match + 1 - N_MATCH_MIN);
        self.tokens[place..].iter().copied().take(n_guess).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_followed_is_guessed_the_further_the_longer_it_matches() {
        let mut lookup = Lookup::new(vec![1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert!(lookup.guess(15).is_empty(), "nothing has come twice");
        lookup.extend([2, 3]);
        assert!(lookup.guess(15).is_empty(), "two tokens may be chance");
        lookup.extend([4]);
        assert_eq!(lookup.guess(15), [5]);
        lookup.extend([5, 6]);
        assert_eq!(lookup.guess(15), [7, 8, 9]);
        assert_eq!(lookup.guess(2), [7, 8]);
        assert!(lookup.guess(0).is_empty());
        // The latest place counts.
        lookup.extend([0, 4, 5, 6]);
        assert_eq!(lookup.guess(15), [0]);
    }

    #[test]
    fn a_loop_is_guessed_as_far_as_it_is_written() {
        let lookup = Lookup::new([1, 2].repeat(10));
        assert_eq!(lookup.guess(15), [1, 2]);
    }
}
