use std::sync::mpsc;

use trellis_engine::model::GivenUp;

use super::super::threads::tests::{owner, owner_with};
use super::*;
use crate::thread_time::thread_time;

#[tokio::test]
async fn long_work_blocks_nobody_and_is_counted() {
    let (beside, clock) = (Beside::new(), Arc::new(CpuClock::default()));
    let (begun, has_begun) = oneshot::channel();
    let (looked, have_looked) = mpsc::channel();
    let owner = owner(1, 1);
    let work = beside.run(&owner, &clock, move || {
        begun.send(()).expect("it is waited for");
        have_looked.recv().expect("they look");
        let begun = thread_time();
        while thread_time() - begun < Duration::from_millis(20) {
            std::hint::spin_loop();
        }
        7
    });
    let others = async {
        has_begun.await.expect("it begins");
        assert!(clock.is_running(), "this thread was free while the work went on");
        looked.send(()).expect("it waits");
    };
    let (result, ()) = tokio::join!(work, others);
    assert_eq!(result, 7);
    assert!(clock.used() >= Duration::from_millis(20), "{:?}", clock.used());
    assert!(!clock.is_running());
}

#[tokio::test]
async fn guests_take_turns_users_do_not_wait_for_each_other_and_what_is_given_up_is_passed_over() {
    let beside = Beside::of(1);
    let (go, gone) = mpsc::channel::<()>();
    let done = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    let mut begin = |user: u32, guest: u64, number: u32, wait: Option<mpsc::Receiver<()>>| {
        let (beside, done) = (beside.clone(), done.clone());
        tasks.push(tokio::spawn(async move {
            let work = move || {
                wait.map(|wait| wait.recv());
                done.lock().expect("no panic").push((user, guest, number));
            };
            beside.run(&owner(user, guest), &Arc::default(), work).await;
        }));
    };
    begin(1, 1, 0, Some(gone));
    tokio::task::yield_now().await;
    for number in 1..5 {
        begin(1, 1, number, None);
        tokio::task::yield_now().await;
    }
    begin(1, 2, 0, None);
    tokio::task::yield_now().await;
    tasks.remove(2).abort();
    tokio::task::yield_now().await;
    // The other user's is done while the first one's is under way.
    assert_eq!(beside.run(&owner(2, 1), &Arc::default(), || 9).await, 9);
    go.send(()).expect("it waits");
    for task in tasks {
        task.await.expect("it ends");
    }
    let mut seen = done.lock().expect("no panic").clone();
    assert_eq!(seen[0], (1, 1, 0));
    assert_ne!(seen.last(), Some(&(1, 2, 0)), "the guest that came last is not served last");
    seen.sort_unstable();
    assert_eq!(seen, [(1, 1, 0), (1, 1, 1), (1, 1, 3), (1, 1, 4), (1, 2, 0)]);
    let pieces = beside.lock();
    assert!(pieces.users.is_empty() && pieces.n_running == 0);
}

#[tokio::test]
async fn long_texts_wait_for_room_and_nothing_else_waits_for_them() {
    const MIB: usize = 1 << 20;
    let beside = Beside::of(8);
    let (begun, mut begins) = tokio::sync::mpsc::unbounded_channel();
    let begin = |user: u32, guest: u64, text_bytes: usize| {
        let (beside, begun) = (beside.clone(), begun.clone());
        let (go, gone) = mpsc::channel::<()>();
        let work = move || {
            begun.send((user, guest)).expect("it is waited for");
            gone.recv().expect("it is told");
        };
        let owner = owner(user, guest);
        let need = Need::of_text(text_bytes);
        let task = async move { beside.run_in_room(&owner, &Arc::default(), need, work).await };
        (go, tokio::spawn(task))
    };
    let mut first = Vec::new();
    for user in 1..=4 {
        first.push(begin(user, 1, MIB));
        assert_eq!(begins.recv().await, Some((user, 1)));
    }
    // Its user has no more room, and then no more has the daemon.
    let second = begin(1, 2, MIB / 2);
    tokio::task::yield_now().await;
    let given_up = begin(5, 1, 2 * MIB);
    tokio::task::yield_now().await;
    let third = begin(6, 1, MIB / 2);
    tokio::task::yield_now().await;
    let clock = Arc::default();
    let short = Need::of_text(60 << 10);
    assert_eq!(beside.run_in_room(&owner(5, 2), &clock, short, || 1).await, 1);
    assert_eq!(beside.run(&owner(1, 3), &clock, || 2).await, 2, "no text at all");
    given_up.1.abort();
    assert!(given_up.1.await.is_err());
    assert!(begins.try_recv().is_err(), "long ones have begun without room");
    let (go, ended) = first.remove(0);
    go.send(()).expect("it waits");
    ended.await.expect("it ends");
    let mut now = [begins.recv().await, begins.recv().await];
    now.sort_unstable();
    assert_eq!(now, [Some((1, 2)), Some((6, 1))]);
    for (go, ended) in first.into_iter().chain([second, third]) {
        go.send(()).expect("it waits");
        ended.await.expect("it ends");
    }
    let pieces = beside.lock();
    assert!(pieces.users.is_empty() && pieces.n_running == 0);
    assert_eq!(pieces.rooms, Rooms::default());
}

#[tokio::test]
async fn work_of_a_smaller_share_is_nicer_while_a_larger_one_has_work() {
    let niceness = |share: u32, largest: u32| {
        let [share, largest] = [share, largest].map(|n| NonZeroU32::new(n).expect("above 0"));
        niceness_beside(share, largest)
    };
    let seen = [(1, 1), (7, 7), (1, 3), (2, 4), (1, 100)].map(|(share, largest)| niceness(share, largest));
    assert_eq!(seen, [5, 5, 10, 8, 19]);
    let beside = Beside::of(1);
    let share = NonZeroU32::MIN;
    assert_eq!(beside.niceness(share), NICENESS);
    let (go, gone) = mpsc::channel::<()>();
    let work = {
        let beside = beside.clone();
        let wait = move || gone.recv().expect("it is told");
        tokio::spawn(async move { beside.run(&owner_with(3, 1, 1), &Arc::default(), wait).await })
    };
    tokio::task::yield_now().await;
    assert_eq!(beside.niceness(share), 10);
    go.send(()).expect("it waits");
    work.await.expect("it ends");
    assert_eq!(beside.niceness(share), NICENESS);
}

#[test]
fn the_user_with_the_least_under_way_for_its_share_is_next() {
    let user = |share, n_running, last_begun| OfUser {
        n_running,
        last_begun,
        ..OfUser::new(NonZeroU32::new(share).expect("above 0"))
    };
    assert!(user(3, 5, 9).compare(&user(1, 2, 1)).is_lt());
    assert!(user(3, 6, 9).compare(&user(1, 2, 1)).is_gt(), "as much: the one that began last comes last");
    assert!(user(1, 1, 1).compare(&user(1, 0, 9)).is_gt());
}

#[tokio::test]
async fn a_panic_reaches_its_guest_and_leaves_nothing() {
    let beside = Beside::of(1);
    let owner = owner(1, 1);
    let clock = Arc::default();
    let panicking = AssertUnwindSafe(beside.run(&owner, &clock, || panic!("an injected panic")));
    let panic = futures_util::FutureExt::catch_unwind(panicking).await.expect_err("it goes on");
    assert_eq!(panic.downcast_ref(), Some(&"an injected panic"));
    assert_eq!(beside.run(&owner, &clock, || 1).await, 1);
    assert!(beside.lock().users.is_empty());
}

/// Work in parts that computes until it is given up, or so long.
fn compute(yields: &YieldPoint, time: Duration) -> Result<(), GivenUp> {
    let begun = thread_time();
    while thread_time() - begun < time {
        yields.reach()?;
    }
    Ok(())
}

const NO_LIMIT: Duration = Duration::MAX;

#[tokio::test]
async fn parts_of_two_users_alternate_and_are_charged_as_they_go() {
    let beside = Beside::of(1);
    // One piece at a time, whosever it is.
    beside.lock().n_running_max = 1;
    let turns = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    let (go, gone) = mpsc::channel::<()>();
    let mut wait = Some(gone);
    for user in [1, 2] {
        let (beside, turns, wait) = (beside.clone(), turns.clone(), wait.take());
        tasks.push(tokio::spawn(async move {
            let clock = Arc::new(CpuClock::default());
            let counted = clock.clone();
            let work = move |yields: &YieldPoint| {
                // Both are there before the first has had its turn.
                wait.map(|wait| wait.recv());
                let mut charged = Vec::new();
                for _ in 0..10 {
                    turns.lock().expect("no panic").push(user);
                    compute(yields, Duration::from_millis(6)).expect("nobody gives it up");
                    charged.push(counted.used());
                }
                charged
            };
            let charged = beside.run_in_parts(&owner(user, 1), &clock, NO_LIMIT, Need::NOTHING, work).await;
            assert!(charged.is_sorted() && charged[4] >= Duration::from_millis(15), "{charged:?}");
            assert!(clock.used() >= Duration::from_millis(60), "{:?}", clock.used());
        }));
        tokio::task::yield_now().await;
    }
    while beside.lock().users.len() < 2 {
        tokio::task::yield_now().await;
    }
    go.send(()).expect("it waits");
    for task in tasks {
        task.await.expect("it ends");
    }
    let turns = turns.lock().expect("no panic").clone();
    // A turn of four milliseconds is shorter than what each notes.
    let n_changes = turns.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert!(n_changes >= 10, "{turns:?}");
    let pieces = beside.lock();
    assert!(pieces.users.is_empty() && pieces.n_running == 0);
    assert_eq!(pieces.rooms, Rooms::default());
}

#[tokio::test]
async fn parts_of_two_guests_of_a_user_go_by_turns_and_keep_their_room() {
    let beside = Beside::of(1);
    let begun = Arc::new(Mutex::new(Vec::new()));
    let piece = |guest: u64| {
        let (beside, begun) = (beside.clone(), begun.clone());
        async move {
            let work = move |yields: &YieldPoint| {
                for _ in 0..8 {
                    begun.lock().expect("no panic").push(guest);
                    compute(yields, Duration::from_millis(6)).expect("nobody gives it up");
                }
            };
            let need = Need::of_text(8 << 10);
            beside.run_in_parts(&owner(1, guest), &Arc::default(), NO_LIMIT, need, work).await;
        }
    };
    tokio::join!(piece(1), piece(2));
    let begun = begun.lock().expect("no panic").clone();
    let n_changes = begun.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert!(n_changes >= 6, "{begun:?}");
    let pieces = beside.lock();
    assert!(pieces.users.is_empty() && pieces.n_running == 0);
    assert_eq!(pieces.rooms, Rooms::default());
}

#[tokio::test]
async fn work_in_parts_ends_with_its_guest_under_way_and_paused() {
    let beside = Beside::of(1);
    let (ended, ends) = mpsc::channel();
    let begin = |guest: u64| {
        let (beside, ended) = (beside.clone(), ended.clone());
        tokio::spawn(async move {
            let work = move |yields: &YieldPoint| {
                let result = compute(yields, Duration::from_secs(60));
                ended.send((guest, result)).expect("it is waited for");
            };
            let need = Need::of_text(8 << 10);
            beside.run_in_parts(&owner(1, guest), &Arc::default(), NO_LIMIT, need, work).await;
        })
    };
    // Of these three one computes at any time, and the others wait for their turn.
    let tasks = [begin(1), begin(2), begin(3)];
    while beside.lock().users.get(&ActorId(1)).is_none_or(|user| user.n_paused < 2) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let stopped = std::time::Instant::now();
    for task in tasks {
        task.abort();
        assert!(task.await.is_err());
    }
    let mut guests = Vec::new();
    for _ in 0..3 {
        let (guest, result) = ends.recv_timeout(Duration::from_secs(20)).expect("it ends");
        assert_eq!(result, Err(GivenUp));
        guests.push(guest);
    }
    // A turn, and what a busy machine adds.
    assert!(stopped.elapsed() < Duration::from_millis(500), "{:?}", stopped.elapsed());
    guests.sort_unstable();
    assert_eq!(guests, [1, 2, 3]);
    while !beside.lock().users.is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!((beside.lock().n_running, beside.lock().rooms), (0, Rooms::default()));
}

#[tokio::test]
async fn work_in_parts_ends_where_its_guest_has_had_its_processor_time() {
    let beside = Beside::of(1);
    let clock = Arc::new(CpuClock::default());
    let work = |yields: &YieldPoint| compute(yields, Duration::from_secs(60));
    let limit = Duration::from_millis(30);
    let result = beside.run_in_parts(&owner(1, 1), &clock, limit, Need::NOTHING, work).await;
    assert_eq!(result, Err(GivenUp));
    let used = clock.used();
    assert!(used > limit && used < limit + Duration::from_millis(20), "{used:?}");
}
