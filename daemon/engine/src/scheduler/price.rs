//! What operations cost the engine's thread, by what they touch: in each turn, and for the virtual time of their guests. It
//! is a fixed measure, so that the same operations cost the same on a machine that is busy; only who may go on in a turn also
//! depends on what they took (`engine/inbox`). The figures are those of a
//! processor of 2023 whose caches hold none of it.

use super::{Saved, Scheduler};
use crate::account::ActorId;
use crate::backend::PAGE_LEN;
use crate::command::{ContextId, Edit, Operation};
use crate::kv::Sequence;

/// An operation, whatever it touches.
const NS_PER_OPERATION: u64 = 300;
/// A token that is written down.
const NS_PER_TOKEN: u64 = 1;
/// A page that changes its holders, and one of a fork, whose holders are counted together.
const NS_PER_PAGE: u64 = 50;
const NS_PER_SHARED_PAGE: u64 = 1;
/// An eviction of a context that is copied: some ten numbers of each.
const NS_PER_EVICTION: u64 = 10;
/// An eviction that is to take effect, beside a look at each page.
const NS_PER_EVICTION_DUE: u64 = 200;
/// A token of a hypothesis that is placed anew: it is compared with others, hashed and written down.
const NS_PER_TOKEN_PLACED: u64 = 5;
/// Bytes of a mask that are copied for the device in a nanosecond.
const MASK_BYTES_PER_NS: u64 = 16;

/// Bytes of pages that are read for an archive, or come back from it, in a nanosecond.
const ARCHIVE_BYTES_PER_NS: u64 = 4;

/// What it takes to have the pages of a sequence held once more, at so much for each; where tokens were evicted, what is
/// known of its pages and of each eviction is written down.
fn copy_ns(kv: &Sequence, ns_per_page: u64) -> u64 {
    let n_pages = kv.blocks().len() as u64;
    let of_evictions = match kv.n_evictions() as u64 {
        0 => 0,
        n => NS_PER_TOKEN * n_pages + NS_PER_EVICTION * n,
    };
    ns_per_page * n_pages + of_evictions
}

impl Scheduler {
    /// Nanoseconds.
    pub(super) fn price_ns(&self, operation: &Operation) -> u64 {
        let base = NS_PER_OPERATION;
        match operation {
            // How far a run has come is said for every token, and a mask that has come should not be late: it is charged,
            // and holds nothing back.
            Operation::Pulled { .. } | Operation::Mask { .. } | Operation::EndRun { .. } => 0,
            Operation::Create { .. }
            | Operation::Cancel { .. }
            | Operation::LetGo { .. }
            | Operation::Stats { .. } => base,
            Operation::Fork { id, edit, .. } => {
                let kv = self.contexts.get(id).map(|context| &context.kv);
                base + self.edit_ns(*id, edit) + kv.map_or(0, |kv| copy_ns(kv, NS_PER_SHARED_PAGE))
            }
            Operation::Evict { id, edit, start, .. } => {
                let n_after =
                    self.contexts.get(id).map_or(0, |context| context.kv.n_kept().saturating_sub(*start));
                let n_tokens = n_after as u64 + edit.appended.len() as u64;
                base + self.edit_ns(*id, edit) + NS_PER_TOKEN * n_tokens + NS_PER_PAGE * self.n_pages_of(*id)
            }
            Operation::Steer { id, edit, from, .. } => {
                let n_after = self.contexts.get(id).map_or(0, |context| match context.kv.steering() {
                    None => context.kv.tokens.len().saturating_sub(*from),
                    // From where on it was steered before may come first.
                    Some(_) => context.kv.tokens.len(),
                });
                let n_after = (n_after + edit.appended.len()) as u64;
                base + self.edit_ns(*id, edit) + NS_PER_TOKEN * n_after + NS_PER_PAGE * self.n_pages_of(*id)
            }
            Operation::Edit { id, edit }
            | Operation::Ask { id, edit, .. }
            | Operation::Run { id, edit, .. } => base + self.edit_ns(*id, edit) + self.due_ns(*id),
            Operation::DrawTogether { members, .. } | Operation::Mix { members, .. } => {
                members.iter().map(|(id, edit)| base + self.edit_ns(*id, edit) + self.due_ns(*id)).sum()
            }
            Operation::SearchBeams(asked) => {
                base * (1 + asked.contexts.len() as u64)
                    + self.edit_ns(asked.base, &asked.edit)
                    + NS_PER_TOKEN_PLACED * asked.search.n_appended() as u64
            }
            Operation::Save { id, edit, name, .. } => {
                let context = self.contexts.get(id);
                let replaced = context.and_then(|context| self.saved_by(context.owner.actor, name));
                let n_let_go = replaced.map_or(0, |saved| saved.kv.blocks().len() as u64);
                let own_ns = context.map_or(0, |context| copy_ns(&context.kv, NS_PER_PAGE));
                base + self.edit_ns(*id, edit) + own_ns + NS_PER_PAGE * n_let_go
            }
            Operation::Release { id, .. } => base + NS_PER_PAGE * self.n_pages_of(*id),
            // The tokens are shared.
            Operation::Open { caller, name, .. } | Operation::Forget { caller, name, .. } => {
                let actor = self.commons.callers.get(caller).map(|owner| owner.actor);
                let saved = actor.and_then(|actor| self.saved_by(actor, name));
                base + saved.map_or(0, |saved| copy_ns(&saved.kv, NS_PER_PAGE))
            }
        }
    }

    /// Charges an operation that stands for itself to its guest's virtual time: what leads to a row is a small part of that.
    /// Opening is charged where the account that gets the context is known.
    pub(super) fn charge_operation(&mut self, operation: &Operation, price_ns: u64) {
        let of_mask = match operation {
            Operation::Mask { mask, .. } => size_of_val(mask.words()) as u64 / MASK_BYTES_PER_NS,
            _ => 0,
        };
        let id = match operation {
            Operation::Edit { id, .. }
            | Operation::Evict { id, .. }
            | Operation::Steer { id, .. }
            | Operation::Fork { id, .. }
            | Operation::Mask { id, .. }
            | Operation::Save { id, .. }
            | Operation::Cancel { id, .. }
            | Operation::Release { id, .. } => Some(*id),
            Operation::Ask { .. }
            | Operation::Run { .. }
            | Operation::DrawTogether { .. }
            | Operation::SearchBeams(_)
            | Operation::Mix { .. }
            | Operation::Create { .. }
            | Operation::Open { .. }
            | Operation::Forget { .. }
            | Operation::Pulled { .. }
            | Operation::EndRun { .. }
            | Operation::LetGo { .. }
            | Operation::Stats { .. } => None,
        };
        if let Some(context) = id.and_then(|id| self.contexts.get(&id)) {
            self.commons.queue.charge(&context.seat, price_ns + of_mask);
            self.commons.arrears.note_active(&context.owner);
        }
    }

    /// What it takes the device to have so many pages read or filled, beside its steps.
    pub(super) fn archive_ns(&self, n_pages: usize) -> u64 {
        n_pages as u64 * self.limits.page_bytes as u64 / ARCHIVE_BYTES_PER_NS
    }

    fn saved_by(&self, actor: ActorId, name: &str) -> Option<&Saved> {
        self.saved.get(&(actor, name.to_owned()))
    }

    fn n_pages_of(&self, id: ContextId) -> u64 {
        self.contexts.get(&id).map_or(0, |context| context.kv.blocks().len() as u64)
    }

    /// What it takes to have evictions take effect in the step that computes what is before them.
    fn due_ns(&self, id: ContextId) -> u64 {
        let Some(context) = self.contexts.get(&id) else { return 0 };
        context.kv.n_evictions_due() as u64 * (NS_PER_EVICTION_DUE + context.kv.blocks().len() as u64)
    }

    fn edit_ns(&self, id: ContextId, edit: &Edit) -> u64 {
        let Some(context) = self.contexts.get(&id) else { return 0 };
        let n_dropped = context.kv.n_kept().saturating_sub(edit.n_kept);
        NS_PER_TOKEN * edit.appended.len() as u64 + NS_PER_PAGE * (n_dropped / PAGE_LEN) as u64
    }
}
