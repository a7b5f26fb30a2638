//! Why rows and tokens were computed in vain, and what work waited for.

use std::fmt;
use std::ops::Index;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// A cause, and what is counted of it: rows of steps, tokens, or steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Rows in vain: their guest gave up what they were computed for by an edit, a cancel or a drop while they were under
    /// way.
    RowsGivenUp,
    /// Rows in vain: the draw before them was the last of its run, by a stop token, by its rule, or because nothing could
    /// be drawn. Their tokens are charged to no budget.
    RowsPastEnd,
    /// Rows in vain: of a step that failed, or under way for work that one ended, or that ran out of a budget.
    RowsFailed,
    /// Rows that drew nothing because their masks had not come. Nothing is planned behind a row whose mask is late, so that
    /// none sits out in vain.
    RowsSatOut,
    /// Tokens in vain: decoded ahead of a guest that did something else then.
    TokensGivenUp,
    /// Tokens in vain: guessed wrongly, or expected of a constraint and not drawn. The latter are charged to no budget, but
    /// to the turn of their guest among others.
    TokensGuessedWrong,
    /// Steps of the device, those of other models included, that went by while a context could decode and had no row,
    /// summed over contexts.
    StepsToDecode,
    /// As above, while a context had a prompt to compute: steps had no room for it within their length.
    StepsWithPrompt,
    /// As above, while a context stood in line for pages.
    StepsForPages,
    /// As above, while a run was without the mask of its next draw, which had sat out or was not planned before it.
    StepsForMasks,
}

impl Cause {
    /// All causes, each at its number.
    const ALL: [Self; 10] = [
        Self::RowsGivenUp,
        Self::RowsPastEnd,
        Self::RowsFailed,
        Self::RowsSatOut,
        Self::TokensGivenUp,
        Self::TokensGuessedWrong,
        Self::StepsToDecode,
        Self::StepsWithPrompt,
        Self::StepsForPages,
        Self::StepsForMasks,
    ];
}

/// What there was of each cause.
#[derive(Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Causes([u64; Cause::ALL.len()]);

impl Index<Cause> for Causes {
    type Output = u64;

    fn index(&self, cause: Cause) -> &u64 {
        &self.0[cause as usize]
    }
}

impl fmt::Debug for Causes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seen = Cause::ALL.into_iter().map(|cause| (cause, self[cause])).filter(|&(_, n)| n > 0);
        f.debug_map().entries(seen).finish()
    }
}

impl Causes {
    /// Counts `n` of a cause.
    pub fn add(&mut self, cause: Cause, n: u64) {
        self.0[cause as usize] += n;
    }

    /// Rows whose work ended while they were under way.
    #[must_use]
    pub fn n_rows_in_vain(&self) -> u64 {
        self[Cause::RowsGivenUp] + self[Cause::RowsPastEnd] + self[Cause::RowsFailed]
    }

    /// Tokens that were decoded ahead, or guessed, and not wanted.
    #[must_use]
    pub fn n_tokens_in_vain(&self) -> u64 {
        self[Cause::TokensGivenUp] + self[Cause::TokensGuessedWrong]
    }

    /// Steps that went by while a context could have been in them, summed over contexts.
    #[must_use]
    pub fn n_steps_waited(&self) -> u64 {
        self[Cause::StepsToDecode]
            + self[Cause::StepsWithPrompt]
            + self[Cause::StepsForPages]
            + self[Cause::StepsForMasks]
    }

    /// Both, cause by cause.
    #[must_use]
    pub fn combined(&self, other: &Self, combine: fn(u64, u64) -> u64) -> Self {
        Self(std::array::from_fn(|idx| combine(self.0[idx], other.0[idx])))
    }
}

/// The same of a guest, counted by engines while others read it.
#[derive(Debug, Default)]
pub(crate) struct Tally([AtomicU64; Cause::ALL.len()]);

impl Tally {
    pub(crate) fn add(&self, cause: Cause, n: u64) {
        self.0[cause as usize].fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, causes: &Causes) {
        for (here, there) in self.0.iter().zip(causes.0) {
            here.store(there, Ordering::Relaxed);
        }
    }

    pub(crate) fn now(&self) -> Causes {
        Causes(std::array::from_fn(|idx| self.0[idx].load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cause_is_counted_at_its_own_place_and_in_one_sum_at_most() {
        let tally = Tally::default();
        for (idx, cause) in Cause::ALL.into_iter().enumerate() {
            assert_eq!(cause as usize, idx, "{cause:?}");
            tally.add(cause, 1 << idx);
        }
        let causes = tally.now();
        let of = |all: &[Cause]| all.iter().map(|&cause| 1 << cause as usize).sum::<u64>();
        use Cause::*;
        assert_eq!(causes.n_rows_in_vain(), of(&[RowsGivenUp, RowsPastEnd, RowsFailed]));
        assert_eq!(causes.n_tokens_in_vain(), of(&[TokensGivenUp, TokensGuessedWrong]));
        let waited = [StepsToDecode, StepsWithPrompt, StepsForPages, StepsForMasks];
        assert_eq!(causes.n_steps_waited(), of(&waited));
        assert_eq!(causes[RowsSatOut], of(&[RowsSatOut]));
        let twice = causes.combined(&causes, u64::saturating_add);
        assert!(Cause::ALL.into_iter().all(|cause| twice[cause] == 2 * causes[cause]), "{twice:?}");
    }
}
