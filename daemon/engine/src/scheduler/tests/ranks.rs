//! Users of ranks: whose pages make room for whom, and that those below come to their ends all the same.

use std::num::NonZeroU32;
use std::sync::Arc;

use super::progress::{House, Question, text};
use super::{Random, context_id};
use crate::account::{Account, ActorId, Budget, GuestId, Owner, Priority, Resource, SessionId, USER};
use crate::backend::PAGE_LEN;
use crate::command::{ContextId, Edit};
use crate::run::{RunEvent, RunQueue};

/// A user, and what it has open.
struct User {
    actor: ActorId,
    account: Arc<Account>,
    n_contexts: u64,
}

impl User {
    fn new(actor: u32, share: u32, rank: u8) -> Self {
        let priority = Priority { share: NonZeroU32::new(share).expect("above 0"), rank };
        let account = Account::with_priority(USER, Budget::UNLIMITED, None, priority);
        Self { actor: ActorId(actor), account, n_contexts: 0 }
    }

    /// A context of one more guest.
    fn create(&mut self, house: &mut House) -> ContextId {
        self.n_contexts += 1;
        let number = u64::from(self.actor.0) * 1_000 + self.n_contexts;
        let account = Account::new("guest", Budget::UNLIMITED, Some(self.account.clone()));
        let (session, guest) = (SessionId(number), GuestId(number));
        house.create_for(context_id(number), Owner { actor: self.actor, session, guest, account });
        context_id(number)
    }

    /// A context that was asked about so many pages and waits for nothing.
    fn asked(&mut self, house: &mut House, random: &mut Random, n_pages: usize) -> ContextId {
        let id = self.create(house);
        let question = house.ask(id, text(random, n_pages * PAGE_LEN - 8));
        house.wait_for(question);
        id
    }

    fn stream(&mut self, house: &mut House, random: &mut Random, n_pages: usize) -> RunQueue {
        let id = self.create(house);
        house.run_after(id, Edit { appended: text(random, n_pages * PAGE_LEN - 8), ..Edit::default() })
    }

    fn n_on_host(&self) -> u64 {
        self.account.used(Resource::HostPages)
    }
}

fn n_pulled(queue: &mut RunQueue) -> usize {
    let tokens = std::iter::from_fn(|| queue.try_pull());
    tokens.inspect(|event| assert!(!matches!(event, RunEvent::Failed(_)), "{event:?}")).count()
}

#[test]
fn pages_of_a_lower_rank_go_to_the_host_first_whatever_was_used_last() {
    let mut random = Random::new(1);
    let mut house = House::new(40, 100, 4096);
    let [mut low, mut high, mut other] = [User::new(1, 1, 0), User::new(2, 1, 1), User::new(3, 1, 0)];
    high.asked(&mut house, &mut random, 15);
    low.asked(&mut house, &mut random, 15);
    // What was used longest ago is of the higher rank.
    other.asked(&mut house, &mut random, 18);
    assert_eq!([&low, &high, &other].map(User::n_on_host), [8, 0, 0]);
    high.asked(&mut house, &mut random, 24);
    assert_eq!([&low, &high, &other].map(User::n_on_host), [15, 0, 17], "and then those of its neighbours");
    // Once no lower rank has any, the rest is theirs.
    other.asked(&mut house, &mut random, 20);
    let n_on_host = [&low, &high, &other].map(User::n_on_host);
    assert_eq!((n_on_host[0], n_on_host[2]), (15, 18));
    assert_eq!(n_on_host[1], 19, "work of a lower rank comes to its end");
}

#[test]
fn what_a_lower_rank_has_on_a_full_host_is_given_up_before_anything_of_a_higher() {
    let mut random = Random::new(2);
    let mut house = House::new(40, 20, 4096);
    let [mut low, mut high] = [User::new(1, 1, 0), User::new(2, 1, 1)];
    let of_low = low.asked(&mut house, &mut random, 20);
    let of_high = high.asked(&mut house, &mut random, 20);
    high.asked(&mut house, &mut random, 30);
    let n_held = |house: &House, id| house.scheduler.contexts[&id].kv.blocks().len();
    let n_given_up = house.scheduler.stats().n_pages_given_up;
    assert_eq!((n_held(&house, of_low), n_held(&house, of_high)), (10, 20));
    assert_eq!((n_given_up, low.n_on_host() + high.n_on_host()), (10, 20));
}

#[test]
fn for_want_of_host_memory_what_a_lower_rank_has_there_goes_first_and_is_computed_again_charged_to_nobody() {
    let mut random = Random::new(5);
    let mut house = House::new(40, 100, 4096);
    let [mut low, mut high] = [User::new(1, 1, 0), User::new(2, 1, 1)];
    let of_low = low.asked(&mut house, &mut random, 20);
    let of_high = high.asked(&mut house, &mut random, 20);
    high.asked(&mut house, &mut random, 40);
    assert_eq!([&low, &high].map(User::n_on_host), [20, 20]);
    assert_eq!(house.scheduler.give_up_host_pages(0), 0);
    assert_eq!(house.scheduler.give_up_host_pages(25), 25);
    assert_eq!([&low, &high].map(User::n_on_host), [0, 15]);
    assert_eq!(house.scheduler.free_host_pages().len(), 85);
    let n_charged = low.account.used(Resource::Tokens);
    for id in [of_low, of_high] {
        let edit = Edit { n_kept: 20 * PAGE_LEN - 8, appended: text(&mut random, 8), ..Edit::default() };
        let question = house.ask_after(id, edit);
        house.wait_for(question);
    }
    assert_eq!(low.account.used(Resource::Tokens), n_charged + 8);
    let stats = house.scheduler.stats();
    assert_eq!(stats.n_pages_given_up, 25);
    assert!(stats.n_tokens_again > 20 * PAGE_LEN as u64, "{stats:?}");
    assert_eq!(house.scheduler.give_up_host_pages(100), 40, "of what waits for nothing all may go");
}

#[test]
fn a_question_of_a_higher_rank_waits_for_no_more_than_two_terms_of_streams_below_it() {
    let mut random = Random::new(3);
    let mut house = House::new(100, 400, 4096);
    let [mut low, mut high] = [User::new(1, 1, 0), User::new(2, 10, 1)];
    // They have more than the device has.
    let mut streams: Vec<RunQueue> = (0..4).map(|_| low.stream(&mut house, &mut random, 30)).collect();
    (0..200).for_each(|_| house.step());
    assert!(low.n_on_host() > 0);
    let mut n_steps_most = 0;
    for _ in 0..20 {
        (0..7).for_each(|_| house.step());
        let id = high.create(&mut house);
        let mut question: Question = house.ask(id, text(&mut random, 60 * PAGE_LEN));
        let mut n_steps = 0;
        while !question.is_answered() {
            house.step();
            n_steps += 1;
        }
        n_steps_most = n_steps.max(n_steps_most);
        house.release(id);
    }
    assert!(n_steps_most <= 72, "{n_steps_most} steps");
    (0..200).for_each(|_| house.step());
    let counts: Vec<usize> = streams.iter_mut().map(n_pulled).collect();
    assert!(counts.iter().all(|&n| n > 60), "{counts:?}");
    assert_eq!(house.scheduler.stats().n_tokens_again, 0, "what left came back as it was");
}

#[test]
fn streams_of_a_lower_rank_go_on_by_their_share_beside_streams_above_them_that_fill_the_pool() {
    for n_host_pages in [0, 600] {
        for (share, rank) in [(1, 0), (1, 1), (4, 1)] {
            let mut random = Random::new(4);
            let mut house = House::new(240, n_host_pages, 512);
            let users = [User::new(1, 1, 0), User::new(2, share, rank)];
            let mut streams = users.map(|mut user| user.stream(&mut house, &mut random, 144));
            let mut counts = [0, 0];
            for _ in 0..1_500 {
                house.step();
                for (count, stream) in counts.iter_mut().zip(&mut streams) {
                    *count += n_pulled(stream);
                }
            }
            let part = counts[0] as f64 / (counts[0] + counts[1]) as f64;
            let due = 1.0 / f64::from(1 + share);
            let case = format!("{n_host_pages} on the host, a share of {share} of rank {rank}: {counts:?}");
            assert!(counts.iter().all(|&n| n > 100), "{case}");
            // What is computed again takes turns that are longer than this.
            let is_due = part > 0.7 * due && part < 1.3 * due;
            assert!(n_host_pages == 0 || is_due, "{case}");
        }
    }
}

#[test]
fn whatever_a_lower_rank_asks_ends_beside_questions_above_it_that_never_do() {
    let mut random = Random::new(5);
    let mut house = House::new(60, 90, 256);
    let [mut low, mut high] = [User::new(1, 1, 0), User::new(2, 10, 3)];
    let mut of_high: Vec<(ContextId, Question)> = Vec::new();
    let mut of_low = (0..3).map(|_| {
        let id = low.create(&mut house);
        house.ask(id, text(&mut random, 50 * PAGE_LEN))
    });
    let mut of_low: Vec<Question> = of_low.by_ref().collect();
    let mut n_steps = 0;
    while !of_low.iter_mut().all(Question::is_answered) {
        assert!(n_steps < 4_000, "a lower rank starves");
        n_steps += 1;
        while of_high.len() < 6 {
            let id = high.create(&mut house);
            of_high.push((id, house.ask(id, text(&mut random, 25 * PAGE_LEN))));
        }
        house.step();
        for (id, _) in of_high.extract_if(.., |(_, question)| question.is_answered()).collect::<Vec<_>>() {
            house.release(id);
        }
    }
}
