//! The threads that guests run on, apart from those of sockets and sessions.
//!
//! As many guests as there are processors have a thread, each until it waits, or until the next epoch; then the thread is
//! given to the guest that comes next by fair shares of processor time: users by their shares, then the sessions of a user,
//! and then its guests, alike ([`trellis_engine::fair`]). So whoever waited in a host call goes before those that compute all the time, and a
//! crowd of one user's guests takes no more than its user's share. Where the system has priorities, those of the engines
//! and of the sockets go first.
//!
//! In a process of guests a thread without a guest is on the lookout for what guests wait for ([`Lookout`]): whoever finds it
//! goes on with its guest.
//!
//! What no epoch interrupts, such as a copy of all of a memory, or a host call that takes its time, makes its guest late.
//! Then the next guest of another user has another thread, and the system shares the processors between them; no user has more
//! threads than there are processors. A guest from which the system has taken the processor is not late by that for a while: on a
//! busy machine each thread more makes all of them later.

use std::future::Future;
use std::io;
use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::task::Poll;
use std::thread::{self, available_parallelism};
use std::time::{Duration, Instant};

use async_task::{Builder, Runnable};
use rustc_hash::FxHashMap;
use tokio::runtime::Handle;
use trellis_engine::account::{ActorId, Owner};
use trellis_engine::fair::{FairQueue, Lane, Seat};

use super::cpu::CpuClock;
use crate::thread_time::ThreadClock;

#[cfg(test)]
pub(super) mod tests;

/// By how much the guests' threads give way to the other threads of the daemon, in the system's steps of niceness.
pub(crate) const NICENESS: i32 = 5;

/// Looks after which a guest that still has its thread may be late: more than an epoch.
const N_LOOKS_LATE: u32 = 2;

/// The processor time that it has had since, or the time that has passed, when it is.
const LATE_CPU: Duration = Duration::from_millis(2);
const LATE: Duration = Duration::from_millis(20);

/// Threads for each processor, those of guests that are late included.
const N_THREADS_PER_PROCESSOR: usize = 8;

/// How long a thread waits for a guest that is one more than there are processors.
const SPARE: Duration = Duration::from_secs(1);

/// Rows are what an engine counts.
const NO_ROWS: usize = 0;

/// Runs guests. They have to have ended when this is dropped.
#[derive(Debug)]
pub(crate) struct GuestThreads(Arc<Shared>);

/// Where what guests wait for comes in, and a thread without a guest is on the lookout.
pub(crate) trait Lookout: Send + Sync {
    /// Takes what comes within a while, unless something else is to be done. Whether the thread may sleep.
    fn look(&self, is_called: &dyn Fn() -> bool) -> bool;

    /// Sleeps until something comes, or the thread is roused.
    fn sleep(&self);

    /// Rouses the thread that sleeps, or is about to.
    fn rouse(&self);

    /// The thread has something else to do.
    fn leave(&self);
}

/// Whether a thread is on the lookout. One is at a time.
const NO_LOOKOUT: u8 = 0;
/// It sees guests that arrive by itself.
const AWAKE: u8 = 1;
/// It has to be roused.
const ASLEEP: u8 = 2;

struct Shared {
    state: Mutex<State>,
    /// Guests that are to have a thread and that no thread has seen yet: whoever wakes a guest takes no lock.
    arriving: mpsc::Sender<Runnable<Place>>,
    /// Whether a thread was called for them that has not looked yet. One is enough: it calls the next.
    is_called: AtomicBool,
    is_closed: AtomicBool,
    /// A guest waits for a thread, or the end has come.
    called: Condvar,
    lookout: OnceLock<Arc<dyn Lookout>>,
    looks_out: AtomicU8,
}

struct State {
    arrived: mpsc::Receiver<Runnable<Place>>,
    waiting: FairQueue<Runnable<Place>>,
    /// What runs on each thread.
    running: Vec<Running>,
    /// Their clocks, of those that have begun.
    clocks: Vec<Option<ThreadClock>>,
    /// Guests of each user that have a thread, late ones included.
    n_running: FxHashMap<ActorId, usize>,
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
    /// The thread has ended.
    Gone,
    Nothing,
    /// A guest, for so many looks.
    OnTime(u32),
    /// A guest that may be late, since then and since its thread had used so much.
    Suspected(Instant, Duration),
    Late,
}

impl Running {
    /// What it is after one more look; `used` is asked for what its thread has used of a processor.
    fn looked_at(self, now: Instant, used: impl FnOnce() -> Duration) -> Self {
        match self {
            Self::OnTime(n_looks) if n_looks >= N_LOOKS_LATE => Self::Suspected(now, used()),
            Self::OnTime(n_looks) => Self::OnTime(n_looks + 1),
            Self::Suspected(since, before)
                if now - since >= LATE || used().saturating_sub(before) >= LATE_CPU =>
            {
                Self::Late
            }
            Self::Gone | Self::Nothing | Self::Suspected(..) | Self::Late => self,
        }
    }
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

    fn n_threads(&self) -> usize {
        self.running.iter().filter(|&&running| running != Running::Gone).count()
    }

    /// A place for a thread that begins.
    fn enter(&mut self) -> usize {
        if let Some(idx) = self.running.iter().position(|&running| running == Running::Gone) {
            self.running[idx] = Running::Nothing;
            return idx;
        }
        self.running.push(Running::Nothing);
        self.clocks.push(None);
        self.running.len() - 1
    }

    /// A thread ends, or has not begun.
    fn leave(&mut self, idx: usize) {
        (self.running[idx], self.clocks[idx]) = (Running::Gone, None);
    }

    /// Whether another guest may have a thread.
    fn has_room(&self) -> bool {
        self.n_on_time < self.n_on_time_max
    }

    /// The guest that comes next, if one may have a thread: late ones of a user leave its others fewer.
    fn pop(&mut self) -> Option<Runnable<Place>> {
        if !self.has_room() {
            return None;
        }
        let Self { waiting, n_running, n_on_time_max, .. } = self;
        let has_all = |user| n_running.get(&user).is_some_and(|n_running| n_running >= n_on_time_max);
        let guest = waiting.pop_but_of(Lane::ONLY, has_all)?;
        *n_running.entry(guest.metadata().user).or_default() += 1;
        self.n_on_time += 1;
        Some(guest)
    }

    /// A guest of a user gives back the thread that it has had.
    fn note_done(&mut self, user: ActorId, was: Running) {
        self.n_on_time -= usize::from(was != Running::Late);
        let n_running = self.n_running.get_mut(&user).expect("a guest with a thread was counted");
        *n_running -= 1;
        if *n_running == 0 {
            self.n_running.remove(&user);
        }
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
    user: ActorId,
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
            clocks: Vec::new(),
            n_running: FxHashMap::default(),
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
            lookout: OnceLock::new(),
            looks_out: AtomicU8::new(NO_LOOKOUT),
        }));
        for _ in 0..n_processors {
            threads.0.begin_thread()?;
        }
        Ok(threads)
    }

    /// Has threads without a guest be on the lookout there.
    pub(crate) fn look_out(&self, lookout: Arc<dyn Lookout>) {
        // A process has one way in.
        let _ = self.0.lookout.set(lookout);
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
        let place =
            Arc::new(Placed { threads: self.0.clone(), user: owner.actor, seat, clock: clock.clone() });
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
        self.0.rouse();
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
        if !self.is_called.swap(true, Ordering::SeqCst) && self.looks_out.load(Ordering::SeqCst) != AWAKE {
            // A thread that has just found nothing waits by then.
            let state = self.lock();
            self.call(state.n_idle);
        }
    }

    /// Calls one thread, of so many that are idle.
    fn call(&self, n_idle: usize) {
        if n_idle > 0 { self.called.notify_one() } else { self.rouse() }
    }

    /// Calls one more thread, of so many that are idle, for guests that wait in line. The caller has the lock: a thread that is on
    /// the lookout takes it, and takes the call back, before it looks at those in line.
    fn call_beside(&self, n_idle: usize) {
        if n_idle > 0 {
            self.called.notify_one();
        } else if self.looks_out.load(Ordering::SeqCst) != NO_LOOKOUT {
            self.is_called.store(true, Ordering::SeqCst);
            self.rouse();
        }
    }

    /// Rouses the thread that is on the lookout, if it sleeps.
    fn rouse(&self) {
        if self.looks_out.load(Ordering::SeqCst) == ASLEEP
            && let Some(lookout) = self.lookout.get()
        {
            lookout.rouse();
        }
    }

    fn is_wanted(&self) -> bool {
        self.is_called.load(Ordering::SeqCst) || self.is_closed.load(Ordering::SeqCst)
    }

    /// Is on the lookout until a guest is to have a thread. Whether no other thread is.
    fn be_on_the_lookout(&self) -> bool {
        let Some(lookout) = self.lookout.get() else { return false };
        let is_first =
            self.looks_out.compare_exchange(NO_LOOKOUT, AWAKE, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if !is_first {
            return false;
        }
        while !self.is_wanted() && lookout.look(&|| self.is_wanted()) {
            // Before the look: who calls after it finds that this thread has to be roused.
            self.looks_out.store(ASLEEP, Ordering::SeqCst);
            if !self.is_wanted() {
                lookout.sleep();
            }
            self.looks_out.store(AWAKE, Ordering::SeqCst);
        }
        lookout.leave();
        self.looks_out.store(NO_LOOKOUT, Ordering::SeqCst);
        true
    }

    fn begin_thread(self: &Arc<Self>) -> io::Result<()> {
        let idx = self.lock().enter();
        let shared = self.clone();
        let begun = thread::Builder::new().name(format!("guests-{idx}")).spawn(move || {
            give_way(NICENESS);
            shared.lock().clocks[idx] = Some(ThreadClock::own());
            shared.serve(idx);
        });
        begun.map(drop).inspect_err(|_| self.lock().leave(idx))
    }

    /// Gives threads to other guests in the place of those that are late.
    fn look(self: &Arc<Self>) {
        let mut state = self.lock();
        state.take_in();
        let (mut n_late, now) = (0, Instant::now());
        let State { running, clocks, .. } = &mut *state;
        for (running, clock) in running.iter_mut().zip(clocks) {
            let used = || clock.and_then(ThreadClock::used).unwrap_or_default();
            let before = *running;
            *running = before.looked_at(now, used);
            n_late += usize::from(*running == Running::Late && before != Running::Late);
        }
        state.n_on_time -= n_late;
        let n_wanted = state.n_waiting().min(state.n_on_time_max - state.n_on_time);
        let looks_out = usize::from(self.looks_out.load(Ordering::SeqCst) != NO_LOOKOUT);
        let n_more =
            n_wanted.saturating_sub(state.n_idle + looks_out).min(state.n_threads_max - state.n_threads());
        let is_called = n_late > 0 && n_wanted > 0;
        if is_called {
            self.call_beside(0);
        }
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
        let mut has_looked_out = self.lookout.get().is_none();
        let mut was_spare = false;
        let mut state = self.lock();
        if let Some((place, cost)) = &done {
            state.waiting.charge(place.seat(), *cost);
            let was = std::mem::replace(&mut state.running[idx], Running::Nothing);
            state.note_done(place.user, was);
        }
        loop {
            // Before the look: what comes after it calls again.
            self.is_called.store(false, Ordering::SeqCst);
            state.take_in();
            if let Some(guest) = state.pop() {
                state.running[idx] = Running::OnTime(0);
                if state.n_waiting() > 0 && state.has_room() {
                    self.call_beside(state.n_idle);
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
            if !has_looked_out {
                drop(state);
                has_looked_out = !self.be_on_the_lookout();
                state = self.lock();
                continue;
            }
            let is_spare = state.n_idle >= state.n_on_time_max;
            // It has looked once more after its time was over: it may have been called just then.
            if is_spare && was_spare {
                state.leave(idx);
                return None;
            }
            state.n_idle += 1;
            if is_spare {
                let waited = self.called.wait_timeout(state, SPARE).unwrap_or_else(PoisonError::into_inner);
                (state, was_spare) = (waited.0, waited.1.timed_out());
            } else {
                state = self.called.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
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
pub(crate) fn give_way(niceness: i32) {
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
