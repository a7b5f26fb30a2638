//! Decides what each step computes. Pure: no I/O, no clock, no threads.
//!
//! [`Scheduler::apply`] takes commands in, [`Scheduler::plan`] makes the next step, [`Scheduler::batch`] shows
//! it to the backend, [`Scheduler::complete`] takes the outputs and answers.

mod commands;
mod complete;
mod fair;
mod follow_up;
mod kv;
mod plan;
mod room;
#[cfg(test)]
mod tests;
mod work;

use std::collections::BTreeMap;

use crate::account::{ActorId, Owner};
use crate::backend::Limits;
use crate::batch::SlotId;
use crate::command::ContextId;
use crate::pages::PageTable;
use crate::prefix::PrefixScope;
use crate::run::AheadWindow;
use crate::stats::EngineStats;
pub(crate) use commands::Flow;
use fair::FairQueue;
use kv::Kv;
pub(crate) use plan::{Move, Plan};
use work::Work;

/// What the scheduler is told at start-up.
#[derive(Clone, Debug)]
pub(crate) struct SchedulerSettings {
    /// Hash of everything that determines the bytes of a page, tokens and position aside.
    pub(crate) model_fingerprint: [u8; 32],
    pub(crate) prefix_scope: PrefixScope,
    /// Tokens in one step at most; prompts are cut to it.
    pub(crate) n_step_tokens: usize,
}

#[derive(Debug)]
struct ContextState {
    owner: Owner,
    slot: SlotId,
    kv: Kv,
    work: Option<Work>,
    window: AheadWindow,
    /// Whether it stands in one of the two queues.
    is_queued: bool,
    /// The last step that computed something for it.
    last_step: u64,
    /// The step at which its pages last came back from host memory.
    resident_since: u64,
}

/// A context kept under a name.
#[derive(Debug)]
struct Saved {
    kv: Kv,
    owner: Owner,
    last_step: u64,
}

/// All contexts of one engine and the order in which they are served.
#[derive(Debug)]
pub(crate) struct Scheduler {
    limits: Limits,
    settings: SchedulerSettings,
    pages: PageTable,
    contexts: BTreeMap<ContextId, ContextState>,
    saved: BTreeMap<(ActorId, String), Saved>,
    free_slots: Vec<SlotId>,
    n_slots: u32,
    /// Contexts with one token to compute: they go first.
    decodes: FairQueue<ContextId>,
    /// Contexts with more.
    prefills: FairQueue<ContextId>,
    step: u64,
    stats: EngineStats,
}

impl Scheduler {
    pub(crate) fn new(limits: Limits, settings: SchedulerSettings) -> Self {
        assert!(limits.n_rows_max > 0 && limits.n_tokens_max > 0, "a backend computes something");
        let settings = SchedulerSettings {
            n_step_tokens: settings.n_step_tokens.clamp(1, limits.n_tokens_max),
            ..settings
        };
        Self {
            pages: PageTable::new(limits.n_pages, limits.n_host_pages),
            contexts: BTreeMap::new(),
            saved: BTreeMap::new(),
            free_slots: Vec::new(),
            n_slots: 0,
            decodes: FairQueue::new(1),
            prefills: FairQueue::new(settings.n_step_tokens),
            step: 0,
            stats: EngineStats::default(),
            limits,
            settings,
        }
    }

    /// Whether there may be something to compute.
    pub(crate) fn has_work(&self) -> bool {
        self.decodes.len() + self.prefills.len() > 0
    }

    pub(crate) fn stats(&self) -> EngineStats {
        EngineStats {
            n_pages: self.pages.n_pages(),
            n_pages_free: self.pages.n_free(),
            n_pages_cached: self.pages.n_idle(),
            n_pages_on_host: self.pages.n_on_host(),
            n_contexts: self.contexts.len(),
            n_saved: self.saved.len(),
            ..self.stats.clone()
        }
    }

    fn take_slot(&mut self) -> SlotId {
        self.free_slots.pop().unwrap_or_else(|| {
            self.n_slots += 1;
            SlotId(self.n_slots - 1)
        })
    }

    /// Puts a context that has work into the queue it belongs to.
    fn enqueue(&mut self, id: ContextId) {
        let Some(context) = self.contexts.get_mut(&id) else { return };
        if context.is_queued || context.work.is_none() {
            return;
        }
        context.is_queued = true;
        let queue = if context.n_pending() <= 1 { &mut self.decodes } else { &mut self.prefills };
        queue.push(&context.owner, id);
    }
}

impl ContextState {
    /// Tokens that its work still has to compute.
    fn n_pending(&self) -> usize {
        self.work.as_ref().map_or(0, |work| work.target(self.kv.tokens.len()) - self.kv.n_computed)
    }
}
