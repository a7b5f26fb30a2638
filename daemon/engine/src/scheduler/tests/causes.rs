//! What was in vain and what was waited for, by cause, of a model and of its guest.

use super::context_id;
use super::steps::endless;
use super::*;
use crate::batch::Candidate;
use crate::causes::Causes;
use crate::guess::Guess;

/// A model with one guest, whose rows draw what tests say.
struct Desk {
    scheduler: Scheduler,
    guests: Guests,
    caller: CallerId,
    account: Arc<Account>,
}

impl Desk {
    fn new() -> Self {
        let limits = Limits { n_steps_under_way: 2, ..Limits::of_nothing(8, 100) };
        let mut scheduler = Scheduler::alone(limits, SchedulerSettings::alone(64));
        let mut guests = Guests::default();
        let account = Account::new("guest", Budget::UNLIMITED, None);
        let (actor, session, guest) = (ActorId(1), SessionId(1), GuestId(1));
        let owner = Owner { actor, session, guest, account: account.clone() };
        let caller = guests.enter(&mut scheduler, owner);
        Self { scheduler, guests, caller, account }
    }

    fn create(&mut self, number: u64) -> ContextId {
        let (id, caller) = (context_id(number), self.caller);
        self.scheduler.apply(Operation::Create { id, caller });
        id
    }

    /// Runs from a new context of one token.
    fn run(&mut self, number: u64, settings: RunSettings) -> (ContextId, RunQueue) {
        let (id, queue) = (self.create(number), self.guests.queue(self.caller));
        let edit = Edit { appended: vec![5], ..Edit::default() };
        self.scheduler.apply(Operation::Run { id, edit, settings, tag: queue.tag() });
        (id, queue)
    }

    /// Masks of a run from a place on, after so many turns, each with what is expected there.
    fn supply(&mut self, id: ContextId, queue: &RunQueue, first: usize, turn: u32, expected: &[Token]) {
        for (position, &token) in (first..).zip(expected) {
            let (tag, mask) = (queue.tag(), late::mask_after(0));
            let expected = Some(token);
            self.scheduler.apply(Operation::Mask { id, tag, position, turn, mask, expected });
        }
    }

    /// Takes in a step of which each row draws this.
    fn take_in(&mut self, plan: Plan, output: &Output) {
        let n_outputs = plan.rows.iter().map(|row| row.n_outputs).sum();
        self.scheduler.complete(plan, vec![output.clone(); n_outputs], 1_000_000);
        self.guests.deliver(&self.scheduler, Port::Direct);
    }

    /// What there is of these causes and of no others, for the model and for its guest.
    fn check(&self, expected: &[(Cause, u64)]) {
        let mut causes = Causes::default();
        expected.iter().for_each(|&(cause, n)| causes.add(cause, n));
        assert_eq!((self.scheduler.stats().causes, self.account.causes()), (causes, causes));
    }
}

fn token(token: Token) -> Output {
    Output::Sampled(Candidate { token, logprob: -1.0 })
}

#[test]
fn an_edit_gives_up_what_ran_ahead_and_what_is_under_way() {
    let mut desk = Desk::new();
    let (id, mut queue) = desk.run(1, endless());
    for drawn in [7, 8, 9] {
        let plan = desk.scheduler.plan();
        desk.take_in(plan, &token(drawn));
    }
    assert!(queue.try_pull().is_some());
    let under_way = [desk.scheduler.plan(), desk.scheduler.plan()];
    let edit = Edit { n_kept: 2, n_pulled: queue.n_pulled(), ..Edit::default() };
    desk.scheduler.apply(Operation::Edit { id, edit });
    under_way.into_iter().for_each(|plan| desk.take_in(plan, &token(10)));
    desk.check(&[(Cause::TokensGivenUp, 2), (Cause::RowsGivenUp, 2)]);
    let stats = desk.scheduler.stats();
    assert_eq!((stats.n_rows, stats.causes.n_rows_in_vain()), (5, 2));
}

#[test]
fn a_context_that_is_dropped_gives_up_its_rows() {
    let mut desk = Desk::new();
    let (id, _queue) = desk.run(1, endless());
    let under_way = [desk.scheduler.plan(), desk.scheduler.plan()];
    desk.scheduler.apply(Operation::Release { id, n_pulled: 0 });
    under_way.into_iter().for_each(|plan| desk.take_in(plan, &token(7)));
    desk.check(&[(Cause::RowsGivenUp, 2)]);
}

#[test]
fn a_stop_token_leaves_the_row_behind_it_in_vain_and_charges_nobody_for_it() {
    let mut desk = Desk::new();
    let (_, _queue) = desk.run(1, RunSettings { stop_tokens: Arc::new([7]), ..endless() });
    let [first, behind] = [desk.scheduler.plan(), desk.scheduler.plan()];
    assert_eq!((first.rows.len(), behind.rows.len()), (1, 1));
    desk.take_in(first, &token(7));
    desk.take_in(behind, &token(8));
    desk.check(&[(Cause::RowsPastEnd, 1)]);
    assert_eq!(desk.account.used(Resource::Tokens), 1);
}

#[test]
fn what_was_guessed_wrongly_is_told_apart() {
    let mut desk = Desk::new();
    let (id, place) = (desk.create(1), desk.guests.ticket(desk.caller));
    let ask = Ask::Verify { sampler: Arc::new(Sampler::greedy()), guess: Guess::Chain(vec![7, 7, 9]) };
    let edit = Edit { appended: vec![5], ..Edit::default() };
    desk.scheduler.apply(Operation::Ask { id, edit, ask, tag: place.tag() });
    let plan = desk.scheduler.plan();
    desk.take_in(plan, &token(7));
    desk.check(&[(Cause::TokensGuessedWrong, 1)]);
}

#[test]
fn what_a_mask_was_wrong_to_force_is_told_and_charged_to_nobody() {
    let mut desk = Desk::new();
    let (id, mut queue) = desk.run(1, RunSettings { masks: MaskSource::Caller, ..endless() });
    desk.supply(id, &queue, 1, 0, &[7, 7, 9, 7]);
    let plan = desk.scheduler.plan();
    assert_eq!((plan.rows.len(), plan.n_tokens(), plan.rows[0].n_outputs), (1, 4, 4));
    assert!(!desk.scheduler.plan().has_rows(), "what follows depends on those draws");
    desk.take_in(plan, &token(7));
    desk.check(&[(Cause::TokensGuessedWrong, 1)]);
    let n_given = std::iter::from_fn(|| queue.try_pull()).count();
    assert_eq!((n_given, desk.scheduler.stats().n_tokens_forced, desk.account.n_tokens_forced()), (3, 2, 2));
    // Those before each draw.
    assert_eq!(desk.account.used(Resource::Tokens), 3);
    // A guest that does something else while such a row is under way.
    desk.supply(id, &queue, 4, 1, &[7, 7, 7, 7]);
    let plan = desk.scheduler.plan();
    assert_eq!(plan.n_tokens(), 4);
    let edit = Edit { n_kept: 4, appended: vec![7], n_pulled: queue.n_pulled() };
    desk.scheduler.apply(Operation::Edit { id, edit });
    desk.take_in(plan, &token(7));
    assert_eq!(desk.account.used(Resource::Tokens), 4);
    desk.check(&[(Cause::TokensGuessedWrong, 1), (Cause::RowsGivenUp, 1)]);
}

#[test]
fn a_step_that_fails_takes_the_row_behind_it_along() {
    let mut desk = Desk::new();
    let (_, mut queue) = desk.run(1, endless());
    let [failing, behind] = [desk.scheduler.plan(), desk.scheduler.plan()];
    desk.scheduler.fail_step(&failing, 0, &EngineError::Stopped);
    desk.take_in(behind, &token(7));
    assert!(matches!(queue.try_pull(), Some(RunEvent::Failed(EngineError::Stopped))));
    desk.check(&[(Cause::RowsFailed, 2)]);
}

#[test]
fn steps_go_by_while_a_run_that_sat_out_has_no_mask() {
    const N_STEPS: u64 = 6;
    let mut desk = Desk::new();
    let (id, queue) = desk.run(1, RunSettings { masks: MaskSource::Caller, ..endless() });
    let mut plan = desk.scheduler.plan();
    assert!(plan.waits_for_masks());
    desk.scheduler.let_draw(&mut plan, &[]);
    desk.take_in(plan, &Output::SatOut);
    desk.check(&[(Cause::RowsSatOut, 1)]);
    // Nobody else is held up.
    let (_, _other) = desk.run(2, endless());
    for _ in 0..N_STEPS {
        let plan = desk.scheduler.plan();
        assert!(plan.rows.iter().all(|row| row.id != id));
        desk.take_in(plan, &token(7));
    }
    let mask = late::mask_after(0);
    desk.scheduler.apply(Operation::Mask {
        id,
        tag: queue.tag(),
        position: 1,
        turn: 0,
        mask,
        expected: None,
    });
    let plan = desk.scheduler.plan();
    assert!(plan.rows.iter().any(|row| row.id == id && row.draws));
    desk.take_in(plan, &token(7));
    desk.check(&[(Cause::RowsSatOut, 1), (Cause::StepsForMasks, N_STEPS)]);
}

#[test]
fn contexts_that_let_go_of_pages_in_one_step_are_counted_once() {
    let mut desk = Desk::new();
    let (ids, _queues): (Vec<ContextId>, Vec<RunQueue>) =
        (1..=4).map(|number| desk.run(number, endless())).unzip();
    let plan = desk.scheduler.plan();
    assert_eq!(plan.rows.len(), ids.len());
    desk.take_in(plan, &token(7));
    let before = desk.scheduler.n_markings;
    ids.iter().for_each(|&id| desk.scheduler.note_let_go(id, 1));
    desk.scheduler.check_room_after(&ids);
    assert_eq!(desk.scheduler.n_markings, before + 1);
    assert_eq!(desk.scheduler.admitted().count(), ids.len(), "there is room for all");
    desk.scheduler.check_admitted();
}

#[test]
fn expected_tokens_of_a_context_that_is_dropped_are_given_back() {
    for fails in [false, true] {
        let mut desk = Desk::new();
        let (id, queue) = desk.run(1, RunSettings { masks: MaskSource::Caller, ..endless() });
        desk.supply(id, &queue, 1, 0, &[7, 7, 7, 7]);
        let plan = desk.scheduler.plan();
        assert_eq!((plan.n_tokens(), desk.account.used(Resource::Tokens)), (4, 4));
        desk.scheduler.apply(Operation::Release { id, n_pulled: 0 });
        match fails {
            true => desk.scheduler.fail_step(&plan, 0, &EngineError::Stopped),
            false => desk.take_in(plan, &token(7)),
        }
        // Its prompt was asked for.
        assert_eq!(desk.account.used(Resource::Tokens), u64::from(!fails));
    }
}
