//! Runs whose tokens are forced, many in a row.

use super::context_id;
use super::steps::endless;
use super::*;
use crate::batch::Candidate;

const FORCED: Token = 7;

/// Two users, each with a run of its own, on a device with room for one row in a step; one of them is forced to all that it
/// draws.
struct Pair {
    scheduler: Scheduler,
    guests: Guests,
    accounts: [Arc<Account>; 2],
    queues: [RunQueue; 2],
    /// Tokens that each has been given.
    n_given: [usize; 2],
    /// Masks that were sent.
    n_masks: usize,
}

impl Pair {
    fn new(n_rows_max: usize) -> Self {
        let limits = Limits { n_steps_under_way: 1, ..Limits::of_nothing(n_rows_max, 1000) };
        let mut scheduler = Scheduler::alone(limits, SchedulerSettings::alone(64));
        let mut guests = Guests::default();
        let accounts = [1, 2].map(|_| Account::new("guest", Budget::UNLIMITED, None));
        let queues = [0, 1].map(|idx| {
            let number = idx as u32 + 1;
            let (actor, session, guest) = (ActorId(number), SessionId(number.into()), GuestId(number.into()));
            let owner = Owner { actor, session, guest, account: accounts[idx].clone() };
            let caller = guests.enter(&mut scheduler, owner);
            let (id, queue) = (context_id(idx as u64), guests.queue(caller));
            scheduler.apply(Operation::Create { id, caller });
            let masks = [MaskSource::Caller, MaskSource::Sampler][idx];
            let edit = Edit { appended: vec![5], ..Edit::default() };
            let settings = RunSettings { masks, ..endless() };
            scheduler.apply(Operation::Run { id, edit, settings, tag: queue.tag() });
            queue
        });
        Self { scheduler, guests, accounts, queues, n_given: [0; 2], n_masks: 0 }
    }

    /// A step, before which the forced one has all masks that it may have. It takes as long as it has tokens.
    fn step(&mut self) {
        let mut mask = TokenMask::none(1000);
        mask.set(FORCED, true);
        let mask = Arc::new(mask);
        while self.n_masks < self.n_given[0] + 16 {
            self.n_masks += 1;
            let (id, tag) = (context_id(0), self.queues[0].tag());
            let (position, mask) = (self.n_masks, mask.clone());
            self.scheduler.apply(Operation::Mask {
                id,
                tag,
                position,
                turn: 0,
                mask,
                expected: Some(FORCED),
            });
        }
        let plan = self.scheduler.plan();
        assert!(plan.has_rows());
        let n_outputs = plan.rows.iter().map(|row| row.n_outputs).sum();
        let ns = 1_000 * (10 + plan.n_tokens() as u64);
        let drawn = Output::Sampled(Candidate { token: FORCED, logprob: -1.0 });
        self.scheduler.complete(plan, vec![drawn; n_outputs], ns);
        self.guests.deliver(&self.scheduler, Port::Direct);
        for (queue, n_given) in self.queues.iter_mut().zip(&mut self.n_given) {
            *n_given += std::iter::from_fn(|| queue.try_pull()).count();
        }
    }
}

#[test]
fn who_is_forced_to_thousands_of_tokens_pays_for_each_and_leaves_others_their_share() {
    let mut pair = Pair::new(1);
    for _ in 0..3_000 {
        pair.step();
    }
    let [n_forced, n_free] = pair.n_given;
    assert!(n_forced > 1_000 && n_free > 1_000, "{:?}", pair.n_given);
    // Both have had as much of the device.
    assert!(n_forced < 3 * n_free, "{:?}", pair.n_given);
    let stats = pair.scheduler.stats();
    assert!(stats.n_tokens_forced as usize > n_forced / 2, "{stats:?}");
    assert_eq!(
        [pair.accounts[0].n_tokens_forced(), pair.accounts[1].n_tokens_forced()],
        [stats.n_tokens_forced, 0]
    );
    // The last token of each has not been computed.
    let used = pair.accounts.map(|account| account.used(Resource::Tokens) as usize);
    assert_eq!(used, pair.n_given);
}

#[test]
fn who_is_forced_holds_up_nobody_in_its_step() {
    let mut pair = Pair::new(4);
    for n_steps in 1..=200 {
        pair.step();
        assert_eq!(pair.n_given[1], n_steps);
    }
    assert!(pair.n_given[0] > 1_000, "{:?}", pair.n_given);
}

#[test]
fn what_is_left_of_a_forced_term_rides_together_where_steps_overlap() {
    for (n_forced, n_rows_expected) in [(1, 1), (2, 2), (3, 1), (16, 1), (18, 3), (19, 2), (20, 2)] {
        let mut scheduler = Scheduler::alone(Limits::of_nothing(4, 1000), SchedulerSettings::alone(64));
        let mut guests = Guests::default();
        let account = Account::new("guest", Budget::UNLIMITED, None);
        let owner = Owner { actor: ActorId(1), session: SessionId(1), guest: GuestId(1), account };
        let caller = guests.enter(&mut scheduler, owner);
        let (id, mut queue) = (context_id(0), guests.queue(caller));
        scheduler.apply(Operation::Create { id, caller });
        let edit = Edit { appended: vec![5], ..Edit::default() };
        let (settings, tag) = (RunSettings { masks: MaskSource::Caller, ..endless() }, queue.tag());
        scheduler.apply(Operation::Run { id, edit, settings, tag });
        let mask = Arc::new(TokenMask::all(1000));
        for position in 1..=n_forced {
            let (mask, expected) = (mask.clone(), Some(FORCED));
            scheduler.apply(Operation::Mask { id, tag, position, turn: 0, mask, expected });
        }
        let (position, end) = (n_forced + 1, Ok(Finish::Complete));
        scheduler.apply(Operation::EndRun { id, tag, position, turn: 0, end });
        let (mut under_way, mut n_rows, mut n_given) = (VecDeque::new(), 0, 0);
        loop {
            while under_way.len() < scheduler.limits.n_steps_under_way {
                let plan = scheduler.plan();
                if !plan.has_rows() {
                    break;
                }
                under_way.push_back(plan);
            }
            let Some(plan) = under_way.pop_front() else { break };
            n_rows += plan.rows.len();
            let n_outputs = plan.rows.iter().map(|row| row.n_outputs).sum();
            let drawn = Output::Sampled(Candidate { token: FORCED, logprob: -1.0 });
            scheduler.complete(plan, vec![drawn; n_outputs], 1_000);
            guests.deliver(&scheduler, Port::Direct);
            let given = std::iter::from_fn(|| queue.try_pull());
            n_given += given.filter(|event| matches!(event, RunEvent::Token(_))).count();
        }
        assert_eq!((n_given, n_rows), (n_forced, n_rows_expected), "{n_forced} tokens");
    }
}

#[test]
fn a_row_that_is_cut_before_its_last_expected_token_asks_for_no_draws_ahead() {
    const N_PAGES: usize = 3;
    let limits = Limits { n_steps_under_way: 1, ..Limits::of_nothing(4, N_PAGES) };
    let mut scheduler = Scheduler::alone(limits, SchedulerSettings::alone(PAGE_LEN - 2));
    let mut guests = Guests::default();
    let account = Account::new("guest", Budget::UNLIMITED, None);
    let owner = Owner { actor: ActorId(1), session: SessionId(1), guest: GuestId(1), account };
    let caller = guests.enter(&mut scheduler, owner);
    let [id, child] = [0, 1].map(context_id);
    scheduler.apply(Operation::Create { id, caller });
    // All but the last four places of the device, of which the last page is shared.
    let n_tokens = N_PAGES * PAGE_LEN - 4;
    let place = guests.ticket(caller);
    let edit = Edit { appended: vec![5; n_tokens], ..Edit::default() };
    scheduler.apply(Operation::Ask { id, edit, ask: Ask::Prefill, tag: place.tag() });
    let edit = || Edit { n_kept: n_tokens, ..Edit::default() };
    let mut queue = None;
    let (mut n_given, mut n_again) = (0, 0);
    for _ in 0..40 {
        let plan = scheduler.plan();
        for row in &scheduler.batch(&plan, Vec::new()).rows {
            let mut positions = row.outputs.iter().map(|request| request.position);
            assert!(positions.all(|position| (row.start..row.tokens.len()).contains(&position)));
        }
        if queue.is_some() {
            n_again += plan.rows.iter().map(|row| row.n_again()).sum::<usize>();
        }
        let n_outputs = plan.rows.iter().map(|row| row.n_outputs).sum();
        let drawn = Output::Sampled(Candidate { token: FORCED, logprob: -1.0 });
        if plan.has_rows() {
            scheduler.complete(plan, vec![drawn; n_outputs], 1_000);
        }
        guests.deliver(&scheduler, Port::Direct);
        if queue.is_none() && place.try_take().is_some() {
            scheduler.apply(Operation::Fork { id, edit: edit(), child });
            let run = guests.queue(caller);
            let (edit, tag) = (edit(), run.tag());
            let settings = RunSettings { masks: MaskSource::Caller, ..endless() };
            scheduler.apply(Operation::Run { id, edit, settings, tag });
            for position in n_tokens..n_tokens + 4 {
                let (mask, expected) = (Arc::new(TokenMask::all(1000)), Some(FORCED));
                scheduler.apply(Operation::Mask { id, tag, position, turn: 0, mask, expected });
            }
            queue = Some(run);
        }
        n_given += queue.iter_mut().flat_map(|queue| std::iter::from_fn(|| queue.try_pull())).count();
    }
    assert!(n_again > 0, "what the page held had to be computed again");
    assert!(n_given >= 4, "{n_given}: those that have masks");
}
