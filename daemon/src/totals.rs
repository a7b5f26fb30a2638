//! What was computed since the daemon started: counters that outlive the models that they are of.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use trellis_engine::{Cause, Causes, EngineStats, ModelHandle};
use trellis_wire::Computed;

/// Counters of all models, those that are gone included. They never shrink.
#[derive(Debug, Default)]
pub(crate) struct Totals(Mutex<Sums>);

/// Names of models that are gone whose counters go on where they are loaded again. Whoever may load may come with any.
const N_NAMES_MAX: usize = 256;

#[derive(Debug, Default)]
struct Sums {
    /// Of those that are gone.
    gone: EngineStats,
    /// Of these, by the names of their models, as far as there is room for names.
    gone_by_name: BTreeMap<String, EngineStats>,
    /// As last seen, of those that are there.
    there: Vec<(ModelHandle, EngineStats)>,
}

/// What a model's counters are at one moment.
pub(crate) fn computed(stats: &EngineStats) -> Computed {
    Computed {
        n_steps: stats.n_steps,
        n_rows: stats.n_rows,
        n_rows_in_vain: stats.causes.n_rows_in_vain(),
        n_tokens: stats.n_tokens,
        n_tokens_cached: stats.n_tokens_cached,
        n_tokens_in_vain: stats.causes.n_tokens_in_vain(),
        n_tokens_again: stats.n_tokens_again,
        causes: by_cause(&stats.causes),
    }
}

/// As clients are told them.
pub(crate) fn by_cause(causes: &Causes) -> trellis_wire::Causes {
    trellis_wire::Causes {
        n_rows_given_up: causes[Cause::RowsGivenUp],
        n_rows_past_end: causes[Cause::RowsPastEnd],
        n_rows_failed: causes[Cause::RowsFailed],
        n_rows_sat_out: causes[Cause::RowsSatOut],
        n_tokens_given_up: causes[Cause::TokensGivenUp],
        n_tokens_guessed_wrong: causes[Cause::TokensGuessedWrong],
        n_steps_waited_to_decode: causes[Cause::StepsToDecode],
        n_steps_waited_with_prompt: causes[Cause::StepsWithPrompt],
        n_steps_waited_for_pages: causes[Cause::StepsForPages],
        n_steps_waited_for_masks: causes[Cause::StepsForMasks],
    }
}

/// Both, counter by counter; gauges are left out.
fn combined(a: &EngineStats, b: &EngineStats, combine: fn(u64, u64) -> u64) -> EngineStats {
    EngineStats {
        n_steps: combine(a.n_steps, b.n_steps),
        n_rows: combine(a.n_rows, b.n_rows),
        n_tokens: combine(a.n_tokens, b.n_tokens),
        n_tokens_cached: combine(a.n_tokens_cached, b.n_tokens_cached),
        n_tokens_again: combine(a.n_tokens_again, b.n_tokens_again),
        n_swaps_out: combine(a.n_swaps_out, b.n_swaps_out),
        n_swaps_in: combine(a.n_swaps_in, b.n_swaps_in),
        n_pages_given_up: combine(a.n_pages_given_up, b.n_pages_given_up),
        n_tokens_of_prompts: combine(a.n_tokens_of_prompts, b.n_tokens_of_prompts),
        n_preempted: combine(a.n_preempted, b.n_preempted),
        n_guesses: combine(a.n_guesses, b.n_guesses),
        n_tokens_guessed: combine(a.n_tokens_guessed, b.n_tokens_guessed),
        n_tokens_guessed_right: combine(a.n_tokens_guessed_right, b.n_tokens_guessed_right),
        runs: a.runs.combined(&b.runs, combine),
        causes: a.causes.combined(&b.causes, combine),
        ..EngineStats::default()
    }
}

impl Totals {
    fn lock(&self) -> MutexGuard<'_, Sums> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counters of a model that is there. Nothing is seen of one that was unloaded or is lost: what was asked before may be
    /// answered after its end.
    pub(crate) fn see(&self, model: &ModelHandle, stats: &EngineStats) {
        let mut sums = self.lock();
        if !model.is_unloaded() && model.device_failure().is_none() {
            sums.note(model, stats);
        }
    }

    /// A model is gone, and these were its counters in the end, as far as it could tell.
    pub(crate) fn close(&self, model: &ModelHandle, last: Option<&EngineStats>) {
        let mut sums = self.lock();
        if let Some(stats) = last {
            sums.note(model, stats);
        }
        if let Some(idx) = sums.there.iter().position(|(other, _)| other.is_same(model)) {
            let (_, stats) = sums.there.swap_remove(idx);
            sums.gone = combined(&sums.gone, &stats, u64::saturating_add);
            let name = &model.model().name;
            let by_name = &mut sums.gone_by_name;
            if by_name.len() < N_NAMES_MAX || by_name.contains_key(name) {
                let sum = by_name.entry(name.clone()).or_default();
                *sum = combined(sum, &stats, u64::saturating_add);
            }
        }
    }

    /// All together.
    pub(crate) fn all(&self) -> Computed {
        let sums = self.lock();
        let add =
            |sum: EngineStats, (_, stats): &(_, EngineStats)| combined(&sum, stats, u64::saturating_add);
        computed(&sums.there.iter().fold(sums.gone.clone(), add))
    }

    /// Counters of each model, by name: they go on where a model is loaded again.
    pub(crate) fn by_name(&self) -> BTreeMap<String, EngineStats> {
        let sums = self.lock();
        let mut all = sums.gone_by_name.clone();
        for (model, stats) in &sums.there {
            let sum = all.entry(model.model().name.clone()).or_default();
            *sum = combined(sum, stats, u64::saturating_add);
        }
        all
    }
}

impl Sums {
    fn note(&mut self, model: &ModelHandle, stats: &EngineStats) {
        match self.there.iter_mut().find(|(other, _)| other.is_same(model)) {
            // Answers may overtake each other.
            Some((_, seen)) => *seen = combined(seen, stats, u64::max),
            None => self.there.push((model.clone(), stats.clone())),
        }
    }
}
