//! The memory of a device's pages, and how it goes from one model to another.
//!
//! All models together have so many bytes for their pages. For a context that stands in line for pages its model gets a part:
//! of what no model has; or of another model, where less is missed by that than its own model would have to give up, in the
//! order of [`Sacrifice`]. What no model has and no context waits for goes to the model that has least. No model has less
//! than its longest context needs, so that whatever fits it alone comes to its end whatever others do.
//!
//! A part changes hands between two steps. The model that gives it is not planned until its steps are taken in: nothing
//! loses its memory that a step could read. A model that got a part from another keeps what it has until it has been
//! served for 32 steps, and for as long as it took to move the pages that were in the way: so memory does not go back
//! before it was used. Until then it gets no more at the cost of work either, unless the part was not enough for the
//! context that it was for.

use smallvec::SmallVec;

use super::Core;
use crate::backend::Damage;
use crate::completion::{Done, Tag};
use crate::engine::resident::{Change, Health, Resident};
use crate::error::{EngineError, EngineFailure};
use crate::handle::DESK;
use crate::scheduler::{Sacrifice, Source, Taking, Want};

/// What changes hands between two steps at most, unless a granule is longer: what a device copies in some milliseconds.
const PART_BYTES: u64 = 64 << 20;

/// Steps for which a model keeps the pages that it got from another.
const N_STEPS_KEPT: u64 = 32;

/// Pages that had to move that count as one step.
const N_MOVED_PAGES_PER_STEP: usize = 64;

/// Memory for pages of all models of a device.
#[derive(Debug, Default)]
pub(super) struct Pool {
    /// The most that all have together; none as long as each has what it came with.
    kv_bytes: Option<u64>,
    /// Where to say that they have no more than that, and that nothing is left to give out.
    asked: Option<Tag>,
    transfer: Option<Transfer>,
    reliefs: Vec<Relief>,
    /// The device's step from which on it is looked again which models lack pages.
    looks_from: u64,
}

/// Memory that is to go back to the system once a step was taken in.
#[derive(Clone, Copy, Debug)]
struct Relief {
    n_bytes: u64,
    tag: Tag,
    after: u64,
}

/// A part that is about to be given up.
#[derive(Clone, Copy, Debug)]
struct Transfer {
    /// The place of the model that gives it.
    from: usize,
    /// What it has afterwards.
    n_pages: usize,
    taking: Taking,
    /// The place of the model that gets it, if any does.
    to: Option<usize>,
}

impl Pool {
    /// Whether the desk waits until memory is where it is to be.
    pub(super) fn is_asked(&self) -> bool {
        self.asked.is_some()
    }

    /// A model has come, and has brought so many bytes with it.
    pub(super) fn note_came(&mut self, n_bytes: u64) {
        self.kv_bytes = self.kv_bytes.map(|kv_bytes| kv_bytes.saturating_add(n_bytes));
    }

    /// A model goes. Its backend still has so many bytes; they are for others once the desk says so.
    pub(super) fn note_left(&mut self, n_bytes: u64) {
        self.kv_bytes = self.kv_bytes.map(|kv_bytes| kv_bytes.saturating_sub(n_bytes));
    }
}

impl Core {
    pub(super) fn note_kv_bytes(&mut self, kv_bytes: u64, tag: Tag) {
        let staying = self.residents.iter().flatten().filter(|resident| resident.change != Change::Leave);
        let needed_bytes = staying.map(Resident::kv_bytes_min).sum();
        if kv_bytes < needed_bytes {
            let error = EngineError::KvTooSmall { needed_bytes, kv_bytes };
            return self.outbox.to(DESK, tag).send(Done::Shared(Err(error)));
        }
        self.pool.kv_bytes = Some(kv_bytes);
        // The caller that asked before is told that it is done as far as it is.
        self.answer_share(Ok(()));
        self.pool.asked = Some(tag);
    }

    fn answer_share(&mut self, answer: Result<(), EngineError>) {
        if let Some(tag) = self.pool.asked.take() {
            self.outbox.to(DESK, tag).send(Done::Shared(answer));
        }
    }

    /// Gives so many bytes of host pages back to the system at most, a piece more or less: of all models what is free anyway, then pages
    /// whose KV is given up for it. No KV is given up where the system does not take memory back. However much is free, a turn takes
    /// no longer than so many bytes do. Says how many went back.
    ///
    /// Where pages move behind a step, it is put off until that was taken in: the engine's thread would wait for the step.
    pub(super) fn relieve(&mut self, n_bytes: u64, tag: Tag) {
        let mut residents = self.residents.iter_mut().flatten();
        match self.under_way.front().map(|(_, plan)| plan.step) {
            Some(after) if residents.any(|resident| resident.backend.is_moving()) => {
                self.pool.reliefs.push(Relief { n_bytes, tag, after });
            }
            _ => self.relieve_now(n_bytes, tag),
        }
    }

    /// Does what was put off, as far as its step was taken in.
    fn relieve_after_steps(&mut self) {
        let oldest = self.under_way.front().map(|(_, plan)| plan.step);
        let due: Vec<Relief> = self.pool.reliefs.extract_if(.., |it| Some(it.after) != oldest).collect();
        due.into_iter().for_each(|Relief { n_bytes, tag, .. }| self.relieve_now(n_bytes, tag));
    }

    fn relieve_now(&mut self, n_bytes: u64, tag: Tag) {
        let mut n_freed_bytes = self.release_host_pages(n_bytes);
        let mut n_left_bytes = n_bytes.saturating_sub(n_freed_bytes);
        for place in self.places() {
            let Self { residents, commons, .. } = self;
            let gives = |it: &&mut Resident| releases_host_pages(it) && !it.backend.keeps_host_memory();
            let Some(resident) = residents[place].as_mut().filter(gives) else { continue };
            let page_bytes = resident.page_bytes();
            let n_pages = usize::try_from(n_left_bytes / page_bytes).unwrap_or(usize::MAX);
            let n_given_up = resident.lend(commons).give_up_host_pages(n_pages);
            n_left_bytes = n_left_bytes.saturating_sub(n_given_up as u64 * page_bytes);
        }
        n_freed_bytes += self.release_host_pages(n_bytes.saturating_sub(n_freed_bytes));
        self.outbox.to(DESK, tag).send(Done::Relieved(n_freed_bytes));
    }

    /// Gives memory of free host pages of all models back to the system, so many bytes at most, and returns how many went. Where what is
    /// free lies between what is not, that is moved together, on the host.
    fn release_host_pages(&mut self, n_bytes: u64) -> u64 {
        let mut n_freed = 0;
        for gathers in [false, true] {
            let releasing = |resident: &&mut Resident| releases_host_pages(resident);
            for resident in self.residents.iter_mut().flatten().filter(releasing) {
                let at_most = n_bytes.saturating_sub(n_freed);
                let mut free = resident.scheduler.free_host_pages();
                if gathers {
                    let moves = resident.backend.gather_host_pages(&free, at_most);
                    if moves.is_empty() {
                        continue;
                    }
                    resident.scheduler.note_gathered(&moves);
                    free = resident.scheduler.free_host_pages();
                }
                n_freed += resident.backend.release_host_pages(&free, at_most);
            }
        }
        n_freed
    }

    /// A step of the model at this place is under way.
    pub(super) fn note_step(&mut self, place: usize) {
        self.count_step(Some(place));
    }

    /// Counts a step of one model, or one in which none had anything to compute, for those that keep pages.
    fn count_step(&mut self, place: Option<usize>) {
        for of in self.places() {
            let is_under_way = self.is_under_way(of);
            let Self { residents, commons, .. } = self;
            let Some(resident) = &mut residents[of] else { continue };
            // A model without work that can be planned would otherwise keep it for ever.
            let stands_still = !is_under_way && !resident.scheduler.waits_for_plan_among(commons);
            if place == Some(of) || stands_still {
                resident.n_steps_kept = resident.n_steps_kept.saturating_sub(1);
            }
        }
    }

    /// Moves one part, as far as there is need and the steps under way allow.
    pub(super) fn move_memory(&mut self) -> Result<(), EngineFailure> {
        self.relieve_after_steps();
        if self.pool.transfer.is_none() {
            if self.kv_bytes() > self.most_bytes() {
                self.choose_for_all();
            } else if self.is_time_to_look() {
                self.look()?;
            }
        }
        self.carry_out()?;
        if self.pool.transfer.is_none()
            && self.kv_bytes() <= self.most_bytes()
            && !self.give_out_what_is_left()?
        {
            self.answer_share(Ok(()));
        }
        self.note_most();
        Ok(())
    }

    /// Tells each model how many pages it could have.
    fn note_most(&mut self) {
        let spare_bytes = |resident: &Resident| resident.kv_bytes().saturating_sub(resident.kv_bytes_min());
        let spare: SmallVec<[u64; 8]> =
            self.residents.iter().map(|resident| resident.as_ref().map_or(0, spare_bytes)).collect();
        let rest_bytes = self.rest_bytes();
        for (place, resident) in self.residents.iter_mut().enumerate() {
            let Some(resident) = resident else { continue };
            // What each gives is of use in whole granules.
            let granule_bytes = resident.granule_bytes();
            let of_others = spare.iter().enumerate().filter(|&(from, _)| from != place);
            let n_granules: u64 = of_others.map(|(_, n_bytes)| n_bytes / granule_bytes).sum();
            let n_bytes = (n_granules * granule_bytes).saturating_add(rest_bytes);
            resident.scheduler.set_n_pages_most(resident.n_pages_with(n_bytes).unwrap_or(0));
        }
    }

    /// Bytes of the pages of all models.
    fn kv_bytes(&self) -> u64 {
        self.residents.iter().flatten().map(Resident::kv_bytes).sum()
    }

    /// The most bytes that all models have together.
    fn most_bytes(&self) -> u64 {
        self.pool.kv_bytes.unwrap_or_else(|| self.kv_bytes())
    }

    /// Bytes that no model has.
    fn rest_bytes(&self) -> u64 {
        self.most_bytes().saturating_sub(self.kv_bytes())
    }

    /// What changes hands between two steps: half of what may move there, since the model that gives a page may have to move
    /// another to host memory for it.
    fn part_bytes(&mut self) -> u64 {
        let Self { residents, commons, .. } = self;
        let of = |resident: &mut Resident| resident.lend(commons).n_move_bytes_per_step() as u64 / 2;
        residents.iter_mut().flatten().map(of).min().map_or(PART_BYTES, |n_bytes| n_bytes.min(PART_BYTES))
    }

    fn places(&self) -> impl Iterator<Item = usize> + use<> {
        0..self.residents.len()
    }

    /// The model at a place, if it may get pages or give them.
    fn settled(&mut self, place: usize) -> Option<&mut Resident> {
        let resident = self.residents.get_mut(place)?.as_mut()?;
        let is_settled = resident.change == Change::None && !matches!(resident.health, Health::Failing(_));
        is_settled.then_some(resident)
    }

    /// At most once for each step that was planned.
    fn is_time_to_look(&mut self) -> bool {
        let mut residents = self.residents.iter_mut().flatten();
        if let (Some(only), None) = (residents.next(), residents.next()) {
            only.scheduler.set_source(Source::Own);
            return false;
        }
        self.under_way.is_empty() || self.pool.looks_from <= self.commons.step()
    }

    /// Looks which models lack pages, and finds a part for the first of them by virtual time that others can help.
    fn look(&mut self) -> Result<(), EngineFailure> {
        self.pool.looks_from = self.commons.step() + 1;
        let mut wants: SmallVec<[(usize, Want); 2]> = SmallVec::new();
        let mut is_still = false;
        for place in self.places() {
            let could_get = self.could_get(place);
            let Self { residents, commons, .. } = self;
            let Some(resident) = residents[place].as_mut().filter(|resident| resident.health.works()) else {
                continue;
            };
            resident.scheduler.set_source(if could_get { Source::Others } else { Source::Own });
            if let Some(want) = resident.lend(commons).want() {
                is_still = self.under_way.is_empty();
                wants.extend(could_get.then_some((place, want)));
            }
        }
        wants.sort_by(|(_, a), (_, b)| a.times.compare(&b.times));
        for (place, want) in wants {
            if self.help(place, &want)? {
                return Ok(());
            }
            self.resident(place).scheduler.set_source(Source::Own);
        }
        if is_still {
            self.count_step(None);
        }
        Ok(())
    }

    /// Whether it is worth looking for pages elsewhere.
    fn could_get(&mut self, place: usize) -> bool {
        let rest_bytes = self.rest_bytes();
        let Some(resident) = self.settled(place) else { return false };
        let granule_bytes = resident.granule_bytes();
        resident.n_pages_with(granule_bytes).is_some()
            && (rest_bytes >= granule_bytes
                || self.places().any(|from| from != place && self.could_give(from)))
    }

    fn could_give(&mut self, place: usize) -> bool {
        self.settled(place)
            .is_some_and(|resident| resident.n_steps_kept == 0 && resident.n_pages_without(1).is_some())
    }

    /// Sees to it that a model gets a part of what its first in line lacks; `false` if it is to help itself.
    fn help(&mut self, place: usize, want: &Want) -> Result<bool, EngineFailure> {
        let (rest_bytes, part_bytes) = (self.rest_bytes(), self.part_bytes());
        let Some(taker) = self.settled(place) else { return Ok(false) };
        let granule_bytes = taker.granule_bytes();
        let wanted_bytes = wanted_bytes(taker, want, part_bytes);
        if let Some(n_pages) = taker.n_pages_with(wanted_bytes.min(rest_bytes)) {
            return self.grow(place, n_pages);
        }
        let Self { residents, commons, .. } = self;
        let taker = residents[place].as_mut().expect("it is settled");
        let own = taker.lend(commons).own_sacrifice(want);
        let mut best: Option<(Sacrifice, Transfer)> = None;
        for from in self.places() {
            if from == place || !self.could_give(from) {
                continue;
            }
            // As much as is wanted, or as is of any use.
            for n_bytes in [wanted_bytes, granule_bytes] {
                let n_bytes = n_bytes.saturating_sub(rest_bytes);
                let Self { residents, commons, .. } = self;
                let giver = residents[from].as_mut().expect("it could give");
                let Some(n_pages) = giver.n_pages_without(n_bytes) else { continue };
                let n_given = giver.backend.n_pages() - n_pages;
                let found_bytes = rest_bytes + n_given as u64 * giver.page_bytes();
                if found_bytes < granule_bytes {
                    continue;
                }
                let Some(sacrifice) = giver.lend(commons).sacrifice(n_given, Some(&want.times)) else {
                    continue;
                };
                // Work is not sent away for what would not do.
                let would_do = found_bytes >= wanted_bytes;
                let than = best.as_ref().map(|(best, _)| best).or(own.as_ref());
                let is_better = than.is_none_or(|than| sacrifice.compare(than).is_lt());
                if is_better && (would_do || !matches!(sacrifice, Sacrifice::Work(_))) {
                    let taking = Taking::Spare;
                    best = Some((sacrifice, Transfer { from, n_pages, taking, to: Some(place) }));
                    break;
                }
            }
        }
        let Some((sacrifice, transfer)) = best else { return Ok(false) };
        let taker = self.resident(place);
        let is_again = taker.n_steps_kept > 0 && taker.helped != Some(want.first);
        if is_again && matches!(sacrifice, Sacrifice::Work(_)) {
            return Ok(false);
        }
        self.begin(transfer);
        Ok(true)
    }

    fn begin(&mut self, transfer: Transfer) {
        self.resident(transfer.from).change = Change::Part;
        self.pool.transfer = Some(transfer);
    }

    /// All models together have more than they may: finds whose part goes. What is admitted loses its pages only if there
    /// is no other way.
    fn choose_for_all(&mut self) {
        let n_bytes = (self.kv_bytes() - self.most_bytes()).min(self.part_bytes());
        let mut best: Option<(Sacrifice, Transfer)> = None;
        let mut last: Option<(u64, Transfer)> = None;
        for from in self.places() {
            if self.settled(from).is_none() {
                continue;
            }
            let Self { residents, commons, .. } = self;
            let giver = residents[from].as_mut().expect("it is settled");
            let Some(n_pages) = giver.n_pages_without(n_bytes) else { continue };
            let n_given = giver.backend.n_pages() - n_pages;
            let transfer = Transfer { from, n_pages, taking: Taking::Spare, to: None };
            if let Some(sacrifice) = giver.lend(commons).sacrifice(n_given, None)
                && best.as_ref().is_none_or(|(best, _)| sacrifice.compare(best).is_lt())
            {
                best = Some((sacrifice, transfer));
            }
            let spare_bytes = giver.kv_bytes() - giver.kv_bytes_min();
            if last.as_ref().is_none_or(|&(most, _)| spare_bytes > most) {
                last = Some((spare_bytes, Transfer { taking: Taking::Any, ..transfer }));
            }
        }
        let best = best.map(|(_, transfer)| transfer).or(last.map(|(_, transfer)| transfer));
        match best {
            Some(transfer) => self.begin(transfer),
            // One that goes takes its pages with it.
            None if self.residents.iter().flatten().any(|resident| resident.change == Change::Leave) => {}
            None => {
                let (needed_bytes, kv_bytes) = (self.kv_bytes(), self.most_bytes());
                self.answer_share(Err(EngineError::KvTooSmall { needed_bytes, kv_bytes }));
            }
        }
    }

    /// Carries out what is about to happen, if no step is under way that could read what goes.
    fn carry_out(&mut self) -> Result<(), EngineFailure> {
        let Some(Transfer { from, n_pages, taking, to }) = self.pool.transfer else { return Ok(()) };
        let is_there = |resident: &Resident| resident.change == Change::Part;
        if !self.residents[from].as_ref().is_some_and(is_there) {
            self.pool.transfer = None;
            return Ok(());
        }
        if self.is_under_way(from) {
            return Ok(());
        }
        self.pool.transfer = None;
        self.resident(from).change = Change::None;
        // The context that it was for may have found pages meanwhile, or be gone.
        let want = to.and_then(|to| self.settled(to).is_some().then_some(to)).and_then(|to| {
            let Self { residents, commons, .. } = self;
            residents[to].as_mut()?.lend(commons).want()
        });
        if to.is_some() && want.is_none() {
            return Ok(());
        }
        let Self { residents, commons, .. } = self;
        let giver = residents[from].as_mut().expect("it is there");
        let plan = match taking {
            Taking::Spare => giver.lend(commons).part_with(n_pages, want.as_ref().map(|want| &want.times)),
            Taking::Any => Some(giver.lend(commons).vacate(n_pages, taking)),
        };
        let Some(plan) = plan else { return Ok(()) };
        let n_moved = match giver.part(&plan, commons) {
            Ok(n_moved) => n_moved,
            Err(error) if error.damage() == Damage::Device => return Err(EngineFailure::Device(error)),
            Err(error) => {
                tracing::warn!(%error, "a model does not give up memory");
                giver.n_steps_kept = N_STEPS_KEPT;
                self.answer_share(Err(EngineError::Memory(error)));
                return Ok(());
            }
        };
        if let (Some(to), Some(want)) = (to, want) {
            let rest_bytes = self.rest_bytes();
            let taker = self.resident(to);
            let n_steps_kept = N_STEPS_KEPT + (n_moved / N_MOVED_PAGES_PER_STEP) as u64;
            taker.n_steps_kept = taker.n_steps_kept.max(n_steps_kept);
            taker.helped = Some(want.first);
            if let Some(n_pages) = taker.n_pages_with(wanted_bytes(taker, &want, PART_BYTES).min(rest_bytes))
            {
                self.grow(to, n_pages)?;
            }
        }
        Ok(())
    }

    /// What no model has goes to the one that has least and may have more; returns whether there was any.
    fn give_out_what_is_left(&mut self) -> Result<bool, EngineFailure> {
        let rest_bytes = self.rest_bytes();
        let mut least: Option<(u64, usize, usize)> = None;
        for place in self.places() {
            let Some(resident) = self.settled(place).filter(|resident| resident.health.works()) else {
                continue;
            };
            let part_bytes = PART_BYTES.max(resident.granule_bytes()).min(rest_bytes);
            if let Some(n_pages) = resident.n_pages_with(part_bytes) {
                let found = (resident.kv_bytes(), place, n_pages);
                least = Some(least.map_or(found, |least| least.min(found)));
            }
        }
        match least {
            Some((_, place, n_pages)) => self.grow(place, n_pages),
            None => Ok(false),
        }
    }

    /// Gives memory to the pages of a model below `n_pages`; returns whether there was any to be had.
    fn grow(&mut self, place: usize, n_pages: usize) -> Result<bool, EngineFailure> {
        match self.resident(place).grow(n_pages) {
            Ok(()) => Ok(true),
            Err(error) if error.damage() == Damage::Device => Err(EngineFailure::Device(error)),
            Err(error) => {
                // Another process has it. It is not tried again before the device is shared anew.
                let kv_bytes = self.kv_bytes();
                self.pool.kv_bytes = Some(kv_bytes);
                tracing::warn!(%error, kv_bytes, "models go on with the pages that they have");
                Ok(false)
            }
        }
    }
}

/// Whether memory of a model's host pages may go back to the system.
fn releases_host_pages(resident: &Resident) -> bool {
    resident.health.works() && resident.backend.can_release_host_pages()
}

/// What a model is to get at once for its first in line.
fn wanted_bytes(taker: &Resident, want: &Want, part_bytes: u64) -> u64 {
    let granule_bytes = taker.granule_bytes();
    let wanted_bytes = (want.n_pages as u64).saturating_mul(taker.page_bytes());
    wanted_bytes.min(part_bytes).next_multiple_of(granule_bytes)
}
