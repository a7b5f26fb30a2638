//! Random choices of a scene, all of them from its seed.

use crate::engines::Random;

/// One sequence of choices. What one part of a scene draws does not move what another draws.
#[derive(Clone, Debug)]
pub(super) struct Draws(Random);

impl Draws {
    /// One of the sequences of a seed.
    pub(super) fn of(seed: u64, sequence: u64) -> Self {
        let (of_seed, of_sequence) = (Random(seed).draw(), Random(!sequence).draw());
        Self(Random(of_seed ^ of_sequence.rotate_left(17)))
    }

    /// A sequence of its own for a part of what this one is for.
    pub(super) fn fork(&mut self) -> Self {
        Self(Random(self.0.draw()))
    }

    /// Any number.
    pub(super) fn number(&mut self) -> u64 {
        self.0.draw()
    }

    /// A number in `0..n`.
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.0.below(n)
    }

    /// A number in `first..=last`.
    pub(super) fn between(&mut self, first: usize, last: usize) -> usize {
        first + self.below(last - first + 1)
    }

    /// Whether something happens that does so many times in a thousand.
    pub(super) fn happens(&mut self, per_mille: usize) -> bool {
        self.below(1000) < per_mille
    }

    /// One of these.
    pub(super) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// So many tokens.
    pub(super) fn tokens(&mut self, n: usize) -> Vec<u32> {
        (0..n).map(|_| self.below(super::naive::VOCAB) as u32).collect()
    }
}
