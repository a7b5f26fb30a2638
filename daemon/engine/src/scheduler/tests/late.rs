//! Streams whose callers supply the mask of each draw, in time or late.

use std::sync::Arc;

use super::guest::Guests;
use super::hash_backend::{VOCAB, drawn, drawn_under, mix};
use super::steps::endless;
use super::{Stream, World, context_id};
use crate::account::{Account, ActorId, Budget, GuestId, Owner, SessionId};
use crate::backend::{Limits, PAGE_LEN};
use crate::batch::{Candidate, Output, Token};
use crate::command::{Ask, Edit, MaskSource, Operation, RunSettings};
use crate::port::Port;
use crate::sampling::TokenMask;
use crate::scheduler::{Scheduler, SchedulerSettings};

/// What may follow a prefix, for the callers of these tests: about half of the vocabulary.
pub(super) fn mask_after(prefix: u64) -> Arc<TokenMask> {
    let mut mask = TokenMask::none(VOCAB as usize);
    let forced = mix(prefix) % VOCAB;
    for token in 0..VOCAB {
        mask.set(token as Token, token == forced || mix(prefix ^ mix(token)).is_multiple_of(2));
    }
    Arc::new(mask)
}

impl Stream {
    /// The token that it gives after a prefix.
    pub(super) fn expected(&self, prefix: u64) -> Candidate {
        match self.is_masked {
            true => drawn_under(&mask_after(prefix), prefix, self.seed).expect("the mask allows something"),
            false => drawn(prefix, self.seed),
        }
    }

    /// Takes note of a draw; whether it was not what was expected.
    pub(super) fn note_drawn(&mut self, token: Token) -> bool {
        let is_turn = self.masked.pop_front().flatten().is_some_and(|expected| expected != token);
        if is_turn {
            self.masked.clear();
            self.n_turns += 1;
        }
        is_turn
    }
}

impl World {
    /// Supplies the next mask of a context's stream, if that is of the kind, and now and then one that was not asked for.
    pub(super) fn supply_mask(&mut self, idx: usize) {
        let stray = self.random.below(12);
        let (id, model) = &mut self.contexts[idx];
        let Some(stream) = model.stream.as_mut().filter(|stream| stream.is_masked) else { return };
        let (id, tag, position) = (*id, stream.queue.tag(), model.tokens.len());
        let (mut prefix, turn, seed) = (model.past.chain(&model.tokens), stream.n_turns, stream.seed);
        let wrong = mask_after(prefix.extend(1).last);
        let mut masks = Vec::new();
        let mut send = |position, turn, mask, expected| {
            masks.push(Operation::Mask { id, tag, position, turn, mask, expected });
        };
        match stray {
            // One that came too late, one that comes too early, and one for another way.
            0 => send(position.saturating_sub(1), turn, wrong.clone(), None),
            1 => send(position + 1, turn, wrong.clone(), None),
            2 => send(position, turn + 1, wrong.clone(), Some(1)),
            _ => {}
        }
        let n_masks = if self.random.below(3) == 0 { 1 + self.random.below(20) } else { 1 };
        for n_ahead in 0..n_masks {
            let mask = mask_after(prefix.last);
            let next = drawn_under(&mask, prefix.last, seed).expect("the mask allows something").token;
            // Mostly it is right.
            let expected = if self.random.below(8) == 0 { (next + 1) % VOCAB as Token } else { next };
            let is_last = n_ahead + 1 == n_masks;
            send(position + n_ahead, turn, mask, (!is_last).then_some(expected));
            if stray == 3 {
                send(position + n_ahead, turn, wrong.clone(), None);
            }
            stream.masked.push_back((!is_last).then_some(expected));
            prefix = prefix.extend(expected);
        }
        self.n_masks_ahead += n_masks - 1;
        masks.into_iter().for_each(|mask| self.apply(mask));
    }

    /// Callers come with their masks, some of them.
    pub(super) fn supply_some_masks(&mut self) {
        for idx in 0..self.contexts.len() {
            let model = &self.contexts[idx].1;
            let is_due = |stream: &Stream| stream.is_masked && stream.masked.is_empty();
            if model.stream.as_ref().is_some_and(is_due) && self.random.below(3) == 0 {
                self.supply_mask(idx);
            }
        }
    }

    /// Whether the last step under way has been let draw, or waits for no masks; lets it draw, at the latest when
    /// its layers are done.
    pub(super) fn lets_draw(&mut self) -> bool {
        let is_oldest = self.under_way.len() == 1;
        let Some((plan, outputs)) = self.under_way.back_mut().filter(|(plan, _)| plan.waits_for_masks())
        else {
            return true;
        };
        let found = self.scheduler.masks_of(plan);
        if found.n_missing > 0 && !(is_oldest && self.random.below(2) == 0) {
            return false;
        }
        self.n_masks_late += found.masks.len();
        // Now and then the device has no room for all of them.
        let n_drawn = if self.random.below(4) == 0 { self.random.below(3) } else { usize::MAX };
        self.backend.supply(&found.masks, n_drawn, outputs);
        let sat_out: Vec<usize> = found.masks.iter().skip(n_drawn).map(|mask| mask.row_idx).collect();
        self.scheduler.let_draw(plan, &sat_out);
        true
    }
}

/// A run whose draw sat out at the end of a page computes its last token again, with others that are expected and need another
/// page. Before that page can be had, another context asks that begins alike.
#[test]
fn a_page_that_is_to_be_written_again_is_found_by_nobody() {
    const N_PAGES: usize = 6;
    let limits = Limits { n_steps_under_way: 1, n_host_pages: 10, ..Limits::of_nothing(4, N_PAGES) };
    let mut scheduler = Scheduler::alone(limits, SchedulerSettings::alone(1024));
    let mut guests = Guests::default();
    let account = Account::new("guest", Budget::UNLIMITED, None);
    let owner = Owner { actor: ActorId(1), session: SessionId(1), guest: GuestId(1), account };
    let caller = guests.enter(&mut scheduler, owner);
    let ids = [0, 1, 2, 3, 4, 5].map(context_id);
    for id in ids {
        scheduler.apply(Operation::Create { id, caller });
    }
    let [idle, other, id, next, large, alike] = ids;
    let text = |token: Token, n_tokens: usize| Edit { appended: vec![token; n_tokens], ..Edit::default() };
    let ask = |scheduler: &mut Scheduler, id, edit, ask| {
        let tag = guests.ticket(caller).tag();
        scheduler.apply(Operation::Ask { id, edit, ask, tag });
    };
    let step = |scheduler: &mut Scheduler, output: Output| {
        let plan = scheduler.plan();
        scheduler.check();
        let (n_rows, n_outputs) = (plan.rows.len(), plan.rows.iter().map(|row| row.n_outputs).sum());
        if plan.has_rows() {
            scheduler.complete(plan, vec![output; n_outputs], 1_000);
        }
        scheduler.check();
        n_rows
    };
    // Three pages and two, of contexts that wait for nothing.
    for (id, token, n_tokens) in [(idle, 1, 40), (other, 2, 24)] {
        ask(&mut scheduler, id, text(token, n_tokens), Ask::Prefill);
        step(&mut scheduler, Output::SatOut);
    }
    assert_eq!(scheduler.pages.n_free(), 1);
    // The run is promised a whole term; those of its pages that are free another context takes. A third one stands in line, so
    // that pages are counted before the next plan looks at the run.
    let mut queue = guests.queue(caller);
    let settings = RunSettings { masks: MaskSource::Caller, ..endless() };
    let (tag, n_tokens) = (queue.tag(), 2 * PAGE_LEN);
    scheduler.apply(Operation::Run { id, edit: text(5, n_tokens), settings, tag });
    ask(&mut scheduler, next, text(3, 24), Ask::Prefill);
    ask(&mut scheduler, large, text(4, N_PAGES * PAGE_LEN), Ask::Prefill);
    assert_eq!(step(&mut scheduler, Output::SatOut), 2);
    assert!(scheduler.contexts[&id].n_promised() > 0 && scheduler.pages.n_free() == 0);
    assert_eq!(scheduler.line.first(), Some(large));
    for position in n_tokens..n_tokens + 4 {
        let (mask, expected) = (Arc::new(TokenMask::all(1000)), Some(7));
        scheduler.apply(Operation::Mask { id, tag, position, turn: 0, mask, expected });
    }
    ask(&mut scheduler, alike, text(5, n_tokens + 1), Ask::Top { n: 1 });
    scheduler.commons.set_link_busy(true);
    assert_eq!(step(&mut scheduler, Output::SatOut), 0, "nothing can leave the device");
    assert!(!scheduler.contexts[&alike].kv.blocks().is_empty(), "it has found the page before");
    scheduler.commons.set_link_busy(false);
    step(&mut scheduler, Output::Sampled(Candidate { token: 7, logprob: -1.0 }));
    guests.deliver(&scheduler, Port::Direct);
    assert_eq!(std::iter::from_fn(|| queue.try_pull()).count(), 4);
}
