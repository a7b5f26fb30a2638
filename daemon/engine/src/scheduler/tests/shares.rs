//! What streams get of a device beside those of others, by what rows cost.

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU32;
use std::sync::Arc;

use super::guest::Guests;
use super::steps::endless;
use super::{Random, context_id};
use crate::account::{Account, ActorId, Budget, GuestId, Owner, Priority, SessionId};
use crate::backend::Limits;
use crate::batch::{Candidate, Output, OutputKind};
use crate::command::{Ask, ContextId, Edit, Operation, SearchBeams};
use crate::completion::CallerId;
use crate::guess::Guess;
use crate::mailbox::Ticket;
use crate::port::Port;
use crate::sampling::Sampler;
use crate::sampling::beams::{BeamSettings, EarlyStopping, Search};
use crate::scheduler::{Plan, Scheduler, SchedulerSettings};

/// How long a step takes: so long, and so much longer for each row, in µs.
#[derive(Clone, Copy, Debug)]
struct Device {
    step_us: u64,
    row_us: u64,
    n_under_way: usize,
}

/// On a CPU rows cost more than what all share.
const CPU: Device = Device { step_us: 2_000, row_us: 1_000, n_under_way: 1 };

/// On a GPU 256 rows take one and a half times as long as one.
const GPU: Device = Device { step_us: 8_000, row_us: 16, n_under_way: 2 };

/// A guest with so many streams, or contexts that are asked.
#[derive(Clone, Copy, Debug)]
struct Guest {
    actor: u32,
    session: u64,
    n_streams: usize,
    kind: Kind,
    /// Of its user.
    share: u32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Streams,
    /// Verifications of so many guessed tokens, each as soon as the last is answered.
    Guesses(usize),
    /// As above, each a step after the last is answered.
    LateGuesses(usize),
    /// One job over all contexts, as soon as the last is answered.
    Jobs,
    /// As above, a job over each so many of them.
    JobsOf(usize),
    /// Beam searches, one after the other: the first context is what they search from, the others their beams.
    Searches,
}

const fn streams(actor: u32, session: u64, n_streams: usize) -> Guest {
    Guest { actor, session, n_streams, kind: Kind::Streams, share: 1 }
}

struct House {
    scheduler: Scheduler,
    guests: Guests,
    device: Device,
    random: Random,
    under_way: VecDeque<Plan>,
    /// What the guests have, each with how many rows it got.
    of_guests: Vec<(Guest, CallerId, Vec<ContextId>, u64)>,
    asked: Vec<Asked>,
    /// What is asked after the step that is under way.
    late: Vec<(usize, Vec<ContextId>)>,
    us: u64,
    n_rows_of_steps: Vec<usize>,
    /// By the first of the contexts asked.
    n_answers: HashMap<ContextId, usize>,
}

struct Asked {
    guest_idx: usize,
    ids: Vec<ContextId>,
    place: Ticket,
}

impl House {
    fn new(device: Device, guests: &[Guest]) -> Self {
        let limits = Limits { n_steps_under_way: device.n_under_way, ..Limits::of_nothing(1024, 100_000) };
        let mut house = Self {
            scheduler: Scheduler::alone(limits, SchedulerSettings::alone(usize::MAX)),
            guests: Guests::default(),
            device,
            random: Random::new(1),
            under_way: VecDeque::new(),
            of_guests: Vec::new(),
            asked: Vec::new(),
            late: Vec::new(),
            us: 0,
            n_rows_of_steps: Vec::new(),
            n_answers: HashMap::new(),
        };
        guests.iter().for_each(|&guest| house.enter(guest));
        house
    }

    fn enter(&mut self, guest: Guest) {
        let idx = self.of_guests.len();
        let priority = Priority { share: NonZeroU32::new(guest.share).expect("above 0"), rank: 0 };
        let account = Account::with_priority("guest", Budget::UNLIMITED, None, priority);
        let (actor, session) = (ActorId(guest.actor), SessionId(guest.session));
        let owner = Owner { actor, session, guest: GuestId(idx as u64), account };
        let caller = self.guests.enter(&mut self.scheduler, owner);
        let ids = (0..guest.n_streams).map(|n| context_id((idx * 10_000 + n) as u64));
        let ids: Vec<ContextId> = ids.collect();
        for &id in &ids {
            self.scheduler.apply(Operation::Create { id, caller });
            if guest.kind == Kind::Streams {
                let edit = Edit { appended: vec![1], ..Edit::default() };
                let settings = endless();
                let tag = self.guests.ticket(caller).tag();
                self.scheduler.apply(Operation::Run { id, edit, settings, tag });
            }
        }
        self.of_guests.push((guest, caller, ids.clone(), 0));
        match guest.kind {
            Kind::Streams => {}
            Kind::Guesses(_) | Kind::LateGuesses(_) => ids.into_iter().for_each(|id| self.ask(idx, vec![id])),
            Kind::Jobs | Kind::Searches => self.ask(idx, ids),
            Kind::JobsOf(n_members) => ids.chunks(n_members).for_each(|ids| self.ask(idx, ids.to_vec())),
        }
    }

    fn ask(&mut self, guest_idx: usize, ids: Vec<ContextId>) {
        let (guest, caller, ..) = self.of_guests[guest_idx];
        let place = self.guests.ticket(caller);
        let (tag, sampler) = (place.tag(), Arc::new(Sampler::greedy()));
        // Always the same one.
        let edit = Edit { appended: vec![1], ..Edit::default() };
        self.scheduler.apply(match guest.kind {
            Kind::Guesses(n) | Kind::LateGuesses(n) => {
                let ask = Ask::Verify { sampler, guess: Guess::Chain(vec![5; n]) };
                Operation::Ask { id: ids[0], edit, ask, tag }
            }
            Kind::Searches => {
                let settings = BeamSettings {
                    n_beams: ids.len() - 1,
                    n_groups: 1,
                    diversity_penalty: 0.0,
                    length_penalty: 1.0,
                    early_stopping: EarlyStopping::Never,
                    n_tokens_max: 40,
                    stop_tokens: Vec::new(),
                };
                let (contexts, search) = (ids[1..].to_vec(), Search::new(settings));
                let (n_steps, sampler, masks) = (None, None, Vec::new());
                let asked =
                    SearchBeams { base: ids[0], edit, contexts, search, n_steps, sampler, masks, tag };
                Operation::SearchBeams(Box::new(asked))
            }
            _ => {
                let members = ids.iter().map(|&id| (id, edit.clone())).collect();
                Operation::DrawTogether { members, sampler, tag }
            }
        });
        self.asked.push(Asked { guest_idx, ids, place });
    }

    fn leave(&mut self, guest_idx: usize) {
        for id in std::mem::take(&mut self.of_guests[guest_idx].2) {
            self.scheduler.apply(Operation::Release { id, n_pulled: 0 });
        }
    }

    /// Plans steps as long as more can be under way, then takes in the oldest and asks anew what was answered.
    fn step(&mut self) {
        while self.under_way.len() < self.device.n_under_way && self.scheduler.has_work() {
            let plan = self.scheduler.plan();
            if !plan.has_rows() {
                break;
            }
            self.under_way.push_back(plan);
        }
        let plan = self.under_way.pop_front().expect("there is always something to compute");
        let mut n_rows = 0;
        for row in &plan.rows {
            let n_tokens = (row.end - row.start).max(1);
            n_rows += n_tokens;
            self.of_guests[row.id.number as usize / 10_000].3 += n_tokens as u64;
        }
        let batch = self.scheduler.batch(&plan, Vec::new());
        let kinds = batch.rows.iter().flat_map(|row| &row.outputs).map(|request| &request.kind);
        let outputs: Vec<Output> = kinds.map(answered).collect();
        drop(batch);
        // No two steps take the same time.
        let us = self.device.step_us + self.device.row_us * n_rows as u64;
        let us = us * (95 + self.random.below(11) as u64) / 100;
        self.us += us;
        self.n_rows_of_steps.push(n_rows);
        self.scheduler.complete(plan, outputs, 1_000 * us);
        self.guests.deliver(&self.scheduler, Port::Direct);
        for (guest_idx, ids) in std::mem::take(&mut self.late) {
            self.ask(guest_idx, ids);
        }
        for idx in (0..self.asked.len()).rev() {
            if self.asked[idx].place.try_take().is_some() {
                let Asked { guest_idx, ids, .. } = self.asked.swap_remove(idx);
                *self.n_answers.entry(ids[0]).or_default() += 1;
                match self.of_guests[guest_idx].0.kind {
                    Kind::LateGuesses(_) => self.late.push((guest_idx, ids)),
                    _ => self.ask(guest_idx, ids),
                }
            }
        }
    }

    /// Rows that each guest gets in a second.
    fn paces(&mut self, n_steps: usize) -> Vec<f64> {
        let (begun, before) = (self.us, self.of_guests.iter().map(|of| of.3).collect::<Vec<_>>());
        (0..n_steps).for_each(|_| self.step());
        let seconds = (self.us - begun) as f64 / 1e6;
        self.of_guests.iter().zip(before).map(|(of, before)| (of.3 - before) as f64 / seconds).collect()
    }
}

/// The same for all.
fn answered(kind: &OutputKind) -> Output {
    let candidate = |token: u32| Candidate { token, logprob: -1.0 - token as f32 };
    match kind {
        OutputKind::Top { n } => {
            Output::Top { candidates: (0..*n as u32).map(candidate).collect(), entropy: 1.0 }
        }
        _ => Output::Sampled(candidate(1)),
    }
}

/// What each guest gets beside the others, of what it would have alone.
fn parts_of_alone(device: Device, guests: &[Guest]) -> Vec<f64> {
    let alone = guests.iter().map(|&guest| House::new(device, &[guest]).paces(300)[0]);
    let alone: Vec<f64> = alone.collect();
    let mut house = House::new(device, guests);
    house.paces(100);
    let together = house.paces(2_000);
    together.iter().zip(&alone).map(|(together, alone)| together / alone).collect()
}

#[test]
fn a_stream_beside_many_of_another_user_has_about_half_of_its_pace_where_rows_cost() {
    for n_under_way in [1, 2] {
        let device = Device { n_under_way, ..CPU };
        for n_streams in [15, 120, 500] {
            let parts = parts_of_alone(device, &[streams(1, 1, 1), streams(2, 2, n_streams)]);
            assert!(parts[0] > 0.45 && parts[1] > 0.45, "{device:?}, {n_streams} streams: {parts:?}");
        }
    }
}

#[test]
fn sessions_of_a_user_and_guests_of_a_session_are_kept_from_each_other_as_users_are() {
    let sessions = parts_of_alone(CPU, &[streams(1, 1, 1), streams(1, 2, 120)]);
    assert!(sessions.iter().all(|&part| part > 0.45), "{sessions:?}");
    let guests = parts_of_alone(CPU, &[streams(1, 1, 1), streams(1, 1, 120)]);
    assert!(guests.iter().all(|&part| part > 0.45), "{guests:?}");
    // A user of two sessions, one of which has two guests, beside a user with one.
    let nested = [streams(1, 1, 2), streams(1, 1, 60), streams(1, 2, 60), streams(2, 3, 120)];
    let parts = parts_of_alone(CPU, &nested);
    let due = [0.125, 0.125, 0.25, 0.5];
    assert!(parts.iter().zip(due).all(|(&part, due)| part > 0.9 * due), "{parts:?}");
}

#[test]
fn each_of_many_users_has_its_part() {
    let n_streams = [1, 1, 3, 10, 40, 120];
    let guests: Vec<Guest> = (1..).zip(n_streams).map(|(actor, n)| streams(actor, actor.into(), n)).collect();
    let parts = parts_of_alone(CPU, &guests);
    let due = 1.0 / guests.len() as f64;
    assert!(parts.iter().all(|&part| part > 0.9 * due), "{parts:?}");
}

#[test]
fn nobody_is_left_out_where_rows_cost_next_to_nothing() {
    for n_under_way in [1, 2] {
        let device = Device { n_under_way, ..GPU };
        let mut house = House::new(device, &[streams(1, 1, 1), streams(2, 2, 255)]);
        house.paces(100);
        house.n_rows_of_steps.clear();
        let paces = house.paces(3_000);
        let n_full = house.n_rows_of_steps.iter().filter(|&&n_rows| n_rows == 256).count();
        assert!(n_full > 2_980, "{n_full} steps are full");
        let step_us = (GPU.step_us + 256 * GPU.row_us) as f64;
        assert!(paces[1] > 0.99 * 255.0 * 1e6 / step_us, "{paces:?}");
    }
}

#[test]
fn a_user_alone_and_many_alike_have_full_steps() {
    let alike: Vec<Guest> = (1..=60).map(|actor| streams(actor, actor.into(), 2)).collect();
    let of_one: Vec<Guest> = (1..=120).map(|session| streams(1, session, 1)).collect();
    for guests in [&[streams(1, 1, 120)], &of_one[..], &alike[..]] {
        let mut house = House::new(CPU, guests);
        house.paces(2);
        house.n_rows_of_steps.clear();
        house.paces(300);
        assert!(house.n_rows_of_steps.iter().all(|&n_rows| n_rows == 120), "{:?}", house.n_rows_of_steps);
    }
}

#[test]
fn steps_are_full_again_soon_after_the_others_have_left() {
    let mut house = House::new(CPU, &[streams(1, 1, 1), streams(2, 2, 120)]);
    house.paces(200);
    house.leave(0);
    house.paces(5);
    house.n_rows_of_steps.clear();
    house.paces(50);
    assert!(house.n_rows_of_steps.iter().all(|&n_rows| n_rows == 120), "{:?}", house.n_rows_of_steps);
}

#[test]
fn a_guest_that_is_a_step_late_finds_no_long_step_under_way() {
    for n_under_way in [1, 2] {
        let late = Guest { kind: Kind::LateGuesses(1), ..streams(1, 1, 1) };
        let mut house = House::new(Device { n_under_way, ..CPU }, &[late, streams(2, 2, 120)]);
        house.paces(100);
        house.n_rows_of_steps.clear();
        house.paces(500);
        let longest = house.n_rows_of_steps.iter().max();
        assert!(longest <= Some(&16), "{:?}", house.n_rows_of_steps);
    }
}

#[test]
fn verifications_jobs_and_searches_leave_others_their_part_and_get_theirs() {
    let guessing =
        |actor, n_streams| Guest { kind: Kind::Guesses(8), ..streams(actor, actor.into(), n_streams) };
    for guests in [[guessing(1, 1), streams(2, 2, 120)], [streams(1, 1, 1), guessing(2, 40)]] {
        let parts = parts_of_alone(CPU, &guests);
        assert!(parts.iter().all(|&part| part > 0.4), "{guests:?}: {parts:?}");
    }
    let jobs = Guest { kind: Kind::Jobs, ..streams(2, 2, 64) };
    let parts = parts_of_alone(CPU, &[streams(1, 1, 1), jobs]);
    assert!(parts.iter().all(|&part| part > 0.4), "{parts:?}");
    for n_beams in [8, 64, 250] {
        let searches = Guest { kind: Kind::Searches, ..streams(2, 2, 1 + n_beams) };
        let parts = parts_of_alone(CPU, &[streams(1, 1, 1), searches]);
        assert!(parts.iter().all(|&part| part > 0.4), "{n_beams} beams: {parts:?}");
    }
}

#[test]
fn beams_and_draws_of_hundreds_of_contexts_make_no_step_long_in_which_another_decodes() {
    for (kind, n_under_way) in [(Kind::Searches, 1), (Kind::Searches, 2), (Kind::Jobs, 1), (Kind::Jobs, 2)] {
        let many = Guest { kind, ..streams(2, 2, 501) };
        let mut house = House::new(Device { n_under_way, ..CPU }, &[streams(1, 1, 1), many]);
        house.paces(200);
        house.n_rows_of_steps.clear();
        let paces = house.paces(1_000);
        let longest = house.n_rows_of_steps.iter().max();
        assert!(longest <= Some(&8), "{kind:?}, {n_under_way} under way: {:?}", house.n_rows_of_steps);
        assert!(paces[1] > 1.5 * paces[0], "{kind:?}: {paces:?}");
    }
}

#[test]
fn searches_that_do_not_fit_into_one_step_leave_a_stream_of_their_user_its_part() {
    let stream = streams(1, 1, 1);
    let alone = House::new(CPU, &[stream]).paces(300)[0];
    for (n_under_way, n_searches, n_steps_before) in
        [(1, 2, 0), (1, 2, 1), (1, 2, 70), (1, 3, 7), (1, 3, 100), (2, 2, 5), (2, 3, 100)]
    {
        let of_session = |session| Guest { kind: Kind::Searches, ..streams(1, session, 1 + 512) };
        let searches: Vec<Guest> = (2..).take(n_searches).map(of_session).collect();
        let mut house = House::new(Device { n_under_way, ..CPU }, &searches);
        house.paces(n_steps_before);
        house.enter(stream);
        house.paces(100);
        let part = house.paces(2_000)[n_searches] / alone;
        let due = 1.0 / (1 + n_searches) as f64;
        let case = format!("{n_searches} searches, {n_steps_before} steps old, {n_under_way} under way");
        assert!(part > 0.75 * due, "{case}: {part} of {due}");
    }
}

#[test]
fn jobs_of_one_guest_that_do_not_fit_into_one_step_take_turns() {
    for (n_jobs, n_members, n_under_way) in [(3, 600, 1), (3, 600, 2), (4, 512, 1), (400, 3, 1), (400, 3, 2)]
    {
        let guest = Guest { kind: Kind::JobsOf(n_members), ..streams(1, 1, n_jobs * n_members) };
        let mut house = House::new(Device { n_under_way, ..CPU }, &[guest]);
        house.paces(120);
        let n_answers: Vec<usize> = house.n_answers.into_values().collect();
        let (least, most) = (n_answers.iter().min().copied(), n_answers.iter().max().copied());
        let case = format!("{n_jobs} jobs of {n_members}, {n_under_way} under way: {least:?} to {most:?}");
        assert_eq!(n_answers.len(), n_jobs, "{case}");
        assert!(least.map(|least| 2 * least) >= most, "{case}");
    }
}

#[test]
fn users_get_rows_in_proportion_to_their_shares_where_all_have_enough_to_do() {
    for n_under_way in [1, 2] {
        let device = Device { n_under_way, ..CPU };
        // However much more one of them asks for.
        for n_streams in [[120, 120], [40, 400], [400, 40]] {
            let [first, second] = n_streams;
            let mut house =
                House::new(device, &[Guest { share: 3, ..streams(1, 1, first) }, streams(2, 2, second)]);
            house.paces(200);
            let paces = house.paces(2_000);
            let part = paces[0] / (paces[0] + paces[1]);
            assert!((part - 0.75).abs() < 0.04, "{n_streams:?}: {paces:?}");
        }
    }
}

#[test]
fn a_stream_has_the_part_of_its_pace_that_its_user_is_due() {
    for (share, due) in [(1, 0.5), (3, 0.75), (9, 0.9)] {
        let one = Guest { share, ..streams(1, 1, 1) };
        let parts = parts_of_alone(CPU, &[one, streams(2, 2, 120)]);
        assert!(parts[0] > 0.9 * due && parts[1] > 0.9 * (1.0 - due), "a share of {share}: {parts:?}");
        let many = Guest { share, ..streams(1, 1, 120) };
        let parts = parts_of_alone(CPU, &[many, streams(2, 2, 1)]);
        assert!(parts[1] > 0.9 * (1.0 - due), "beside a share of {share}: {parts:?}");
    }
}

#[test]
fn a_user_alone_has_all_whatever_its_share_and_one_that_comes_has_no_arrears() {
    for (share, of_newcomer) in [(1, 1), (1, 4), (4, 1)] {
        let mut house = House::new(CPU, &[Guest { share, ..streams(1, 1, 120) }]);
        house.paces(2);
        house.n_rows_of_steps.clear();
        house.paces(300);
        assert!(house.n_rows_of_steps.iter().all(|&n_rows| n_rows == 120), "{:?}", house.n_rows_of_steps);
        house.enter(Guest { share: of_newcomer, ..streams(2, 2, 120) });
        house.paces(20);
        let paces = house.paces(100);
        let part = paces[1] / (paces[0] + paces[1]);
        let due = f64::from(of_newcomer) / f64::from(share + of_newcomer);
        assert!((0.85 * due..1.15 * due).contains(&part), "{share} and {of_newcomer}: {part} of {due}");
    }
}
