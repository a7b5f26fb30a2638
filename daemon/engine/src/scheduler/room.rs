//! Finding device pages when none are free.
//!
//! In this order: cached pages without a holder; pages of contexts that wait for nothing, of the owner furthest ahead in
//! virtual time first, then of the longest idle (`holders`); pages of contexts that stand in the line, its end first. They
//! leave from the tail of a context, as few as needed, and go to host memory; when that is full, the KV in the tail of the
//! least deserving is given up and computed again later.
//! All that users of a lower rank have to give goes before anything of a higher rank: work makes room at the cost of those
//! below it, and of those above only once there is nothing else, so that it comes to its end under any load.
//! Contexts that are admitted, and those of the step being planned, keep theirs.

use super::admission::Standing;
use super::holders::{Does, Holder};
use super::{ContextState, Move, Plan, SavedKey, Scheduler};
use crate::command::ContextId;
use crate::kv::{BlockId, Sequence};

/// Whose pages may go.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Victim {
    Context(ContextId),
    Saved(SavedKey),
}

/// Whose pages may go in the plan of one step, and how far that has come.
#[derive(Debug, Default)]
pub(super) struct Victims {
    /// Those that may have pages to move, the least deserving first, as far as the list was needed.
    list: Vec<Listed>,
    /// Those in line that are not in the list yet, the least deserving last: those of a rank come between its contexts that
    /// wait for nothing and those that are queued. `None` as long as it was not needed.
    in_line: Option<Vec<(u8, ContextId)>>,
    /// The last in the list that holds pages freely.
    last_holder: Option<Holder>,
    /// The first whose pages may still move, and how many of its blocks were not looked at yet.
    moving: (usize, Option<usize>),
    /// The last that was looked at of those that have nothing on the device; the first of the list that may still give up
    /// its tail.
    giving_up: (Option<Holder>, usize),
}

#[derive(Debug)]
enum Listed {
    Holder(Holder),
    /// Of a user of this rank.
    InLine(u8, Victim),
}

impl Listed {
    fn victim(&self) -> &Victim {
        match self {
            Self::Holder(holder) => &holder.victim,
            Self::InLine(_, victim) => victim,
        }
    }

    /// Whether one that holds pages freely deserves them no more.
    fn comes_after(&self, other: &Holder) -> bool {
        match self {
            Self::Holder(holder) => other <= holder,
            Self::InLine(rank, _) => (other.rank, other.does) <= (*rank, Does::Nothing),
        }
    }
}

impl Scheduler {
    /// Whether a context would fill the device but for a page that it shares and is to write: there is no room for the
    /// page and its copy, so what it has in it is computed again.
    pub(super) fn has_no_room_for_copy(&self, context: &ContextState, target: usize) -> bool {
        let blocks = context.kv.blocks();
        let n_blocks = context.kv.n_blocks_until(target).max(blocks.len());
        let is_copied =
            || blocks.get(context.kv.block_of(context.start())).is_some_and(|&b| self.pages.is_shared(b));
        n_blocks >= self.limits.n_pages && context.under_way.is_none() && is_copied()
    }

    /// Takes note of pages that an admitted context has let go of, and may need again on its way.
    pub(super) fn note_let_go(&mut self, id: ContextId, n_pages: usize) {
        if let Some(mut context) = self.contexts.remove(&id) {
            self.note_let_go_by(&mut context, n_pages);
            self.contexts.insert(id, context);
        }
    }

    /// As [`Self::note_let_go`], for a context that is out of the table.
    pub(super) fn note_let_go_by(&mut self, context: &mut ContextState, n_pages: usize) {
        if n_pages > 0
            && let Standing::Admitted(term) = &mut context.standing
        {
            term.note_let_go(n_pages);
            self.line.n_promised += n_pages;
            self.line.forget_count();
        }
    }

    /// Ends the right to pages of contexts that have let go of some, as long as there is no room for them all: others may hold
    /// what they let go of. Where there is room, that takes one count, of however many contexts.
    pub(super) fn check_room_after(&mut self, let_go: &[ContextId]) {
        for &id in let_go {
            if self.count(None).n_left >= 0 {
                return;
            }
            if self.contexts.get(&id).is_some_and(|context| context.is_admitted()) {
                self.leave_by_id(id);
            }
        }
    }

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
                self.pin_what_is_under_way(plan);
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
    fn pin_what_is_under_way(&mut self, plan: &Plan) {
        let Self { contexts, pages, steps_under_way, .. } = self;
        let before = steps_under_way.iter().flat_map(|under_way| &under_way.ids);
        for id in before.chain(plan.rows.iter().map(|row| &row.id)) {
            if let Some(context) = contexts.get(id).filter(|context| context.under_way.is_some()) {
                context.kv.blocks().iter().for_each(|&block| pages.pin(block));
            }
        }
    }

    /// Whose pages may go.
    pub(super) fn victims(&mut self) -> Victims {
        self.put_holders_in_order();
        Victims::default()
    }

    /// Sees to it that the list goes as far as this; `false` if there are not as many.
    fn list_victims(&mut self, victims: &mut Victims, idx: usize) -> bool {
        while victims.list.len() <= idx {
            let next = self.next_holder(victims.last_holder.as_ref());
            if self.list_line_before(victims, next.as_ref()) {
                continue;
            }
            let Some(next) = next else { return false };
            victims.list.push(Listed::Holder(next.clone()));
            victims.last_holder = Some(next);
        }
        true
    }

    /// Lists those in line that come before a holder, or all that are left; returns whether there were any.
    fn list_line_before(&self, victims: &mut Victims, next: Option<&Holder>) -> bool {
        let comes_before = |rank: u8| next.is_none_or(|next| (rank, Does::Nothing) < (next.rank, next.does));
        if victims.in_line.is_none() && !comes_before(0) {
            return false;
        }
        let in_line = victims.in_line.get_or_insert_with(|| {
            let rank_of = |id: ContextId| {
                self.contexts.get(&id).map_or(0, |context| context.owner.account.priority().rank)
            };
            let mut in_line: Vec<_> =
                self.line.last_first().into_iter().map(|id| (rank_of(id), id)).collect();
            in_line.sort_by_key(|&(rank, _)| rank);
            in_line.reverse();
            in_line
        });
        let n_before = victims.list.len();
        while let Some((rank, id)) = in_line.pop_if(|&mut (rank, _)| comes_before(rank)) {
            victims.list.push(Listed::InLine(rank, Victim::Context(id)));
        }
        victims.list.len() > n_before
    }

    /// Takes one page from the least deserving that has one to give.
    pub(super) fn free_one(&mut self, victims: &mut Victims, marking: u64, plan: &mut Plan) -> bool {
        loop {
            if self.limits.n_host_pages > 0 && !plan.has_room_for_move() {
                return false;
            }
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
    fn next_to_move(&mut self, victims: &mut Victims, marking: u64) -> Option<(usize, BlockId)> {
        loop {
            let (idx, n_blocks) = victims.moving;
            if !self.list_victims(victims, idx) {
                return None;
            }
            let blocks = self.kv_of(victims.list[idx].victim()).map_or(&[][..], Sequence::blocks);
            let n = n_blocks.map_or(blocks.len(), |n| n.min(blocks.len()));
            let may_go = |&block: &BlockId| self.pages.page(block).is_some() && !self.is_kept(block, marking);
            match blocks[..n].iter().rposition(may_go) {
                Some(block_idx) => {
                    victims.moving = (idx, Some(block_idx + 1));
                    return Some((idx, blocks[block_idx]));
                }
                None => victims.moving = (idx + 1, None),
            }
        }
    }

    /// Frees the last block of the least deserving victim that holds one which is neither marked nor pinned: of one that has
    /// nothing on the device and deserves no more than the last of the list that may, or of one in the list.
    fn give_up_one(&mut self, victims: &mut Victims, last_idx: usize, marking: u64) -> bool {
        let (mut aside, mut idx) = std::mem::take(&mut victims.giving_up);
        let found = loop {
            let up_to = &victims.list[last_idx];
            match self.next_aside(aside.as_ref(), |holder| up_to.comes_after(holder)) {
                Some(holder) if self.may_give_up(&holder.victim, marking) => break Some(holder.victim),
                Some(holder) => aside = Some(holder),
                None => {
                    while idx <= last_idx && !self.may_give_up(victims.list[idx].victim(), marking) {
                        idx += 1;
                    }
                    break (idx <= last_idx).then(|| victims.list[idx].victim().clone());
                }
            }
        };
        victims.giving_up = (aside, idx);
        let Some(victim) = found else { return false };
        let kv = match &victim {
            Victim::Context(id) => self.contexts.get_mut(id).map(|context| &mut context.kv),
            Victim::Saved(key) => self.saved.get_mut(key).map(|saved| &mut saved.kv),
        };
        kv.expect("it may give something up").give_up_last_block(&mut self.pages);
        self.stats.n_pages_given_up += 1;
        true
    }

    /// Whether it is of use that a victim lets go of its tail. What others keep of it, or a step reads, stays where it is;
    /// then this one comes at what it holds alone. Of one with rows under way all is kept.
    fn may_give_up(&self, victim: &Victim, marking: u64) -> bool {
        let blocks = self.kv_of(victim).map_or(&[][..], Sequence::blocks);
        blocks.iter().any(|&block| !self.is_kept(block, marking))
    }

    fn is_kept(&self, block: BlockId, marking: u64) -> bool {
        self.pages.is_marked(block, marking) || self.pages.is_pinned(block)
    }
}
