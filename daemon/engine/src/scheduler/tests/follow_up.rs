//! What rows are told of the step after them, and the pages they get for it.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::N_POSITIONS;
use super::hash_backend::{HashBackend, VOCAB, drawn, fails, hash};
use crate::account::{Account, ActorId, Budget, GuestId, Owner, Resource, SessionId};
use crate::backend::{Limits, PAGE_LEN};
use crate::batch::FollowUp::{self, Expected, Unknown};
use crate::batch::Token;
use crate::command::{Ahead, Ask, Command, ContextId, Edit, RunSettings};
use crate::prefix::PrefixScope;
use crate::run::{RunEvent, RunQueue, RunSender};
use crate::sampling::Sampler;
use crate::scheduler::{Scheduler, SchedulerSettings};

struct House {
    scheduler: Scheduler,
    backend: HashBackend,
}

fn owner(n_pages: u64) -> Owner {
    let account = Account::new("guest", Budget { n_pages, ..Budget::UNLIMITED }, None);
    Owner { actor: ActorId(0), session: SessionId(0), guest: GuestId(0), account }
}

fn text(n: usize) -> Vec<Token> {
    (0..n as Token).map(|token| token % VOCAB as Token).collect()
}

fn settings(n_tokens_max: Option<usize>, ahead: Ahead) -> RunSettings {
    let (sampler, stop_tokens) = (Arc::new(Sampler::greedy()), Arc::new([]));
    RunSettings { sampler, stop_tokens, n_tokens_max, ahead }
}

impl House {
    fn new(n_pages: usize) -> Self {
        let limits = Limits {
            n_pages,
            n_host_pages: 0,
            page_bytes: 128,
            n_rows_max: 8,
            n_tokens_max: 64,
            n_positions_max: N_POSITIONS,
            vocab_size: VOCAB as usize,
            hidden_size: 1,
        };
        let settings = SchedulerSettings {
            model_fingerprint: [7; 32],
            prefix_scope: PrefixScope::Actor,
            n_step_tokens: limits.n_tokens_max,
        };
        Self { scheduler: Scheduler::new(limits, settings), backend: HashBackend::new(n_pages, 0) }
    }

    fn create(&mut self, id: u64, owner: &Owner) -> ContextId {
        let id = ContextId(id);
        self.scheduler.apply(Command::Create { id, owner: owner.clone() });
        id
    }

    fn run(&mut self, id: ContextId, prompt: &[Token], settings: RunSettings) -> Arc<RunQueue> {
        let queue = Arc::new(RunQueue::default());
        let edit = Edit { n_kept: 0, appended: prompt.to_vec() };
        let sender = RunSender::new(queue.clone());
        self.scheduler.apply(Command::Run { id, edit, settings, queue: sender });
        queue
    }

    /// Computes the context's tokens with these past the first `n_kept`.
    fn prefill(&mut self, id: ContextId, n_kept: usize, appended: &[Token]) {
        let (reply, mut answer) = oneshot::channel();
        let edit = Edit { n_kept, appended: appended.to_vec() };
        self.scheduler.apply(Command::Ask { id, edit, ask: Ask::Prefill, reply });
        while answer.try_recv().is_err() {
            self.step();
        }
    }

    /// One step; what each of its rows was told, and its pages.
    fn step(&mut self) -> Vec<(FollowUp, usize)> {
        let plan = self.scheduler.plan();
        let batch = self.scheduler.batch(&plan);
        let rows = batch.rows.iter().map(|row| (row.follow_up, row.pages.len())).collect();
        let outputs = self.backend.run(&plan.moves, &batch);
        drop(batch);
        self.scheduler.complete(plan, outputs);
        rows
    }

    fn n_blocks(&self, id: ContextId) -> usize {
        self.scheduler.contexts[&id].kv.blocks.len()
    }

    fn follow_ups(&mut self, n_steps: usize) -> Vec<FollowUp> {
        (0..n_steps).flat_map(|_| self.step()).map(|(follow_up, _)| follow_up).collect()
    }
}

#[test]
fn a_follow_up_is_expected_as_long_as_the_run_goes_on() {
    let owner = owner(u64::MAX);
    let start = |prompt: usize, n_tokens_max, ahead| {
        let mut house = House::new(100);
        let id = house.create(1, &owner);
        let queue = house.run(id, &text(prompt), settings(n_tokens_max, ahead));
        (house, id, queue)
    };
    // To the last token asked for.
    let (mut house, ..) = start(20, Some(3), Ahead::Unbounded);
    assert_eq!(house.follow_ups(5), [Expected, Expected, Unknown]);
    // To the end of the context.
    let (mut house, ..) = start(60, None, Ahead::Unbounded);
    let follow_ups = house.follow_ups(N_POSITIONS);
    assert_eq!(follow_ups.len(), N_POSITIONS - 60);
    assert_eq!(follow_ups.iter().position(|&follow_up| follow_up == Unknown), Some(N_POSITIONS - 60 - 1));
    // A chunk of a prompt draws nothing.
    let (mut house, ..) = start(65, Some(3), Ahead::Unbounded);
    assert_eq!(house.follow_ups(5), [Unknown, Expected, Expected, Unknown]);
    // To the end of the window: four tokens that nobody has pulled.
    let (mut house, id, queue) = start(20, None, Ahead::Adaptive);
    assert_eq!(house.follow_ups(6), [Expected, Expected, Expected, Unknown]);
    // The guest pulls all of them and waits for the next.
    for _ in 0..4 {
        assert!(matches!(queue.try_pull().0, Some(RunEvent::Token(_))));
    }
    assert!(queue.try_pull().0.is_none());
    house.scheduler.apply(Command::Resume { id });
    assert_eq!(house.follow_ups(1), [Expected]);

    // A question is asked once.
    let mut house = House::new(100);
    let id = house.create(1, &owner);
    let (reply, _answer) = oneshot::channel();
    let edit = Edit { n_kept: 0, appended: text(20) };
    let ask = Ask::Sample(Arc::new(Sampler::greedy()));
    house.scheduler.apply(Command::Ask { id, edit, ask, reply });
    assert_eq!(house.follow_ups(2), [Unknown]);
}

#[test]
fn a_page_comes_ahead_where_one_ends_and_goes_with_what_needs_it() {
    let owner = owner(u64::MAX);
    let n_charged = || owner.account.used(Resource::Pages);
    let mut house = House::new(4);
    let id = house.create(1, &owner);
    house.run(id, &text(PAGE_LEN - 1), settings(Some(4), Ahead::Unbounded));
    assert_eq!(house.step(), [(Expected, 1)]);
    assert_eq!(house.step(), [(Expected, 2)], "position 15 was computed, 16 is next");
    assert_eq!((n_charged(), house.n_blocks(id)), (2, 2));
    // A fork has no part in a page that nothing is in.
    let edit = Edit { n_kept: PAGE_LEN + 1, appended: Vec::new() };
    house.scheduler.apply(Command::Fork { id, edit, child: ContextId(2) });
    assert_eq!((n_charged(), house.n_blocks(id), house.n_blocks(ContextId(2))), (2, 2, 1));
    let edit = Edit { n_kept: PAGE_LEN, appended: Vec::new() };
    house.scheduler.apply(Command::Edit { id, edit });
    assert_eq!((n_charged(), house.n_blocks(id)), (1, 1));

    // The last token needs no page.
    house.run(id, &text(PAGE_LEN), settings(Some(1), Ahead::Unbounded));
    assert_eq!(house.step(), [(Unknown, 1)]);
    assert_eq!((n_charged(), house.n_blocks(id)), (2, 1), "the fork holds the page that was written again");
}

#[test]
fn a_failed_draw_gives_the_page_ahead_back() {
    let owner = owner(u64::MAX);
    let mut house = House::new(4);
    let id = house.create(1, &owner);
    let prompt = text(PAGE_LEN);
    let seed = (1..).step_by(8).find(|&seed| fails(hash(&prompt), seed)).expect("one in eight fails");
    let sampler = Arc::new(Sampler { seed, ..Sampler::greedy() });
    let queue = house.run(id, &prompt, RunSettings { sampler, ..settings(None, Ahead::Unbounded) });
    assert_eq!(house.step(), [(Expected, 2)]);
    assert!(matches!(queue.try_pull().0, Some(RunEvent::Failed(_))));
    assert_eq!((owner.account.used(Resource::Pages), house.n_blocks(id)), (1, 1));
}

#[test]
fn a_page_ahead_is_never_taken_from_anybody() {
    // The budget ends with the page: the draw itself is within it.
    let poor = owner(1);
    let mut house = House::new(4);
    let id = house.create(1, &poor);
    let queue = house.run(id, &text(PAGE_LEN), settings(None, Ahead::Unbounded));
    assert_eq!(house.step(), [(Expected, 1)]);
    assert!(matches!(queue.try_pull().0, Some(RunEvent::Token(_))));
    assert_eq!(house.step(), []);
    assert!(matches!(queue.try_pull().0, Some(RunEvent::Failed(_))));

    // All pages are held by another context.
    let rich = owner(u64::MAX);
    let mut house = House::new(3);
    let other = house.create(1, &rich);
    house.prefill(other, 0, &text(2 * PAGE_LEN + 1));
    assert_eq!(house.n_blocks(other), 2);
    let id = house.create(2, &rich);
    house.run(
        id,
        &[&[VOCAB as Token - 1], &text(PAGE_LEN - 1)[..]].concat(),
        settings(None, Ahead::Unbounded),
    );
    assert_eq!(house.step(), [(Expected, 1)]);
    assert_eq!(house.n_blocks(other), 2);

    // Pages that only the cache remembers are nobody's.
    let mut house = House::new(3);
    let other = house.create(1, &rich);
    house.prefill(other, 0, &text(2 * PAGE_LEN + 1));
    house.scheduler.apply(Command::Release { id: other });
    let id = house.create(2, &rich);
    house.run(
        id,
        &[&[VOCAB as Token - 1], &text(PAGE_LEN - 1)[..]].concat(),
        settings(None, Ahead::Unbounded),
    );
    assert_eq!(house.step(), [(Expected, 2)]);
    let stats = house.scheduler.stats();
    assert_eq!((stats.n_pages_free, stats.n_pages_cached), (0, 1));
}

#[test]
fn a_run_that_ends_gives_its_page_ahead_back() {
    let owner = owner(u64::MAX);
    let mut house = House::new(20);
    let prompt = text(PAGE_LEN);
    let stop = drawn(hash(&prompt), Sampler::greedy().seed).token;
    let long = [&prompt[..], &[stop], &text(3 * PAGE_LEN)].concat();
    let id = house.create(1, &owner);
    // The run ends where it was expected to go on.
    let stop_tokens = Arc::new([stop]);
    house.run(id, &prompt, RunSettings { stop_tokens, ..settings(None, Ahead::Unbounded) });
    assert_eq!(house.step(), [(Expected, 2)]);
    assert_eq!(house.n_blocks(id), 1);
    assert_eq!(owner.account.used(Resource::Pages), 1);
    let other = house.create(2, &owner);
    house.prefill(other, 0, &long);
    let before = owner.account.n_tokens_cached();
    house.prefill(id, prompt.len() + 1, &long[prompt.len() + 1..]);
    assert_eq!(owner.account.n_tokens_cached() - before, 3 * PAGE_LEN as u64);
    assert_eq!(owner.account.used(Resource::Pages), 4);
}

#[test]
fn a_page_ahead_never_costs_another_context_its_own() {
    let owner = owner(2);
    let mut house = House::new(20);
    let first = house.create(1, &owner);
    house.run(first, &text(PAGE_LEN), settings(None, Ahead::Adaptive));
    assert_eq!(house.step(), [(Expected, 2)]);
    assert_eq!(owner.account.used(Resource::Pages), 2);
    // The run is no longer asked for anything; step by step it would hold one page.
    let second = house.create(2, &owner);
    house.scheduler.contexts.get_mut(&first).expect("created").is_queued = true;
    house.scheduler.decodes.pop();
    house.prefill(second, 0, &text(PAGE_LEN + 5)[5..]);
    assert_eq!(house.n_blocks(second), 1);
    assert_eq!(house.n_blocks(first), 1);
}
