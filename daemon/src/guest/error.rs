//! What can be wrong with a component, and how a guest can end.

use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use trellis_engine::account::{BudgetExceeded, GuestId};

use super::names::{cut, list};
use crate::on_demand::Again;

/// More than the bytes of any text in a [`GuestEnd`].
const TEXT_BYTES_MAX: usize = 32 << 10;

/// Why a guest cannot be compiled or started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuestError {
    /// The bytes are not WebAssembly.
    #[error("not WebAssembly: {n_bytes} bytes that do not begin with `\\0asm`")]
    NotWasm {
        /// Length of what was given.
        n_bytes: usize,
    },
    /// The bytes are a core module.
    #[error("a core WebAssembly module, not a component: build it for the target wasm32-wasip2")]
    CoreModule,
    /// The component is too large.
    #[error("the component has {n_bytes} bytes, more than the limit of {limit_bytes}")]
    TooLarge {
        /// Its length.
        n_bytes: usize,
        /// The most.
        limit_bytes: usize,
    },
    /// The component is broken, or uses what is switched off.
    #[error("not a valid component: {reason}")]
    Invalid {
        /// What the compiler said.
        reason: String,
    },
    /// The component does not export `run`.
    #[error("the component exports no `run: func() -> result<_, string>`; it exports: {}; in Rust \
         `trellis_guest::main!(run);` exports a function", list(.exports))]
    MissingRun {
        /// What it exports.
        exports: Vec<String>,
    },
    /// The component asks for an interface that the host does not have.
    #[error("the component imports {import}, which the host does not have; it has: {}", .host.join(", "))]
    UnknownImport {
        /// The import; of a long name the beginning.
        import: String,
        /// What the host has.
        host: Vec<String>,
    },
    /// The component asks for another version of an interface.
    #[error("the component imports {import}, the host has {host}: build the guest against that version")]
    WrongVersion {
        /// The import; of a long name the beginning.
        import: String,
        /// The interface in the versions that the host has.
        host: String,
    },
    /// An import or export has the right name and another type.
    #[error("the component does not fit the host: {reason}")]
    WrongType {
        /// What does not fit.
        reason: String,
    },
    /// The component needs more from the start than any guest may have.
    #[error("the component needs {needed} {what}, more than the limit of {limit}")]
    NeedsTooMuch {
        /// What it needs.
        what: &'static str,
        /// How much.
        needed: u64,
        /// The most.
        limit: u64,
    },
    /// The component takes too long to compile.
    #[error("compiling the component took more than {limit_ms} ms of processors")]
    CompileTimeout {
        /// The most.
        limit_ms: u64,
    },
    /// The machine had no time for it. Another time it may have.
    #[error("compiling the component has not ended after {seconds} seconds: the machine is too busy")]
    CompileLate {
        /// After how long.
        seconds: u64,
    },
    /// The compiling process ended without an answer, as it does when its memory is used up.
    #[error("the compiler ended without a result ({status}); it may use {limit_bytes} bytes of memory")]
    CompilerDied {
        /// How it ended.
        status: String,
        /// Its bound on memory.
        limit_bytes: u64,
    },
    /// Too many components of this user wait to be compiled.
    #[error("{n_queued} components of this user wait to be compiled already, the limit is {limit}")]
    CompileQueueFull {
        /// Those that wait.
        n_queued: usize,
        /// The most of them.
        limit: usize,
    },
    /// The compiling process could not be run.
    #[error("{exe}: {source}", exe = .exe.display())]
    Compiler {
        /// The executable.
        exe: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// No file can be opened for the component at this moment.
    #[error("the daemon has no file descriptor left for the component; try again later")]
    NoDescriptors,
    /// The cache of compiled components cannot be used.
    #[error("{path}: {reason}", path = .path.display())]
    Cache {
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// Too many guests run.
    #[error("{running} guests of the {level} run already, the limit is {limit}")]
    TooManyGuests {
        /// `daemon` or `user`; `user beside others` for who would leave less to the next user.
        level: &'static str,
        /// Those that run.
        running: u32,
        /// The most.
        limit: u32,
    },
    /// The arguments are too long.
    #[error("the arguments have {n_bytes} bytes, more than the limit of {limit_bytes}")]
    ArgumentsTooLarge {
        /// Their length.
        n_bytes: usize,
        /// The most.
        limit_bytes: usize,
    },
    /// A budget has no memory for one more guest.
    #[error(transparent)]
    OverBudget(BudgetExceeded),
    /// No such guest runs.
    #[error("no guest {} runs", .id.0)]
    NotRunning {
        /// The guest.
        id: GuestId,
    },
    /// The host has no model for guests to use.
    #[error("no model is loaded; `trellis load` loads one")]
    NoModel,
    /// Guests are to run in processes of their own, and this machine cannot confine such.
    #[error(
        "guests cannot run in processes of their own here: {reason}; `isolation = \"thread\"` in the configuration runs them in \
         the daemon, where WebAssembly alone keeps them in: for guests that are trusted"
    )]
    NotConfined {
        /// What is missing.
        reason: String,
    },
    /// The wasm runtime could not be set up.
    #[error("the wasm runtime cannot start: {reason}")]
    Runtime {
        /// What it said.
        reason: String,
    },
}

/// How a guest ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum GuestEnd {
    /// `run` returned.
    #[error("finished")]
    Finished,
    /// `run` returned an error.
    #[error("{message}")]
    Failed {
        /// The error's text.
        message: String,
    },
    /// The guest called `exit` with something else than success.
    #[error("the guest exited with status {code}")]
    Exited {
        /// The status.
        code: i32,
    },
    /// The guest did what wasm or the host API does not allow.
    #[error("the guest trapped: {reason}")]
    Trapped {
        /// The trap, and where in the guest it happened.
        reason: String,
    },
    /// The processor time is used up.
    #[error("the guest used {used_ms} ms of processor time, the limit is {limit_ms} ms")]
    CpuExceeded {
        /// Time used.
        used_ms: u64,
        /// The most.
        limit_ms: u64,
    },
    /// The guest gave up after it was denied memory.
    #[error("the guest asked for {requested_bytes} bytes of memory, the limit is {limit_bytes}")]
    MemoryExceeded {
        /// What its memories would have come to.
        requested_bytes: u64,
        /// The most.
        limit_bytes: u64,
    },
    /// The guest gave up after it was denied memory for which a budget around its own has no room.
    #[error("{0}")]
    HostBytesExceeded(BudgetExceeded),
    /// The guest gave up after it was denied table elements.
    #[error("the guest asked for {requested} table elements, the limit is {limit}")]
    TableExceeded {
        /// What its tables would have come to.
        requested: u64,
        /// The most.
        limit: u64,
    },
    /// The guest made an object without room for one more, where the host API has no error to return.
    #[error("the guest holds {limit} host objects, the limit, and asked for one more")]
    HandlesExceeded {
        /// The most.
        limit: u64,
    },
    /// The guest passed too much to the host in one call.
    #[error("the guest passed more than {limit_bytes} bytes to the host in one call")]
    CallBytesExceeded {
        /// The most.
        limit_bytes: u64,
    },
    /// The recording of the guest grew faster than the client took it.
    #[error("{waiting_bytes} bytes of the guest's recording wait for the client, the limit is {limit_bytes}")]
    RecordingExceeded {
        /// Bytes that wait.
        waiting_bytes: u64,
        /// The most.
        limit_bytes: u64,
    },
    /// The guest ran too long.
    #[error("the guest ran for its {limit_ms} ms and was stopped")]
    DeadlineExceeded {
        /// The most.
        limit_ms: u64,
    },
    /// The guest waited for messages too long.
    #[error("the guest waited for messages for its {limit_ms} ms and was stopped")]
    IdleExceeded {
        /// The most, of all its waits together.
        limit_ms: u64,
    },
    /// The guest was stopped.
    #[error("the guest was stopped")]
    Stopped,
    /// A device failed, and the guest with it.
    #[error("the device failed, try again: {device}: {reason}")]
    DeviceFailed {
        /// The device; in older recordings a model on it.
        #[serde(alias = "model")]
        device: String,
        /// What the device reported.
        reason: String,
    },
    /// A model that the guest worked with failed, and others on its device did not.
    #[error("model {model:?} failed; once it was unloaded and loaded again, try again: {reason}")]
    ModelFailed {
        /// The model.
        model: String,
        /// What its steps reported.
        reason: String,
    },
    /// A model that the guest worked with was unloaded.
    #[error("model {model:?} was unloaded; once it is loaded again, try again")]
    ModelUnloaded {
        /// The model.
        model: String,
    },
    /// The guest gave up after it did not get a model that was to be loaded for it.
    #[error("model {model:?} was not loaded: {reason}")]
    ModelNotLoaded {
        /// The model.
        model: String,
        /// Why.
        reason: String,
        /// Whether it may be asked for again.
        again: Again,
    },
    /// The guest failed because its client went away.
    #[error("the client went away")]
    ClientGone,
    /// The host API panicked; only this guest is harmed.
    #[error("the host failed while it served the guest: {message}")]
    Panicked {
        /// The panic's message.
        message: String,
    },
    /// The process in which the guests of its user run has come to its end, and all of them with it.
    #[error("the process of the user's guests has ended, try again: {reason}")]
    ProcessLost {
        /// Why.
        reason: String,
    },
}

impl GuestEnd {
    /// The same with the beginnings of its texts, as long as they are where a guest of ours has ended: it may come from a process
    /// that says anything.
    pub(crate) fn with_texts_cut(mut self) -> Self {
        let texts: [Option<&mut String>; 2] = match &mut self {
            Self::Failed { message } | Self::Panicked { message } => [Some(message), None],
            Self::Trapped { reason } | Self::ProcessLost { reason } => [Some(reason), None],
            Self::DeviceFailed { device, reason } => [Some(device), Some(reason)],
            Self::ModelFailed { model, reason } | Self::ModelNotLoaded { model, reason, .. } => {
                [Some(model), Some(reason)]
            }
            Self::ModelUnloaded { model } => [Some(model), None],
            _ => [None, None],
        };
        for text in texts.into_iter().flatten() {
            if text.len() > TEXT_BYTES_MAX {
                *text = cut(text, TEXT_BYTES_MAX);
            }
        }
        self
    }
}

/// Why the host stops a guest from within a call, where the host API has no error for it.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum GuestFault {
    /// The processor time is used up.
    #[error("the processor time is used up")]
    Cpu {
        /// Time used.
        used_ms: u64,
    },
    /// More was passed in one call than may be, where the host API has no error to return.
    #[error("more bytes were passed in one call than may be")]
    CallBytes,
    /// No room for a host object.
    #[error("no room for another host object")]
    Handles,
    /// No room in a budget of host memory for what is recorded.
    #[error(transparent)]
    HostBytes(BudgetExceeded),
    /// The client does not take the recording that it asked for.
    #[error("{waiting_bytes} bytes of the recording wait for the client")]
    Recording {
        /// Bytes that wait.
        waiting_bytes: usize,
    },
}
