//! What a session needs of the rest of the daemon.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::sync::watch;
use trellis_engine::account::Account;
use trellis_wire::{
    ComponentHash, DaemonInfo, ErrorBody, ErrorCode, FitInfo, GuestInfo, GuestUsage, LimitInfo, LogLines,
    LogsAsked, ModelInfo, Program, ReloadInfo, Stage, UpgradeInfo,
};

use super::{Actor, SessionsUsed};
use crate::guest::GuestIo;
use crate::metrics::{Exposition, SessionCounts};

/// Runs guests and knows about them.
///
/// Each call runs in a task of its own. A call whose client cancels or leaves is dropped at its next await, and
/// must then undo what it has begun.
pub trait Service: Send + Sync + 'static {
    /// Compiles what has to be compiled and starts a guest. Returns once it runs, not when it ends; `io` may carry
    /// output before that, and `progress` may be told afterwards of what the guest waits for.
    ///
    /// # Errors
    /// Why it cannot run; [`trellis_wire::ErrorCode::UnknownComponent`] makes the client upload and try again.
    fn start(
        &self,
        request: StartRequest,
        io: GuestIo,
        progress: ProgressSink,
    ) -> impl Future<Output = Result<RunningGuest, ErrorBody>> + Send;

    /// Says whether the actor may bring components, before any byte of one is taken.
    ///
    /// # Errors
    /// It may not.
    fn may_upload(&self, _actor: Actor) -> impl Future<Output = Result<(), ErrorBody>> + Send {
        async { Ok(()) }
    }

    /// Keeps a component for later starts. The hash has been verified; the component may be known already.
    ///
    /// # Errors
    /// Why it is not kept.
    fn store_component(
        &self,
        actor: Actor,
        hash: ComponentHash,
        bytes: Bytes,
    ) -> impl Future<Output = Result<(), ErrorBody>> + Send;

    /// Whether [`Self::store_component`] would have nothing to do. Must not block.
    fn has_component(&self, _actor: Actor, _hash: &ComponentHash) -> bool {
        false
    }

    /// Says whether there is room for a model.
    ///
    /// # Errors
    /// The actor may not know, or the model cannot be used.
    fn fit(
        &self,
        _actor: Actor,
        _request: LoadRequest,
    ) -> impl Future<Output = Result<FitInfo, ErrorBody>> + Send {
        async { Err(ErrorBody::new(ErrorCode::Unsupported, "models do not change here")) }
    }

    /// The loaded models, in the order of their names, and those that are loaded on demand.
    ///
    /// # Errors
    /// The actor may not know.
    fn models(&self, actor: Actor) -> impl Future<Output = Result<Vec<ModelInfo>, ErrorBody>> + Send;

    /// Loads a model; guests can open it once this returns, by the name that it returns.
    ///
    /// # Errors
    /// The actor may not, or why it is not loaded.
    fn load(
        &self,
        _actor: Actor,
        _request: LoadRequest,
        _progress: ProgressSink,
    ) -> impl Future<Output = Result<String, ErrorBody>> + Send {
        async { Err(ErrorBody::new(ErrorCode::Unsupported, "models do not change here")) }
    }

    /// Unloads a model; its memory is free once this returns. Returns the name of the model that is the default then.
    ///
    /// # Errors
    /// The actor may not, or there is no such model.
    fn unload(
        &self,
        _actor: Actor,
        _model: String,
        _drain: Option<Duration>,
    ) -> impl Future<Output = Result<Option<String>, ErrorBody>> + Send {
        async { Err(ErrorBody::new(ErrorCode::Unsupported, "models do not change here")) }
    }

    /// The running guests that the actor may see, in the order of their numbers.
    ///
    /// # Errors
    /// The actor may not know.
    fn guests(&self, actor: Actor) -> impl Future<Output = Result<Vec<GuestInfo>, ErrorBody>> + Send;

    /// The daemon as a whole.
    ///
    /// # Errors
    /// The actor may not know.
    fn info(&self, actor: Actor) -> impl Future<Output = Result<DaemonInfo, ErrorBody>> + Send;

    /// Every limit of the daemon, with what the actor has in use of it; `used` is what the sessions know.
    ///
    /// # Errors
    /// The actor may not know.
    fn limits(
        &self,
        _actor: Actor,
        _used: SessionsUsed,
    ) -> impl Future<Output = Result<Vec<LimitInfo>, ErrorBody>> + Send {
        async { Err(ErrorBody::new(ErrorCode::Unsupported, "nothing is bounded here")) }
    }

    /// What monitoring is told at this moment, by this actor or by nobody known; `counts` is what the sessions know.
    ///
    /// # Errors
    /// There is nothing to tell.
    fn metrics(
        &self,
        _actor: Option<Actor>,
        _counts: &SessionCounts,
    ) -> impl Future<Output = Result<Exposition, ErrorBody>> + Send {
        async { Err(ErrorBody::new(ErrorCode::Unsupported, "nothing is measured here")) }
    }

    /// Lines of the daemon's log.
    ///
    /// # Errors
    /// The actor may not, or none are kept.
    fn logs(
        &self,
        _actor: Actor,
        _asked: LogsAsked,
    ) -> impl Future<Output = Result<LogLines, ErrorBody>> + Send {
        async { Err(ErrorBody::new(ErrorCode::Unsupported, "no log is kept here")) }
    }

    /// Stops a guest of the actor.
    ///
    /// # Errors
    /// There is none of that number, or it is not the actor's.
    fn stop(&self, actor: Actor, guest_id: u64) -> impl Future<Output = Result<(), ErrorBody>> + Send;

    /// Has the daemon read its configuration again.
    ///
    /// # Errors
    /// The actor may not, or the configuration is wrong; nothing has changed then.
    fn reload(&self, _actor: Actor) -> impl Future<Output = Result<ReloadInfo, ErrorBody>> + Send {
        async { Err(ErrorBody::new(ErrorCode::Unsupported, "there is nothing to read here")) }
    }

    /// Begins to put another program in the daemon's place, once that one was found to start. The caller's sessions are told as of
    /// [`Self::shutdown`], after the drain.
    ///
    /// # Errors
    /// The actor may not, or the program would not start; nothing has changed then.
    fn upgrade(
        &self,
        _actor: Actor,
        _program: Option<String>,
    ) -> impl Future<Output = Result<UpgradeInfo, ErrorBody>> + Send {
        async { Err(ErrorBody::new(ErrorCode::Unsupported, "there is no program to be replaced here")) }
    }

    /// Begins to stop the daemon: the caller's sessions are told through their own shutdown token.
    ///
    /// # Errors
    /// The actor may not.
    fn shutdown(&self, actor: Actor) -> impl Future<Output = Result<(), ErrorBody>> + Send;

    /// A connection has said hello, or a detached guest is about to start; nothing was asked in its name before. What is held for
    /// it is charged to the account that this returns.
    fn session_began(&self, actor: Actor, session_id: u64) -> impl Future<Output = Arc<Account>> + Send;

    /// How much of the limit of this name a user has where each user has `most`: more or less where a class says so that the user is known to
    /// be in, as it is once a session of its has begun.
    fn limit_of(&self, _actor: Actor, _name: &'static str, most: usize) -> usize {
        most
    }

    /// A connection has ended, and all its guests with it; or a detached guest has. A start that was dropped may still be on its way to its
    /// next await.
    fn session_ended(&self, _session_id: u64) {}
}

/// A model to load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadRequest {
    /// A bundled model's name, or a folder.
    pub model: String,
    /// Where it is to run, if that was said.
    pub device: Option<String>,
}

/// What to run, and for which user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartRequest {
    /// The user that asks.
    pub actor: Actor,
    /// The connection that asks; of a detached guest a number among theirs.
    pub session_id: u64,
    /// The program; never [`Program::Unknown`].
    pub program: Program,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// The model that it gets when it names none, if the client has picked one.
    pub model: Option<String>,
    /// The seed that it is to see, if the client has picked one.
    pub seed: Option<u64>,
    /// How long the client lets it run.
    pub deadline: Option<Duration>,
    /// What the client calls its program.
    pub label: Option<String>,
    /// Whether to record its calls.
    pub is_recorded: bool,
    /// Whether to account for its time.
    pub is_profiled: bool,
}

/// A guest that runs. Dropping this stops it.
pub struct RunningGuest {
    /// Its number, never given twice.
    pub guest_id: u64,
    /// Resolves when the guest has ended, everything that it held is free, and its [`GuestIo`] is dropped.
    pub end: BoxFuture<'static, GuestEnd>,
    /// Stops it.
    pub stop: StopHandle,
}

impl fmt::Debug for RunningGuest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunningGuest").field("guest_id", &self.guest_id).finish_non_exhaustive()
    }
}

/// How a guest ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestEnd {
    /// Well, or why not.
    pub result: Result<(), ErrorBody>,
    /// What it used.
    pub usage: GuestUsage,
}

/// Stops a guest, once; at the latest when it is dropped, which says that its request is over. Stopping one that has ended
/// does nothing.
pub struct StopHandle(Option<Box<dyn FnOnce(StopReason) + Send>>);

impl StopHandle {
    /// A handle that calls `stop`, which must not block.
    pub fn new(stop: impl FnOnce(StopReason) + Send + 'static) -> Self {
        Self(Some(Box::new(stop)))
    }

    /// Stops the guest, unless that has been done.
    pub fn stop(&mut self, reason: StopReason) {
        if let Some(stop) = self.0.take() {
            stop(reason);
        }
    }
}

impl Drop for StopHandle {
    fn drop(&mut self) {
        self.stop(StopReason::Disconnected);
    }
}

impl fmt::Debug for StopHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StopHandle").field(&self.0.is_some()).finish()
    }
}

/// Why a session stops a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The client cancelled it.
    Cancelled,
    /// The client is gone.
    Disconnected,
    /// The daemon is going down.
    ShuttingDown,
    /// The client left more credit open than it may.
    Overdrawn {
        /// Bytes that would be open.
        open_bytes: u64,
        /// The most.
        limit_bytes: u64,
    },
    /// The guest sent something larger than the session passes on.
    LimitExceeded,
    /// No client was attached to the detached guest for so long.
    Unread {
        /// The longest time, in milliseconds.
        limit_ms: u64,
    },
}

/// How far a load is, or the work that a guest waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Which work.
    pub stage: Stage,
    /// What it is done to, where that is not plain.
    pub name: Option<String>,
    /// Units done.
    pub done: u64,
    /// Units in all; 0 when that is not known.
    pub total: u64,
}

/// Where the service reports progress. The client sees the newest state, not each one.
#[derive(Clone, Debug)]
pub struct ProgressSink(watch::Sender<Option<Progress>>);

impl ProgressSink {
    pub(crate) fn new() -> (Self, watch::Receiver<Option<Progress>>) {
        let (sender, receiver) = watch::channel(None);
        (Self(sender), receiver)
    }

    /// Tells how far the work is.
    pub fn report(&self, stage: Stage, done: u64, total: u64) {
        self.0.send_replace(Some(Progress { stage, name: None, done, total }));
    }

    /// Tells how far the load of a model is.
    pub fn report_load(&self, model: &str, done: u64, total: u64) {
        let name = Some(model.to_owned());
        self.0.send_replace(Some(Progress { stage: Stage::Load, name, done, total }));
    }
}
