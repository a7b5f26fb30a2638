//! Whose pages go first, and whose hidden states.

use super::progress::{House, Question, text};
use super::{Random, context_id};
use crate::account::{Account, ActorId, Budget, GuestId, Owner, SessionId};
use crate::backend::PAGE_LEN;
use crate::command::{Ahead, ContextId, Edit, Operation};
use crate::run::RunQueue;
use crate::scheduler::slots::{N_STEPS_KEPT, Slots};

impl House {
    /// A context of this guest that has been asked something of so many pages.
    fn asked(
        &mut self,
        random: &mut Random,
        (actor, session, guest): (u32, u64, u64),
        n_pages: usize,
    ) -> ContextId {
        let id = context_id(self.n_contexts() as u64 + 1);
        let account = Account::new("guest", Budget::UNLIMITED, None);
        let (actor, session, guest) = (ActorId(actor), SessionId(session), GuestId(guest));
        self.create_for(id, Owner { actor, session, guest, account });
        let question = self.ask(id, text(random, n_pages * PAGE_LEN - 8));
        self.wait_for(question);
        id
    }

    /// Asks about one token more.
    fn ask_more(&mut self, id: ContextId) -> Question {
        let n_kept = self.scheduler.contexts[&id].kv.tokens.len();
        self.ask_after(id, Edit { n_kept, appended: vec![1], ..Edit::default() })
    }

    fn n_contexts(&self) -> usize {
        self.scheduler.contexts.len()
    }

    fn n_pages_there(&self, id: ContextId) -> usize {
        let blocks = self.scheduler.contexts[&id].kv.blocks();
        blocks.iter().filter(|&&block| self.scheduler.pages.page(block).is_some()).count()
    }
}

#[test]
fn idle_pages_go_of_what_was_used_longest_ago_where_nobody_is_far_ahead() {
    let mut random = Random::new(8);
    let mut house = House::new(40, 100, 4096);
    let [first, second, third] = [(1, 5), (2, 15), (3, 15)]
        .map(|(actor, n)| house.asked(&mut random, (actor, actor.into(), actor.into()), n));
    house.asked(&mut random, (4, 4, 4), 7);
    assert_eq!([first, second, third].map(|id| house.n_pages_there(id)), [3, 15, 15]);
}

#[test]
fn idle_pages_go_of_whoever_has_had_most_and_of_one_guest_what_was_used_longest_ago() {
    // Another user, another session of the same user, another guest of the same session.
    for greedy in [(2, 2, 2), (1, 2, 2), (1, 1, 2)] {
        let mut random = Random::new(8);
        let mut house = House::new(40, 100, 4096);
        house.step_ns = 1_500_000_000;
        let modest = house.asked(&mut random, (1, 1, 1), 5);
        let [first, second] = [1, 2].map(|_| house.asked(&mut random, greedy, 15));
        // It decodes for some seconds of the device.
        for id in [first, second].into_iter().cycle().take(4) {
            let question = house.ask_more(id);
            house.wait_for(question);
        }
        // Five pages are free. What was served longest ago is the modest guest's.
        house.asked(&mut random, (3, 3, 3), 10);
        let n_there = [modest, first, second].map(|id| house.n_pages_there(id));
        assert_eq!(n_there, [5, 10, 15], "{greedy:?}");
    }
}

#[test]
fn a_context_that_is_asked_gets_the_state_of_one_that_is_not_any_more() {
    let mut random = Random::new(9);
    let mut house = House::new(100, 0, 64);
    house.scheduler.limits.n_states = 4;
    house.scheduler.slots = Slots::new(4);
    let idle: Vec<ContextId> = (0..4).map(|_| house.asked(&mut random, (1, 1, 1), 1)).collect();
    let asked = house.asked(&mut random, (2, 2, 2), 1);
    let again = |house: &mut House, id: ContextId| {
        let n_before = house.backend.n_rows_of_head;
        let n_kept = house.scheduler.contexts[&id].kv.tokens.len();
        let question = house.ask_after(id, Edit { n_kept, ..Edit::default() });
        house.wait_for(question);
        house.backend.n_rows_of_head - n_before
    };
    assert_eq!(again(&mut house, asked), 0, "the others were asked a moment ago");
    for _ in 0..=N_STEPS_KEPT {
        // Those that are asked again and again keep theirs.
        assert_eq!(again(&mut house, idle[0]), 1);
    }
    assert_eq!(again(&mut house, asked), 0, "its token is computed once more");
    assert_eq!([asked, idle[0], asked].map(|id| again(&mut house, id)), [1, 1, 1]);
}

#[test]
fn a_stream_that_its_guest_does_not_pull_leaves_its_state_to_others() {
    let mut random = Random::new(9);
    let mut house = House::new(100, 0, 64);
    house.scheduler.limits.n_states = 4;
    house.scheduler.slots = Slots::new(4);
    let idle: Vec<ContextId> = (0..4).map(|_| house.asked(&mut random, (1, 1, 1), 1)).collect();
    let edit = |house: &House, id: ContextId| {
        let n_kept = house.scheduler.contexts[&id].kv.tokens.len();
        Edit { n_kept, ..Edit::default() }
    };
    let mut streams: Vec<_> =
        idle.iter().map(|&id| house.stream_after(id, edit(&house, id), Ahead::Adaptive)).collect();
    let asked = house.asked(&mut random, (2, 2, 2), 1);
    let pulled = |streams: &mut [RunQueue]| {
        streams.iter_mut().map(|stream| std::iter::from_fn(|| stream.try_pull()).count()).collect::<Vec<_>>()
    };
    // They decode as far ahead as they may, and no token is taken.
    for _ in 0..=N_STEPS_KEPT + 4 {
        let question = house.ask_after(asked, edit(&house, asked));
        house.wait_for(question);
    }
    let n_before = house.backend.n_rows_of_head;
    let question = house.ask_after(asked, edit(&house, asked));
    house.wait_for(question);
    assert_eq!(house.backend.n_rows_of_head - n_before, 1, "it has the state of a stream");
    assert!(pulled(&mut streams).iter().all(|&n| n > 0), "what was decoded is there all the same");
}

/// Two contexts computed their first page at once, each for itself; what follows is the same page for both.
#[test]
fn what_a_context_holds_alone_leaves_though_it_shares_its_end_with_who_decodes() {
    let mut random = Random::new(10);
    let mut house = House::new(20, 0, 256);
    let prompt = text(&mut random, 6 * PAGE_LEN + 1);
    let both: [ContextId; 2] = [1, 2].map(|guest| {
        let id = context_id(guest);
        let account = Account::new("guest", Budget::UNLIMITED, None);
        let owner = Owner { actor: ActorId(1), session: SessionId(1), guest: GuestId(guest), account };
        house.create_for(id, owner);
        id
    });
    let questions = both.map(|id| house.ask(id, prompt[..PAGE_LEN].to_vec()));
    questions.into_iter().for_each(|question| house.wait_for(question));
    for id in both {
        let edit = Edit { n_kept: PAGE_LEN, appended: prompt[PAGE_LEN..].to_vec(), ..Edit::default() };
        let question = house.ask_after(id, edit);
        house.wait_for(question);
    }
    let [decoding, idle] = both;
    let edit = Edit { n_kept: 6 * PAGE_LEN, ..Edit::default() };
    house.scheduler.apply(Operation::Edit { id: idle, edit });
    let is_alone = house.scheduler.contexts[&idle].kv.n_alone(&house.scheduler.pages);
    assert_eq!((is_alone, house.n_pages_there(idle)), (1, 6));
    let mut stream = house.run_after(decoding, Edit { n_kept: prompt.len(), ..Edit::default() });
    (0..3).for_each(|_| house.step());
    // That page is one of 13, the others are free.
    let account = Account::new("guest", Budget::UNLIMITED, None);
    let other = context_id(3);
    let owner = Owner { actor: ActorId(3), session: SessionId(3), guest: GuestId(3), account };
    house.create_for(other, owner);
    let mut question = house.ask(other, text(&mut random, 13 * PAGE_LEN - 8));
    (0..6).for_each(|_| house.step());
    assert!(question.is_answered(), "a page of whoever waits for nothing was kept");
    assert_eq!(house.n_pages_there(idle), 0);
    let n_given = std::iter::from_fn(|| stream.try_pull()).count();
    assert!((8..16).contains(&n_given), "{n_given} tokens: it has crossed no page");
}
