//! What a detached guest has for its readers, and who reads it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use trellis_engine::account::HostCharge;
use trellis_wire::{ErrorBody, ErrorCode, Event, GuestInfo, Outcome};

use super::kept::Kept;
use crate::guest::InboxSender;
use crate::session::Actor;
use crate::session::call::{Ending, shortened};
use crate::session::service::Progress;

/// A detached guest, from its start until its end is forgotten.
#[derive(Debug)]
pub(crate) struct DetachedGuest {
    pub(super) id: u64,
    /// The user that started it.
    pub(super) actor: Actor,
    session_id: u64,
    /// What its client called it.
    name: String,
    /// What it waits for, of which its reader hears.
    pub(super) progress: watch::Receiver<Option<Progress>>,
    state: Mutex<State>,
    /// For readers: there is more, or another reader.
    news: Notify,
    /// For the task that keeps the guest: credit came back, or a reader came or went.
    asked: Notify,
    /// Its end was acknowledged, or others took its place.
    pub(super) settled: Notify,
}

#[derive(Debug)]
struct State {
    kept: Kept,
    /// Pays for what is kept.
    charge: HostCharge,
    /// Acknowledged and not yet given back to the guest.
    freed_bytes: usize,
    n_readers: u64,
    reader: Option<Reader>,
    /// Since when nobody reads; not while somebody does.
    unread_since: Option<Instant>,
    inbox: Option<InboxSender>,
    end: Option<Ended>,
}

/// How a guest ended, and its place among the ends of all.
#[derive(Debug)]
struct Ended {
    ending: Ending,
    number: u64,
}

/// The last that attached.
#[derive(Debug)]
struct Reader {
    number: u64,
    session_id: u64,
    /// What it was sent: it can acknowledge no more.
    sent: u64,
}

/// What a start knows of its guest.
pub(super) struct About {
    pub(super) id: u64,
    pub(super) actor: Actor,
    pub(super) session_id: u64,
    pub(super) name: String,
    pub(super) progress: watch::Receiver<Option<Progress>>,
}

/// What there is for a reader at a place.
pub(super) enum Next {
    /// An event that takes so much credit.
    Event { credit_bytes: usize },
    /// The guest has ended, and all that it sent was read.
    End(Box<Ending>),
    /// Nothing yet.
    Nothing,
    /// Another reader has come.
    TakenOver,
}

/// A client's place at a guest, until this is dropped.
#[derive(Debug)]
pub(crate) struct Reading {
    pub(super) guest: Arc<DetachedGuest>,
    number: u64,
}

impl DetachedGuest {
    pub(super) fn new(about: About, kept: Kept, charge: HostCharge, inbox: InboxSender) -> Arc<Self> {
        let About { id, actor, session_id, name, progress } = about;
        let state = State {
            kept,
            charge,
            freed_bytes: 0,
            n_readers: 0,
            reader: None,
            unread_since: Some(Instant::now()),
            inbox: Some(inbox),
            end: None,
        };
        Arc::new(Self {
            id,
            actor,
            session_id,
            name,
            progress,
            state: Mutex::new(state),
            news: Notify::new(),
            asked: Notify::new(),
            settled: Notify::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a connection the guest's reader, from the event of this number or the oldest that is kept. Whoever read it before
    /// reads it no more.
    ///
    /// # Errors
    /// That event is not kept any more, or the guest has not come so far.
    pub(crate) fn attach(
        self: &Arc<Self>,
        session_id: u64,
        from: Option<u64>,
    ) -> Result<(Reading, u64), ErrorBody> {
        let mut state = self.lock();
        let (first, next) = (state.kept.first(), state.kept.next());
        let from = from.unwrap_or(first);
        if from < first {
            let message =
                format!("event {from} of the guest is not kept any more; the first that is, is {first}");
            let error = ErrorBody::new(ErrorCode::OutputLost, message).about("from");
            return Err(error.with_value(from).with_limit(first));
        }
        if from > next {
            let message = format!("event {from} of the guest is still to come: there are {next}");
            let error = ErrorBody::new(ErrorCode::InvalidArgument, message).about("from");
            return Err(error.with_value(from).with_limit(next));
        }
        state.n_readers += 1;
        let number = state.n_readers;
        state.reader = Some(Reader { number, session_id, sent: from });
        state.unread_since = None;
        drop(state);
        self.news.notify_waiters();
        self.asked.notify_one();
        Ok((Reading { guest: self.clone(), number }, from))
    }

    /// What the reader of this connection was sent before this number need not be kept any more. Once that is all and its end, the
    /// guest may be forgotten.
    pub(crate) fn acknowledge(&self, session_id: u64, until: u64) {
        let mut state = self.lock();
        let Some(reader) = &state.reader else { return };
        if reader.session_id != session_id {
            return;
        }
        let until = until.min(reader.sent);
        let is_settled = state.end.is_some() && until > state.kept.next();
        state.freed_bytes += state.kept.acknowledge(until);
        drop(state);
        self.asked.notify_one();
        if is_settled {
            self.settled.notify_one();
        }
    }

    /// Where messages to it go, unless they were ended.
    pub(crate) fn inbox(&self) -> Option<InboxSender> {
        self.lock().inbox.clone()
    }

    /// No more messages will come for it, of any client.
    pub(crate) fn end_messages(&self) {
        self.lock().inbox = None;
    }

    /// Whether it has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.lock().end.is_some()
    }

    /// The number of its end, once it has ended.
    pub(super) fn end_number(&self) -> Option<u64> {
        self.lock().end.as_ref().map(|end| end.number)
    }

    /// Whether a client reads it.
    pub(super) fn is_attached(&self) -> bool {
        self.lock().unread_since.is_none()
    }

    /// What is shown of it among guests, once it has ended.
    pub(super) fn shown(&self) -> Option<GuestInfo> {
        let state = self.lock();
        let usage = state.end.as_ref()?.ending.usage.clone().unwrap_or_default();
        Some(GuestInfo {
            guest_id: self.id,
            session_id: self.session_id,
            uid: self.actor.uid,
            program: self.name.clone(),
            state: "ended".to_owned(),
            elapsed_ms: usage.elapsed_us / 1000,
            usage,
            is_detached: true,
            is_attached: state.unread_since.is_none(),
            ..GuestInfo::default()
        })
    }

    /// Bytes of what is kept, as credit counts them.
    #[cfg(test)]
    pub(crate) fn kept_bytes(&self) -> usize {
        self.lock().kept.n_bytes()
    }

    /// Keeps what the guest has sent.
    pub(super) fn push(&self, event: Event) {
        self.lock().kept.push(event);
        self.news.notify_waiters();
    }

    /// Waits until credit came back, or a reader came or went.
    pub(super) async fn asked(&self) {
        self.asked.notified().await;
    }

    /// Credit that has come back.
    pub(super) fn take_freed(&self) -> usize {
        std::mem::take(&mut self.lock().freed_bytes)
    }

    /// Since when nobody reads it, if nobody does.
    pub(super) fn unread_since(&self) -> Option<Instant> {
        self.lock().unread_since
    }

    /// The guest has ended, as the one of this number; what is kept of it from now on is paid for, and no more.
    pub(super) fn finish(&self, ending: Ending, number: u64) {
        let mut state = self.lock();
        state.inbox = None;
        let Ending { mut outcome, usage } = ending;
        if let Outcome::Error { error } = outcome {
            let n_bytes = state.kept.n_bytes() + text_bytes(&error);
            let is_paid = state.charge.resize(n_bytes as u64).is_ok();
            outcome = Outcome::Error { error: if is_paid { error } else { shortened(error) } };
        } else {
            let n_bytes = state.kept.n_bytes() as u64;
            // What becomes less is paid for.
            let _ = state.charge.resize(n_bytes);
        }
        state.end = Some(Ended { ending: Ending { outcome, usage }, number });
        drop(state);
        self.news.notify_waiters();
    }
}

fn text_bytes(error: &ErrorBody) -> usize {
    let texts = [Some(&error.message), error.name.as_ref(), error.value.as_ref()];
    texts.into_iter().flatten().map(String::len).sum()
}

impl Reading {
    /// What there is at a place. All before it has been read.
    pub(super) fn next(&self, number: u64) -> Next {
        let mut state = self.guest.lock();
        if state.n_readers != self.number {
            return Next::TakenOver;
        }
        if let Some(event) = state.kept.get(number) {
            return Next::Event { credit_bytes: event.credit_bytes() };
        }
        let Some(ending) = state.end.as_ref().map(|end| end.ending.clone()) else { return Next::Nothing };
        self.note_sent(&mut state, number + 1);
        Next::End(Box::new(ending))
    }

    /// The event at a place, which the reader is about to be sent; nothing where another reader has come.
    pub(super) fn take(&self, number: u64) -> Option<Event> {
        let mut state = self.guest.lock();
        if state.n_readers != self.number {
            return None;
        }
        self.note_sent(&mut state, number + 1);
        state.kept.get(number).cloned()
    }

    fn note_sent(&self, state: &mut State, sent: u64) {
        if let Some(reader) = state.reader.as_mut().filter(|reader| reader.number == self.number) {
            reader.sent = sent;
        }
    }

    /// Waits until there may be something else than before `look`, which looks, and returns what it saw where that is something.
    pub(super) async fn wait_for<T>(&self, look: impl Fn() -> Option<T>) -> T {
        loop {
            // Once this exists, what comes meanwhile cannot be missed.
            let notified = self.guest.news.notified();
            if let Some(seen) = look() {
                return seen;
            }
            notified.await;
        }
    }

    /// Waits until another reader has come.
    pub(super) async fn taken_over(&self) {
        self.wait_for(|| (self.guest.lock().n_readers != self.number).then_some(())).await;
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        let mut state = self.guest.lock();
        if state.n_readers == self.number {
            state.unread_since = Some(Instant::now());
            drop(state);
            self.guest.asked.notify_one();
        }
    }
}
