//! What is added to logits, as a row that a program takes.

use serde::{Deserialize, Serialize};

use super::SamplerError;
use crate::batch::Token;

/// One number for each token, 0 where none is given.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub enum Bias {
    /// For a few tokens, by rising token.
    Sparse(Vec<(Token, f32)>),
    /// For all.
    Dense(Vec<f32>), // [vocab_size]
}

/// A bias on its way, which is checked where it arrives, but for its tokens: the vocabulary is not known there.
#[derive(Deserialize)]
#[serde(rename = "Bias")]
enum Unchecked {
    Sparse(Vec<(Token, f32)>),
    Dense(Vec<f32>),
}

impl TryFrom<Unchecked> for Bias {
    type Error = SamplerError;

    fn try_from(bias: Unchecked) -> Result<Self, SamplerError> {
        match bias {
            Unchecked::Sparse(entries) => Self::sparse(entries, Token::MAX as usize + 1),
            Unchecked::Dense(values) => {
                let n_tokens = values.len();
                Self::dense(values, n_tokens)
            }
        }
    }
}

impl Bias {
    /// A bias for a few tokens. Of two for one token the later one counts.
    ///
    /// # Errors
    /// A token that the vocabulary does not have; a number that is NaN or +∞.
    pub fn sparse(entries: Vec<(Token, f32)>, vocab_size: usize) -> Result<Self, SamplerError> {
        let mut entries = entries;
        if let Some(&(token, _)) = entries.iter().find(|(token, _)| *token as usize >= vocab_size) {
            return Err(SamplerError::TokenOutOfRange { token, vocab_size });
        }
        check(entries.iter().map(|&(_, value)| value))?;
        // Stable: the later one of a token comes last, and first when turned round.
        entries.reverse();
        entries.sort_by_key(|&(token, _)| token);
        entries.dedup_by_key(|&mut (token, _)| token);
        // What is paid for is what is kept.
        entries.shrink_to_fit();
        Ok(Self::Sparse(entries))
    }

    /// A bias for all tokens.
    ///
    /// # Errors
    /// There are more or fewer numbers than tokens; a number is NaN or +∞.
    pub fn dense(values: Vec<f32>, vocab_size: usize) -> Result<Self, SamplerError> {
        if values.len() != vocab_size {
            return Err(SamplerError::MaskSize { n_tokens: values.len(), vocab_size });
        }
        check(values.iter().copied())?;
        let mut values = values;
        values.shrink_to_fit();
        Ok(Self::Dense(values))
    }

    /// Checks one that came from elsewhere.
    pub(super) fn validate(&self, vocab_size: usize) -> Result<(), SamplerError> {
        match self {
            Self::Dense(values) if values.len() != vocab_size => {
                Err(SamplerError::MaskSize { n_tokens: values.len(), vocab_size })
            }
            Self::Dense(_) => Ok(()),
            Self::Sparse(entries) => match entries.iter().find(|(token, _)| *token as usize >= vocab_size) {
                Some(&(token, _)) => Err(SamplerError::TokenOutOfRange { token, vocab_size }),
                None => Ok(()),
            },
        }
    }

    /// Writes it over a row of zeros.
    pub(super) fn write(&self, row: &mut [f32]) {
        match self {
            Self::Sparse(entries) => entries.iter().for_each(|&(token, value)| row[token as usize] = value),
            Self::Dense(values) => row.copy_from_slice(values),
        }
    }

    /// The memory that it takes.
    #[must_use]
    pub fn n_bytes(&self) -> usize {
        match self {
            Self::Sparse(entries) => std::mem::size_of_val(entries.as_slice()),
            Self::Dense(values) => std::mem::size_of_val(values.as_slice()),
        }
    }
}

/// −∞ forbids a token; +∞ and NaN have no meaning.
fn check(mut values: impl Iterator<Item = f32>) -> Result<(), SamplerError> {
    match values.find(|value| value.is_nan() || *value == f32::INFINITY) {
        Some(value) => Err(SamplerError::OutOfRange { name: "bias", value, expected: "a number below +inf" }),
        None => Ok(()),
    }
}
