//! Where the device that computes nothing and the benchmark meet.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::thread_time::thread_time;

/// How often a waiting device looks around. It uses no processor time that is measured.
const POLL: Duration = Duration::from_micros(50);

/// How long a device should wait for guests that do not come: a token that is not wanted any more is never taken.
pub(super) const PATIENCE: Duration = Duration::from_millis(100);

/// A step as the device sees it when it is called.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) n_rows: usize,
    pub(super) n_tokens: usize,
    /// The processor time of the engine's thread by then.
    pub(super) entered: Duration,
}

/// What the engine's thread did between the end of one call and the beginning of the next.
#[derive(Clone, Copy, Debug)]
pub(super) struct Between {
    pub(super) n_rows: usize,
    pub(super) n_tokens: usize,
    pub(super) host: Duration,
}

#[derive(Debug, Default)]
struct Book {
    steps: Vec<Between>,
    left: Option<Duration>,
}

/// Steps as they come, and what holds the device up: a step is over when every guest has taken the tokens of the step
/// before, as on a device that is slower than its guests.
#[derive(Debug)]
pub(super) struct Desk {
    /// How long it waits for them.
    patience: Duration,
    book: Mutex<Book>,
    n_drawn: AtomicU64,
    n_taken: AtomicU64,
    is_held: AtomicBool,
    is_waiting: AtomicBool,
    is_over: AtomicBool,
}

impl Desk {
    pub(super) fn new(patience: Duration) -> Self {
        Self {
            patience,
            book: Mutex::default(),
            n_drawn: AtomicU64::default(),
            n_taken: AtomicU64::default(),
            is_held: AtomicBool::default(),
            is_waiting: AtomicBool::default(),
            is_over: AtomicBool::default(),
        }
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device is called, and waits until it may go on.
    pub(super) fn enter(&self, step: Step) {
        let Step { n_rows, n_tokens, entered } = step;
        {
            let mut book = self.book();
            if let Some(left) = book.left.take() {
                book.steps.push(Between { n_rows, n_tokens, host: entered - left });
            }
        }
        let due = Instant::now() + self.patience;
        loop {
            if self.is_over.load(Ordering::SeqCst) {
                return;
            }
            let is_held = self.is_held.load(Ordering::SeqCst);
            self.is_waiting.store(is_held, Ordering::SeqCst);
            let n_missing =
                self.n_drawn.load(Ordering::SeqCst).saturating_sub(self.n_taken.load(Ordering::SeqCst));
            if !is_held && n_missing == 0 {
                return;
            }
            if !is_held && Instant::now() >= due {
                self.n_taken.fetch_add(n_missing, Ordering::SeqCst);
                return;
            }
            std::thread::sleep(POLL);
        }
    }

    /// The device has drawn so many tokens.
    pub(super) fn leave(&self, n_drawn: u64) {
        self.n_drawn.fetch_add(n_drawn, Ordering::SeqCst);
    }

    /// The call is over, at this processor time of the engine's thread.
    pub(super) fn left(&self, at: Duration) {
        self.book().left = Some(at);
    }

    /// A guest has taken a token.
    pub(super) fn take(&self) {
        self.n_taken.fetch_add(1, Ordering::SeqCst);
    }

    /// Steps seen so far.
    pub(super) fn n_steps(&self) -> usize {
        self.book().steps.len()
    }

    /// The steps from this one on.
    pub(super) fn steps_from(&self, first: usize) -> Vec<Between> {
        self.book().steps[first..].to_vec()
    }

    /// Lets the device wait in its next call, and returns once it does. What is sent to the engine from here on is
    /// carried out in one go after [`Desk::release`].
    pub(super) async fn hold(&self) {
        self.is_held.store(true, Ordering::SeqCst);
        while !self.is_waiting.load(Ordering::SeqCst) {
            tokio::time::sleep(POLL).await;
        }
    }

    /// Lets the device go on.
    pub(super) fn release(&self) {
        self.is_held.store(false, Ordering::SeqCst);
    }

    /// Waits until there are so many steps.
    pub(super) async fn reached(&self, n_steps: usize) {
        while self.n_steps() < n_steps {
            tokio::time::sleep(POLL).await;
        }
    }

    /// The device waits for no guest any more.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
    }
}

/// Processor time that a call uses on this thread. The call must not wait: another thread could go on with it.
pub(super) async fn own_time<T>(call: impl Future<Output = T>) -> (T, Duration) {
    let begun = thread_time();
    let answer = call.await;
    (answer, thread_time() - begun)
}
