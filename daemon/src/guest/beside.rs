//! Long work beside the threads that guests and sockets share.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZero;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::available_parallelism;

use tokio::sync::oneshot;
use trellis_engine::account::ActorId;

use super::cpu::CpuClock;
use crate::tasks::blocking;

/// Runs long work of guests on threads of its own, as many at once as there are processors. Users are served round robin: no
/// user waits for more than the work that is under way and one piece of each other user's.
#[derive(Clone, Debug)]
pub(crate) struct Beside {
    queue: Arc<Mutex<Queue>>,
}

/// Work that waits for a thread.
#[derive(Debug)]
struct Queue {
    n_free: usize,
    waiting: BTreeMap<ActorId, VecDeque<oneshot::Sender<ThreadPermit>>>,
    /// Users with something in the queue, the next one first.
    order: VecDeque<ActorId>,
}

/// A thread that may be used; the next in the queue gets it when this is dropped.
#[derive(Debug)]
struct ThreadPermit(Beside);

impl Drop for ThreadPermit {
    fn drop(&mut self) {
        self.0.lock().n_free += 1;
        self.0.serve();
    }
}

impl Beside {
    pub(crate) fn new() -> Self {
        Self::of(available_parallelism().map_or(1, NonZero::get))
    }

    fn of(n_free: usize) -> Self {
        let queue = Queue { n_free, waiting: BTreeMap::new(), order: VecDeque::new() };
        Self { queue: Arc::new(Mutex::new(queue)) }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs work of a user on another thread; its time counts on the clock, the time in the queue does not. Work that waits
    /// for its turn is forgotten when the future is dropped.
    ///
    /// # Panics
    /// The work does.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        actor: ActorId,
        clock: &Arc<CpuClock>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        let (sender, turn) = oneshot::channel();
        {
            let queue = &mut *self.lock();
            let waiting = queue.waiting.entry(actor).or_default();
            if waiting.is_empty() {
                queue.order.push_back(actor);
            }
            waiting.push_back(sender);
        }
        self.serve();
        let permit = turn.await.expect("the queue keeps what is waited for");
        let clock = clock.clone();
        blocking(move || {
            let _permit = permit;
            clock.measure(work)
        })
        .await
    }

    /// Gives free threads to the work that waits.
    fn serve(&self) {
        while let Some(next) = self.next() {
            // A permit whose receiver is gone comes back when it is dropped.
            let _ = next.send(ThreadPermit(self.clone()));
        }
    }

    /// The work that comes next, if a thread is free: it is taken then.
    fn next(&self) -> Option<oneshot::Sender<ThreadPermit>> {
        let queue = &mut *self.lock();
        while queue.n_free > 0 {
            let actor = queue.order.pop_front()?;
            let waiting = queue.waiting.get_mut(&actor).expect("a user in the order waits");
            // Work whose future was dropped costs its user nothing.
            while waiting.front().is_some_and(oneshot::Sender::is_closed) {
                waiting.pop_front();
            }
            let next = waiting.pop_front();
            if waiting.is_empty() {
                queue.waiting.remove(&actor);
            } else {
                queue.order.push_back(actor);
            }
            if let Some(next) = next {
                queue.n_free -= 1;
                return Some(next);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    const USER: ActorId = ActorId(1);

    #[tokio::test]
    async fn long_work_blocks_nobody_and_is_counted() {
        let (beside, clock) = (Beside::new(), Arc::new(CpuClock::default()));
        let (begun, has_begun) = oneshot::channel();
        let (looked, have_looked) = mpsc::channel();
        let work = beside.run(USER, &clock, move || {
            begun.send(()).expect("it is waited for");
            have_looked.recv().expect("they look");
            std::thread::sleep(Duration::from_millis(50));
            7
        });
        let others = async {
            has_begun.await.expect("it begins");
            assert!(clock.is_running(), "this thread was free while the work went on");
            looked.send(()).expect("it waits");
        };
        let (result, ()) = tokio::join!(clock.meter(work), others);
        assert_eq!(result, 7);
        assert!(clock.used() >= Duration::from_millis(50), "{:?}", clock.used());
        assert!(!clock.is_running());
    }

    #[tokio::test]
    async fn users_take_turns_and_work_that_is_given_up_is_passed_over() {
        let beside = Beside::of(1);
        let (go, gone) = mpsc::channel::<()>();
        let done = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = Vec::new();
        let mut begin = |user: u32, number: u32, wait: Option<mpsc::Receiver<()>>| {
            let (beside, done) = (beside.clone(), done.clone());
            tasks.push(tokio::spawn(async move {
                let clock = Arc::new(CpuClock::default());
                let work = beside.run(ActorId(user), &clock, move || {
                    wait.map(|wait| wait.recv());
                    done.lock().expect("no panic").push((user, number));
                });
                clock.meter(work).await;
            }));
        };
        begin(1, 0, Some(gone));
        tokio::task::yield_now().await;
        for number in 1..5 {
            begin(1, number, None);
            tokio::task::yield_now().await;
        }
        begin(2, 0, None);
        begin(2, 1, None);
        tokio::task::yield_now().await;
        tasks.remove(2).abort();
        tokio::task::yield_now().await;
        go.send(()).expect("it waits");
        for task in tasks {
            task.await.expect("it ends");
        }
        let expected = [(1, 0), (1, 1), (2, 0), (1, 3), (2, 1), (1, 4)];
        assert_eq!(*done.lock().expect("no panic"), expected);
        assert_eq!(beside.lock().n_free, 1);
    }
}
