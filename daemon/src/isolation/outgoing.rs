//! What waits to go to a process of guests. Engines and sessions put it there and never wait; one thread writes it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use trellis_engine::remote::{Answered, Outward};

use super::message::{EngineNumber, NotUnderstood, ToGuests};

/// Bytes that may wait. A process whose guests take their answers has next to nothing here.
const WAITING_BYTES_MAX: usize = 64 << 20;

/// What a message counts beside the lists in it.
const MESSAGE_BYTES: usize = 128;

/// How long the thread looks for more before it sleeps: waking it costs more than what is sent mostly does.
const SPIN: Duration = Duration::from_micros(20);

/// The queue of one process.
#[derive(Debug)]
pub(crate) struct Outgoing {
    queue: Mutex<Queue>,
    alarm: Arc<Alarm>,
    waker: Waker,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<(ToGuests, usize)>,
    n_bytes: usize,
    is_closed: bool,
}

/// Wakes the thread that writes.
#[derive(Debug, Default)]
struct Alarm(Mutex<Option<Thread>>);

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(thread) = &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            thread.unpark();
        }
    }
}

impl Outgoing {
    pub(crate) fn new() -> Arc<Self> {
        let alarm = Arc::<Alarm>::default();
        Arc::new(Self { queue: Mutex::default(), waker: alarm.clone().into(), alarm })
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a message behind the others.
    pub(crate) fn put(&self, message: ToGuests) {
        self.push(message);
        self.waker.wake_by_ref();
    }

    fn push(&self, message: ToGuests) {
        let n_bytes = MESSAGE_BYTES + n_bytes_of(&message);
        let mut queue = self.lock();
        if !queue.is_closed {
            queue.waiting.push_back((message, n_bytes));
            queue.n_bytes += n_bytes;
        }
    }

    /// Nothing more is written.
    pub(crate) fn close(&self) {
        let mut queue = self.lock();
        queue.is_closed = true;
        queue.waiting.clear();
        drop(queue);
        self.waker.wake_by_ref();
    }

    /// This thread is the one that writes.
    pub(crate) fn attend(&self) {
        *self.alarm.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread::current());
    }

    /// Waits for messages, and takes all of them into the empty list; `false` at the end.
    ///
    /// # Errors
    /// The process does not read.
    pub(crate) fn take(&self, into: &mut Vec<ToGuests>) -> Result<bool, NotUnderstood> {
        let mut begun = None;
        loop {
            let mut queue = self.lock();
            if queue.is_closed {
                return Ok(false);
            }
            let n_bytes = queue.n_bytes;
            if n_bytes > WAITING_BYTES_MAX {
                return Err(NotUnderstood::ReadsNothing { n_bytes, limit_bytes: WAITING_BYTES_MAX });
            }
            if !queue.waiting.is_empty() {
                queue.n_bytes = 0;
                into.extend(queue.waiting.drain(..).map(|(message, _)| message));
                return Ok(true);
            }
            drop(queue);
            match begun {
                Some(begun) if Instant::now().duration_since(begun) >= SPIN => thread::park(),
                Some(_) => thread::yield_now(),
                None => begun = Some(Instant::now()),
            }
        }
    }
}

/// Bytes of the lists in a message.
fn n_bytes_of(message: &ToGuests) -> usize {
    match message {
        // Code and models are sent once, and by nothing that a guest does.
        ToGuests::Answer { answered, .. } => answered.n_bytes(),
        ToGuests::Message { text, .. } => text.len(),
        _ => 0,
    }
}

/// One engine's answers on their way to a process.
#[derive(Debug)]
pub(crate) struct Answers {
    pub(crate) engine: EngineNumber,
    pub(crate) outgoing: Arc<Outgoing>,
}

impl Outward for Answers {
    fn put(&self, answered: Answered) -> Waker {
        self.outgoing.push(ToGuests::Answer { engine: self.engine, answered });
        self.outgoing.waker.clone()
    }
}
