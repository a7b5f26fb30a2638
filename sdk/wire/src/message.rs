use std::fmt;

use serde::{Deserialize, Serialize};

use crate::OUTPUT_OVERHEAD_BYTES;
use crate::fault::ErrorBody;
use crate::info::{DaemonInfo, FitInfo, GuestInfo, GuestUsage, ModelInfo, ReloadInfo, UpgradeInfo, is_false};
use crate::limit::LimitInfo;
use crate::logs::{LogLines, LogsAsked};
use crate::open_enum::open_enum;

/// From a client to the daemon. A message about a request that has ended is skipped, as is an unknown one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ClientMessage {
    /// Asks for something; answered by events and one end.
    Request {
        /// Greater than every id before it on this connection.
        id: u64,
        /// What is asked for.
        call: Call,
    },
    /// Ends a request early; its end still comes.
    Cancel {
        /// The request.
        id: u64,
    },
    /// Lets a guest send so many bytes more.
    Credit {
        /// The request that started the guest.
        id: u64,
        /// As counted by [`Event::credit_bytes`].
        n_bytes: u64,
    },
    /// The next bytes of a component.
    Chunk {
        /// The upload.
        id: u64,
        /// At most [`crate::CHUNK_BYTES_MAX`].
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
    /// No more messages will come for a guest.
    EndMessages {
        /// The request that started the guest.
        id: u64,
    },
    /// What a detached guest sent is taken care of, up to a place: the daemon need not keep it. Counts on the connection that
    /// attached last.
    Acknowledge {
        /// The guest.
        guest_id: u64,
        /// The number of the first event that is not; one more than all events for the guest's end.
        until: u64,
    },
    /// A kind that this version does not know.
    #[serde(other)]
    Unknown,
}

/// What a request asks for, and in which [`Value`] the answer comes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Call {
    /// Runs a guest; ends with [`Value::Done`] when the guest does.
    Start(Start),
    /// Runs a guest that goes on without its connection; ends with [`Value::Done`] once it runs, after [`Event::Started`]. The
    /// daemon keeps what it sends, under a credit of its own, until a client that attaches has acknowledged it. An older daemon
    /// ends it with [`crate::ErrorCode::Unsupported`].
    StartDetached(Start),
    /// Reads what a detached guest of the same user sends: [`Event::Attached`], then its events; ends as the guest does. To
    /// cancel it leaves the guest alone. A later one, of any connection, ends it with [`crate::ErrorCode::TakenOver`]. An older
    /// daemon ends it with [`crate::ErrorCode::Unsupported`].
    Attach(Attach),
    /// Announces a component; ends with [`Value::Done`] once it is stored, by this upload or by another one. Its bytes
    /// follow in chunks, after [`Event::Wanted`] and not before.
    Upload {
        /// The hash of the whole.
        hash: ComponentHash,
        /// Bytes of the whole.
        n_bytes: u64,
    },
    /// Puts a message into a guest's inbox; ends with [`Value::Done`] once there was room for it.
    Message {
        /// The request that started the guest or attached to it, on this connection.
        to: u64,
        /// The message.
        text: String,
    },
    /// Lists the loaded models: [`Value::Models`].
    Models,
    /// Lists the running guests that the actor may see: [`Value::Guests`].
    Guests,
    /// Describes the daemon: [`Value::Info`].
    Info,
    /// Lists the daemon's limits: [`Value::Limits`]. An older daemon ends it with [`crate::ErrorCode::Unsupported`].
    Limits,
    /// Asks for the daemon's metrics: [`Value::Metrics`]. An older daemon ends it with [`crate::ErrorCode::Unsupported`].
    Metrics,
    /// Reads the daemon's log: [`Value::Logs`]. For the user that the daemon runs as, and root. An older daemon ends it with
    /// [`crate::ErrorCode::Unsupported`].
    Logs(LogsAsked),
    /// Stops a guest: [`Value::Done`].
    Stop {
        /// The guest.
        guest_id: u64,
    },
    /// Loads a model while others go on, with [`Event::Progress`] in bytes; ends with [`Value::Loaded`] once guests can
    /// open it ([`Value::Done`] before [`crate::VERSION_OF_MODELS`]). For who has the permission `load`.
    Load {
        /// A bundled model's name, a folder on the daemon's machine, or `shape:NAME`.
        model: String,
        /// Where it is to run: `cpu`, `cuda`, `cuda:N`; where the others do when absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        device: Option<String>,
    },
    /// Unloads a model; ends with [`Value::Unloaded`] once its memory is free ([`Value::Done`] before
    /// [`crate::VERSION_OF_MODELS`]). New contexts are refused at once; guests that have some open when the time is over
    /// end with [`crate::ErrorCode::ModelUnloaded`]. Asked for again meanwhile, the shorter time counts, and both end
    /// together. Cancelling the request does not take it back. For who has the permission `load`.
    Unload {
        /// Its name.
        model: String,
        /// How long its guests have to come to their ends; as long as the daemon says when absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        drain_ms: Option<u64>,
    },
    /// Says whether there is room for a model, and loads nothing: [`Value::Fit`]. Any user may ask about a model that is loaded on
    /// demand, who has the permission `load` about any. An older daemon ends it with
    /// [`crate::ErrorCode::Unsupported`].
    Fit {
        /// As for [`Call::Load`].
        model: String,
        /// As for [`Call::Load`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        device: Option<String>,
    },
    /// Has the daemon read its configuration again: [`Value::Reloaded`]. For the operator. An older daemon ends it with
    /// [`crate::ErrorCode::Unsupported`].
    Reload,
    /// Has the daemon put another program in its place, in the same process and on the same socket: [`Value::Upgrading`] once
    /// that program has said that it would start; the daemon then takes on nothing more, and ends as for [`Call::Shutdown`] when what
    /// it is at has ended or has had its time. Connections that are made after the answer are of the next daemon. For the operator.
    /// An older daemon ends it with [`crate::ErrorCode::Unsupported`].
    Upgrade {
        /// The absolute path of the program; what lies where the daemon was started from when absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        program: Option<String>,
    },
    /// Stops the daemon: [`Value::Done`] before it goes down.
    Shutdown,
    /// A kind that this version does not know.
    #[serde(other)]
    Unknown,
}

/// What a guest runs, and with what.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// The program.
    pub program: Program,
    /// Its arguments.
    #[serde(default)]
    pub arguments: Vec<String>,
    /// The name of the model that it gets when it names none; the daemon's default when absent. Only for a daemon that
    /// speaks [`crate::VERSION_OF_MODELS`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The seed that it sees; the daemon picks one otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Bytes of output that it may send before the client grants more.
    pub credit_bytes: u64,
    /// Milliseconds that it may run; the daemon's own limit holds as well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
    /// What people call the program, where it has no name that the daemon knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Whether its calls are to be recorded; the recording comes as [`Event::Recorded`].
    #[serde(default, skip_serializing_if = "is_false")]
    pub is_recorded: bool,
    /// Whether its time is to be accounted for; the profile comes as [`Event::Profiled`].
    #[serde(default, skip_serializing_if = "is_false")]
    pub is_profiled: bool,
}

/// Which detached guest is read, and from where.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    /// The guest.
    pub guest_id: u64,
    /// The number of the first event that is wanted, counted from 0 over all that the guest has sent
    /// ([`Event::is_numbered`]); the first that is kept when absent. One that is not kept any more is
    /// [`crate::ErrorCode::OutputLost`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<u64>,
    /// The daemon that runs it, as [`Event::Attached`] said: another one has no such guest. Any, when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub daemon: Option<u64>,
    /// Bytes of output that may come before the client grants more.
    pub credit_bytes: u64,
}

/// How a client names a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Program {
    /// A component, by its hash.
    Component {
        /// The hash of its bytes.
        hash: ComponentHash,
    },
    /// A program that the daemon has registered.
    Named {
        /// Its name.
        name: String,
    },
    /// A kind that this version does not know.
    #[serde(other)]
    Unknown,
}

/// The BLAKE3 hash of a component's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ComponentHash(#[serde(with = "serde_bytes")] pub [u8; 32]);

impl fmt::Display for ComponentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ComponentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// From the daemon to a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ServerMessage {
    /// Something happened in a request.
    Event {
        /// The request.
        id: u64,
        /// What happened.
        event: Event,
    },
    /// A request is over; nothing more comes for it.
    End {
        /// The request.
        id: u64,
        /// How it ended.
        outcome: Outcome,
        /// What the guest used, if the request ran one; nothing, if its start was cancelled before.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        usage: Option<GuestUsage>,
    },
    /// The daemon closes the connection, for this reason.
    Fault {
        /// The reason.
        error: ErrorBody,
    },
    /// A kind that this version does not know.
    #[serde(other)]
    Unknown,
}

open_enum! {
    /// What is being done for a guest.
    pub enum Stage {
        /// The component's bytes travel; counted in bytes.
        Upload = "upload",
        /// The component is compiled; counted in milliseconds, of which nobody knows how many there will be.
        Compile = "compile",
        /// A model is loaded; counted in bytes.
        Load = "load",
    }
}

/// Something that happened in a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Event {
    /// How far the work is that a guest waits for: before its start, or while it runs, a model that is loaded because it asked
    /// for that.
    Progress {
        /// Which work.
        stage: Stage,
        /// What it is done to, where that is not plain: the name of a model.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        /// Units done.
        done: u64,
        /// Units in all; 0 when that is not known.
        total: u64,
    },
    /// The guest runs.
    Started {
        /// Its number.
        guest_id: u64,
    },
    /// The client is the reader of a detached guest; the guest's events follow.
    Attached {
        /// The guest's number.
        guest_id: u64,
        /// The number of the event that comes next.
        from: u64,
        /// A number that this daemon was given by chance when it started: numbers of guests begin anew with each daemon.
        daemon: u64,
    },
    /// The daemon is ready for the bytes of an upload.
    Wanted,
    /// Text of the guest.
    Text {
        /// The text.
        text: String,
    },
    /// Tokens of the guest's model.
    Tokens {
        /// The tokens.
        tokens: Vec<u32>,
    },
    /// A JSON text of the guest.
    Json {
        /// The text.
        json: String,
    },
    /// A line of the guest for its log.
    Log {
        /// How much it matters.
        level: LogLevel,
        /// The line.
        line: String,
    },
    /// The next bytes of the guest's recording, if one was asked for; its last ones come right before the end.
    Recorded {
        /// The bytes; a recording is cut anywhere.
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
    /// The next bytes of the guest's profile, if one was asked for; its last ones come right before the end.
    Profiled {
        /// The bytes; a profile is cut anywhere.
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
    /// A kind that this version does not know.
    #[serde(other)]
    Unknown,
}

impl Event {
    /// Bytes of what a guest sends; `None` for what the daemon says itself.
    #[must_use]
    pub fn output_bytes(&self) -> Option<usize> {
        match self {
            Self::Progress { .. }
            | Self::Started { .. }
            | Self::Attached { .. }
            | Self::Wanted
            | Self::Unknown => None,
            Self::Text { text } => Some(text.len()),
            Self::Tokens { tokens } => Some(size_of_val(tokens.as_slice())),
            Self::Json { json } => Some(json.len()),
            Self::Log { line, .. } => Some(line.len()),
            Self::Recorded { bytes } | Self::Profiled { bytes } => Some(bytes.len()),
        }
    }

    /// Whether a client that is attached to a detached guest counts it: all that the guest sends, kinds that this version does
    /// not know included.
    #[must_use]
    pub fn is_numbered(&self) -> bool {
        !matches!(self, Self::Progress { .. } | Self::Started { .. } | Self::Attached { .. } | Self::Wanted)
    }

    /// Bytes that the event takes of the client's credit: its output and [`OUTPUT_OVERHEAD_BYTES`]; 0 for what the
    /// daemon says itself.
    #[must_use]
    pub fn credit_bytes(&self) -> usize {
        self.output_bytes().map_or(0, |n_bytes| n_bytes + OUTPUT_OVERHEAD_BYTES)
    }
}

open_enum! {
    /// How much a log line matters.
    pub enum LogLevel {
        /// For the guest's author.
        Debug = "debug",
        /// For the user that runs it.
        Info = "info",
        /// Something unexpected that the guest went around.
        Warn = "warn",
        /// Something that failed.
        Error = "error",
    }
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Outcome {
    /// As asked for.
    Ok {
        /// The answer.
        value: Value,
    },
    /// Not as asked for.
    Error {
        /// Why.
        error: ErrorBody,
    },
    /// A kind that this version does not know.
    #[serde(other)]
    Unknown,
}

/// The answer to a [`Call`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Value {
    /// It is done, and there is nothing to tell.
    Done,
    /// A model was loaded.
    Loaded {
        /// The name that guests ask for.
        model: String,
    },
    /// A model was unloaded.
    Unloaded {
        /// The model that guests get from now on when they name none, if there is any.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        default_model: Option<String>,
    },
    /// Whether there is room for a model.
    Fit {
        /// The numbers.
        fit: Box<FitInfo>,
    },
    /// The configuration was read again.
    Reloaded {
        /// What has changed.
        info: Box<ReloadInfo>,
    },
    /// Another program is about to take the daemon's place.
    Upgrading {
        /// Which, and when.
        info: Box<UpgradeInfo>,
    },
    /// The loaded models, and those that are loaded on demand.
    Models {
        /// In the order of their names.
        models: Vec<ModelInfo>,
    },
    /// The running guests.
    Guests {
        /// In the order of their numbers.
        guests: Vec<GuestInfo>,
    },
    /// The daemon.
    Info {
        /// The daemon.
        info: Box<DaemonInfo>,
    },
    /// The daemon's limits.
    Limits {
        /// By their scopes: those of a guest first, the daemon's last.
        limits: Vec<LimitInfo>,
    },
    /// Lines of the daemon's log.
    Logs {
        /// The lines, and where the next ones begin.
        logs: LogLines,
    },
    /// The daemon's metrics.
    Metrics {
        /// As text, in the format 0.0.4 of Prometheus.
        text: String,
    },
    /// A kind that this version does not know.
    #[serde(other)]
    Unknown,
}
