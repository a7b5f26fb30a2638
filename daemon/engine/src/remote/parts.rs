//! What the samplers of a process have in common.
//!
//! Where a guest is, samplers share their masks and biases, and each of these is paid for once. On its way every sampler becomes a
//! copy of its own, and a run has one as long as it lives. Here what is alike becomes one again.

use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::sync::{Arc, Weak};

use rustc_hash::FxHashMap;

use super::near::Violation;
use crate::sampling::{Bias, Sampler, TokenMask};

/// Parts that are smaller stay copies: that costs less than to find them.
const SMALL_BYTES: usize = 1 << 10;

/// Below that nothing is looked at.
const LOOK_BYTES: u64 = 4 << 20;

/// What engines may still have of what its guest has let go of, beside what guests may have.
const LET_GO_BYTES: u64 = 256 << 20;

/// A mask that the host makes of a rule for the next token of a context, in the largest vocabularies. Nobody pays for it.
const MASK_BYTES: u64 = 32 << 10;

/// Something that samplers share.
trait Part: PartialEq {
    fn n_bytes(&self) -> usize;
    fn hash_into(&self, hasher: &mut impl Hasher);
}

impl Part for TokenMask {
    fn n_bytes(&self) -> usize {
        size_of_val(self.words())
    }

    fn hash_into(&self, hasher: &mut impl Hasher) {
        self.words().hash(hasher);
    }
}

impl Part for Bias {
    fn n_bytes(&self) -> usize {
        Bias::n_bytes(self)
    }

    fn hash_into(&self, hasher: &mut impl Hasher) {
        match self {
            Bias::Sparse(entries) => {
                entries.iter().for_each(|(token, value)| (token, value.to_bits()).hash(hasher))
            }
            Bias::Dense(values) => values.iter().for_each(|value| hasher.write_u32(value.to_bits())),
        }
    }
}

/// Parts of one kind that engines have.
#[derive(Debug)]
struct Pool<T> {
    known: FxHashMap<u64, Weak<T>>,
    /// Of those that were there at the last look, and of all that have come since.
    n_bytes: usize,
}

impl<T: Part> Pool<T> {
    fn new() -> Self {
        Self { known: FxHashMap::default(), n_bytes: 0 }
    }

    /// Takes the place of a copy where there is the same already.
    fn share(&mut self, part: &mut Arc<T>, keys: &RandomState) {
        if part.n_bytes() < SMALL_BYTES {
            return;
        }
        let mut hasher = keys.build_hasher();
        part.hash_into(&mut hasher);
        let place = self.known.entry(hasher.finish()).or_default();
        match place.upgrade() {
            Some(known) if known == *part => *part = known,
            _ => {
                *place = Arc::downgrade(part);
                self.n_bytes += part.n_bytes();
            }
        }
    }

    /// Forgets those that no engine has any more.
    fn look(&mut self) {
        self.known.retain(|_, part| part.strong_count() > 0);
        self.known.shrink_to(2 * self.known.len());
        self.n_bytes = self.known.values().filter_map(Weak::upgrade).map(|part| part.n_bytes()).sum();
    }
}

/// What samplers of a process share, of all that an engine has.
#[derive(Debug)]
pub(super) struct Parts {
    /// Nobody outside knows them: what is not alike is not made to look so.
    keys: RandomState,
    masks: Pool<TokenMask>,
    biases: Pool<Bias>,
    n_bytes_max: u64,
    /// At how many bytes to look what is gone.
    look_at: u64,
}

impl Parts {
    /// Of a process whose guests may have so many bytes of host memory, and so many contexts.
    pub(super) fn new(host_bytes: u64, n_contexts: u64) -> Self {
        let of_rules = n_contexts.saturating_mul(MASK_BYTES);
        let n_bytes_max = host_bytes.saturating_add(of_rules).saturating_add(LET_GO_BYTES);
        let (masks, biases) = (Pool::new(), Pool::new());
        Self { keys: RandomState::new(), masks, biases, n_bytes_max, look_at: LOOK_BYTES }
    }

    /// Has a sampler that has just come share what others have.
    ///
    /// # Errors
    /// There is more of different ones than guests can have paid for.
    pub(super) fn share(&mut self, sampler: &mut Arc<Sampler>) -> Result<(), Violation> {
        let Self { keys, masks, biases, .. } = self;
        // It has come by itself.
        let Some(sampler) = Arc::get_mut(sampler) else { return Ok(()) };
        sampler.mask.iter_mut().for_each(|mask| masks.share(mask, keys));
        if let Some(put_on) = &mut sampler.program {
            let of_program = put_on.masks.iter_mut().chain(&mut put_on.within);
            of_program.for_each(|mask| masks.share(mask, keys));
            put_on.biases.iter_mut().for_each(|bias| biases.share(bias, keys));
        }
        self.check()
    }

    fn n_bytes(&self) -> u64 {
        (self.masks.n_bytes + self.biases.n_bytes) as u64
    }

    fn check(&mut self) -> Result<(), Violation> {
        if self.n_bytes() < self.look_at {
            return Ok(());
        }
        self.masks.look();
        self.biases.look();
        // Looking costs as much as there is, and comes once for as much that is new.
        self.look_at = (2 * self.n_bytes()).clamp(LOOK_BYTES, self.n_bytes_max.max(LOOK_BYTES));
        let (n_bytes, n_bytes_max) = (self.n_bytes(), self.n_bytes_max);
        if n_bytes > n_bytes_max {
            return Err(Violation(format!(
                "{n_bytes} bytes of masks and biases of samplers: at most {n_bytes_max}"
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::program::{Definition, Program, PutOn, RowShape};

    const VOCAB_SIZE: usize = 100_000;

    fn mask(token: u32) -> Arc<TokenMask> {
        let mut mask = TokenMask::none(VOCAB_SIZE);
        mask.set(token, true);
        Arc::new(mask)
    }

    fn with_mask(token: u32) -> Arc<Sampler> {
        Arc::new(Sampler { mask: Some(mask(token)), ..Sampler::greedy() })
    }

    fn mask_of(sampler: &Sampler) -> &Arc<TokenMask> {
        sampler.mask.as_ref().expect("it has one")
    }

    fn come(parts: &mut Parts, mut sampler: Arc<Sampler>) -> Arc<Sampler> {
        parts.share(&mut sampler).expect("they are paid for");
        sampler
    }

    #[test]
    fn what_is_alike_is_one_again_whatever_else_differs() {
        let mut parts = Parts::new(0, 0);
        let first = come(&mut parts, with_mask(1));
        let again = Sampler { seed: 7, ..Arc::unwrap_or_clone(with_mask(1)) };
        let again = come(&mut parts, Arc::new(again));
        let other = come(&mut parts, with_mask(2));
        assert!(Arc::ptr_eq(mask_of(&first), mask_of(&again)));
        assert!(!Arc::ptr_eq(mask_of(&first), mask_of(&other)));
        assert_eq!((again.seed, mask_of(&other)), (7, &mask(2)));
    }

    #[test]
    fn biases_and_masks_of_programs_are_shared() {
        let shape = RowShape { vocab_size: VOCAB_SIZE, n_positions: 100 };
        let definition = Definition::build(|b| b.logits().argmax());
        let program = Arc::new(Program::new(definition, shape).expect("it is in order"));
        let with = |value| {
            let bias = Arc::new(Bias::Dense(vec![value; VOCAB_SIZE]));
            let (biases, within) = (vec![bias.clone(), bias], Some(mask(3)));
            let put_on = PutOn { biases, within, ..PutOn::new(program.clone()) };
            Arc::new(Sampler { program: Some(Box::new(put_on)), ..Sampler::greedy() })
        };
        let mut parts = Parts::new(0, 0);
        let all = [0.5, 0.5, 0.25].map(|value| come(&mut parts, with(value)));
        let put_on = all.each_ref().map(|sampler| sampler.program.as_deref().expect("it has one"));
        let within = |put_on: &PutOn| put_on.within.clone().expect("it has one");
        assert!(Arc::ptr_eq(&put_on[0].biases[1], &put_on[1].biases[0]));
        assert!(!Arc::ptr_eq(&put_on[0].biases[0], &put_on[2].biases[0]));
        assert!(Arc::ptr_eq(&within(put_on[0]), &within(put_on[2])));
        assert_eq!(*put_on[2].biases[0], Bias::Dense(vec![0.25; VOCAB_SIZE]));
    }

    #[test]
    fn what_is_gone_counts_no_longer_and_what_is_there_has_a_bound() {
        let mut parts = Parts { n_bytes_max: 2 * LOOK_BYTES, ..Parts::new(0, 0) };
        let n = 2 * LOOK_BYTES as usize / mask(0).n_bytes();
        (0..3 * n).for_each(|token| drop(come(&mut parts, with_mask(token as u32))));
        assert!(parts.masks.known.len() < n, "those that are gone are forgotten");
        let mut held = Vec::new();
        let refused = (0..2 * n).find_map(|token| {
            let mut sampler = with_mask(token as u32);
            let shared = parts.share(&mut sampler);
            held.push(sampler);
            shared.err()
        });
        assert!(refused.is_some() && (n..=n + 2).contains(&held.len()), "{} of {n}", held.len());
        held.truncate(held.len() / 2);
        come(&mut parts, with_mask(99_999));
    }
}
