//! Another program in the place of this one: in the same process, on the same socket.
//!
//! - Comes in: that the daemon is to be replaced, by what lies where it was started from or by another program, and the command line
//!   that it was started with.
//! - Goes out: a refusal, and nothing has changed; or the program, once it has said itself that it would start with that command line
//!   ([`Successor`]). From then on nobody is accepted any more, and whoever connects waits for it.
//! - In the end, when all sessions have ended and the engines are gone, [`replace`] puts the program there, which takes the socket,
//!   its lock and those for metrics and for HTTP requests out of a message ([`Inherited`]).
//! - Must not happen: a daemon that ends for a program that cannot start; a moment in which nobody has the socket or its lock; a
//!   descriptor or a child of the old program that the new one does not know of; a signal that is lost in between.

mod command;
mod handover;
mod replace;
mod signals;
mod successor;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use tokio_util::sync::CancellationToken;
use trellis_wire::UpgradeInfo;

pub(crate) use self::command::CommandLine;
pub(crate) use self::handover::{Inherited, InheritedMetrics, NAME, check_asked};
pub(crate) use self::replace::replace;
pub(crate) use self::signals::{Signals, hold_signals, let_signals_through};
pub(crate) use self::successor::Successor;
pub(crate) use self::successor::UpgradeError;
use crate::ipc::{HandOver, Listener};
use crate::service::HostService;
use crate::session::Sessions;

/// What puts another program in the place of this one.
pub(crate) struct Upgrade {
    command: OnceLock<CommandLine>,
    /// Held while a program is looked at.
    turn: tokio::sync::Mutex<()>,
    successor: Mutex<Option<Successor>>,
    is_replaced: AtomicBool,
    hand_over: Arc<HandOver>,
    sessions: OnceLock<Weak<Sessions<HostService>>>,
    shutdown: CancellationToken,
}

impl Upgrade {
    pub(crate) fn new(shutdown: CancellationToken) -> Arc<Self> {
        Arc::new(Self {
            command: OnceLock::new(),
            turn: tokio::sync::Mutex::default(),
            successor: Mutex::default(),
            is_replaced: AtomicBool::new(false),
            hand_over: Arc::default(),
            sessions: OnceLock::new(),
            shutdown,
        })
    }

    /// Says how the daemon was started; without that it is not replaced.
    pub(crate) fn set_command(&self, command: CommandLine) {
        // A daemon has one, which is said before it serves.
        let _ = self.command.set(command);
    }

    /// Says whose ends are waited for.
    pub(crate) fn set_sessions(&self, sessions: &Arc<Sessions<HostService>>) {
        let _ = self.sessions.set(Arc::downgrade(sessions));
    }

    /// Where the socket lies in the end.
    pub(crate) fn hand_over(&self) -> &Arc<HandOver> {
        &self.hand_over
    }

    /// Looks whether a program would start in this one's place, and begins to put it there.
    ///
    /// # Errors
    /// It would not, or the daemon is about to end; nothing has changed then.
    pub(crate) async fn begin(&self, program: Option<PathBuf>) -> Result<UpgradeInfo, UpgradeError> {
        let command = self.command.get().ok_or(UpgradeError::NoProgram)?;
        let _turn = self.turn.lock().await;
        let sessions = self.sessions()?;
        if self.hand_over.is_lent() {
            return Err(UpgradeError::Lent);
        }
        let successor = tokio::select! {
            successor = Successor::find(program, command) => successor?,
            () = self.shutdown.cancelled() => return Err(UpgradeError::Ending),
        };
        // Meanwhile the daemon may have begun to serve there.
        if self.hand_over.is_lent() {
            return Err(UpgradeError::Lent);
        }
        if sessions.is_draining() || self.shutdown.is_cancelled() {
            return Err(UpgradeError::Ending);
        }
        let info = UpgradeInfo {
            program: successor.program().display().to_string(),
            version: successor.version().to_owned(),
            n_at_work: sessions.n_at_work() as u64,
            drain_ms: u64::try_from(sessions.drain_time().as_millis()).unwrap_or(u64::MAX),
        };
        *self.successor.lock().unwrap_or_else(PoisonError::into_inner) = Some(successor);
        self.is_replaced.store(true, Ordering::Relaxed);
        self.hand_over.begin();
        Ok(info)
    }

    /// The sessions of a daemon that goes on.
    fn sessions(&self) -> Result<Arc<Sessions<HostService>>, UpgradeError> {
        let sessions = self.sessions.get().and_then(Weak::upgrade).ok_or(UpgradeError::Ending)?;
        match sessions.is_draining() || self.hand_over.has_begun() || self.shutdown.is_cancelled() {
            true => Err(UpgradeError::Ending),
            false => Ok(sessions),
        }
    }

    /// Whether a program is to take the daemon's place, or has begun to.
    pub(crate) fn is_replaced(&self) -> bool {
        self.is_replaced.load(Ordering::Relaxed)
    }

    /// The daemon was told to end: no program takes its place.
    pub(crate) fn give_up(&self) {
        self.is_replaced.store(false, Ordering::Relaxed);
        self.hand_over.give_up();
        self.successor.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// What takes the place of the daemon, and the socket, once it has ended for that.
    pub(crate) fn take(&self) -> Option<(Successor, Listener)> {
        let listener = self.hand_over.take()?;
        let successor = self.successor.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        Some((successor, listener))
    }
}
