//! Whatever fits the device alone comes to its end, in a small multiple of the work that it needs.

mod passing;

use std::collections::{HashMap, VecDeque};
use std::ops::AddAssign;
use std::sync::Arc;

use super::Random;
use super::context_id;
use super::guest::Guests;
use super::hash_backend::{HashBackend, VOCAB};
use crate::account::{Account, ActorId, Budget, GuestId, Owner, Resource, SessionId};
use crate::backend::{AskLimits, Limits, PAGE_LEN, SteeringTimes};
use crate::batch::{Output, Token};
use crate::causes::Cause;
use crate::command::{Ahead, Ask, ContextId, Edit, MaskSource, Operation, RunSettings};
use crate::completion::{CallerId, Done, Opened};
use crate::history::History;
use crate::mailbox::Ticket;
use crate::port::Port;
use crate::run::{RunEvent, RunQueue};
use crate::sampling::Sampler;
use crate::scheduler::{Plan, Scheduler, SchedulerSettings};

pub(super) struct House {
    pub(super) scheduler: Scheduler,
    guests: Guests,
    callers: HashMap<ContextId, CallerId>,
    pub(super) backend: HashBackend,
    under_way: VecDeque<(Plan, Vec<Output>)>,
    next_id: u64,
    n_steps: usize,
    /// Steps since the last one that moved pages, at the least.
    n_steps_between_moves: usize,
    n_steps_still: usize,
    /// How long a step takes, and how much longer for each token of a prompt.
    pub(super) step_ns: u64,
    prompt_token_ns: u64,
    /// The most pages that one plan has moved.
    n_moves_most: usize,
}

impl House {
    pub(super) fn new(n_pages: usize, n_host_pages: usize, n_step_tokens: usize) -> Self {
        let limits = Limits {
            n_pages,
            n_granule_pages: 1,
            n_host_pages,
            page_bytes: 128,
            n_rows_max: 8,
            n_tokens_max: n_step_tokens,
            n_tile_tokens: 1,
            n_block_tokens: 1,
            n_queries_per_key: 1,
            n_positions_max: n_pages * PAGE_LEN,
            vocab_size: VOCAB as usize,
            hidden_size: 1,
            n_layers: 6,
            n_steps_under_way: 2,
            n_slots: 1 << 16,
            n_states: 0,
            n_stretches_max: 0,
            logits_tokens: 1.0,
            steering: SteeringTimes::NONE,
            asks: AskLimits::NONE,
        };
        let settings = SchedulerSettings::alone(n_step_tokens);
        Self {
            scheduler: Scheduler::alone(limits, settings),
            guests: Guests::default(),
            callers: HashMap::new(),
            backend: HashBackend::new(n_pages, n_host_pages),
            under_way: VecDeque::new(),
            next_id: 0,
            n_steps: 0,
            n_steps_between_moves: usize::MAX,
            n_steps_still: usize::MAX,
            step_ns: 1_000_000,
            prompt_token_ns: 0,
            n_moves_most: 0,
        }
    }

    fn create(&mut self, actor: u32) -> (ContextId, Arc<Account>) {
        self.next_id += 1;
        let (id, account) = (context_id(self.next_id), Account::new("user", Budget::UNLIMITED, None));
        let (session, guest) = (SessionId(self.next_id), GuestId(self.next_id));
        let owner = Owner { actor: ActorId(actor), session, guest, account: account.clone() };
        self.create_for(id, owner);
        (id, account)
    }

    /// A context of this user, session and guest.
    fn create_of(&mut self, names: [u64; 3]) -> ContextId {
        self.next_id += 1;
        let id = context_id(self.next_id);
        self.create_for(id, owner_of(names));
        id
    }

    pub(super) fn create_for(&mut self, id: ContextId, owner: Owner) {
        let caller = self.guests.enter(&mut self.scheduler, owner);
        self.callers.insert(id, caller);
        self.scheduler.apply(Operation::Create { id, caller });
    }

    pub(super) fn ask(&mut self, id: ContextId, tokens: Vec<Token>) -> Question {
        self.ask_after(id, Edit { appended: tokens, ..Edit::default() })
    }

    pub(super) fn ask_after(&mut self, id: ContextId, edit: Edit) -> Question {
        let place = self.guests.ticket(self.callers[&id]);
        self.scheduler.apply(Operation::Ask { id, edit, ask: Ask::Top { n: 1 }, tag: place.tag() });
        Question { place, is_answered: false }
    }

    fn run(&mut self, id: ContextId, tokens: Vec<Token>) -> RunQueue {
        self.run_after(id, Edit { appended: tokens, ..Edit::default() })
    }

    pub(super) fn run_after(&mut self, id: ContextId, edit: Edit) -> RunQueue {
        self.stream_after(id, edit, Ahead::Unbounded)
    }

    pub(super) fn stream_after(&mut self, id: ContextId, edit: Edit, ahead: Ahead) -> RunQueue {
        let queue = self.guests.queue(self.callers[&id]);
        let settings = RunSettings {
            sampler: Arc::new(Sampler::greedy()),
            stop_tokens: Arc::new([]),
            n_tokens_max: None,
            ahead,
            masks: MaskSource::Sampler,
        };
        self.scheduler.apply(Operation::Run { id, edit, settings, tag: queue.tag() });
        queue
    }

    /// Plans up to two steps ahead and takes in the oldest.
    pub(super) fn step(&mut self) {
        while self.under_way.len() < 2 && self.scheduler.has_work() {
            let plan = self.scheduler.plan();
            self.n_moves_most = self.n_moves_most.max(plan.moves.len());
            if plan.moves.is_empty() {
                self.n_steps_still = self.n_steps_still.saturating_add(1);
            } else {
                self.n_steps_between_moves = self.n_steps_between_moves.min(self.n_steps_still);
                self.n_steps_still = 0;
            }
            let outputs = self.backend.run(&plan.moves, &self.scheduler.batch(&plan, Vec::new()));
            if !plan.has_rows() {
                break;
            }
            self.under_way.push_back((plan, outputs));
        }
        self.n_steps += 1;
        if let Some((plan, outputs)) = self.under_way.pop_front() {
            let ns = self.step_ns + self.prompt_token_ns * plan.work.n_prompt_tokens as u64;
            self.scheduler.complete(plan, outputs, ns);
        }
        self.guests.deliver(&self.scheduler, Port::Direct);
    }

    /// Steps until a question is answered.
    pub(super) fn wait_for(&mut self, mut question: Question) {
        while !question.is_answered() {
            self.step();
        }
    }

    /// Returns the price, in nanoseconds.
    pub(super) fn save(&mut self, id: ContextId, edit: Edit, name: &str, tokens: Arc<History>) -> u64 {
        let (place, name) = (self.guests.ticket(self.callers[&id]), name.to_owned());
        let price = self.scheduler.apply(Operation::Save { id, edit, name, tokens, tag: place.tag() });
        self.guests.deliver(&self.scheduler, Port::Direct);
        assert!(matches!(place.try_take(), Some(Done::Kept(Ok(())))), "it is within every budget");
        price
    }

    /// Opens what was saved for the guest of another context; also returns the price, in nanoseconds.
    pub(super) fn open(&mut self, id: ContextId, beside: ContextId, name: &str) -> (Opened, u64) {
        let caller = self.callers[&beside];
        let (place, name) = (self.guests.ticket(caller), name.to_owned());
        let price = self.scheduler.apply(Operation::Open { id, caller, name, tag: place.tag() });
        self.guests.deliver(&self.scheduler, Port::Direct);
        match place.try_take() {
            Some(Done::Opened(Ok(opened))) => (opened, price),
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn release(&mut self, id: ContextId) {
        self.scheduler.apply(Operation::Release { id, n_pulled: 0 });
    }
}

/// An owner of whom the user, the session and the guest are given.
fn owner_of([actor, session, guest]: [u64; 3]) -> Owner {
    let account = Account::new("guest", Budget::UNLIMITED, None);
    Owner { actor: ActorId(actor as u32), session: SessionId(session), guest: GuestId(guest), account }
}

/// A question on its way.
pub(super) struct Question {
    place: Ticket,
    is_answered: bool,
}

impl Question {
    pub(super) fn is_answered(&mut self) -> bool {
        match self.place.try_take() {
            Some(Done::Answer(answer)) => {
                answer.expect("it fits");
                self.is_answered = true;
            }
            Some(other) => panic!("{other:?}"),
            None => {}
        }
        self.is_answered
    }
}

/// Tokens that no other context has.
pub(super) fn text(random: &mut Random, n: usize) -> Vec<Token> {
    (0..n).map(|_| random.below(VOCAB as usize) as Token).collect()
}

#[test]
fn prompts_that_each_fill_the_pool_all_end_whatever_arrives_later() {
    for (n_host_pages, n_step_tokens) in [(0, 64), (0, 2048), (13, 64), (200, 2048)] {
        for n_pages in [13, 40, 600] {
            let mut random = Random::new(n_pages as u64);
            let mut house = House::new(n_pages, n_host_pages, n_step_tokens);
            let n_tokens = n_pages * PAGE_LEN;
            let mut prompts = Vec::new();
            for actor in 0..3 {
                let (id, account) = house.create(actor % 2);
                prompts.push((house.ask(id, text(&mut random, n_tokens)), account));
            }
            let mut others = Vec::new();
            let n_steps_max = 4 * 3 * n_tokens.div_ceil(n_step_tokens) + 400;
            while !prompts.iter_mut().fold(true, |all, (answer, _)| answer.is_answered() && all) {
                assert!(house.n_steps < n_steps_max, "{n_pages} pages, {n_host_pages} on the host");
                // Other guests ask something short in between, again and again, and never leave.
                if house.n_steps.is_multiple_of(4) && others.len() < 50 {
                    let (id, _) = house.create(2 + random.below(3) as u32);
                    let n = 1 + random.below(3 * PAGE_LEN);
                    others.push((id, house.ask(id, text(&mut random, n))));
                }
                house.step();
            }
            for (_, account) in &prompts {
                assert_eq!(account.used(Resource::Tokens), n_tokens as u64, "charged once");
            }
            let stats = house.scheduler.stats();
            assert!(stats.n_tokens <= 3 * 3 * n_tokens as u64 + 200 * 48, "{stats:?}");
            assert_eq!(stats.n_tokens_again, 0, "who was admitted came to its end: {stats:?}");
        }
    }
}

#[test]
fn streams_that_do_not_fit_together_take_turns() {
    for n_host_pages in [0, 400] {
        let (n_pages, n_step_tokens) = (240, 512);
        let mut random = Random::new(5);
        let mut house = House::new(n_pages, n_host_pages, n_step_tokens);
        let prompt = n_pages * PAGE_LEN * 6 / 10;
        let mut queues = Vec::new();
        for actor in 0..2 {
            let (id, account) = house.create(actor);
            queues.push((house.run(id, text(&mut random, prompt)), account, 0));
        }
        for _ in 0..1500 {
            house.step();
            for (queue, _, n_tokens) in &mut queues {
                while let Some(event) = queue.try_pull() {
                    match event {
                        RunEvent::Token(_) => *n_tokens += 1,
                        RunEvent::Finished(_) => {}
                        RunEvent::Failed(error) => panic!("{error}"),
                    }
                }
            }
        }
        let counts: Vec<u64> = queues.iter().map(|&(.., n)| n).collect();
        let stats = house.scheduler.stats();
        let n_decoded: u64 = counts.iter().sum();
        assert!(counts.iter().all(|&n| n > 100), "{counts:?} {stats:?}");
        if n_host_pages > 0 {
            assert!(house.n_steps_between_moves >= 31, "moves {} steps apart", house.n_steps_between_moves);
            assert_eq!(stats.n_tokens_again, 0);
            assert!(stats.n_swaps_out > 100, "{stats:?}");
        } else {
            assert!(stats.n_tokens_again > 100, "{stats:?}");
            // What was lost last may not have been decoded for yet.
            let bound = n_decoded + prompt as u64;
            assert!(stats.n_tokens_again <= bound, "{} again for {n_decoded}", stats.n_tokens_again);
        }
        for ((_, account, n), _) in queues.iter().zip(0..) {
            let charged = account.used(Resource::Tokens);
            assert!(charged <= prompt as u64 + n + 1, "{charged} tokens charged for {prompt} and {n}");
        }
    }
}

#[test]
fn memory_changes_hands_in_parts_that_leave_who_decodes_its_pace() {
    let n_pages = 600;
    let mut random = Random::new(6);
    let mut house = House::new(n_pages, 1200, 512);
    house.scheduler.limits.page_bytes = 1 << 20;
    let (id, _) = house.create(0);
    let mut queues = vec![(house.run(id, vec![1]), 0)];
    while house.n_steps < 100 {
        house.step();
    }
    for actor in 1..3 {
        let (id, _) = house.create(actor);
        queues.push((house.run(id, text(&mut random, n_pages * PAGE_LEN * 6 / 10)), 0));
    }
    while house.n_steps < 3000 {
        house.step();
        for (queue, n_tokens) in &mut queues {
            n_tokens.add_assign(std::iter::from_fn(|| queue.try_pull()).count());
        }
    }
    let stats = house.scheduler.stats();
    let counts: Vec<usize> = queues.iter().map(|&(_, n)| n).collect();
    // Of a step of 1 ms, 0.3 ms at 16 GB/s.
    assert!((1..=4).contains(&house.n_moves_most), "{} pages in one plan", house.n_moves_most);
    assert!(stats.n_swaps_out > 500 && stats.n_swaps_in > 500, "{stats:?}");
    assert!(counts.iter().all(|&n| n > 300), "{counts:?} {stats:?}");
    assert_eq!(stats.n_tokens_again, 0);
}

#[test]
fn whoever_waits_for_pages_does_so_beside_all_others_of_its_user_and_session_and_not_behind_them() {
    for (session, guest) in [(1, 1), (1, 2), (2, 2)] {
        let mut random = Random::new(7);
        let mut house = House::new(40, 0, 4096);
        let mut ask = |house: &mut House, session: u64, guest: u64| {
            house.next_id += 1;
            let account = Account::new("guest", Budget::UNLIMITED, None);
            let (session, guest) = (SessionId(session), GuestId(guest));
            let id = context_id(house.next_id);
            house.create_for(id, Owner { actor: ActorId(1), session, guest, account });
            house.ask(id, text(&mut random, 30 * PAGE_LEN))
        };
        let mut of_first: Vec<Question> = (0..20).map(|_| ask(&mut house, 1, 1)).collect();
        // All of them stand in line, some have been served.
        while of_first.iter_mut().filter_map(|question| question.is_answered().then_some(())).count() < 4 {
            house.step();
        }
        let mut last = ask(&mut house, session, guest);
        while !last.is_answered() {
            house.step();
        }
        let n_before =
            of_first.iter_mut().filter_map(|question| question.is_answered().then_some(())).count();
        let is_before = if (session, guest) == (1, 1) { n_before == 20 } else { n_before <= 7 };
        assert!(is_before, "session {session}, guest {guest}: {n_before} before it");
    }
}

#[test]
fn what_is_left_of_a_cached_prompt_is_found() {
    for n_reclaimed in [0, 1, 7, 40, 79] {
        let mut random = Random::new(9);
        let mut house = House::new(100, 0, 512);
        let prompt = text(&mut random, 80 * PAGE_LEN + 1);
        let (id, _) = house.create(1);
        let question = house.ask(id, prompt.clone());
        house.wait_for(question);
        house.release(id);
        // Takes what is free and so many of the cached pages.
        let n_free = house.scheduler.stats().n_pages_free;
        let (id, _) = house.create(1);
        let question = house.ask(id, text(&mut random, (n_free + n_reclaimed) * PAGE_LEN));
        house.wait_for(question);
        let (again, account) = house.create(1);
        house.release(id);
        let question = house.ask(again, prompt);
        house.wait_for(question);
        let n_found = account.n_tokens_cached() as usize;
        assert_eq!(n_found, (80 - n_reclaimed) * PAGE_LEN, "{n_reclaimed} of 80 pages reclaimed");
    }
}

#[test]
fn what_a_context_lost_and_finds_again_in_the_cache_is_not_found_twice() {
    let mut random = Random::new(5);
    let mut house = House::new(40, 0, 512);
    let prompt = text(&mut random, 10 * PAGE_LEN + 1);
    let (first, _) = house.create(1);
    let question = house.ask(first, prompt.clone());
    house.wait_for(question);
    let (second, _) = house.create(1);
    let question = house.ask(second, prompt.clone());
    house.wait_for(question);
    let found = |house: &House| {
        let stats = house.scheduler.stats();
        [stats.n_tokens_cached, stats.n_tokens_found].map(|n| n as usize / PAGE_LEN)
    };
    assert_eq!(found(&house), [10, 10]);
    let kv = &mut house.scheduler.contexts.get_mut(&second).expect("it is there").kv;
    kv.lose_after(4, &mut house.scheduler.pages);
    let edit = Edit { n_kept: prompt.len(), appended: text(&mut random, 8), ..Edit::default() };
    let question = house.ask_after(second, edit);
    house.wait_for(question);
    assert_eq!(found(&house), [16, 10]);
}

#[test]
fn a_page_is_charged_once_to_each_user_through_who_has_held_it_longest() {
    let user = Account::new("user", Budget::UNLIMITED, None);
    let guests: Vec<_> =
        (0..2).map(|_| Account::new("guest", Budget::UNLIMITED, Some(user.clone()))).collect();
    let mut house = House::new(40, 0, 512);
    let prompt: Vec<Token> = (0..5 * PAGE_LEN as Token).map(|token| token % VOCAB as Token).collect();
    for (id, account) in (1..).map(context_id).zip(&guests) {
        let owner = Owner {
            actor: ActorId(1),
            session: SessionId(1),
            guest: GuestId(id.number),
            account: account.clone(),
        };
        house.create_for(id, owner);
        let question = house.ask(id, prompt.clone());
        house.wait_for(question);
    }
    let used = |account: &Account| account.used(Resource::Pages);
    // The last page is written by both, the others are shared.
    assert_eq!((used(&user), used(&guests[0]), used(&guests[1])), (6, 5, 1));
    house.release(context_id(1));
    assert_eq!((used(&user), used(&guests[0]), used(&guests[1])), (5, 0, 5));
    house.release(context_id(2));
    assert_eq!(used(&user), 0);
}

#[test]
fn steps_that_go_by_without_a_context_are_counted_by_what_it_waits_for() {
    let mut random = Random::new(3);
    let mut house = House::new(40, 400, 64);
    let (first, of_first) = house.create(1);
    let mut of_first = (house.ask(first, text(&mut random, 40 * PAGE_LEN)), of_first);
    house.step();
    // There is no page for the second before the first is done.
    let (second, of_second) = house.create(2);
    let question = house.ask(second, text(&mut random, 20 * PAGE_LEN));
    while !of_first.0.is_answered() {
        house.step();
    }
    let n_of_first = house.scheduler.stats().n_steps;
    house.wait_for(question);
    let stats = house.scheduler.stats();
    let waited = stats.causes[Cause::StepsForPages];
    assert!((n_of_first - 3..=n_of_first).contains(&waited), "{stats:?}");
    assert_eq!(stats.causes[Cause::StepsToDecode], 0);
    let n_waited = [&of_first.1, &of_second].map(|account| account.causes().n_steps_waited());
    let n_all = stats.causes[Cause::StepsForPages] + stats.causes[Cause::StepsWithPrompt];
    assert_eq!(n_waited, [0, n_all], "{stats:?}");

    // Two prompts of which each fills a step take turns: each waits while the other is served.
    let mut house = House::new(100, 0, 64);
    let questions = [1, 2].map(|actor| {
        let (id, account) = house.create(actor);
        (house.ask(id, text(&mut random, 10 * 64)), account)
    });
    let [_, second] = questions.map(|(question, account)| {
        house.wait_for(question);
        account
    });
    let stats = house.scheduler.stats();
    assert_eq!((stats.causes[Cause::StepsForPages], stats.causes[Cause::StepsToDecode]), (0, 0), "{stats:?}");
    let n_waited = second.causes().n_steps_waited();
    assert!((stats.n_steps / 2 - 3..stats.n_steps).contains(&n_waited), "{n_waited} {stats:?}");
}
