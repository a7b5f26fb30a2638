//! Threads that work out what constraints allow: beside the engine's thread, while its device computes.

use std::collections::VecDeque;
use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, available_parallelism};
use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHashSet};

use crate::completion::CallerId;
use crate::constraint::ConstraintError;

/// What takes longer is slow. A mask of an ordinary grammar takes a hundredth of it.
const SLOW: Duration = Duration::from_millis(5);

/// Addresses for a thread's stack. Regular expressions are worked on as deep as they nest.
const STACK_BYTES: usize = 16 << 20;

/// Works out what a grammar allows. A panic in that ends it with an error: its run, or question, waits for nothing else.
pub(crate) fn caught<T>(work: impl FnOnce() -> Result<T, ConstraintError>) -> Result<T, ConstraintError> {
    let reason = || "working that out panicked".to_owned();
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(ConstraintError::TooComplex { reason: reason() }))
}

/// The threads of one engine. They serve guests round robin, a mask each; those whose last mask was slow are never on all
/// threads at once, so that they wait for each other and no other guest for them.
#[derive(Debug)]
pub(crate) struct MaskThreads(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// What takes longer is slow.
    slow: Duration,
    queue: Mutex<Queue>,
    /// There is something to do, or there never will be.
    called: Condvar,
}

type Work = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    waiting: FxHashMap<CallerId, VecDeque<Work>>,
    /// Guests with something to do, the next one first.
    order: VecDeque<CallerId>,
    /// Those whose last mask was slow.
    slow: FxHashSet<CallerId>,
    n_threads: usize,
    n_threads_max: usize,
    n_idle: usize,
    /// Threads that work for a guest of those.
    n_on_slow: usize,
    is_closed: bool,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("order", &self.order).finish_non_exhaustive()
    }
}

impl Queue {
    /// Takes out what is next, and whether it is for a guest whose last mask was slow.
    fn take(&mut self) -> Option<(CallerId, Work, bool)> {
        let may_be_slow = self.n_on_slow < (self.n_threads_max - 1).max(1);
        let is_next = |caller: &CallerId| may_be_slow || !self.slow.contains(caller);
        let idx = self.order.iter().position(is_next)?;
        let caller = self.order.remove(idx).expect("it was found");
        let waiting = self.waiting.get_mut(&caller).expect("a guest in the order waits");
        let work = waiting.pop_front().expect("for something");
        if waiting.is_empty() {
            self.waiting.remove(&caller);
        } else {
            self.order.push_back(caller);
        }
        Some((caller, work, self.slow.contains(&caller)))
    }
}

impl Default for MaskThreads {
    fn default() -> Self {
        // Half of the processors, of which there may be one: the device's own work is the other half.
        let n_processors = available_parallelism().map_or(1, NonZero::get);
        Self::of((n_processors / 2).clamp(2, 16), SLOW)
    }
}

impl MaskThreads {
    fn of(n_threads_max: usize, slow: Duration) -> Self {
        let queue = Mutex::new(Queue { n_threads_max, ..Queue::default() });
        Self(Arc::new(Shared { slow, queue, called: Condvar::new() }))
    }

    /// Has something done for a guest, after what it asked for before.
    pub(crate) fn run(&self, caller: CallerId, work: impl FnOnce() + Send + 'static) {
        let mut queue = self.0.lock();
        let waiting = queue.waiting.entry(caller).or_default();
        waiting.push_back(Box::new(work));
        if waiting.len() == 1 {
            queue.order.push_back(caller);
        }
        // A thread that was called is idle until it wakes: there may be more to do than idle threads.
        let is_short = queue.order.len() > queue.n_idle;
        self.0.called.notify_one();
        if is_short && queue.n_threads < queue.n_threads_max {
            queue.n_threads += 1;
            drop(queue);
            self.begin();
        }
    }

    fn begin(&self) {
        let shared = self.0.clone();
        let thread = thread::Builder::new().name("masks".to_owned()).stack_size(STACK_BYTES);
        thread.spawn(move || shared.serve()).expect("the system has a thread for it");
    }
}

impl Drop for MaskThreads {
    fn drop(&mut self) {
        self.0.lock().is_closed = true;
        self.0.called.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        let mut queue = self.lock();
        while !queue.is_closed {
            let Some((caller, work, was_slow)) = queue.take() else {
                queue.n_idle += 1;
                queue = self.called.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.n_idle -= 1;
                continue;
            };
            queue.n_on_slow += usize::from(was_slow);
            drop(queue);
            let begun = Instant::now();
            // What a guest waits for is told before: this is to keep the thread.
            if catch_unwind(AssertUnwindSafe(work)).is_err() {
                tracing::error!("a mask was not worked out");
            }
            let is_slow = begun.elapsed() > self.slow;
            queue = self.lock();
            queue.n_on_slow -= usize::from(was_slow);
            if is_slow {
                queue.slow.insert(caller);
            } else {
                queue.slow.remove(&caller);
            }
            // Others may have waited for one of the slow to be done.
            if was_slow && queue.n_idle > 0 && !queue.order.is_empty() {
                self.called.notify_one();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Long enough for what happens at once to have happened.
    const SOON: Duration = Duration::from_secs(60);

    /// What takes longer is slow here: nothing else does, on the busiest machine.
    const SLOW: Duration = Duration::from_millis(400);

    #[test]
    fn guests_take_turns_and_each_has_its_work_done_in_order() {
        let threads = MaskThreads::of(1, SLOW);
        let (done, dones) = mpsc::channel();
        let (go, gone) = mpsc::channel::<()>();
        threads.run(CallerId(9), move || gone.recv().expect("it is let go"));
        for number in 0..3 {
            for caller in [1, 2] {
                let done = done.clone();
                threads
                    .run(CallerId(caller), move || done.send((caller, number)).expect("they are waited for"));
            }
        }
        go.send(()).expect("it waits");
        let order: Vec<(u64, i32)> = (0..6).map(|_| dones.recv_timeout(SOON).expect("done")).collect();
        assert_eq!(order, [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2)]);
    }

    #[test]
    fn slow_guests_wait_for_each_other_and_nobody_for_them() {
        let threads = MaskThreads::of(2, SLOW);
        let (done, dones) = mpsc::channel();
        // They are known as slow, one after the other.
        for caller in [1, 2] {
            let done = done.clone();
            threads.run(CallerId(caller), move || {
                thread::sleep(SLOW + SLOW / 4);
                done.send(0).expect("it is waited for");
            });
            assert_eq!(dones.recv_timeout(SOON), Ok(0));
        }
        while threads.0.lock().slow.len() < 2 {
            thread::yield_now();
        }
        let gates = [1, 2].map(|caller| {
            let (gate, opened) = mpsc::channel::<()>();
            let done = done.clone();
            threads.run(CallerId(caller), move || {
                opened.recv().expect("it is opened");
                done.send(caller).expect("it is waited for");
            });
            gate
        });
        for _ in 0..50 {
            let done = done.clone();
            threads.run(CallerId(3), move || done.send(3).expect("it is waited for"));
            assert_eq!(dones.recv_timeout(SOON), Ok(3), "one thread is free of the slow");
        }
        for (gate, caller) in gates.into_iter().zip([1, 2]) {
            gate.send(()).expect("it waits, or will");
            assert_eq!(dones.recv_timeout(SOON), Ok(caller));
        }
    }

    #[test]
    fn work_that_panics_ends_itself_alone() {
        let threads = MaskThreads::of(1, SLOW);
        let (done, dones) = mpsc::channel();
        threads.run(CallerId(1), || panic!("an injected panic"));
        threads.run(CallerId(1), move || done.send(()).expect("it is waited for"));
        assert_eq!(dones.recv_timeout(SOON), Ok(()));
    }

    #[test]
    fn who_waits_for_what_panics_is_told() {
        assert_eq!(caught(|| Ok(7)), Ok(7));
        let told = caught(|| -> Result<(), _> { panic!("an injected panic") });
        assert!(matches!(told, Err(ConstraintError::TooComplex { .. })), "{told:?}");
    }
}
