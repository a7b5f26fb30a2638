//! What prompts owe those that decode.
//!
//! The least of a prompt may take longer than a step is to last: on a processor one token more than one costs as much as
//! several. Then prompts ride in some steps and not in others, so that steps are as long as they are to be in the mean.

/// What steps may have lasted too long, in steps of the length that they are to have, before prompts are left out: how long
/// steps take is not the same from one to the next, and prompts fill blocks.
const N_STEPS_OWED: f64 = 1.0;

/// What is owed at most, in steps of the length that they are to have.
const N_STEPS_OWED_MOST: f64 = 64.0;

/// Device time without decode rows after which prompts may take a whole step. A guest that ends a stream and begins another
/// is back sooner.
const QUIET_NS: u64 = 250_000_000;

/// How long prompts may take of a step before that, or in steps with decode rows, if that is longer: who decodes again in the
/// meantime waits for that step.
const STEP_NS_MOST: u64 = 8_000_000;
const N_STEPS_MOST: f64 = 2.0;

/// What steps with decode rows lasted beyond what they were to, and how long ago the last of them was.
#[derive(Debug)]
pub(in crate::scheduler) struct PromptDebt {
    owed_ns: f64,
    target_ns: f64,
    since_decode_ns: u64,
}

impl Default for PromptDebt {
    fn default() -> Self {
        Self { owed_ns: 0.0, target_ns: 0.0, since_decode_ns: QUIET_NS }
    }
}

impl PromptDebt {
    /// A step has lasted so long, with decode rows if `target_ns` says how long those may make one last.
    pub(in crate::scheduler) fn note_step(
        &mut self,
        elapsed_ns: u64,
        has_prompts: bool,
        target_ns: Option<u64>,
    ) {
        let Some(target_ns) = target_ns else {
            self.since_decode_ns = self.since_decode_ns.saturating_add(elapsed_ns);
            return;
        };
        self.since_decode_ns = 0;
        self.target_ns = target_ns as f64;
        // What was too long without prompts is not theirs.
        let over_ns = elapsed_ns as f64 - self.target_ns;
        let owed_ns = self.owed_ns + if has_prompts { over_ns } else { over_ns.min(0.0) };
        self.owed_ns = owed_ns.clamp(0.0, N_STEPS_OWED_MOST * self.target_ns);
    }

    /// Whether prompts are left out of a step with decode rows.
    pub(super) fn is_due(&self) -> bool {
        self.owed_ns > N_STEPS_OWED * self.target_ns
    }

    /// How long prompts alone may make a step last; as long as they like when `None`.
    pub(super) fn ns_alone(&self) -> Option<u64> {
        let most = STEP_NS_MOST.max((N_STEPS_MOST * self.target_ns) as u64);
        (self.since_decode_ns < QUIET_NS).then_some(most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_as_long_as_they_are_to_be_in_the_mean() {
        // Alone 1 ms, to last 1.7, and 4 with the least of a prompt.
        let (mut debt, mut total_ns, mut n_with_prompts) = (PromptDebt::default(), 0, 0);
        for _ in 0..1000 {
            let is_with_prompts = !debt.is_due();
            let elapsed_ns = if is_with_prompts { 4_000_000 } else { 1_000_000 };
            debt.note_step(elapsed_ns, is_with_prompts, Some(1_700_000));
            total_ns += elapsed_ns;
            n_with_prompts += usize::from(is_with_prompts);
        }
        let mean_ms = total_ns as f64 / 1e9;
        assert!((1.6..1.85).contains(&mean_ms), "{mean_ms} ms");
        assert!((200..280).contains(&n_with_prompts), "{n_with_prompts}");
    }

    #[test]
    fn a_step_that_is_a_little_longer_owes_nothing() {
        let mut debt = PromptDebt::default();
        for ns in [1_900_000, 1_500_000, 1_800_000, 1_700_000, 1_600_000] {
            debt.note_step(ns, true, Some(1_700_000));
            assert!(!debt.is_due());
        }
    }

    #[test]
    fn prompts_alone_are_bounded_until_nobody_has_decoded_for_a_while() {
        let mut debt = PromptDebt::default();
        assert_eq!(debt.ns_alone(), None);
        debt.note_step(1_000_000, false, Some(1_700_000));
        (0..12).for_each(|_| debt.note_step(20_000_000, true, None));
        assert_eq!(debt.ns_alone(), Some(STEP_NS_MOST));
        debt.note_step(20_000_000, true, None);
        assert_eq!(debt.ns_alone(), None);
    }
}
