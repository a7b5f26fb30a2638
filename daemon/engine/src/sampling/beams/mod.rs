//! Beam search, defined once: which continuations of a prompt go on, which are finished, and when the search is over.
//!
//! A *hypothesis* is a continuation with the sum of its log-probabilities, in f32. In each step every live one is continued
//! by every token, and of each group the best of what comes of that go on:
//!
//! 1. What a row gives are log-probabilities after whatever a sampler makes of them; the sum so far is added after that.
//! 2. The candidates of a group are taken best first, ties to the better hypothesis, then to the more probable token, then
//!    to the lower one. As many of them as a group has beams, of those that go on, are the next live ones.
//! 3. A candidate that ends (a stop token, or the most tokens) is finished if it is among the best of all candidates, as many
//!    as the group has beams; what is worse does not count, because something better runs on.
//! 4. A finished hypothesis scores its sum over its number of tokens to the power of the length penalty. A group keeps as many
//!    of them as it has beams.
//! 5. A group with so many is done by [`EarlyStopping`], and has no more live ones then.
//!
//! The source is Hugging Face transformers: `_beam_search` of version 5 for one group, and for several
//! (Vijayakumar and others, "Diverse Beam Search", 2018) `_group_beam_search` with `BeamSearchScorer` and
//! `HammingDiversityLogitsProcessor` of versions before 4.55, where groups go one after the other and each takes the diversity penalty off
//! the log-probability of a token for every time that the groups before it have gone on with that token in this step.
//! A group that is done takes nothing off. Where the two sources differ, one group follows the first: its bound for the running ones is
//! the best of them, where the second takes the best candidate, ended or not; and at the most tokens it finishes all that is
//! among the best, where the second does so only in groups that are not done by then.
//!
//! Of a row no more candidates are looked at than can matter: the beams of a group, and the stop tokens, and those that a
//! penalty may push behind others.

mod chains;
mod merge;
mod search;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

pub use self::search::{Finished, Kept, Live, Row, Search};
use super::SamplerError;
use crate::batch::Token;

/// The most beams of a search, all groups together.
pub const N_BEAMS_MAX: usize = 512;

/// The most stop tokens of a search.
pub const N_STOP_TOKENS_MAX: usize = 256;

/// When a group with as many finished hypotheses as beams is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum EarlyStopping {
    /// When the best running one, scored at its present length, is no better than the worst finished one.
    #[default]
    Heuristic,
    /// At once.
    AtOnce,
    /// When the best running one cannot become better than the worst finished one at any length.
    Never,
}

/// What a search is to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BeamSettings {
    /// Hypotheses that live at once, 1 to [`N_BEAMS_MAX`].
    pub n_beams: usize,
    /// Groups of as many beams each, which divide `n_beams`.
    pub n_groups: usize,
    /// Taken off the log-probability of a token for every time that an earlier group goes on with it; at least 0.
    pub diversity_penalty: f32,
    /// A score is the sum of log-probabilities over the number of tokens to the power of this; finite.
    pub length_penalty: f64,
    /// When to stop.
    pub early_stopping: EarlyStopping,
    /// The longest hypothesis, at least 1 token.
    pub n_tokens_max: usize,
    /// Tokens that end a hypothesis, and belong to it; at most [`N_STOP_TOKENS_MAX`].
    pub stop_tokens: Vec<Token>,
}

impl BeamSettings {
    /// So many beams in one group, for so many tokens that nothing ends before, scored as Hugging Face scores them unless told.
    #[must_use]
    pub fn of(n_beams: usize, n_tokens_max: usize) -> Self {
        Self {
            n_beams,
            n_groups: 1,
            diversity_penalty: 0.0,
            length_penalty: 1.0,
            early_stopping: EarlyStopping::default(),
            n_tokens_max,
            stop_tokens: Vec::new(),
        }
    }

    /// Beams of one group.
    #[must_use]
    pub fn n_group_beams(&self) -> usize {
        self.n_beams / self.n_groups
    }

    /// Checks all ranges.
    ///
    /// # Errors
    /// A setting is outside its range, or a stop token outside the vocabulary.
    pub fn validate(&self, vocab_size: usize) -> Result<(), SamplerError> {
        let refuse = |name, value: f32, expected| Err(SamplerError::OutOfRange { name, value, expected });
        if !(1..=N_BEAMS_MAX).contains(&self.n_beams) {
            return refuse("n-beams", self.n_beams as f32, "1 to 512");
        }
        if self.n_groups == 0 || !self.n_beams.is_multiple_of(self.n_groups) {
            return Err(SamplerError::Groups { n_groups: self.n_groups, n_beams: self.n_beams });
        }
        if !(self.diversity_penalty.is_finite() && self.diversity_penalty >= 0.0) {
            return refuse("diversity-penalty", self.diversity_penalty, "finite, at least 0");
        }
        if !self.length_penalty.is_finite() {
            return refuse("length-penalty", self.length_penalty as f32, "finite");
        }
        if self.n_tokens_max == 0 {
            return refuse("max-tokens", 0.0, "at least 1");
        }
        if self.stop_tokens.len() > N_STOP_TOKENS_MAX {
            return Err(SamplerError::TooMany {
                what: "stop-tokens",
                n: self.stop_tokens.len(),
                max: N_STOP_TOKENS_MAX,
            });
        }
        match self.stop_tokens.iter().find(|&&token| token as usize >= vocab_size) {
            Some(&token) => Err(SamplerError::TokenOutOfRange { token, vocab_size }),
            None => Ok(()),
        }
    }

    /// The score of a sum of log-probabilities over so many tokens.
    fn score(&self, logprob: f32, n_tokens: usize) -> f32 {
        logprob / (n_tokens as f64).powf(self.length_penalty) as f32
    }

    /// Candidates of one row that can matter, of a vocabulary of this size.
    fn n_top(&self, vocab_size: usize) -> usize {
        let n_group = self.n_group_beams();
        let n_pushed_back = if self.diversity_penalty > 0.0 { self.n_beams - n_group } else { 0 };
        (n_group + self.stop_tokens.len() + n_pushed_back).min(vocab_size)
    }
}
