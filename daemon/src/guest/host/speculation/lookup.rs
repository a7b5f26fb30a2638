//! Guesses from texts: what followed the last tokens where they stood before.
//!
//! A. Saxena, "Prompt Lookup Decoding" (2023).

use std::sync::Arc;

use trellis_engine::N_GUESS_MAX;
use trellis_engine::batch::{Token, Tokens};

/// Tokens that have to stand there twice before anything is guessed.
const N_MATCH_MIN: usize = 3;

/// Tokens of a context that are looked through, from its end: a search takes a few microseconds.
const N_BACK_MAX: usize = 1 << 12;

/// Texts in which the last tokens may stand.
#[derive(Debug)]
pub(super) struct Lookup {
    /// Those that the guest gave.
    texts: Arc<[Vec<Token>]>,
    /// What was guessed where no guess was verified, to see whether it would have been right.
    pending: Vec<Token>,
    n_pending_right: usize,
    /// How many tokens of such guesses are right, lately.
    n_right: f64,
}

impl Lookup {
    pub(super) fn new(texts: Vec<Vec<Token>>) -> Self {
        Self { texts: texts.into(), pending: Vec::new(), n_pending_right: 0, n_right: 0.0 }
    }

    /// At most `n` tokens. The longer the match, the more is guessed: what is copied goes on, what repeats by chance ends
    /// soon. A loop is guessed to go on.
    pub(super) fn guess(&self, tokens: Tokens<'_>, n: usize) -> Vec<Token> {
        let first = tokens.len().saturating_sub(N_BACK_MAX);
        let own = tokens.copy_of(first..tokens.len());
        let Some(last) = own.last_chunk::<N_MATCH_MIN>() else { return Vec::new() };
        // The context's own text comes first: it is nearer. What is found has to have a token behind it.
        let found = latest(&own[..own.len() - 1], last).map(|end| (&own[..], end));
        let found = found.or_else(|| {
            self.texts.iter().find_map(|text| {
                let end = latest(text, last).filter(|&end| end < text.len())?;
                Some((&text[..], end))
            })
        });
        let Some((text, end)) = found else { return Vec::new() };
        let n_match = text[..end].iter().rev().zip(own.iter().rev()).take_while(|(a, b)| a == b).count();
        let n = n.min(n_match + 1 - N_MATCH_MIN);
        let is_own = std::ptr::eq(text, &own[..]);
        let mut guess: Vec<Token> = Vec::with_capacity(n);
        for place in end..end + n {
            match text.get(place) {
                Some(&token) => guess.push(token),
                None if is_own => guess.push(guess[place - text.len()]),
                None => break,
            }
        }
        guess
    }

    /// Whether guesses would have been right lately, by more than a token.
    pub(super) fn promises(&self) -> bool {
        self.n_right >= 1.5
    }

    /// A token came without guesses: what would have been guessed is compared with it.
    pub(super) fn follow(&mut self, tokens: Tokens<'_>, token: Token) {
        if let Some(&expected) = self.pending.get(self.n_pending_right) {
            self.n_pending_right += usize::from(expected == token);
            if expected == token && self.n_pending_right < self.pending.len() {
                return;
            }
            self.n_right += 0.25 * (self.n_pending_right as f64 - self.n_right);
        }
        (self.pending, self.n_pending_right) = (self.guess(tokens, N_GUESS_MAX), 0);
    }

    /// So many of a guess were right.
    pub(super) fn note(&mut self, n_right: usize) {
        self.n_right += 0.25 * (n_right as f64 - self.n_right);
        self.pending.clear();
        self.n_pending_right = 0;
    }
}

/// Where these tokens stand last in a text: the place behind them.
fn latest(text: &[Token], wanted: &[Token; N_MATCH_MIN]) -> Option<usize> {
    text.windows(N_MATCH_MIN).rposition(|window| window == wanted).map(|start| start + N_MATCH_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guess(lookup: &Lookup, tokens: &[Token], n: usize) -> Vec<Token> {
        lookup.guess(tokens.into(), n)
    }

    #[test]
    fn what_followed_is_guessed_the_further_the_longer_it_matches() {
        let lookup = Lookup::new(Vec::new());
        let text = [1, 2, 3, 4, 5, 6, 7, 8, 9];
        assert!(guess(&lookup, &text, 15).is_empty(), "nothing has come twice");
        let then = |more: &[Token]| [&text[..], more].concat();
        assert!(guess(&lookup, &then(&[2, 3]), 15).is_empty(), "two tokens may be chance");
        assert_eq!(guess(&lookup, &then(&[2, 3, 4]), 15), [5]);
        assert_eq!(guess(&lookup, &then(&[2, 3, 4, 5, 6]), 15), [7, 8, 9]);
        assert_eq!(guess(&lookup, &then(&[2, 3, 4, 5, 6]), 2), [7, 8]);
        assert!(guess(&lookup, &then(&[2, 3, 4]), 0).is_empty());
        // The latest place counts.
        assert_eq!(guess(&lookup, &then(&[2, 3, 4, 5, 6, 0, 4, 5, 6]), 15), [0]);
        assert_eq!(guess(&lookup, &[1, 2, 3].repeat(10), 7), [1, 2, 3, 1, 2, 3, 1], "a loop goes on");
        assert!(guess(&lookup, &[1, 2], 7).is_empty());
    }

    #[test]
    fn texts_of_the_guest_are_looked_through_behind_its_own() {
        let lookup = Lookup::new(vec![vec![9, 9], vec![5, 6, 7, 8, 1, 2]]);
        assert_eq!(guess(&lookup, &[0, 5, 6, 7], 15), [8]);
        assert_eq!(guess(&lookup, &[5, 6, 7, 8], 15), [1, 2]);
        assert_eq!(guess(&lookup, &[5, 6, 7, 3, 0, 5, 6, 7], 15), [3], "its own is nearer");
        assert!(guess(&lookup, &[8, 1, 2], 15).is_empty(), "nothing follows there");
    }

    #[test]
    fn what_would_have_been_right_is_seen_without_a_verification() {
        let mut lookup = Lookup::new(Vec::new());
        let mut tokens: Vec<Token> = (0..40).collect();
        for token in (0..40).chain(0..40) {
            assert!(!lookup.promises() || tokens.len() > 45);
            tokens.push(token);
            lookup.follow((&tokens).into(), token);
        }
        assert!(lookup.promises());
        for token in 1000..1020 {
            tokens.push(token);
            lookup.follow((&tokens).into(), token);
            lookup.note(0);
        }
        assert!(!lookup.promises());
    }
}
