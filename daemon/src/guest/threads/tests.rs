use std::num::NonZeroU32;
use std::sync::atomic::AtomicUsize;

use tokio::sync::oneshot;
use trellis_engine::account::{Account, ActorId, Budget, GuestId, Priority, SessionId};

use super::*;
use crate::thread_time::thread_time;

/// A guest of a user who has one session.
pub(in crate::guest) fn owner(user: u32, guest: u64) -> Owner {
    Owner {
        actor: ActorId(user),
        session: SessionId(u64::from(user)),
        guest: GuestId(guest),
        account: Account::new("guest", Budget::UNLIMITED, None),
    }
}

/// As [`owner`], of a user with a share.
pub(in crate::guest) fn owner_with(share: u32, user: u32, guest: u64) -> Owner {
    let priority = Priority { share: NonZeroU32::new(share).expect("above 0"), rank: 0 };
    let account = Account::with_priority("guest", Budget::UNLIMITED, None, priority);
    Owner { account, ..owner(user, guest) }
}

/// Computes for a millisecond at a time, until it is over.
async fn spin(is_over: Arc<AtomicBool>, n_spun: Arc<AtomicUsize>) {
    while !is_over.load(Ordering::Relaxed) {
        let begun = thread_time();
        while thread_time() - begun < Duration::from_millis(1) {
            std::hint::spin_loop();
        }
        n_spun.fetch_add(1, Ordering::Relaxed);
        tokio::task::yield_now().await;
    }
}

/// How much two users, of whom the first has twenty guests and the second one, have of a thread by their shares.
async fn served(shares: [u32; 2]) -> [f64; 2] {
    let threads = GuestThreads::of(1).expect("a thread");
    let is_over = Arc::new(AtomicBool::new(false));
    let counts: Vec<_> = [(1, 20), (2, 1)]
        .into_iter()
        .zip(shares)
        .map(|((user, n_guests), share)| {
            let n_spun = Arc::<AtomicUsize>::default();
            for guest in 0..n_guests {
                let (owner, clock) = (owner_with(share, user, guest), Arc::default());
                threads.spawn(&owner, &clock, spin(is_over.clone(), n_spun.clone()));
            }
            n_spun
        })
        .collect();
    while counts.iter().map(|n_spun| n_spun.load(Ordering::Relaxed)).sum::<usize>() < 200 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    is_over.store(true, Ordering::Relaxed);
    [0, 1].map(|idx| counts[idx].load(Ordering::Relaxed) as f64)
}

#[tokio::test]
async fn users_have_what_they_are_due_whatever_their_crowds() {
    for (shares, ratio) in [([1, 1], 1.0), ([1, 3], 3.0), ([4, 1], 0.25)] {
        let [crowd, one] = served(shares).await;
        assert!(crowd + one > 100.0 && (one / crowd / ratio - 1.0).abs() < 0.2, "{crowd} and {one}");
    }
}

#[tokio::test]
async fn who_waited_goes_before_who_computes_all_the_time() {
    let threads = GuestThreads::of(1).expect("a thread");
    let (is_over, n_spun) = (Arc::new(AtomicBool::new(false)), Arc::<AtomicUsize>::default());
    for guest in 0..30 {
        threads.spawn(&owner(1, guest), &Arc::default(), spin(is_over.clone(), n_spun.clone()));
    }
    let (call, mut called) = tokio::sync::mpsc::channel::<oneshot::Sender<usize>>(1);
    let n_spun_now = {
        let n_spun = n_spun.clone();
        move || n_spun.load(Ordering::Relaxed)
    };
    let n_spun_then = n_spun_now.clone();
    threads.spawn(&owner(1, 99), &Arc::default(), async move {
        while let Some(answer) = called.recv().await {
            answer.send(n_spun_then()).expect("it is waited for");
        }
    });
    let mut n_before = Vec::new();
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        let (answer, answered) = oneshot::channel();
        let n_at_first = n_spun_now();
        call.send(answer).await.expect("it listens");
        n_before.push(answered.await.expect("it answers") - n_at_first);
    }
    is_over.store(true, Ordering::Relaxed);
    n_before.sort_unstable();
    // The piece that was under way, and what came while the call was on its way; in line it would be thirty.
    // Where the machine has taken the processor from this test in between, more.
    assert!(n_before[n_before.len() / 4] <= 3, "{n_before:?}");
}

#[tokio::test]
async fn a_guest_has_timers_and_its_time_is_counted() {
    let threads = GuestThreads::of(2).expect("threads");
    let (clock, (done, ended)) = (Arc::<CpuClock>::default(), oneshot::channel());
    threads.spawn(&owner(1, 1), &clock, async move {
        tokio::time::sleep(Duration::from_millis(20)).await;
        let begun = thread_time();
        while thread_time() - begun < Duration::from_millis(20) {
            std::hint::spin_loop();
        }
        done.send(()).expect("it is waited for");
    });
    ended.await.expect("it ends");
    while clock.is_running() {
        tokio::task::yield_now().await;
    }
    assert!(clock.used() >= Duration::from_millis(20), "{:?}", clock.used());
}

#[test]
fn who_has_no_processor_is_not_late_until_it_has_had_one() {
    let (now, used) = (Instant::now(), Duration::from_secs(1));
    let mut running = Running::OnTime(0);
    (0..=N_LOOKS_LATE).for_each(|_| running = running.looked_at(now, || used));
    assert_eq!(running, Running::Suspected(now, used));
    let then = now + LATE / 2;
    assert_eq!(running.looked_at(then, || used), running);
    assert_eq!(running.looked_at(then, || used + LATE_CPU), Running::Late);
    assert_eq!(running.looked_at(now + LATE, || used), Running::Late);
}

#[tokio::test]
async fn who_is_late_holds_up_nobody() {
    let threads = GuestThreads::of(1).expect("a thread");
    let look = threads.look();
    let (go, gone) = mpsc::channel::<()>();
    // What no epoch interrupts.
    threads.spawn(&owner(1, 1), &Arc::default(), async move {
        gone.recv().expect("it is told");
    });
    let mut answers = Vec::new();
    for guest in 2..5 {
        let (done, ended) = oneshot::channel();
        threads.spawn(&owner(2, guest), &Arc::default(), async move {
            done.send(()).expect("it is waited for");
        });
        answers.push(ended);
    }
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(answers[0].try_recv().is_err(), "there is one thread");
    (0..=N_LOOKS_LATE).for_each(|_| look());
    tokio::time::sleep(LATE).await;
    look();
    for ended in answers {
        ended.await.expect("they have another");
    }
    go.send(()).expect("it waits");
    while threads.0.lock().n_idle < 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    {
        let state = threads.0.lock();
        assert_eq!((state.n_on_time, state.n_threads()), (0, 2));
    }
    // The one that was begun beside the late one is there for no longer than it may be wanted again.
    while threads.0.lock().n_threads() > 1 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let idx = threads.0.lock().enter();
    assert!(idx < 2, "its place is free: {idx}");
}

#[tokio::test]
async fn late_guests_of_a_user_leave_its_others_no_more_threads_than_there_are_processors() {
    let threads = GuestThreads::of(2).expect("threads");
    let look = threads.look();
    let (go, gone) = std::sync::mpsc::channel::<()>();
    let gone = Arc::new(Mutex::new(gone));
    for guest in 0..20 {
        let gone = gone.clone();
        threads.spawn(&owner(1, guest), &Arc::default(), async move {
            // What no epoch interrupts.
            let _ = gone.lock().map(|gone| gone.recv());
        });
    }
    for _ in 0..3 {
        (0..=N_LOOKS_LATE).for_each(|_| look());
        tokio::time::sleep(LATE).await;
        look();
    }
    let (done, ended) = oneshot::channel();
    threads.spawn(&owner(2, 1), &Arc::default(), async move { done.send(()).expect("it is waited for") });
    ended.await.expect("it has a thread");
    assert_eq!(threads.0.lock().n_running.get(&ActorId(1)), Some(&2));
    drop(go);
    while threads.0.lock().n_running.contains_key(&ActorId(1)) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(threads.0.lock().n_on_time, 0);
}

#[tokio::test]
async fn a_panic_costs_no_thread() {
    let threads = GuestThreads::of(1).expect("a thread");
    threads.spawn(&owner(1, 1), &Arc::default(), async { panic!("an injected panic") });
    let (done, ended) = oneshot::channel();
    threads.spawn(&owner(1, 2), &Arc::default(), async move { done.send(()).expect("it is waited for") });
    ended.await.expect("it ends");
}

/// What guests of another process wait for, as it comes to this one.
#[derive(Default)]
struct Post {
    state: Mutex<Posted>,
    rung: Condvar,
}

#[derive(Default)]
struct Posted {
    answers: Vec<oneshot::Sender<()>>,
    /// Whether a thread of guests is on the lookout. Otherwise whoever posts delivers.
    is_looked_after: bool,
    is_rung: bool,
    n_by_lookout: usize,
}

impl Post {
    fn lock(&self) -> MutexGuard<'_, Posted> {
        self.state.lock().expect("no panic")
    }

    fn put(&self, answer: oneshot::Sender<()>) {
        let mut state = self.lock();
        if state.is_looked_after {
            state.answers.push(answer);
            state.is_rung = true;
            self.rung.notify_one();
        } else {
            drop(state);
            answer.send(()).expect("it is waited for");
        }
    }

    fn deliver(&self) {
        let answers = std::mem::take(&mut self.lock().answers);
        self.lock().n_by_lookout += answers.len();
        for answer in answers {
            answer.send(()).expect("it is waited for");
        }
    }
}

impl Lookout for Post {
    fn look(&self, is_called: &dyn Fn() -> bool) -> bool {
        self.lock().is_looked_after = true;
        self.deliver();
        !is_called()
    }

    fn sleep(&self) {
        let mut state = self.lock();
        while !state.is_rung {
            state = self.rung.wait(state).expect("no panic");
        }
        state.is_rung = false;
    }

    fn rouse(&self) {
        self.lock().is_rung = true;
        self.rung.notify_one();
    }

    fn leave(&self) {
        self.lock().is_looked_after = false;
        self.deliver();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thread_on_the_lookout_finds_what_guests_wait_for_and_guests_that_others_wake() {
    const N_GUESTS: u64 = 12;
    const N_CALLS: usize = 400;
    for n_threads in [1, 3] {
        let threads = GuestThreads::of(n_threads).expect("threads");
        let post = Arc::<Post>::default();
        threads.look_out(post.clone());
        let (ask, asked) = mpsc::channel::<(u64, oneshot::Sender<()>)>();
        let answers = {
            let post = post.clone();
            thread::spawn(move || {
                for (n, (guest, answer)) in asked.iter().enumerate() {
                    if n % 97 == 0 {
                        thread::sleep(Duration::from_millis(1));
                    }
                    // Half of the guests are woken by this thread.
                    match guest % 2 {
                        0 => post.put(answer),
                        _ => answer.send(()).expect("it is waited for"),
                    }
                }
            })
        };
        let mut ends = Vec::new();
        for guest in 0..N_GUESTS {
            let (ask, (done, ended)) = (ask.clone(), oneshot::channel());
            threads.spawn(&owner(1, guest), &Arc::default(), async move {
                for _ in 0..N_CALLS {
                    let (answer, answered) = oneshot::channel();
                    ask.send((guest, answer)).expect("it listens");
                    answered.await.expect("it is answered");
                }
                done.send(()).expect("it is waited for");
            });
            ends.push(ended);
        }
        drop(ask);
        for ended in ends {
            let ended = tokio::time::timeout(Duration::from_secs(60), ended).await;
            ended.expect("nobody is forgotten").expect("they end");
        }
        answers.join().expect("no panic");
        assert!(post.lock().n_by_lookout > 0, "no thread was on the lookout");
    }
}
