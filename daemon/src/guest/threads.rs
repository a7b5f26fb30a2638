//! The threads that guests run on, apart from those of sockets and sessions.
//!
//! As many guests as there are processors have a thread, each until it waits, or until the next epoch; then the thread is
//! given to the guest that comes next by fair shares of processor time: users by their shares, then the sessions of a user,
//! and then its guests, alike ([`trellis_engine::fair`]). So whoever waited in a host call goes before those that compute all the time, and a
//! crowd of one user's guests takes no more than its user's share. Where the system has priorities, those of the engines
//! and of the sockets go first.
//!
//! What no epoch interrupts, such as a copy of all of a memory, or a host call that takes its time, makes its guest late.
//! Then the next guest has another thread, and the system shares the processors between them.

use std::future::Future;
use std::io;
use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::task::Poll;
use std::thread::{self, available_parallelism};
use std::time::Duration;

use async_task::{Builder, Runnable};
use tokio::runtime::Handle;
use trellis_engine::account::Owner;
use trellis_engine::fair::{FairQueue, Lane, Seat};

use super::cpu::CpuClock;

/// By how much the guests' threads give way to the other threads of the daemon, in the system's steps of niceness.
const NICENESS: i32 = 5;

/// Looks after which a guest that still has its thread is late: more than an epoch, and than a thread sleeps that the system
/// has taken the processor from.
const N_LOOKS_LATE: u32 = 4;

/// Threads for each processor, those of guests that are late included.
const N_THREADS_PER_PROCESSOR: usize = 8;

/// Rows are what an engine counts.
const NO_ROWS: usize = 0;

/// Runs guests. They have to have ended when this is dropped.
#[derive(Debug)]
pub(crate) struct GuestThreads(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// Guests that are to have a thread and that no thread has seen yet: whoever wakes a guest takes no lock.
    arriving: mpsc::Sender<Runnable<Place>>,
    /// Whether a thread was called for them that has not looked yet. One is enough: it calls the next.
    is_called: AtomicBool,
    is_closed: AtomicBool,
    /// A guest waits for a thread, or the end has come.
    called: Condvar,
}

struct State {
    arrived: mpsc::Receiver<Runnable<Place>>,
    waiting: FairQueue<Runnable<Place>>,
    /// What runs on each thread.
    running: Vec<Running>,
    /// Threads without a guest.
    n_idle: usize,
    /// Guests that have a thread and are not late.
    n_on_time: usize,
    n_on_time_max: usize,
    n_threads_max: usize,
}

/// What runs on a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Running {
    Nothing,
    /// A guest, for so many looks.
    OnTime(u32),
    Late,
}

impl State {
    /// Puts those that have arrived where they belong.
    fn take_in(&mut self) {
        while let Ok(guest) = self.arrived.try_recv() {
            let place = guest.metadata().clone();
            self.waiting.push(place.seat(), Lane::ONLY, guest, NO_ROWS);
        }
    }

    fn n_waiting(&self) -> usize {
        self.waiting.len(Lane::ONLY)
    }

    /// Whether another guest may have a thread.
    fn has_room(&self) -> bool {
        self.n_on_time < self.n_on_time_max
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GuestThreads").field("n_idle", &self.lock().n_idle).finish_non_exhaustive()
    }
}

/// A guest's place among those that wait, for as long as it lives.
type Place = Arc<Placed>;

struct Placed {
    threads: Arc<Shared>,
    /// Until it is given back.
    seat: Option<Seat>,
    clock: Arc<CpuClock>,
}

impl Placed {
    fn seat(&self) -> &Seat {
        self.seat.as_ref().expect("it is given back at the end")
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        let seat = self.seat.take().expect("it is given back once");
        self.threads.lock().waiting.vacate(seat);
    }
}

impl GuestThreads {
    /// Starts the threads.
    ///
    /// # Errors
    /// The system has none.
    pub(crate) fn start() -> io::Result<Self> {
        Self::of(available_parallelism().map_or(1, NonZero::get))
    }

    fn of(n_processors: usize) -> io::Result<Self> {
        let (arriving, arrived) = mpsc::channel();
        let state = State {
            arrived,
            waiting: FairQueue::default(),
            running: Vec::new(),
            n_idle: 0,
            n_on_time: 0,
            n_on_time_max: n_processors,
            n_threads_max: n_processors * N_THREADS_PER_PROCESSOR,
        };
        let threads = Self(Arc::new(Shared {
            state: Mutex::new(state),
            arriving,
            is_called: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            called: Condvar::new(),
        }));
        for _ in 0..n_processors {
            threads.0.begin_thread()?;
        }
        Ok(threads)
    }

    /// Looks for guests that are late, once for each epoch.
    pub(crate) fn look(&self) -> impl Fn() + Send + 'static + use<> {
        let shared = Arc::downgrade(&self.0);
        move || {
            if let Some(shared) = shared.upgrade() {
                shared.look();
            }
        }
    }

    /// Runs a guest to its end, with the timers of the current tokio runtime; its time counts on the clock.
    pub(crate) fn spawn(
        &self,
        owner: &Owner,
        clock: &Arc<CpuClock>,
        guest: impl Future<Output = ()> + Send + 'static,
    ) {
        let seat = Some(self.0.lock().waiting.seat(owner));
        let place = Arc::new(Placed { threads: self.0.clone(), seat, clock: clock.clone() });
        let guest = Entered { runtime: Handle::current(), future: Box::pin(guest) };
        let (runnable, task) = Builder::new().metadata(place).spawn(
            move |_| guest,
            |guest: Runnable<Place>| {
                let threads = guest.metadata().threads.clone();
                threads.push(guest);
            },
        );
        task.detach();
        runnable.schedule();
    }
}

impl Drop for GuestThreads {
    fn drop(&mut self) {
        self.0.is_closed.store(true, Ordering::SeqCst);
        drop(self.0.lock());
        self.0.called.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, guest: Runnable<Place>) {
        if self.is_closed.load(Ordering::SeqCst) {
            return;
        }
        self.arriving.send(guest).expect("the other end is beside it");
        if !self.is_called.swap(true, Ordering::SeqCst) {
            // A thread that has just found nothing waits by then.
            drop(self.lock());
            self.called.notify_one();
        }
    }

    fn begin_thread(self: &Arc<Self>) -> io::Result<()> {
        let idx = {
            let mut state = self.lock();
            state.running.push(Running::Nothing);
            state.running.len() - 1
        };
        let shared = self.clone();
        let begun = thread::Builder::new().name(format!("guests-{idx}")).spawn(move || {
            give_way(NICENESS);
            shared.serve(idx);
        });
        if let Err(error) = begun {
            self.lock().running.pop();
            return Err(error);
        }
        Ok(())
    }

    /// Gives threads to other guests in the place of those that are late.
    fn look(self: &Arc<Self>) {
        let mut state = self.lock();
        state.take_in();
        let mut n_late = 0;
        for running in &mut state.running {
            match running {
                Running::OnTime(n_looks) if *n_looks >= N_LOOKS_LATE => {
                    *running = Running::Late;
                    n_late += 1;
                }
                Running::OnTime(n_looks) => *n_looks += 1,
                Running::Nothing | Running::Late => {}
            }
        }
        state.n_on_time -= n_late;
        let n_wanted = state.n_waiting().min(state.n_on_time_max - state.n_on_time);
        let n_more = n_wanted.saturating_sub(state.n_idle).min(state.n_threads_max - state.running.len());
        let is_called = n_late > 0 && n_wanted > 0;
        drop(state);
        if is_called {
            self.called.notify_all();
        }
        for _ in 0..n_more {
            if let Err(error) = self.begin_thread() {
                tracing::debug!(%error, "no thread beside guests that are late");
            }
        }
    }

    fn serve(&self, idx: usize) {
        let mut done = None;
        while let Some(guest) = self.next(idx, done.take()) {
            let place = guest.metadata().clone();
            let span = place.clock.begin();
            // What runs on here catches its panics itself; a thread that was lost would be missed by all.
            if catch_unwind(AssertUnwindSafe(|| guest.run())).is_err() {
                tracing::error!("a guest's task panicked");
            }
            let cost = as_ns(span.elapsed());
            drop(span);
            done = Some((place, cost));
        }
    }

    /// The guest that comes next, after the one that has had the thread, and what that has cost.
    fn next(&self, idx: usize, mut done: Option<(Place, u64)>) -> Option<Runnable<Place>> {
        let mut state = self.lock();
        if let Some((place, cost)) = &done {
            state.waiting.charge(place.seat(), *cost);
            if std::mem::replace(&mut state.running[idx], Running::Nothing) != Running::Late {
                state.n_on_time -= 1;
            }
        }
        loop {
            // Before the look: what comes after it calls again.
            self.is_called.store(false, Ordering::SeqCst);
            state.take_in();
            if state.has_room()
                && let Some(guest) = state.waiting.pop(Lane::ONLY)
            {
                state.running[idx] = Running::OnTime(0);
                state.n_on_time += 1;
                if state.n_idle > 0 && state.n_waiting() > 0 && state.has_room() {
                    self.called.notify_one();
                }
                return Some(guest);
            }
            if self.is_closed.load(Ordering::SeqCst) {
                return None;
            }
            if let Some(place) = done.take() {
                // A place takes the lock when it is dropped.
                drop(state);
                drop(place);
                state = self.lock();
                continue;
            }
            state.n_idle += 1;
            state = self.called.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.n_idle -= 1;
        }
    }
}

/// A future that finds the timers of a runtime wherever it is polled.
struct Entered<F> {
    runtime: Handle,
    future: Pin<Box<F>>,
}

impl<F: Future> Future for Entered<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> Poll<F::Output> {
        let Self { runtime, future } = &mut *self;
        let _inside = runtime.enter();
        pin!(future).poll(cx)
    }
}

/// Has the calling thread give way to others. Without priorities for threads, the system shares alike.
pub(super) fn give_way(niceness: i32) {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::nice(niceness) {
        tracing::debug!(%error, "a thread keeps its priority");
    }
    #[cfg(not(target_os = "linux"))]
    let _ = niceness;
}

pub(super) fn as_ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
pub(super) mod tests {
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
        for ended in answers {
            ended.await.expect("they have another");
        }
        go.send(()).expect("it waits");
        while threads.0.lock().n_idle < 2 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let state = threads.0.lock();
        assert_eq!((state.n_on_time, state.running.len()), (0, 2));
    }

    #[tokio::test]
    async fn a_panic_costs_no_thread() {
        let threads = GuestThreads::of(1).expect("a thread");
        threads.spawn(&owner(1, 1), &Arc::default(), async { panic!("an injected panic") });
        let (done, ended) = oneshot::channel();
        threads.spawn(&owner(1, 2), &Arc::default(), async move { done.send(()).expect("it is waited for") });
        ended.await.expect("it ends");
    }
}
