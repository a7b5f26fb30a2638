//! Sampler settings, validated once.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::TokenMask;
use super::program::{DrawState, PutOn};
use crate::batch::Token;
use crate::port::{Name, names, shared_option};

/// Settings of one draw. The fields are checked by [`Sampler::validate`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampler {
    /// 0 for greedy, otherwise the divisor of the logits.
    pub temperature: f32,
    /// Keep the k largest logits.
    pub top_k: Option<u32>,
    /// Keep the smallest set of tokens that reaches this probability, in (0, 1].
    pub top_p: Option<f32>,
    /// Drop tokens below this share of the largest probability, in [0, 1].
    pub min_p: Option<f32>,
    /// Divides positive and multiplies negative logits of seen tokens; 1 for none.
    pub repetition_penalty: f32,
    /// Subtracted once for each occurrence; 0 for none.
    pub frequency_penalty: f32,
    /// Subtracted once for a seen token; 0 for none.
    pub presence_penalty: f32,
    /// How many of the last tokens the penalties look at; all when `None`.
    pub penalty_last_n: Option<u32>,
    /// Added to the logits.
    pub bias: Vec<(Token, f32)>,
    /// The tokens that may be drawn; all when `None`.
    #[serde(with = "shared_option")]
    pub mask: Option<Arc<TokenMask>>,
    /// Key of the random draws.
    pub seed: u64,
    /// Draws in the place of all the settings above but the seed.
    pub program: Option<Box<PutOn>>,
    /// What is reported with each token that a run or a verification draws. It changes no draw.
    pub looks: Looks,
}

/// What is looked at in the place of a draw.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Looks {
    /// How many of the most probable tokens, under the model, before any sampler setting.
    pub n_top: usize,
    /// Hidden states of the token before the draw, each after so many layers; see
    /// [`OutputKind::Hidden`](crate::batch::OutputKind::Hidden).
    pub hidden: Vec<usize>,
}

impl Default for Sampler {
    fn default() -> Self {
        Self::greedy()
    }
}

impl Sampler {
    /// Bytes of host memory that are its own. Masks, biases and programs are shared, and on somebody's account.
    #[must_use]
    pub fn n_bytes(&self) -> usize {
        let of_program = self.program.as_ref().map_or(0, |put_on| {
            let PutOn { parameters, masks, biases, .. } = &**put_on;
            size_of::<PutOn>() + size_of_val(&**parameters) + size_of_val(&**masks) + size_of_val(&**biases)
        });
        size_of::<Self>() + size_of_val(&*self.bias) + size_of_val(&*self.looks.hidden) + of_program
    }

    /// Whether any penalty is on.
    #[must_use]
    pub fn penalizes(&self) -> bool {
        self.repetition_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0
    }

    /// How many of the last of `n_tokens` tokens the penalties look at.
    #[must_use]
    pub fn n_penalized(&self, n_tokens: usize) -> usize {
        match self.penalizes() {
            true => self.penalty_last_n.map_or(n_tokens, |n| n_tokens.min(n as usize)),
            false => 0,
        }
    }

    /// How many of the last of `n_tokens` tokens a draw looks at.
    #[must_use]
    pub fn n_history(&self, n_tokens: usize) -> usize {
        match &self.program {
            Some(put_on) => put_on.program.n_history(n_tokens),
            None => self.n_penalized(n_tokens),
        }
    }

    /// Where its first draw starts.
    #[must_use]
    pub fn start(&self) -> DrawState {
        self.program.as_ref().map_or_else(DrawState::default, |put_on| put_on.start)
    }

    /// Takes the most probable token.
    #[must_use]
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: None,
            top_p: None,
            min_p: None,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            penalty_last_n: None,
            bias: Vec::new(),
            mask: None,
            seed: 0,
            program: None,
            looks: Looks::default(),
        }
    }

    /// Checks every setting against its range and the vocabulary.
    ///
    /// # Errors
    /// The first setting out of range, with its value and what was expected.
    pub fn validate(&self, vocab_size: usize) -> Result<(), SamplerError> {
        let checks = [
            ("temperature", self.temperature, self.temperature >= 0.0, "a number of at least 0"),
            ("top-p", self.top_p.unwrap_or(1.0), in_unit(self.top_p, false), "a number in (0, 1]"),
            ("min-p", self.min_p.unwrap_or(0.0), in_unit(self.min_p, true), "a number in [0, 1]"),
            (
                "repetition-penalty",
                self.repetition_penalty,
                self.repetition_penalty > 0.0,
                "a number above 0",
            ),
            ("frequency-penalty", self.frequency_penalty, true, "a finite number"),
            ("presence-penalty", self.presence_penalty, true, "a finite number"),
        ];
        for (name, value, holds, expected) in checks {
            if !(value.is_finite() && holds) {
                return Err(SamplerError::OutOfRange { name, value, expected });
            }
        }
        if self.top_k == Some(0) {
            return Err(SamplerError::OutOfRange { name: "top-k", value: 0.0, expected: "at least 1" });
        }
        for &(token, value) in &self.bias {
            if token as usize >= vocab_size {
                return Err(SamplerError::TokenOutOfRange { token, vocab_size });
            }
            // -∞ forbids a token; +∞ and NaN have no meaning.
            if value.is_nan() || value == f32::INFINITY {
                return Err(SamplerError::OutOfRange {
                    name: "bias",
                    value,
                    expected: "a number below +inf",
                });
            }
        }
        if let Some(put_on) = &self.program {
            put_on.validate(vocab_size)?;
        }
        match &self.mask {
            Some(mask) if mask.vocab_size() != vocab_size => {
                Err(SamplerError::MaskSize { n_tokens: mask.vocab_size(), vocab_size })
            }
            _ => Ok(()),
        }
    }
}

fn in_unit(value: Option<f32>, zero_allowed: bool) -> bool {
    value.is_none_or(|v| v <= 1.0 && (v > 0.0 || (zero_allowed && v == 0.0)))
}

/// A setting out of range.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
pub enum SamplerError {
    /// A number outside its range.
    #[error("{name} is {value}, expected {expected}")]
    OutOfRange {
        /// The setting.
        #[serde(with = "names")]
        name: Name,
        /// Its value.
        value: f32,
        /// The range.
        #[serde(with = "names")]
        expected: Name,
    },
    /// A parameter of a program that is no number to reckon with.
    #[error("parameter {idx} is {value}, expected a finite number")]
    Parameter {
        /// Which, from 0 on.
        idx: usize,
        /// Its value.
        value: f32,
    },
    /// Beams that come in no such number of groups of one size.
    #[error("n-groups is {n_groups}, expected a divisor of n-beams, which is {n_beams}")]
    Groups {
        /// Groups that were asked for.
        n_groups: usize,
        /// Beams of all groups.
        n_beams: usize,
    },
    /// A biased token that the model does not have.
    #[error("token {token} is out of range: the vocabulary has {vocab_size} entries")]
    TokenOutOfRange {
        /// The token.
        token: Token,
        /// Entries of the vocabulary.
        vocab_size: usize,
    },
    /// A program that ends in a row does not draw.
    #[error("the program ends in a row, and a draw takes one that ends in a token")]
    EndsInARow,
    /// A program that does not end in a row of its own.
    #[error("a beam search takes a program that ends in a row and keeps nothing from token to token")]
    EndsInNoRow,
    /// A program is given more of something than it can name.
    #[error("a program is given {n} {what}, at most {max} are allowed")]
    TooMany {
        /// Of what.
        #[serde(with = "names")]
        what: Name,
        /// How many.
        n: usize,
        /// How many there may be.
        max: usize,
    },
    /// A mask made for another vocabulary.
    #[error("the mask covers {n_tokens} tokens, the vocabulary has {vocab_size}")]
    MaskSize {
        /// Tokens the mask covers.
        n_tokens: usize,
        /// Entries of the vocabulary.
        vocab_size: usize,
    },
}
