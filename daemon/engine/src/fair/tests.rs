//! Shares under load, after pauses, across classes; what is forgotten of owners that left.

use super::*;
use crate::account::{Account, ActorId, Budget, GuestId, Priority, SessionId};

const DECODE: Lane = Lane(0);
const PROMPT: Lane = Lane(1);

fn owner(actor: u32, session: u64, guest: u64) -> Owner {
    let account = Account::new("guest", Budget::UNLIMITED, None);
    Owner { actor: ActorId(actor), session: SessionId(session), guest: GuestId(guest), account }
}

fn owner_with(share: u32, actor: u32, session: u64, guest: u64) -> Owner {
    let priority = Priority { share: NonZeroU32::new(share).expect("above 0"), rank: 0 };
    let account = Account::with_priority("guest", Budget::UNLIMITED, None, priority);
    Owner { account, ..owner(actor, session, guest) }
}

/// Serves `n` items, each put back at once, and counts the tokens that each owner got.
fn serve(owners: &[(Owner, usize)], n: usize) -> Vec<usize> {
    let mut queue = FairQueue::default();
    let seats: Vec<Seat> = owners.iter().map(|(owner, _)| queue.seat(owner)).collect();
    for (idx, seat) in seats.iter().enumerate() {
        queue.push(seat, DECODE, idx, 1);
    }
    let mut served = vec![0; owners.len()];
    for _ in 0..n {
        let idx = queue.pop(DECODE).expect("everybody is put back");
        let cost = owners[idx].1;
        served[idx] += cost;
        queue.charge(&seats[idx], cost as u64);
        queue.push(&seats[idx], DECODE, idx, 1);
    }
    served
}

#[test]
fn users_get_equal_shares_whatever_they_run() {
    // One user with one guest, one with three guests in two sessions; items of unlike cost.
    let owners = [(owner(1, 1, 1), 100), (owner(2, 2, 2), 7), (owner(2, 2, 3), 30), (owner(2, 3, 4), 1)];
    let served = serve(&owners, 20_000);
    let (one, other) = (served[0] as f64, (served[1] + served[2] + served[3]) as f64);
    assert!((one / other - 1.0).abs() < 0.05, "users: {one} and {other}");
    let (session_a, session_b) = ((served[1] + served[2]) as f64, served[3] as f64);
    assert!((session_a / session_b - 1.0).abs() < 0.05, "sessions: {session_a} and {session_b}");
    let (guest_a, guest_b) = (served[1] as f64, served[2] as f64);
    assert!((guest_a / guest_b - 1.0).abs() < 0.05, "guests: {guest_a} and {guest_b}");
}

#[test]
fn who_is_kept_out_keeps_its_place() {
    let mut queue = FairQueue::default();
    let seats = [1, 2, 3].map(|user| queue.seat(&owner(user, 1, 1)));
    for (seat, item) in seats.iter().zip(["a", "b", "c"]) {
        queue.push(seat, DECODE, item, 1);
    }
    let but_of = |users: &'static [u32]| move |user: ActorId| users.contains(&user.0);
    assert_eq!(queue.pop_but_of(DECODE, but_of(&[1, 2, 3])), None);
    assert_eq!(queue.pop_but_of(DECODE, but_of(&[1, 3])), Some("b"));
    queue.charge(&seats[1], 5);
    queue.push(&seats[1], DECODE, "b", 1);
    assert_eq!(queue.pop_but_of(DECODE, but_of(&[2])), Some("a"));
    assert_eq!([(); 3].map(|()| queue.pop(DECODE)), [Some("c"), Some("b"), None]);
}

#[test]
fn idleness_earns_no_credit() {
    let mut queue = FairQueue::default();
    let (busy, late) = (queue.seat(&owner(1, 1, 1)), queue.seat(&owner(2, 2, 2)));
    for _ in 0..1000 {
        queue.push(&busy, DECODE, "busy", 1);
        assert_eq!(queue.pop(DECODE), Some("busy"));
        queue.charge(&busy, 16);
    }
    queue.push(&busy, DECODE, "busy", 1);
    let mut n_late_in_a_row = 0;
    queue.push(&late, DECODE, "late", 1);
    while queue.pop(DECODE) == Some("late") {
        queue.charge(&late, 16);
        queue.push(&late, DECODE, "late", 1);
        n_late_in_a_row += 1;
    }
    assert!(n_late_in_a_row <= 2, "{n_late_in_a_row} turns before the busy user's");
}

#[test]
fn users_then_their_sessions_then_their_guests_are_due_equal_parts() {
    let mut queue = FairQueue::default();
    let owners = [owner(1, 1, 1), owner(1, 1, 2), owner(1, 2, 3), owner(2, 3, 4)];
    let seats = owners.map(|owner| queue.seat(&owner));
    let n_rows = [2, 1, 7, 1];
    for (idx, seat) in seats.iter().enumerate() {
        queue.push(seat, DECODE, idx, n_rows[idx]);
    }
    queue.push(&seats[0], DECODE, 4, 3);
    queue.push(&seats[3], PROMPT, 5, 1);
    let due = |queue: &FairQueue<usize>| {
        let mut due: Vec<_> =
            queue.shares(DECODE).map(|share| (share.n_parts as usize, share.n_rows)).collect();
        due.sort_unstable();
        due
    };
    assert_eq!(due(&queue), [(2, 1), (4, 7), (8, 1), (8, 5)]);
    assert_eq!(queue.n_rows(DECODE), 14);
    let other = queue.shares(DECODE).find(|share| share.n_parts == 2.0).expect("it waits");
    assert_eq!(queue.share_if_back(other, DECODE), None);
    // The other user's item is taken, and its guest due its part all the same, should it come back.
    queue.charge(&seats[0], 1);
    queue.charge(&seats[1], 1);
    queue.charge(&seats[2], 1);
    assert_eq!(queue.pop(DECODE), Some(3));
    assert_eq!(due(&queue), [(2, 7), (4, 1), (4, 5)]);
    assert_eq!(queue.share_if_back(other, DECODE), Some(other));
    while queue.pop(DECODE).is_some() {}
    assert_eq!((due(&queue), queue.n_rows(DECODE)), (Vec::new(), 0));
    let back = queue.share_if_back(other, DECODE).expect("it does not wait");
    assert_eq!((back.n_parts, back.n_rows), (1.0, 1));
}

#[test]
fn nothing_is_lost() {
    let mut queue = FairQueue::default();
    let owners = [owner(1, 1, 1), owner(1, 2, 2), owner(2, 3, 3)].map(|owner| queue.seat(&owner));
    for idx in 0..300 {
        queue.push(&owners[idx % 3], if idx % 2 == 0 { DECODE } else { PROMPT }, idx, 1);
    }
    let mut seen: Vec<usize> = std::iter::from_fn(|| {
        let idx = queue.pop(DECODE).or_else(|| queue.pop(PROMPT))?;
        queue.charge(&owners[idx % 3], idx as u64);
        Some(idx)
    })
    .collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..300).collect::<Vec<_>>());
    assert_eq!((queue.len(DECODE), queue.len(PROMPT)), (0, 0));
}

#[test]
fn what_was_charged_is_not_forgotten_by_a_pause() {
    let mut queue = FairQueue::default();
    let (heavy, light) = (queue.seat(&owner(1, 1, 1)), queue.seat(&owner(2, 2, 2)));
    queue.push(&heavy, PROMPT, "heavy", 1);
    queue.push(&light, PROMPT, "light", 1);
    assert_eq!(queue.pop(PROMPT), Some("heavy"));
    queue.charge(&heavy, 1000);
    // The heavy user pauses while the light one still waits, and comes back.
    for _ in 0..10 {
        queue.push(&heavy, DECODE, "heavy", 1);
        assert_eq!(queue.lead(DECODE, PROMPT), 1000);
        queue.push(&light, PROMPT, "light", 1);
        assert_eq!(queue.pop(PROMPT), Some("light"));
        queue.charge(&light, 10);
        assert_eq!(queue.pop(DECODE), Some("heavy"));
        queue.charge(&heavy, 10);
    }
}

#[test]
fn both_classes_draw_on_one_time() {
    let mut queue = FairQueue::default();
    let (a, b) = (queue.seat(&owner(1, 1, 1)), queue.seat(&owner(2, 2, 2)));
    queue.push(&a, PROMPT, "prompt of a", 1);
    queue.push(&a, DECODE, "token of a", 1);
    queue.push(&b, DECODE, "token of b", 1);
    assert_eq!(queue.pop(PROMPT), Some("prompt of a"));
    queue.charge(&a, 5);
    assert_eq!(queue.pop(DECODE), Some("token of b"));
    assert_eq!(queue.pop(DECODE), Some("token of a"));
}

#[test]
fn of_two_lanes_the_one_comes_first_whose_next_owner_is_further_behind() {
    let mut queue = FairQueue::default();
    let seats = [1, 2].map(|guest| queue.seat(&owner(1, 1, guest)));
    let lanes = [DECODE, PROMPT];
    assert_eq!(queue.first_of(lanes), None);
    queue.push(&seats[0], DECODE, "a", 1);
    queue.push(&seats[1], PROMPT, "b", 1);
    assert_eq!(queue.first_of(lanes), Some(DECODE), "both are as far");
    queue.charge(&seats[0], 10);
    assert_eq!(queue.first_of(lanes), Some(PROMPT));
    assert_eq!(queue.first_of([DECODE]), Some(DECODE));
}

#[test]
fn a_debt_outlives_the_session_that_ran_it_up() {
    let mut queue = FairQueue::default();
    let (user, other) = (owner(1, 1, 1), owner(1, 2, 2));
    let (heavy, light) = (queue.seat(&user), queue.seat(&other));
    queue.push(&light, DECODE, "light", 1);
    queue.push(&heavy, DECODE, "heavy", 1);
    queue.charge(&heavy, 1000);
    assert_eq!(queue.pop(DECODE), Some("light"));
    queue.push(&light, DECODE, "light", 1);
    // The debtor takes its work back, leaves, and comes again.
    queue.charge(&light, 1);
    while queue.pop(DECODE) != Some("heavy") {
        queue.charge(&light, 1);
        queue.push(&light, DECODE, "light", 1);
    }
    queue.charge(&heavy, 1000);
    queue.vacate(heavy);
    let heavy = queue.seat(&user);
    queue.push(&heavy, DECODE, "heavy", 1);
    queue.push(&light, DECODE, "light", 1);
    for _ in 0..900 {
        assert_eq!(queue.pop(DECODE), Some("light"));
        queue.charge(&light, 1);
        queue.push(&light, DECODE, "light", 1);
    }
}

#[test]
fn who_left_is_forgotten_once_the_others_have_come_as_far() {
    let mut queue = FairQueue::default();
    let stays = queue.seat(&owner(1, 0, 0));
    for n in 1..=1000 {
        let passes = queue.seat(&owner(1 + n as u32 % 2, n, n));
        queue.push(&passes, PROMPT, n, 1);
        assert_eq!(queue.pop(PROMPT), Some(n));
        queue.charge(&passes, 10);
        queue.vacate(passes);
        queue.push(&stays, DECODE, 0, 1);
        assert_eq!(queue.pop(DECODE), Some(0));
        queue.charge(&stays, 10);
    }
    assert!(queue.nodes.len() < 30, "{} owners are remembered", queue.nodes.len());
    let has_memory = |&id: &NodeId| queue.node(id).lanes().next().is_some();
    assert!(!queue.free.is_empty() && !queue.free.iter().any(has_memory), "of what waited nothing is kept");
}

#[test]
fn of_guests_that_come_once_and_go_a_bounded_number_is_remembered() {
    let mut queue = FairQueue::default();
    let stays = queue.seat(&owner(1, 0, 0));
    let serve = |queue: &mut FairQueue<u64>, n: u64, cost| {
        let passes = queue.seat(&owner(1, 0, n));
        queue.push(&passes, DECODE, n, 1);
        assert_eq!(queue.pop(DECODE), Some(n));
        queue.charge(&passes, cost);
        queue.vacate(passes);
    };
    serve(&mut queue, 1, 1000);
    (2..100_000).for_each(|n| serve(&mut queue, n, 10));
    assert!(queue.nodes.len() < N_RESTING_MAX + 10, "{} owners are remembered", queue.nodes.len());
    assert_eq!(queue.vtimes([1, 0, 1])[2], 1000, "who is furthest ahead is remembered");
    queue.vacate(stays);
}

#[test]
fn who_leaves_something_behind_rests_once_that_is_served_or_forgotten() {
    const N_BEHIND: u64 = 1000;
    let mut queue = FairQueue::default();
    let stays = queue.seat(&owner(1, 0, 0));
    let ahead = queue.seat(&owner(1, 0, 1));
    queue.charge(&ahead, 1000);
    queue.vacate(ahead);
    for n in 2..N_BEHIND {
        for lane in [DECODE, PROMPT] {
            let leaves = queue.seat(&owner(1, 0, n));
            queue.push(&leaves, lane, n, 1);
            queue.vacate(leaves);
        }
    }
    let session = queue.node(stays.0).parent;
    assert_eq!(queue.node(session).n_resting(), 1, "those that wait for something do not rest");
    assert_eq!(queue.vtimes([1, 0, 1])[2], 1000);
    let served: Vec<u64> = std::iter::from_fn(|| queue.pop(DECODE)).collect();
    assert_eq!(served.len() as u64, N_BEHIND - 2, "what was left behind is served");
    assert_eq!(queue.node(session).n_resting(), 1, "there is more of each in the other lane");
    queue.clear(PROMPT);
    assert!(queue.len(PROMPT) == 0 && queue.pop(PROMPT).is_none());
    assert!(queue.node(session).n_resting() <= N_RESTING_MAX);
    queue.vacate(stays);
    let n_free = queue.free.len();
    assert!(queue.nodes.len() - n_free < N_RESTING_MAX + 10, "{n_free} of {}", queue.nodes.len());
    // Places that are free are free once, and nobody stands below one that is gone.
    let mut free: Vec<NodeId> = queue.free.clone();
    free.sort_unstable();
    free.dedup();
    assert_eq!(free.len(), n_free);
    assert_eq!(queue.by_name.len(), queue.nodes.len() - 1 - n_free);
    assert!(queue.by_name.keys().all(|(parent, _)| !free.contains(parent)));
}

/// Against the definition: at each level the child with items that is furthest behind, found by looking at all.
#[test]
fn heaps_that_are_put_in_order_late_give_the_right_order() {
    let mut state = 1_u64;
    let mut below = |n: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % n
    };
    let mut queue: FairQueue<usize> = FairQueue::default();
    let seats: Vec<Seat> = (0..40).map(|n| queue.seat(&owner((n % 4) as u32, n % 10, n))).collect();
    for _ in 0..20_000 {
        let (idx, lane) = (below(40) as usize, if below(2) == 0 { DECODE } else { PROMPT });
        match below(3) {
            0 => {
                queue.push(&seats[idx], lane, idx, 1);
            }
            1 => queue.charge(&seats[idx], below(100)),
            _ => {
                let mut at = ROOT;
                let mut expected = Vec::new();
                loop {
                    let children = queue.nodes.iter().enumerate().skip(1);
                    let waiting = children.filter(|(_, n)| {
                        n.parent == at && n.lane(lane).is_some_and(|waiting| waiting.n_items > 0)
                    });
                    let Some((id, node)) = waiting.min_by_key(|(id, node)| (node.vtime, *id)) else { break };
                    expected.push(node.vtime);
                    at = NodeId(id as u32);
                }
                match queue.pop(lane) {
                    Some(idx) => assert_eq!(seats[idx].0, at),
                    None => assert!(expected.is_empty()),
                }
            }
        }
    }
}

#[test]
fn what_is_put_first_comes_before_all_else_of_its_guest() {
    let mut queue = FairQueue::default();
    let seats = [queue.seat(&owner(1, 1, 1)), queue.seat(&owner(2, 2, 2))];
    (0..3).for_each(|idx| {
        queue.push(&seats[0], PROMPT, idx, 1);
    });
    queue.push(&seats[1], PROMPT, 10, 1);
    queue.push_first(&seats[0], PROMPT, 3, 1);
    queue.charge(&seats[0], 5);
    let order: Vec<usize> = std::iter::from_fn(|| queue.pop(PROMPT)).collect();
    assert_eq!(order, [10, 3, 0, 1, 2]);
    assert_eq!(queue.len(PROMPT), 0);
}

#[test]
fn arrears_are_forgotten_beyond_a_bound() {
    let mut queue = FairQueue::default();
    let seats = [1, 2, 3].map(|actor| queue.seat(&owner(actor, actor.into(), actor.into())));
    queue.push(&seats[0], DECODE, 0, 1);
    (1..3).for_each(|idx| {
        queue.push(&seats[idx], PROMPT, idx, 1);
    });
    queue.charge(&seats[0], 100);
    queue.charge(&seats[2], 50);
    assert_eq!(queue.lead(DECODE, PROMPT), 100);
    queue.bound_lead(DECODE, PROMPT, 60);
    assert_eq!(queue.lead(DECODE, PROMPT), 60);
    queue.bound_lead(DECODE, PROMPT, 30);
    assert_eq!(queue.lead(DECODE, PROMPT), 30);
    queue.charge(&seats[1], 1);
    assert_eq!(queue.pop(PROMPT), Some(2), "both have come as far");
}

#[test]
fn users_are_served_in_proportion_to_their_shares_and_their_sessions_alike() {
    // Items that cost less than a share move their users on as well.
    for cost in [1, 2, 100] {
        let owners = [
            (owner_with(7, 1, 1, 1), cost),
            (owner_with(7, 1, 2, 2), cost),
            (owner_with(2, 2, 3, 3), 3 * cost),
            (owner(3, 4, 4), cost),
        ];
        let served: Vec<f64> = serve(&owners, 40_000).into_iter().map(|n| n as f64).collect();
        let all: f64 = served.iter().sum();
        for (n, due) in served.iter().zip([0.35, 0.35, 0.2, 0.1]) {
            assert!((n / all - due).abs() < 0.01, "{served:?} of {all}");
        }
    }
}

#[test]
fn work_that_is_done_in_pieces_counts_as_much_as_work_done_at_once() {
    let mut queue: FairQueue<()> = FairQueue::default();
    let seat = queue.seat(&owner_with(7, 1, 2, 3));
    (0..701).for_each(|_| queue.charge(&seat, 1));
    assert_eq!(queue.vtimes([1, 2, 3]), [100, 701, 701]);
    queue.charge(&seat, 6);
    assert_eq!(queue.vtimes([1, 2, 3]), [101, 707, 707]);
}

#[test]
fn users_are_due_parts_by_the_shares_of_those_that_wait() {
    let mut queue = FairQueue::default();
    let seats = [owner_with(3, 1, 1, 1), owner_with(3, 1, 1, 2), owner_with(1, 2, 2, 3)]
        .map(|owner| queue.seat(&owner));
    seats.iter().enumerate().for_each(|(idx, seat)| {
        queue.push(seat, DECODE, idx, 1);
    });
    let due = |queue: &FairQueue<usize>| {
        let mut due: Vec<f64> = queue.shares(DECODE).map(|share| 1.0 / share.n_parts).collect();
        due.sort_unstable_by(f64::total_cmp);
        due
    };
    assert_eq!(due(&queue), [0.25, 0.375, 0.375]);
    let light = queue.shares(DECODE).find(|share| share.n_parts == 4.0).expect("it waits");
    queue.charge(&seats[0], 1);
    queue.charge(&seats[1], 100);
    assert_eq!(queue.pop(DECODE), Some(2));
    assert_eq!(due(&queue), [0.5, 0.5]);
    assert_eq!(queue.share_if_back(light, DECODE).map(|share| share.n_parts), Some(4.0));
}
