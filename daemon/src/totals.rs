//! What was computed since the daemon started: counters that outlive the models that they are of.

use std::sync::{Mutex, MutexGuard, PoisonError};

use trellis_engine::{EngineStats, ModelHandle};
use trellis_wire::Computed;

/// Counters of all models, those that are gone included. They never shrink.
#[derive(Debug, Default)]
pub(crate) struct Totals(Mutex<Sums>);

#[derive(Debug, Default)]
struct Sums {
    /// Of those that are gone.
    gone: Computed,
    /// As last seen, of those that are there.
    there: Vec<(ModelHandle, Computed)>,
}

/// What a model's counters are at one moment.
pub(crate) fn computed(stats: &EngineStats) -> Computed {
    Computed {
        n_steps: stats.n_steps,
        n_rows: stats.n_rows,
        n_rows_in_vain: stats.n_rows_in_vain,
        n_rows_sat_out: stats.n_rows_sat_out,
        n_tokens: stats.n_tokens,
        n_tokens_cached: stats.n_tokens_cached,
        n_tokens_in_vain: stats.n_tokens_in_vain,
        n_tokens_again: stats.n_tokens_again,
        n_steps_waited_to_decode: stats.n_steps_waited_to_decode,
        n_steps_waited_with_prompt: stats.n_steps_waited_with_prompt,
        n_steps_waited_for_pages: stats.n_steps_waited_for_pages,
    }
}

/// Both, counter by counter.
fn combined(a: &Computed, b: &Computed, combine: fn(u64, u64) -> u64) -> Computed {
    Computed {
        n_steps: combine(a.n_steps, b.n_steps),
        n_rows: combine(a.n_rows, b.n_rows),
        n_rows_in_vain: combine(a.n_rows_in_vain, b.n_rows_in_vain),
        n_rows_sat_out: combine(a.n_rows_sat_out, b.n_rows_sat_out),
        n_tokens: combine(a.n_tokens, b.n_tokens),
        n_tokens_cached: combine(a.n_tokens_cached, b.n_tokens_cached),
        n_tokens_in_vain: combine(a.n_tokens_in_vain, b.n_tokens_in_vain),
        n_tokens_again: combine(a.n_tokens_again, b.n_tokens_again),
        n_steps_waited_to_decode: combine(a.n_steps_waited_to_decode, b.n_steps_waited_to_decode),
        n_steps_waited_with_prompt: combine(a.n_steps_waited_with_prompt, b.n_steps_waited_with_prompt),
        n_steps_waited_for_pages: combine(a.n_steps_waited_for_pages, b.n_steps_waited_for_pages),
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
            let (_, computed) = sums.there.swap_remove(idx);
            sums.gone = combined(&sums.gone, &computed, u64::saturating_add);
        }
    }

    /// All together.
    pub(crate) fn all(&self) -> Computed {
        let sums = self.lock();
        let add =
            |sum: Computed, (_, computed): &(_, Computed)| combined(&sum, computed, u64::saturating_add);
        sums.there.iter().fold(sums.gone.clone(), add)
    }
}

impl Sums {
    fn note(&mut self, model: &ModelHandle, stats: &EngineStats) {
        let seen = computed(stats);
        match self.there.iter_mut().find(|(other, _)| other.is_same(model)) {
            // Answers may overtake each other.
            Some((_, computed)) => *computed = combined(computed, &seen, u64::max),
            None => self.there.push((model.clone(), seen)),
        }
    }
}
