use super::*;
use crate::command::{ContextId, Edit, Operation};
use crate::completion::Tag;

const PRICE_NS: u64 = OF_ONE_NS / 4;

/// A guest's command with a number.
fn command(from: u64, number: usize) -> Posted {
    let edit = Edit { n_kept: number, ..Edit::default() };
    Posted::new(CallerId(from), Message::Operation(Operation::Edit { id: ContextId::LEAST, edit }))
}

/// A mask of a guest's.
fn mask(from: u64) -> Posted {
    let (id, tag) = (ContextId::LEAST, Tag::new(0, 0));
    let mask = Arc::new(crate::sampling::TokenMask::all(1));
    let operation = Operation::Mask { id, tag, position: 0, turn: 0, mask, expected: None };
    Posted::new(CallerId(from), Message::Operation(operation))
}

/// Stands for a mask among numbers.
const MASK: usize = usize::MAX;

/// The numbers of the commands that a turn carries out, each of which costs so much.
fn turn(inbox: &mut Inbox, price_ns: u64) -> Vec<usize> {
    let (mut inputs, mut numbers, mut last_ns) = (inbox.inputs(None), Vec::new(), 0);
    while let Some(input) = inputs.next(last_ns) {
        last_ns = price_ns;
        match input {
            EngineInput::Operation(Operation::Edit { edit, .. }) => numbers.push(edit.n_kept),
            EngineInput::Operation(Operation::Mask { .. }) => numbers.push(MASK),
            _ => panic!("a command"),
        }
    }
    inbox.end_turn(false);
    numbers
}

#[test]
fn commands_of_a_guest_that_take_long_wait_for_the_next_turn_and_nobody_else_does() {
    let (sender, messages) = mpsc::unbounded_channel();
    let mut inbox = Inbox::new(messages, Arc::default());
    for number in 0..10 {
        assert!(sender.send(command(1, number)).is_ok());
    }
    assert!(sender.send(command(2, 100)).is_ok());
    assert_eq!(turn(&mut inbox, PRICE_NS), [0, 1, 2, 3, 100]);
    // What comes later from that guest stays behind.
    assert!(sender.send(command(1, 10)).is_ok());
    assert!(sender.send(command(2, 101)).is_ok());
    assert_eq!(turn(&mut inbox, PRICE_NS), [4, 5, 6, 7, 101]);
    assert!(!inbox.is_empty());
    assert_eq!(turn(&mut inbox, PRICE_NS), [8, 9, 10]);
    assert!(inbox.is_empty() && inbox.deferred.queues.is_empty());
}

#[test]
fn what_guests_once_had_waiting_takes_no_memory_afterwards() {
    let (sender, messages) = mpsc::unbounded_channel();
    let mut inbox = Inbox::new(messages, Arc::default());
    for from in 1..=N_QUEUES as u64 + 10 {
        for number in 0..1_000 {
            assert!(sender.send(command(from, number)).is_ok());
        }
    }
    while !turn(&mut inbox, PRICE_NS).is_empty() {}
    let spare = &inbox.deferred.spare;
    assert!(inbox.deferred.queues.is_empty() && spare.len() == N_QUEUES);
    assert!(spare.iter().all(|queue| queue.capacity() <= N_HELD_KEPT));
}

/// An inbox with commands of 40 guests, three of each; every second is of the second of two users, or all are of one.
fn crowd(n_users: u32) -> (mpsc::UnboundedSender<Posted>, Inbox) {
    let (sender, messages) = mpsc::unbounded_channel();
    let mut inbox = Inbox::new(messages, Arc::default());
    for guest in 1..=40 {
        inbox.users.enter(CallerId(guest.into()), ActorId(guest % n_users));
        for number in 0..3 {
            assert!(sender.send(command(guest.into(), number)).is_ok());
        }
    }
    (sender, inbox)
}

/// More than a command takes here on a busy machine.
const LONG_NS: u64 = OF_USER_NS / 3 + 1;

#[test]
fn guests_of_a_lone_user_whose_commands_take_long_get_one_each_once_their_time_is_up() {
    let (_sender, mut inbox) = crowd(1);
    let first = turn(&mut inbox, LONG_NS);
    assert_eq!(first.iter().filter(|&&number| number == 0).count(), 40);
    assert!(first.len() <= 42, "{first:?}");
    while !turn(&mut inbox, 0).is_empty() {}
    assert!(inbox.is_empty());
}

#[test]
fn a_crowd_of_one_of_two_users_has_what_a_user_has() {
    let (_sender, mut inbox) = crowd(2);
    // Each of the users has three; those of its guests that had none are next.
    assert_eq!(turn(&mut inbox, LONG_NS), [0, 1, 0, 1, 0, 0]);
    let first_two = [1, 2].map(|guest| inbox.deferred.queues[&CallerId(guest)].len());
    assert_eq!(first_two, [1, 1]);
    assert_eq!(turn(&mut inbox, LONG_NS), [0, 1, 0, 1, 0, 0]);
    let mut n_turns = 2;
    while !turn(&mut inbox, LONG_NS).is_empty() {
        n_turns += 1;
    }
    assert!(inbox.is_empty() && inbox.deferred.queues.is_empty());
    assert!((20..=22).contains(&n_turns), "{n_turns}");
}

#[test]
fn a_command_that_takes_many_turns_is_made_up_for_beside_others() {
    let (_sender, mut inbox) = crowd(2);
    let n_of_first = |inbox: &mut Inbox, ns: u64| {
        let (mut inputs, mut n, mut last_ns) = (inbox.inputs(None), 0, 0);
        while inputs.next(last_ns).is_some() {
            let is_first = inputs.last.0 % 2 == 1;
            n += usize::from(is_first);
            last_ns = if is_first { ns } else { 0 };
        }
        inbox.end_turn(false);
        n
    };
    for n_times in [3, N_TURNS_OF_DEBT + 1, 1_000] {
        assert_eq!(n_of_first(&mut inbox, n_times * OF_USER_NS), 1, "one goes through whatever it costs");
        for _ in 1..n_times.min(N_TURNS_OF_DEBT + 1) {
            assert_eq!(n_of_first(&mut inbox, LONG_NS), 0);
        }
    }
    assert_eq!(n_of_first(&mut inbox, LONG_NS), 3, "it has been made up for");
}

#[test]
fn while_the_device_waits_for_a_user_others_have_little() {
    let (_sender, mut inbox) = crowd(2);
    let mut inputs = inbox.inputs(Some(ActorId(1)));
    let mut n_of_users = [0, 0];
    let mut price_ns = 0;
    while inputs.next(price_ns).is_some() {
        n_of_users[inputs.last.0 as usize % 2] += 1;
        price_ns = BESIDE_FAVOURED_NS;
    }
    let n_of_favoured = OF_USER_NS.div_ceil(BESIDE_FAVOURED_NS);
    assert_eq!(n_of_users, [1, n_of_favoured]);
}

#[test]
fn turns_that_follow_at_once_are_one_for_a_crowd_beside_others() {
    let (_sender, mut inbox) = crowd(2);
    let n_taken = |inbox: &mut Inbox| {
        let (mut inputs, mut n, mut last_ns) = (inbox.inputs(None), 0, 0);
        while inputs.next(last_ns).is_some() {
            (n, last_ns) = (n + 1, LONG_NS);
        }
        inbox.end_turn(true);
        n
    };
    let taken: Vec<_> = (0..2 * N_TURNS_AT_ONCE).map(|_| n_taken(&mut inbox)).collect();
    assert_eq!(taken, [6, 0, 0, 6, 0, 0]);
}

#[test]
fn a_mask_of_a_guest_that_asks_little_waits_for_no_other_guest() {
    let (sender, mut inbox) = crowd(2);
    inbox.users.enter(CallerId(42), ActorId(1));
    assert!(sender.send(mask(42)).is_ok());
    assert!(turn(&mut inbox, LONG_NS).contains(&MASK));
    while !turn(&mut inbox, LONG_NS).is_empty() {}
    assert!(inbox.is_empty());
}

#[test]
fn who_has_left_is_no_user() {
    let mut users = Users::default();
    (1..=3_u32).for_each(|guest| users.enter(CallerId(guest.into()), ActorId(guest % 2)));
    assert!(users.are_several());
    users.leave(CallerId(2));
    assert!(!users.are_several());
    users.leave(CallerId(2));
    assert_eq!((users.of_guests.len(), users.n_guests[&ActorId(1)]), (2, 2));
}
