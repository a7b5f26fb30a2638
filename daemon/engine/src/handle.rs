//! Messages to the engine thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use crate::account::Owner;
use crate::backend::{Limits, WeightsInfo};
use crate::command::{Command, ContextId};
use crate::error::{EngineError, EngineFailure};
use crate::model::Model;
use crate::stats::EngineStats;

/// Commands in flight to one engine. Enough for every context of a large batch to have one on its way.
const N_COMMANDS_MAX: usize = 4096;

/// A command and, for those that count against the bound, the room it takes until the engine has read it.
pub(crate) struct Posted {
    pub(crate) command: Command,
    _permit: Option<tokio::sync::OwnedSemaphorePermit>,
}

/// Room for one command.
#[derive(Debug)]
pub(crate) struct Room(tokio::sync::OwnedSemaphorePermit);

/// Whether an engine works.
#[derive(Clone, Debug)]
pub enum EngineState {
    /// It does.
    Running,
    /// It was stopped.
    Stopped,
    /// It came to its end by itself.
    Failed(EngineFailure),
}

/// The engine thread's side of a handle.
pub(crate) struct Served {
    pub(crate) commands: mpsc::UnboundedReceiver<Posted>,
    pub(crate) state: watch::Sender<EngineState>,
}

/// A way to one engine. Cheap to clone.
#[derive(Clone, Debug)]
pub struct EngineHandle(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    commands: mpsc::UnboundedSender<Posted>,
    room: Arc<Semaphore>,
    state: watch::Receiver<EngineState>,
    next_context: AtomicU64,
    model: Arc<Model>,
    limits: Limits,
    weights: WeightsInfo,
    device: String,
}

impl EngineHandle {
    pub(crate) fn new(
        model: Arc<Model>,
        limits: Limits,
        weights: WeightsInfo,
        device: String,
    ) -> (Self, Served) {
        let (commands, receiver) = mpsc::unbounded_channel();
        let (sender, state) = watch::channel(EngineState::Running);
        let room = Arc::new(Semaphore::new(N_COMMANDS_MAX));
        let next_context = AtomicU64::new(0);
        let shared = Shared { commands, room, state, next_context, model, limits, weights, device };
        (Self(Arc::new(shared)), Served { commands: receiver, state: sender })
    }

    /// The model that the engine runs.
    #[must_use]
    pub fn model(&self) -> &Arc<Model> {
        &self.0.model
    }

    /// What the engine can hold.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.0.limits
    }

    /// The weights as the device holds them.
    #[must_use]
    pub fn weights(&self) -> WeightsInfo {
        self.0.weights
    }

    /// The device's name for people.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.0.device
    }

    /// Whether the engine works, and if not, why.
    #[must_use]
    pub fn state(&self) -> EngineState {
        self.0.state.borrow().clone()
    }

    /// Why the engine has failed, if it has.
    #[must_use]
    pub fn failure(&self) -> Option<EngineFailure> {
        match self.state() {
            EngineState::Failed(failure) => Some(failure),
            EngineState::Running | EngineState::Stopped => None,
        }
    }

    /// Waits for the engine's failure; for ever, if it is stopped before it fails.
    pub async fn failed(&self) -> EngineFailure {
        let mut state = self.0.state.clone();
        loop {
            if let EngineState::Failed(failure) = &*state.borrow_and_update() {
                return failure.clone();
            }
            if state.changed().await.is_err() {
                break;
            }
        }
        // The thread has said its last, and that was no failure; or did it in between?
        match self.failure() {
            Some(failure) => failure,
            None => std::future::pending().await,
        }
    }

    /// Why there is no answer. The engine says why it ends before it lets go of what it was asked.
    pub(crate) fn ended(&self) -> EngineError {
        self.failure().map_or(EngineError::Stopped, EngineError::Failed)
    }

    /// Forgets the context that this owner's user saved under a name.
    ///
    /// # Errors
    /// Nothing is saved under the name, or the engine has failed or stopped.
    pub async fn forget(&self, owner: &Owner, name: &str) -> Result<(), EngineError> {
        let (reply, answer) = oneshot::channel();
        self.post(Command::Forget { owner: owner.clone(), name: name.to_owned(), reply }).await?;
        answer.await.map_err(|_| self.ended())?
    }

    /// Counters and gauges.
    ///
    /// # Errors
    /// The engine has failed or stopped.
    pub async fn stats(&self) -> Result<EngineStats, EngineError> {
        let (reply, answer) = oneshot::channel();
        self.post(Command::Stats { reply }).await?;
        answer.await.map_err(|_| self.ended())
    }

    pub(crate) fn next_context_id(&self) -> ContextId {
        ContextId(self.0.next_context.fetch_add(1, Ordering::Relaxed))
    }

    /// Waits until there is room for one more command.
    pub(crate) async fn room(&self) -> Result<Room, EngineError> {
        let permit = match self.0.room.clone().try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => self.0.room.clone().acquire_owned().await.map_err(|_| self.ended())?,
        };
        Ok(Room(permit))
    }

    /// Sends a command. What its sender notes down together with that cannot come apart: nothing waits here.
    pub(crate) fn post_into(&self, room: Room, command: Command) -> Result<(), EngineError> {
        self.send(Posted { command, _permit: Some(room.0) })
    }

    /// Sends a command once there is room for it.
    pub(crate) async fn post(&self, command: Command) -> Result<(), EngineError> {
        let room = self.room().await?;
        self.post_into(room, command)
    }

    /// Sends a command that something else bounds: one release for each context, one resume for each token
    /// that was given.
    pub(crate) fn post_unbounded(&self, command: Command) -> Result<(), EngineError> {
        self.send(Posted { command, _permit: None })
    }

    fn send(&self, posted: Posted) -> Result<(), EngineError> {
        // One that has said why it ends may not have closed its end yet.
        if !matches!(*self.0.state.borrow(), EngineState::Running) {
            return Err(self.ended());
        }
        self.0.commands.send(posted).map_err(|_| self.ended())
    }
}
