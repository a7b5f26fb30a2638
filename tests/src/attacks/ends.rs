//! How attacks end, and how they may.

use serde::{Deserialize, Serialize};
use trellis_wire::{ErrorBody, Outcome};

/// The code of what ended well.
pub(crate) const OK: &str = "ok";

/// The code where the daemon closed the connection without a word.
pub(crate) const CLOSED: &str = "closed";

/// The code where nobody waited for the end.
const LEFT: &str = "left";

/// The code of a guest that was cancelled because the time of its attack was over.
const CALLED_OFF: &str = "called off";

/// How a request, or a whole client, ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ending {
    /// The error's code, `ok` where there was none, `closed` where the connection was closed without one, `left` where
    /// nobody waited for it, `called off` where the guest was cancelled because the time of its attack was over.
    pub code: String,
    /// What the error is about.
    pub name: Option<String>,
    /// The error's message.
    pub message: String,
}

impl Ending {
    /// No error.
    #[must_use]
    pub fn well() -> Self {
        Self { code: OK.to_owned(), name: None, message: String::new() }
    }

    /// The daemon hung up.
    #[must_use]
    pub fn closed() -> Self {
        Self { code: CLOSED.to_owned(), name: None, message: String::new() }
    }

    /// The attacker left without waiting for an end.
    #[must_use]
    pub fn left() -> Self {
        Self { code: LEFT.to_owned(), name: None, message: String::new() }
    }

    /// This end of a guest that was cancelled because the time of its attack was over.
    #[must_use]
    pub fn of_cancelled(self) -> Self {
        match CANCELLED.iter().any(|end| end.fits(&self)) {
            true => Self { code: CALLED_OFF.to_owned(), ..self },
            false => self,
        }
    }

    /// What an attack itself found wrong; no end of the table fits it.
    #[must_use]
    pub fn wrong(message: impl Into<String>) -> Self {
        Self { code: "wrong".to_owned(), name: None, message: message.into() }
    }

    /// Whether the attack was over before it came to an end of its own.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.code == LEFT || self.code == CALLED_OFF
    }

    /// Whether there was no error.
    #[must_use]
    pub fn is_well(&self) -> bool {
        self.code == OK
    }

    /// Code and name, as the table has them.
    #[must_use]
    pub fn short(&self) -> String {
        match &self.name {
            Some(name) => format!("{} {name}", self.code),
            None => self.code.clone(),
        }
    }
}

impl From<ErrorBody> for Ending {
    fn from(body: ErrorBody) -> Self {
        Self { code: body.code.as_str().to_owned(), name: body.name, message: body.message }
    }
}

impl From<Outcome> for Ending {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Ok { .. } => Self::well(),
            Outcome::Error { error } => error.into(),
            Outcome::Unknown => Self::wrong("an outcome that this client does not know"),
        }
    }
}

/// An end that an attack may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The code of the error, or `ok`.
    pub code: &'static str,
    /// What the error is about; anything where it is not given.
    pub name: Option<&'static str>,
}

impl End {
    const fn of(code: &'static str) -> Self {
        Self { code, name: None }
    }

    const fn about(code: &'static str, name: &'static str) -> Self {
        Self { code, name: Some(name) }
    }

    /// Whether it is this one.
    #[must_use]
    pub fn fits(&self, ending: &Ending) -> bool {
        self.code == ending.code && self.name.is_none_or(|name| ending.name.as_deref() == Some(name))
    }
}

/// Ends for the time that a guest has, which comes to whatever else does not end.
const OF_TIME: [End; 2] = [CPU, TIME];

impl End {
    /// Whether this is the end of what would go on for ever.
    pub(super) fn is_of_time(self) -> bool {
        OF_TIME.contains(&self)
    }
}

const CPU: End = End::about("budget_exceeded", "cpu_ms");
const TIME: End = End::about("deadline_exceeded", "deadline_ms");
const HANDLES: End = End::about("budget_exceeded", "n_handles");
const BUDGET: End = End::of("budget_exceeded");

/// It ends by itself.
pub(crate) const WELL: &[End] = &[End::of(OK)];
/// It is ended for its processor time, or, on a machine that gives it too little of that, for its time.
pub(crate) const BUSY: &[End] = &[CPU, TIME];
/// It is ended for its time; what it does is not computing.
pub(crate) const LATE: &[End] = &[TIME];
/// It is ended for its time, also that of its waits for messages.
pub(crate) const IDLE: &[End] = &[TIME, End::about("deadline_exceeded", "idle_ms")];
/// It is ended for the memory of the guest, or of those around it, or on a slow machine for its time.
pub(crate) const MEMORY: &[End] = &[End::about("budget_exceeded", "memory_bytes"), BUDGET, TIME];
/// It has as much memory as it may, until its time is up.
pub(crate) const MEMORY_OR_LATE: &[End] = &[BUDGET, TIME];
/// It is refused more objects or contexts than there may be, by an error that it passes on or that ends it.
pub(crate) const HOARD: &[End] = &[HANDLES, BUDGET, TIME, End::of("guest_failed")];
/// It is refused more of the host's memory, by an error that it passes on or that ends it.
pub(crate) const HOST_MEMORY: &[End] =
    &[End::about("budget_exceeded", "host_bytes"), TIME, End::of("guest_failed")];
/// The host refused, and the guest passed it on.
pub(crate) const FAILED: &[End] = &[End::of("guest_failed")];
/// The guest did what WebAssembly forbids.
pub(crate) const TRAPPED: &[End] = &[End::of("guest_trapped")];
/// One call had too much in it.
pub(crate) const CALL: &[End] = &[End::about("budget_exceeded", "call_bytes")];
/// The component is refused for what it is.
pub(crate) const INVALID: &[End] = &[End::of("invalid_component")];
/// The component is refused for what it wants.
pub(crate) const FOREIGN: &[End] = &[End::about("incompatible_host", "import")];
/// It is refused for a limit of components, by whatever finds it first.
pub(crate) const REFUSED: &[End] =
    &[End::of("invalid_component"), End::of("limit_exceeded"), End::of("compile_failed")];
/// It runs, or is refused for a limit, with its name.
pub(crate) const WELL_OR_REFUSED: &[End] =
    &[End::of(OK), End::of("invalid_component"), End::of("limit_exceeded"), End::of("compile_failed")];
/// Not the protocol.
pub(crate) const PROTOCOL: &[End] = &[End::of("protocol")];
/// What copies of an attack may also end with: all are of one user, and so are the budgets around a guest and the places of a user.
pub(crate) const OF_COPIES: &[End] = &[
    BUDGET,
    End::about("limit_exceeded", "n_guests"),
    End::about("limit_exceeded", "n_compiles_queued"),
    End::about("limit_exceeded", "connections"),
];
/// It ended for a trap, its processor time or its time.
pub(crate) const BUSY_OR_TRAPPED: &[End] = &[CPU, TIME, End::of("guest_trapped")];
/// The host refuses, or takes until the guest's time is up.
pub(crate) const BUSY_OR_FAILED: &[End] = &[CPU, TIME, End::of("guest_failed")];
/// It does what it is there for, or passes on that the host refuses.
pub(crate) const WELL_OR_FAILED: &[End] = &[End::of(OK), End::of("guest_failed")];
/// The guest waits for its client until its time is up, or the client has left in good order before.
pub(crate) const UNREAD_OR_LATE: &[End] = &[End::of(OK), CPU, TIME];
/// The daemon goes on, or hangs up on who does not say what they want.
pub(crate) const WELL_OR_CLOSED: &[End] = &[End::of(OK), End::of(CLOSED)];
/// Ends for a budget, its time, an error or well.
pub(crate) const ANY_ORDERLY: &[End] = &[End::of(OK), BUDGET, TIME, End::of("guest_failed")];

macro_rules! ends {
    ($($(#[$doc:meta])* $name:ident = $code:literal $(about $about:literal)?;)*) => {
        $($(#[$doc])* pub(crate) const $name: &[End] = &[ends!(@ $code $($about)?)];)*
    };
    (@ $code:literal) => { End::of($code) };
    (@ $code:literal $about:literal) => { End::about($code, $about) };
}

ends! {
    /// The client that started it has cancelled it.
    CANCELLED = "cancelled";
    /// A request of its user has stopped it.
    STOPPED = "stopped";
    /// More arguments than there may be.
    ARGUMENTS = "limit_exceeded" about "argument_bytes";
    /// More credit than there may be.
    CREDIT = "limit_exceeded" about "credit bytes";
    /// A frame that is too long.
    FRAME = "protocol" about "frame bytes";
    /// An id that is not greater than those before.
    ID = "protocol" about "id";
    /// A message that is too long.
    MESSAGE = "limit_exceeded" about "message bytes";
    /// Messages that nobody takes.
    INBOX = "limit_exceeded";
    /// More guests than there may be.
    GUESTS = "limit_exceeded" about "n_guests";
    /// A chunk that is too long.
    CHUNK = "limit_exceeded" about "chunk bytes";
    /// More bytes than were announced.
    UPLOADED = "limit_exceeded" about "uploaded bytes";
    /// A component that is too long.
    COMPONENT = "limit_exceeded" about "component bytes";
    /// Bytes with another hash.
    HASH = "hash_mismatch" about "hash";
    /// Bytes that were not asked for.
    UNASKED = "invalid_argument" about "chunk";
    /// A program of a name that is none.
    NO_PROGRAM = "unknown_program" about "program";
    /// A component that nobody has sent.
    NO_COMPONENT = "unknown_component";
    /// A model that is not loaded.
    NO_MODEL = "unknown_model";
    /// A guest that is another's, or nobody's.
    NO_GUEST = "unknown_guest";
    /// What only the daemon's own user may do.
    DENIED = "permission_denied";
    /// A call or a message of a kind that is unknown.
    UNSUPPORTED = "unsupported";
}
