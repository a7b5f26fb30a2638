//! Tokens decoded ahead of whoever pulls them.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use crate::batch::Candidate;
use crate::error::EngineError;

/// Tokens decoded ahead of a stream until it is known how far its guest runs.
const N_AHEAD_DEFAULT: usize = 4;

/// The most tokens decoded ahead. Past the time a guest takes to wake up, more hides nothing and only adds to
/// what an interruption wastes.
const N_AHEAD_MAX: usize = 16;

/// How far to decode ahead of one context's guest, learnt from how far it ran before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AheadWindow {
    n: usize,
}

impl Default for AheadWindow {
    fn default() -> Self {
        Self { n: N_AHEAD_DEFAULT }
    }
}

impl AheadWindow {
    /// Tokens to decode ahead of the guest, not counting one that it already waits for.
    pub(crate) fn n(self) -> usize {
        self.n
    }

    /// A run ended early after `n_taken` tokens: a guest that stops after so many gains nothing from more.
    pub(crate) fn note_interrupted(&mut self, n_taken: usize) {
        self.n = self.n.min(n_taken.saturating_sub(1));
    }

    /// A run has gone on for `n_taken` tokens: widen it by one each time it runs four windows deep.
    pub(crate) fn note_taken(&mut self, n_taken: usize) {
        if n_taken > 4 * self.n.max(1) {
            self.n = (self.n + 1).min(N_AHEAD_MAX);
        }
    }
}

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop token was drawn.
    Stop,
    /// As many tokens as asked for.
    MaxTokens,
    /// The context is full.
    ContextFull,
}

/// What a run gives.
#[derive(Clone, Debug)]
pub(crate) enum RunEvent {
    /// The next token.
    Token(Candidate),
    /// No more tokens.
    Finished(Finish),
    /// No more tokens, because of an error.
    Failed(EngineError),
}

#[derive(Debug, Default)]
struct Inner {
    events: VecDeque<RunEvent>,
    waker: Option<Waker>,
    is_waiting: bool,
    is_parked: bool,
}

/// The queue between the engine, which fills it, and a guest, which pulls.
#[derive(Debug, Default)]
pub(crate) struct RunQueue(Mutex<Inner>);

/// Whether the engine waits to be told that tokens were taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pulled {
    /// It goes on by itself.
    Running,
    /// It has to be told.
    Parked,
}

impl RunQueue {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tokens that nobody has pulled yet.
    fn n_unread(&self) -> usize {
        let inner = self.lock();
        // Only the last event can be the end of the run.
        let has_end = inner.events.back().is_some_and(|event| !matches!(event, RunEvent::Token(_)));
        inner.events.len() - usize::from(has_end)
    }

    fn push(&self, event: RunEvent) {
        let mut inner = self.lock();
        inner.events.push_back(event);
        inner.is_waiting = false;
        let waker = inner.waker.take();
        drop(inner);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn wants_more(&self, n_ahead: usize, n_under_way: usize) -> bool {
        let mut inner = self.lock();
        let wants = inner.events.len() + n_under_way < n_ahead + usize::from(inner.is_waiting);
        inner.is_parked = !wants;
        wants
    }

    /// Takes the next event if there is one. `Parked` obliges the caller to resume the engine.
    pub(crate) fn try_pull(&self) -> (Option<RunEvent>, Pulled) {
        let mut inner = self.lock();
        let event = inner.events.pop_front();
        inner.is_waiting = event.is_none();
        let pulled = if std::mem::take(&mut inner.is_parked) { Pulled::Parked } else { Pulled::Running };
        (event, pulled)
    }

    /// The next event, once there is one.
    pub(crate) async fn arrived(&self) -> RunEvent {
        poll_fn(|cx| {
            let mut inner = self.lock();
            match inner.events.pop_front() {
                Some(event) => Poll::Ready(event),
                None => {
                    inner.waker = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

/// The engine's end of a queue. A guest never waits on a queue whose other end is gone: dropping it without
/// an end of the run says that the engine has come to its own.
#[derive(Debug)]
pub(crate) struct RunSender {
    queue: Arc<RunQueue>,
    has_ended: bool,
}

impl RunSender {
    pub(crate) fn new(queue: Arc<RunQueue>) -> Self {
        Self { queue, has_ended: false }
    }

    /// Adds an event and wakes the guest.
    pub(crate) fn push(&mut self, event: RunEvent) {
        self.has_ended = !matches!(event, RunEvent::Token(_));
        self.queue.push(event);
    }

    /// Whether another token may be decoded now, beside those that are under way; if not, the next pull says that the
    /// engine is parked.
    pub(crate) fn wants_more(&self, n_ahead: usize, n_under_way: usize) -> bool {
        self.queue.wants_more(n_ahead, n_under_way)
    }

    /// Tokens that nobody has pulled yet.
    pub(crate) fn n_unread(&self) -> usize {
        self.queue.n_unread()
    }
}

impl Drop for RunSender {
    fn drop(&mut self) {
        if !self.has_ended {
            self.queue.push(RunEvent::Failed(EngineError::Stopped));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_follows_how_far_a_guest_runs() {
        let mut window = AheadWindow::default();
        window.note_interrupted(1);
        assert_eq!(window.n(), 0, "a guest that changes course after every token gets nothing ahead");
        for n_taken in 1..=200 {
            window.note_taken(n_taken);
        }
        assert_eq!(window.n(), N_AHEAD_MAX);
        window.note_interrupted(3);
        assert_eq!(window.n(), 2);
    }

    #[test]
    fn an_empty_window_still_serves_who_waits() {
        let queue = RunQueue::default();
        assert!(!queue.wants_more(0, 0));
        let (event, pulled) = queue.try_pull();
        assert!(event.is_none());
        assert_eq!(pulled, Pulled::Parked);
        assert!(queue.wants_more(0, 0));
        queue.push(RunEvent::Finished(Finish::Stop));
        assert!(!queue.wants_more(0, 0));
    }
}
