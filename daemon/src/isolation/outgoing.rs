//! What waits to go to a process of guests. Engines and sessions put it there and never wait. What is short whoever put it there
//! writes at once, since to wake a thread that writes takes longer; the rest is written by a thread.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::{Wake, Waker};
use std::thread::{self, Thread};

use trellis_engine::remote::{Answered, Outward};

use super::message::{EngineNumber, NotUnderstood, ToGuests};

/// Bytes that may wait. A process whose guests take their answers has next to nothing here.
const WAITING_BYTES_MAX: usize = 64 << 20;

/// Bytes of code that may wait: a few times what a process has at once. They are the daemon's own, but may be so no longer.
const WAITING_CODE_BYTES_MAX: usize = 1 << 30;

/// What a message counts beside the lists in it.
const MESSAGE_BYTES: usize = size_of::<(ToGuests, usize)>();

/// The most that an engine's thread writes by itself, in messages and in bytes as they are counted: some microseconds. Of more
/// it has the thread woken that writes beside it.
const N_AT_ONCE: usize = 4;
const AT_ONCE_BYTES: usize = 4 << 10;

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
    n_code_bytes: usize,
    is_closed: bool,
}

impl Queue {
    fn check(&self) -> Result<(), NotUnderstood> {
        let amounts = [(self.n_bytes, WAITING_BYTES_MAX), (self.n_code_bytes, WAITING_CODE_BYTES_MAX)];
        match amounts.into_iter().find(|(n_bytes, limit_bytes)| n_bytes > limit_bytes) {
            Some((n_bytes, limit_bytes)) => Err(NotUnderstood::ReadsNothing { n_bytes, limit_bytes }),
            None => Ok(()),
        }
    }

    /// All of it, without what it counted.
    fn take(&mut self) -> VecDeque<(ToGuests, usize)> {
        (self.n_bytes, self.n_code_bytes) = (0, 0);
        std::mem::take(&mut self.waiting)
    }
}

/// Writes what waits if it can do so at once. Never waits.
pub(crate) trait Pen: std::fmt::Debug + Send + Sync {
    /// Whether all that waited has been written.
    fn write_at_once(&self) -> bool;

    /// Ends the channel, whoever waits for room in it.
    fn shut(&self);
}

/// Has what waits written.
#[derive(Debug, Default)]
struct Alarm {
    pen: OnceLock<Weak<dyn Pen>>,
    /// The thread that writes what is not written at once.
    thread: Mutex<Option<Thread>>,
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.pen.get().and_then(Weak::upgrade).is_some_and(|pen| pen.write_at_once()) {
            return;
        }
        if let Some(thread) = &*self.thread.lock().unwrap_or_else(PoisonError::into_inner) {
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
        let n_code_bytes = if let ToGuests::Program { code, .. } = &message { code.len() } else { 0 };
        let mut queue = self.lock();
        if queue.is_closed {
            return;
        }
        queue.waiting.push_back((message, n_bytes));
        queue.n_bytes += n_bytes;
        queue.n_code_bytes += n_code_bytes;
        let is_too_much = queue.check().is_err();
        drop(queue);
        // The thread that writes waits for room, and would not see it.
        if is_too_much && let Some(pen) = self.alarm.pen.get().and_then(Weak::upgrade) {
            pen.shut();
        }
    }

    /// Whether more waits than may.
    ///
    /// # Errors
    /// The process does not read.
    pub(crate) fn check(&self) -> Result<(), NotUnderstood> {
        self.lock().check()
    }

    /// Nothing more is written.
    pub(crate) fn close(&self) {
        let mut queue = self.lock();
        queue.is_closed = true;
        let waiting = queue.take();
        drop(queue);
        self.waker.wake_by_ref();
        // An engine that answers the process does not wait for this.
        drop(waiting);
    }

    /// This thread is the one that writes, from here on with this pen.
    pub(crate) fn attend(&self, pen: Weak<dyn Pen>) {
        *self.alarm.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread::current());
        // It begins once.
        let _ = self.alarm.pen.set(pen);
    }

    /// Waits for messages; `false` at the end.
    ///
    /// # Errors
    /// The process does not read.
    pub(crate) fn wait(&self) -> Result<bool, NotUnderstood> {
        loop {
            let queue = self.lock();
            if queue.is_closed {
                return Ok(false);
            }
            queue.check()?;
            if !queue.waiting.is_empty() {
                return Ok(true);
            }
            drop(queue);
            thread::park();
        }
    }

    /// Takes all messages into the empty list. Who writes them holds the pen before.
    pub(crate) fn take(&self, into: &mut Vec<ToGuests>) {
        let mut queue = self.lock();
        let waiting = queue.take();
        drop(queue);
        into.extend(waiting.into_iter().map(|(message, _)| message));
    }

    /// The same where they are few and short; `false` where they are not.
    pub(crate) fn take_few(&self, into: &mut Vec<ToGuests>) -> bool {
        let mut queue = self.lock();
        let is_few = queue.waiting.len() <= N_AT_ONCE && queue.n_bytes <= AT_ONCE_BYTES;
        if queue.is_closed || !is_few || !queue.waiting.iter().all(|(message, _)| is_short(message)) {
            return false;
        }
        queue.n_bytes = 0;
        into.extend(queue.waiting.drain(..).map(|(message, _)| message));
        true
    }

    /// Puts messages back that were taken, before all others.
    pub(crate) fn put_back(&self, messages: impl DoubleEndedIterator<Item = ToGuests>) {
        let mut queue = self.lock();
        if queue.is_closed {
            return;
        }
        for message in messages.rev() {
            let n_bytes = MESSAGE_BYTES + n_bytes_of(&message);
            queue.n_bytes += n_bytes;
            queue.waiting.push_front((message, n_bytes));
        }
    }
}

/// Whether a message is written in about a microsecond, as far as its lists are short.
fn is_short(message: &ToGuests) -> bool {
    match message {
        // What the process has sent that it must not have, it hears of by its end.
        ToGuests::Answer { answered, .. } => answered.violation().is_none(),
        ToGuests::Lent { .. }
        | ToGuests::Credit { .. }
        | ToGuests::ClientGone { .. }
        | ToGuests::Message { .. }
        | ToGuests::InputClosed { .. }
        | ToGuests::Stop { .. }
        | ToGuests::Start(_) => true,
        _ => false,
    }
}

/// Bytes of the lists in a message.
fn n_bytes_of(message: &ToGuests) -> usize {
    match message {
        ToGuests::Answer { answered, .. } => answered.n_bytes(),
        ToGuests::Message { text, .. } => text.len(),
        ToGuests::Start(start) => start.arguments.iter().map(|text| size_of::<String>() + text.len()).sum(),
        // Code counts by itself, and models are sent once.
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

#[cfg(test)]
mod tests {
    use trellis_engine::account::GuestId;

    use super::*;

    #[test]
    fn what_waits_is_counted_with_its_texts_and_code_by_itself() {
        let outgoing = Outgoing::new();
        let code: Arc<[u8]> = vec![0; WAITING_CODE_BYTES_MAX / 8].into();
        for _ in 0..8 {
            outgoing.put(ToGuests::Program { hash: [0; 32], code: code.clone() });
        }
        outgoing.put(ToGuests::Message { guest: GuestId(1), text: "x".repeat(WAITING_BYTES_MAX / 2) });
        outgoing.check().expect("no more waits than may");
        outgoing.put(ToGuests::Program { hash: [0; 32], code });
        assert!(matches!(
            outgoing.check(),
            Err(NotUnderstood::ReadsNothing { limit_bytes: WAITING_CODE_BYTES_MAX, .. })
        ));
        let mut messages = Vec::new();
        outgoing.take(&mut messages);
        assert_eq!(messages.len(), 10);
        outgoing.check().expect("nothing waits");
        for _ in 0..3 {
            outgoing.put(ToGuests::Message { guest: GuestId(1), text: "x".repeat(WAITING_BYTES_MAX / 2) });
        }
        assert!(matches!(
            outgoing.check(),
            Err(NotUnderstood::ReadsNothing { limit_bytes: WAITING_BYTES_MAX, .. })
        ));
        outgoing.close();
        outgoing.put(ToGuests::Stop { guest: GuestId(1) });
        assert!(!outgoing.wait().expect("nothing waits"));
    }
}
