//! A set of tokens that may be drawn.

use serde::{Deserialize, Serialize};

use crate::batch::Token;

/// One bit for each token of the vocabulary; set means allowed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct TokenMask {
    words: Vec<u64>, // [ceil(vocab_size / 64)], bits past the vocabulary are 0
    vocab_size: usize,
}

/// A mask on its way, which is checked where it arrives.
#[derive(Deserialize)]
struct Unchecked {
    words: Vec<u64>,
    vocab_size: usize,
}

impl TryFrom<Unchecked> for TokenMask {
    type Error = &'static str;

    fn try_from(Unchecked { words, vocab_size }: Unchecked) -> Result<Self, &'static str> {
        Self::from_words(words, vocab_size).ok_or("a mask of as many words as its vocabulary fills")
    }
}

impl TokenMask {
    /// A mask that allows nothing.
    #[must_use]
    pub fn none(vocab_size: usize) -> Self {
        Self { words: vec![0; vocab_size.div_ceil(64)], vocab_size }
    }

    /// A mask that allows everything.
    #[must_use]
    pub fn all(vocab_size: usize) -> Self {
        let mut mask = Self::none(vocab_size);
        for token in 0..vocab_size {
            mask.set(token as Token, true);
        }
        mask
    }

    /// A mask of these bits, 64 tokens a word, lowest bit first; bits past the vocabulary count for nothing. `None` where
    /// there are more words than the vocabulary fills, or fewer.
    #[must_use]
    pub fn from_words(mut words: Vec<u64>, vocab_size: usize) -> Option<Self> {
        if words.len() != vocab_size.div_ceil(64) {
            return None;
        }
        if let (Some(last), n_bits @ 1..) = (words.last_mut(), vocab_size % 64) {
            *last &= (1 << n_bits) - 1;
        }
        Some(Self { words, vocab_size })
    }

    /// Allows or forbids one token. Tokens past the vocabulary are ignored.
    pub fn set(&mut self, token: Token, allowed: bool) {
        if (token as usize) < self.vocab_size {
            let bit = 1u64 << (token % 64);
            let word = &mut self.words[token as usize / 64];
            *word = if allowed { *word | bit } else { *word & !bit };
        }
    }

    /// Whether the token may be drawn.
    #[must_use]
    pub fn allows(&self, token: Token) -> bool {
        (token as usize) < self.vocab_size && self.words[token as usize / 64] >> (token % 64) & 1 == 1
    }

    /// What both allow.
    ///
    /// # Panics
    /// They are for different vocabularies.
    #[must_use]
    pub fn and(mut self, other: &Self) -> Self {
        assert_eq!(self.vocab_size, other.vocab_size, "masks of one vocabulary");
        self.words.iter_mut().zip(&other.words).for_each(|(word, other)| *word &= other);
        self
    }

    /// Tokens that the mask covers, allowed or not.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Tokens that may be drawn.
    #[must_use]
    pub fn n_allowed(&self) -> usize {
        self.words.iter().map(|w| w.count_ones() as usize).sum()
    }

    /// The tokens that may be drawn, in order.
    pub fn allowed(&self) -> impl Iterator<Item = Token> {
        let words = self.words.iter().enumerate();
        words.flat_map(|(idx, &word)| {
            let rests =
                std::iter::successors(Some(word), |&rest| rest.checked_sub(1).map(|less| rest & less));
            let bits = rests.take_while(|&rest| rest != 0).map(u64::trailing_zeros);
            bits.map(move |bit| (64 * idx) as Token + bit)
        })
    }

    /// The bits, 64 tokens a word, lowest bit first.
    #[must_use]
    pub fn words(&self) -> &[u64] {
        &self.words
    }
}
