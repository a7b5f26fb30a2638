//! What is shown of work that is not done yet.

use super::progress::{House, text};
use super::random::Random;
use super::*;
use crate::command::Edit;

/// Contexts of one guest, and its account.
fn contexts(house: &mut House, n: u64) -> (Vec<ContextId>, Arc<Account>) {
    let account = Account::new("guest", Budget::UNLIMITED, None);
    let (actor, session, guest) = (ActorId(1), SessionId(1), GuestId(1));
    let ids: Vec<ContextId> = (1..=n).map(context_id).collect();
    for &id in &ids {
        house.create_for(id, Owner { actor, session, guest, account: account.clone() });
    }
    (ids, account)
}

#[test]
fn how_far_prompts_are_is_told_until_they_are_computed_or_given_up() {
    let (mut random, mut house) = (Random::new(4), House::new(80, 0, 64));
    let (ids, account) = contexts(&mut house, 2);
    let mut question = house.ask(ids[0], text(&mut random, 300));
    let mut seen = vec![account.prompts().now()];
    while !question.is_answered() {
        house.step();
        seen.push(account.prompts().now());
    }
    assert_eq!((seen.first(), seen.last()), (Some(&(300, 300)), Some(&(0, 0))));
    let on_the_way: Vec<u64> = seen.iter().filter(|&&(n, _)| n == 300).map(|&(_, n_left)| n_left).collect();
    assert!(on_the_way.len() > 2 && on_the_way.is_sorted_by(|a, b| a >= b), "{seen:?}");

    let _questions = ids.iter().map(|&id| house.ask(id, text(&mut random, 300))).collect::<Vec<_>>();
    house.step();
    let (n_tokens, n_left) = account.prompts().now();
    assert!(n_tokens > 500 && n_left < n_tokens, "both: {n_left} of {n_tokens}");
    for id in ids {
        house.release(id);
    }
    assert_eq!(account.prompts().now(), (0, 0));
}

#[test]
fn contexts_that_steps_have_no_room_for_are_counted_while_they_wait() {
    let mut house = House::new(80, 0, 64);
    let (ids, _) = contexts(&mut house, 20);
    let begin = |house: &mut House, id| house.run_after(id, Edit { appended: vec![1], ..Edit::default() });
    let mut queues = vec![begin(&mut house, ids[0])];
    for _ in 0..5 {
        house.step();
        assert_eq!(house.scheduler.stats().n_waiting, 0, "one context has all the room");
    }
    queues.extend(ids[1..].iter().map(|&id| begin(&mut house, id)));
    for _ in 0..5 {
        house.step();
        let n_waiting = house.scheduler.stats().n_waiting;
        // A step has 8 rows.
        assert!((12..20).contains(&n_waiting), "{n_waiting}");
    }
    for id in ids {
        house.release(id);
    }
    // Plans find that they are gone.
    for _ in 0..4 {
        house.step();
    }
    assert_eq!(house.scheduler.stats().n_waiting, 0);
}
