//! Finding device pages when none are free.
//!
//! In this order: cached pages that nobody holds; pages of contexts that wait for nothing, the longest idle first; pages
//! of contexts that stand in the line, its end first. They leave from the tail of a context, as few as needed, and go to
//! host memory; when that is full, the KV in the tail of the least deserving is given up and computed again later.
//! Contexts that are admitted, and those of the step being planned, keep theirs.

use super::{ContextState, Move, Plan, SavedKey, Scheduler};
use crate::command::ContextId;
use crate::kv::BlockId;

/// Whose pages may go.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Victim {
    Context(ContextId),
    Saved(SavedKey),
}

/// Whose pages may go in the plan of one step, and how far that has come.
#[derive(Debug, Default)]
pub(super) struct Victims {
    list: Vec<Victim>,
    /// The first whose pages may still move, and how many of its blocks were not looked at yet.
    moving: (usize, Option<usize>),
    /// The first that may still give up its tail.
    giving_up: usize,
}

impl Scheduler {
    /// Sees to it that `n` pages are free for a context, which is out of the table, if that is possible.
    pub(super) fn make_room(&mut self, n: usize, context: &ContextState, plan: &mut Plan) -> bool {
        while self.pages.n_free() < n && self.pages.reclaim_one() {}
        if self.pages.n_free() >= n {
            return true;
        }
        let marking = self.marking(context);
        let mut victims = match plan.victims.take() {
            Some(victims) => victims,
            None => {
                self.pin_what_is_under_way();
                self.victims()
            }
        };
        self.pin(context);
        while self.pages.n_free() < n && self.free_one(&mut victims, marking, plan) {
            while self.pages.n_free() < n && self.pages.reclaim_one() {}
        }
        plan.victims = Some(victims);
        self.pages.n_free() >= n
    }

    /// Keeps what a context holds where it is in the plan being made.
    pub(super) fn pin(&mut self, context: &ContextState) {
        context.kv.blocks().iter().for_each(|&block| self.pages.pin(block));
    }

    /// Rows that were planned, for this step too, find their pages where they were; what they bring is expected in them.
    fn pin_what_is_under_way(&mut self) {
        let Self { contexts, pages, .. } = self;
        for context in contexts.values().filter(|context| context.under_way.is_some()) {
            context.kv.blocks().iter().for_each(|&block| pages.pin(block));
        }
    }

    /// Whose pages may go, the least deserving first.
    pub(super) fn victims(&self) -> Victims {
        let idle = self.idle_victims();
        // They could go on with what they hold.
        let queued = self.contexts.iter().filter(|(_, context)| context.is_queued && context.holds_freely());
        let mut queued: Vec<(u64, Victim)> =
            queued.map(|(&id, context)| (context.last_step, Victim::Context(id))).collect();
        queued.sort_unstable();
        let list = idle.into_iter().map(|(_, victim)| victim);
        let list = list.chain(self.line.last_first().map(Victim::Context));
        Victims {
            list: list.chain(queued.into_iter().map(|(_, victim)| victim)).collect(),
            ..Victims::default()
        }
    }

    /// Contexts that wait for nothing and hold something, and the device's steps in which they were served last, the
    /// longest ago first.
    pub(super) fn idle_victims(&self) -> Vec<(u64, Victim)> {
        let mut idle: Vec<(u64, Victim)> = Vec::new();
        // What holds nothing has nothing to give; a user may have saved thousands.
        for (key, saved) in self.saved.iter().filter(|(_, saved)| !saved.kv.blocks().is_empty()) {
            idle.push((saved.last_step, Victim::Saved(key.clone())));
        }
        let contexts =
            self.contexts.iter().filter(|(_, context)| !context.is_queued && context.holds_freely());
        idle.extend(contexts.map(|(&id, context)| (context.last_step, Victim::Context(id))));
        idle.sort_unstable();
        idle
    }

    /// Takes one page from the least deserving that has one to give.
    pub(super) fn free_one(&mut self, victims: &mut Victims, marking: u64, plan: &mut Plan) -> bool {
        loop {
            let Some((victim_idx, block)) = self.next_to_move(victims, marking) else { return false };
            if let Some((from, to)) = self.pages.move_out(block) {
                plan.moves.push(Move::Out(from, to));
                self.stats.n_swaps_out += 1;
                return true;
            }
            // Host memory is full: a tail is given up, on the device or there.
            let n_free = self.pages.n_free() + self.pages.n_idle();
            if !self.give_up_one(victims, victim_idx, marking) {
                // This one keeps what it has; others may have something to give.
                victims.moving = (victim_idx + 1, None);
                continue;
            }
            if self.pages.n_free() + self.pages.n_idle() > n_free {
                return true;
            }
        }
    }

    /// The last block on the device of the first victim that has one.
    fn next_to_move(&self, victims: &mut Victims, marking: u64) -> Option<(usize, BlockId)> {
        loop {
            let (idx, n_blocks) = &mut victims.moving;
            let blocks = match victims.list.get(*idx)? {
                Victim::Context(id) => self.contexts.get(id).map(|context| context.kv.blocks()),
                Victim::Saved(key) => self.saved.get(key).map(|saved| saved.kv.blocks()),
            };
            let blocks = blocks.unwrap_or_default();
            let n = n_blocks.map_or(blocks.len(), |n| n.min(blocks.len()));
            let may_go = |&block: &BlockId| self.pages.page(block).is_some() && !self.is_kept(block, marking);
            match blocks[..n].iter().rposition(may_go) {
                Some(block_idx) => {
                    *n_blocks = Some(block_idx + 1);
                    return Some((*idx, blocks[block_idx]));
                }
                None => victims.moving = (*idx + 1, None),
            }
        }
    }

    /// Gives up the last block of the least deserving that holds one which nobody is to keep.
    fn give_up_one(&mut self, victims: &mut Victims, last_idx: usize, marking: u64) -> bool {
        while victims.giving_up <= last_idx {
            let kv = match &victims.list[victims.giving_up] {
                Victim::Context(id) => self.contexts.get(id).map(|context| &context.kv),
                Victim::Saved(key) => self.saved.get(key).map(|saved| &saved.kv),
            };
            // A tail that others keep stays with them; this one lets go of it to come at what it holds alone.
            let may_give = kv.is_some_and(|kv| {
                kv.blocks().last().is_some_and(|&last| !self.pages.is_pinned(last))
                    && kv.blocks().iter().any(|&block| !self.is_kept(block, marking))
            });
            if may_give {
                let kv = match &victims.list[victims.giving_up] {
                    Victim::Context(id) => self.contexts.get_mut(id).map(|context| &mut context.kv),
                    Victim::Saved(key) => self.saved.get_mut(key).map(|saved| &mut saved.kv),
                };
                kv.expect("it was there").give_up_last_block(&mut self.pages);
                self.stats.n_pages_given_up += 1;
                return true;
            }
            victims.giving_up += 1;
        }
        false
    }

    fn is_kept(&self, block: BlockId, marking: u64) -> bool {
        self.pages.is_marked(block, marking) || self.pages.is_pinned(block)
    }
}

impl ContextState {
    /// Whether it holds blocks that it was not admitted for and does not stand in line with.
    fn holds_freely(&self) -> bool {
        !self.is_admitted() && !self.is_in_line() && !self.kv.blocks().is_empty()
    }
}
