//! What the operator puts in front of everybody's samplers: tokens that nobody draws, and a program whose row is what samplers
//! and programs have for the logits.
//!
//! - A token is not drawn that is forbidden, or at −∞ in the program's row: by no chain, program, mask, bias or constraint. Where
//!   nothing else is left a draw finds no token.
//! - The program's row takes the place of the logits, in the log-probabilities that a beam search ranks too, and of those of
//!   each other member of a mixture. What a sampler says itself comes after it.
//! - Log-probabilities that are reported, `top`, `score` and whole rows are the model's, untouched.
//!
//! What comes of a sampler is worked out once, and kept while the sampler lives.

mod behind;
mod check;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, PoisonError, Weak};

use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use trellis_programs::Definition;

pub use self::check::OperatorError;
use super::program::{Program, ProgramId, RowShape};
use super::{Sampler, TokenMask};
use crate::batch::Token;

/// The most operations of the operator's program.
pub const N_FRONT_OPERATIONS_MAX: usize = 48;
/// Operations of the operator's program that depend on the logits: they are made again for each member of a mixture.
pub const N_FRONT_OVER_LOGITS_MAX: usize = 8;
/// The most readings of the row that the operator's program may cost, beside those of everybody's own.
pub const FRONT_COST_MAX: f32 = 4.0;

/// Samplers and programs of which it is kept what came of them.
const N_KEPT_MAX: usize = 256;

/// What a sampler is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Purpose {
    /// It draws tokens, with so many other members.
    Draws {
        /// Of the mixture.
        n_members: usize,
    },
    /// A beam search ranks rows by it.
    Ranks,
}

/// What stands in front of everybody's samplers for one model.
#[derive(Debug)]
pub struct Operator {
    shape: RowShape,
    n_forbidden: usize,
    /// What may be drawn, if anything may not.
    allowed: Option<Arc<TokenMask>>,
    front: Option<Program>,
    kept: Mutex<Kept>,
}

/// What stands in front of everybody's samplers, as data.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct OperatorData {
    forbidden: Vec<Token>,
    front: Option<Definition>,
    shape: RowShape,
}

impl OperatorData {
    /// What it is the data of.
    pub(crate) fn operator(&self) -> Result<Option<Operator>, OperatorError> {
        Operator::new(&self.forbidden, self.front.clone(), self.shape)
    }
}

#[derive(Debug, Default)]
struct Kept {
    /// By the place of the sampler, which is its own as long as it lives.
    samplers: FxHashMap<(usize, Purpose), (Weak<Sampler>, Arc<Sampler>)>,
    programs: FxHashMap<(ProgramId, usize), Arc<Program>>,
    /// The mask that came of a late one last.
    mask: Option<(Weak<TokenMask>, Arc<TokenMask>)>,
}

impl Operator {
    /// Forbids these tokens, and puts this program in front; `None` where there would be nothing to do.
    ///
    /// # Errors
    /// A token that the vocabulary does not have, a vocabulary of which nothing is left, or a program that may not stand there.
    pub fn new(
        forbidden: &[Token],
        front: Option<Definition>,
        shape: RowShape,
    ) -> Result<Option<Self>, OperatorError> {
        let mut mask = TokenMask::all(shape.vocab_size);
        for &token in forbidden {
            if token as usize >= shape.vocab_size {
                return Err(OperatorError::TokenOutOfRange { token, vocab_size: shape.vocab_size });
            }
            mask.set(token, false);
        }
        let n_forbidden = shape.vocab_size - mask.n_allowed();
        if n_forbidden == shape.vocab_size {
            return Err(OperatorError::NothingLeft { n_forbidden });
        }
        let front = front.map(|definition| check::front(definition, shape)).transpose()?;
        if n_forbidden == 0 && front.is_none() {
            return Ok(None);
        }
        let allowed = (n_forbidden > 0).then(|| Arc::new(mask));
        Ok(Some(Self { shape, n_forbidden, allowed, front, kept: Mutex::default() }))
    }

    /// The same as data.
    pub(crate) fn data(&self) -> OperatorData {
        let is_forbidden = |token: &Token| self.allowed.as_ref().is_some_and(|mask| !mask.allows(*token));
        OperatorData {
            forbidden: (0..self.shape.vocab_size as Token).filter(is_forbidden).collect(),
            front: self.front.as_ref().map(|front| front.definition().clone()),
            shape: self.shape,
        }
    }

    /// Tokens that are forbidden.
    #[must_use]
    pub fn n_forbidden(&self) -> usize {
        self.n_forbidden
    }

    /// The operations of its program.
    #[must_use]
    pub fn n_operations(&self) -> usize {
        self.front.as_ref().map_or(0, |front| front.definition().operations.len())
    }

    /// The sampler behind what the operator puts in front of it. It has passed [`Sampler::validate`], or
    /// [`Sampler::validate_for_search`] where it ranks.
    pub(crate) fn before(&self, sampler: &Arc<Sampler>, purpose: Purpose) -> Arc<Sampler> {
        let key = (Arc::as_ptr(sampler) as usize, purpose);
        let mut kept = self.kept();
        if let Some((_, behind)) = kept.samplers.get(&key).filter(|(of, _)| is_of(of, sampler)) {
            return behind.clone();
        }
        let behind = Arc::new(self.behind(sampler, purpose, &mut kept));
        kept.samplers.retain(|_, (of, _)| of.strong_count() > 0);
        if kept.samplers.len() >= N_KEPT_MAX {
            kept.samplers.clear();
        }
        kept.samplers.insert(key, (Arc::downgrade(sampler), behind.clone()));
        behind
    }

    /// What of this mask may be drawn.
    pub(crate) fn within(&self, mask: &Arc<TokenMask>) -> Arc<TokenMask> {
        let Some(allowed) = &self.allowed else { return mask.clone() };
        let mut kept = self.kept();
        if let Some((_, within)) = kept.mask.as_ref().filter(|(of, _)| is_of(of, mask)) {
            return within.clone();
        }
        let within = Arc::new(both(mask, allowed));
        kept.mask = Some((Arc::downgrade(mask), within.clone()));
        within
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_of<T>(weak: &Weak<T>, strong: &Arc<T>) -> bool {
    std::ptr::eq(weak.as_ptr(), Arc::as_ptr(strong))
}

/// What both allow; nothing where they are for different vocabularies.
fn both(mask: &TokenMask, allowed: &TokenMask) -> TokenMask {
    match mask.vocab_size() == allowed.vocab_size() {
        true => mask.clone().and(allowed),
        false => TokenMask::none(mask.vocab_size()),
    }
}
