//! Requests with one answer.

use std::pin::pin;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::unconstrained;
use tokio_util::task::AbortOnDropHandle;
use trellis_engine::account::HostCharge;
use trellis_wire::{
    ErrorBody, ErrorCode, Event, GuestUsage, Outbox, Outcome, Room, ServerMessage, VERSION_OF_MODELS, Value,
};

use super::control::Control;
use super::service::{Progress, StopReason};
use crate::guest::InboxSender;

/// Bytes of each text of an error that would not fit in a frame.
const TEXT_BYTES_MAX: usize = 1 << 10;

/// How a request ended.
#[derive(Clone, Debug)]
pub(crate) struct Ending {
    pub(crate) outcome: Outcome,
    pub(crate) usage: Option<GuestUsage>,
}

impl Ending {
    /// The code of the error that it ended with, if it did.
    pub(crate) fn error_code(&self) -> Option<&str> {
        match &self.outcome {
            Outcome::Error { error } => Some(error.code.as_str()),
            _ => None,
        }
    }

    /// Whether what was asked failed by itself, and not by a stop, or because it could not send any more, which a guest may
    /// notice before the stop reaches it.
    pub(crate) fn has_failed(&self) -> bool {
        match &self.outcome {
            Outcome::Error { error } => !matches!(error.code, ErrorCode::Stopped | ErrorCode::Cancelled),
            _ => false,
        }
    }
}

impl From<Result<Value, ErrorBody>> for Ending {
    fn from(result: Result<Value, ErrorBody>) -> Self {
        let outcome = match result {
            Ok(value) => Outcome::Ok { value },
            Err(error) => Outcome::Error { error },
        };
        Self { outcome, usage: None }
    }
}

/// What a load or an unload is answered with: a client of an older version knows that it is done, and no more.
pub(crate) fn told(value: Value, version: u16) -> Value {
    if version < VERSION_OF_MODELS { Value::Done } else { value }
}

/// Waits for a call on the service, in a task of its own so that it can neither hold up the connection nor take it
/// down; unless the client cancels.
pub(crate) async fn run<F>(control: Arc<Control>, call: F) -> Ending
where
    F: Future<Output = Result<Value, ErrorBody>> + Send + 'static,
{
    let task = AbortOnDropHandle::new(tokio::spawn(call));
    tokio::select! {
        biased;
        result = task => result.unwrap_or_else(|_| Err(panicked())).into(),
        reason = control.stopped() => Err(stopped(reason)).into(),
    }
}

/// As [`run`], and tells the client how far the call is; a slow reader skips states instead of collecting them.
pub(crate) async fn run_telling<F>(
    id: u64,
    outbox: Arc<Outbox>,
    control: Arc<Control>,
    call: F,
    mut states: watch::Receiver<Option<Progress>>,
) -> Ending
where
    F: Future<Output = Result<Value, ErrorBody>> + Send + 'static,
{
    let mut ending = pin!(run(control, call));
    loop {
        tokio::select! {
            biased;
            // First: the last state is told also of a call that is over before this is polled.
            Ok(()) = states.changed() => {
                let progress = states.borrow_and_update().clone();
                if let Some(Progress { stage, name, done, total }) = progress
                    && outbox.has_room(Room::Bulk)
                {
                    let event = Event::Progress { stage, name, done, total };
                    let pushed = outbox.push(&ServerMessage::Event { id, event });
                    debug_assert!(pushed.is_ok(), "the daemon's own events are small");
                }
            }
            ending = &mut ending => return ending,
        }
    }
}

/// Waits for room in a guest's inbox.
pub(crate) async fn deliver(
    control: Arc<Control>,
    inbox: InboxSender,
    text: String,
    charge: HostCharge,
) -> Ending {
    tokio::select! {
        biased;
        // Outside tokio's budget, a message waits only where the inbox has no room for it.
        sent = unconstrained(inbox.send(text, charge)) => {
            sent.map(|()| Value::Done).map_err(|_| guest_gone()).into()
        }
        reason = control.stopped() => Err(stopped(reason)).into(),
    }
}

pub(crate) fn guest_gone() -> ErrorBody {
    ErrorBody::new(ErrorCode::UnknownGuest, "the guest has ended")
}

/// The error of work that comes while the daemon only ends what it has.
pub(crate) fn drains() -> ErrorBody {
    ErrorBody::new(ErrorCode::ShuttingDown, "the daemon takes on nothing more: it is about to go down")
}

/// The error of a request that the session itself ends early.
pub(crate) fn stopped(reason: StopReason) -> ErrorBody {
    match reason {
        StopReason::Cancelled | StopReason::Disconnected => {
            ErrorBody::new(ErrorCode::Cancelled, "cancelled by the client")
        }
        StopReason::ShuttingDown => ErrorBody::new(ErrorCode::ShuttingDown, "the daemon is going down"),
        StopReason::Overdrawn { open_bytes, limit_bytes } => {
            let message = format!(
                "the client left {open_bytes} bytes of credit open, more than the limit of {limit_bytes}"
            );
            let error = ErrorBody::new(ErrorCode::LimitExceeded, message).about("credit bytes");
            error.with_value(open_bytes).with_limit(limit_bytes)
        }
        StopReason::Unread { limit_ms } => {
            let message = format!("no client was attached to the detached guest for {limit_ms} ms");
            ErrorBody::new(ErrorCode::DeadlineExceeded, message)
                .about("detached_idle_ms")
                .with_limit(limit_ms)
        }
        StopReason::LimitExceeded => {
            ErrorBody::new(ErrorCode::LimitExceeded, "a limit of the session was passed")
        }
    }
}

/// An error that fits in every frame: what it quotes may be as long as what a client or a guest says.
pub(crate) fn shortened(error: ErrorBody) -> ErrorBody {
    let cut = |text: String| match text.len() {
        0..=TEXT_BYTES_MAX => text,
        n_bytes => format!("{}… ({n_bytes} bytes)", &text[..text.floor_char_boundary(TEXT_BYTES_MAX)]),
    };
    ErrorBody { message: cut(error.message), name: error.name.map(cut), value: error.value.map(cut), ..error }
}

/// The service panicked or was torn down under the request.
pub(crate) fn panicked() -> ErrorBody {
    ErrorBody::new(ErrorCode::Internal, "the daemon failed inside this request; its log says where")
}
