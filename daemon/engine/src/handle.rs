//! The way to an engine's thread.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustc_hash::FxHashMap;
use tokio::sync::{Semaphore, mpsc, watch};

use crate::account::{N_OPERATIONS_MAX, Owner};
use crate::backend::{Limits, WeightsInfo};
use crate::command::{ContextId, Operation};
use crate::completion::{CallerId, Done};
use crate::error::{EngineError, EngineFailure};
use crate::line::{Line, Standing};
use crate::model::Model;
use crate::port::Port;
use crate::stats::EngineStats;

/// The caller in whose name the handle itself asks.
pub(crate) const DESK: CallerId = CallerId(0);

/// What goes to the engine's thread.
#[derive(Debug)]
pub(crate) enum Message {
    /// A guest that asks from now on, and its line.
    Enter { caller: CallerId, owner: Owner, line: Arc<Line> },
    /// A guest that has asked its last.
    Leave { caller: CallerId },
    /// What a guest asks.
    Operation(Operation),
    /// The end.
    Shutdown,
}

/// A message and, for those that count against the bound, the room it takes until the engine has read it.
pub(crate) struct Posted {
    pub(crate) message: Message,
    _permit: Option<tokio::sync::OwnedSemaphorePermit>,
}

/// Room for one operation.
#[derive(Debug)]
pub(crate) struct Room(tokio::sync::OwnedSemaphorePermit);

/// A guest as this engine knows it: who it is and its line. The engine forgets it when this is dropped.
#[derive(Debug)]
pub(crate) struct Caller {
    id: CallerId,
    owner: Owner,
    line: Arc<Line>,
    engine: Weak<Shared>,
}

impl Caller {
    pub(crate) fn id(&self) -> CallerId {
        self.id
    }

    pub(crate) fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Takes a place on its line.
    pub(crate) fn stand(&self) -> Standing {
        self.line.stand()
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        if let Some(shared) = self.engine.upgrade() {
            let key = account_key(&self.owner);
            let mut callers = shared.callers();
            // Another may have taken its place by now.
            if callers.get(&key).is_some_and(|caller| caller.strong_count() == 0) {
                callers.remove(&key);
            }
            drop(callers);
            // A stopped engine knows nobody.
            let _ = EngineHandle(shared).post_message(Message::Leave { caller: self.id });
        }
    }
}

/// A guest is its account: there is none without, and no two guests have the same.
fn account_key(owner: &Owner) -> usize {
    Arc::as_ptr(&owner.account) as usize
}

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
    pub(crate) messages: mpsc::UnboundedReceiver<Posted>,
    pub(crate) state: watch::Sender<EngineState>,
    pub(crate) desk: Arc<Line>,
}

/// A way to one engine. Cheap to clone.
#[derive(Clone, Debug)]
pub struct EngineHandle(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    messages: mpsc::UnboundedSender<Posted>,
    /// For what the handle itself asks.
    room: Arc<Semaphore>,
    desk: Arc<Line>,
    port: Port,
    /// The guests that have something here, by their accounts.
    callers: Mutex<FxHashMap<usize, Weak<Caller>>>,
    n_callers: AtomicU64,
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
        port: Port,
    ) -> (Self, Served) {
        let (messages, receiver) = mpsc::unbounded_channel();
        let (sender, state) = watch::channel(EngineState::Running);
        let desk = Arc::<Line>::default();
        let served = Served { messages: receiver, state: sender, desk: desk.clone() };
        let shared = Shared {
            messages,
            room: Arc::new(Semaphore::new(N_OPERATIONS_MAX)),
            desk,
            port,
            callers: Mutex::default(),
            n_callers: AtomicU64::new(DESK.0),
            state,
            next_context: AtomicU64::new(0),
            model,
            limits,
            weights,
            device,
        };
        (Self(Arc::new(shared)), served)
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
        let caller = self.caller(owner)?;
        let place = caller.stand();
        let operation = Operation::Forget { caller: caller.id(), name: name.to_owned(), tag: place.tag() };
        self.post(&caller, operation).await?;
        match place.take().await {
            Some(Done::Kept(forgotten)) => forgotten,
            Some(other) => unreachable!("asked to forget, answered with {other:?}"),
            None => Err(self.ended()),
        }
    }

    /// Counters and gauges.
    ///
    /// # Errors
    /// The engine has failed or stopped.
    pub async fn stats(&self) -> Result<EngineStats, EngineError> {
        let place = self.0.desk.stand();
        let room = self.take_room(&self.0.room).await?;
        self.post_into(room, Operation::Stats { caller: DESK, tag: place.tag() })?;
        match place.take().await {
            Some(Done::Stats(stats)) => Ok(*stats),
            Some(other) => unreachable!("asked for counters, answered with {other:?}"),
            None => Err(self.ended()),
        }
    }

    /// The guest of this account, as this engine knows it.
    ///
    /// # Errors
    /// The engine has failed or stopped.
    pub(crate) fn caller(&self, owner: &Owner) -> Result<Arc<Caller>, EngineError> {
        let mut callers = self.0.callers();
        let known = callers.entry(account_key(owner)).or_default();
        if let Some(caller) = known.upgrade() {
            return Ok(caller);
        }
        let id = CallerId(self.0.n_callers.fetch_add(1, Ordering::Relaxed) + 1);
        let line = Arc::<Line>::default();
        self.post_message(Message::Enter { caller: id, owner: owner.clone(), line: line.clone() })?;
        let caller = Arc::new(Caller { id, owner: owner.clone(), line, engine: Arc::downgrade(&self.0) });
        *known = Arc::downgrade(&caller);
        Ok(caller)
    }

    pub(crate) fn next_context_id(&self) -> ContextId {
        ContextId(self.0.next_context.fetch_add(1, Ordering::Relaxed))
    }

    /// Waits until there is room for one more operation of a guest.
    pub(crate) async fn room(&self, caller: &Caller) -> Result<Room, EngineError> {
        self.take_room(caller.owner.account.operations()).await
    }

    async fn take_room(&self, room: &Arc<Semaphore>) -> Result<Room, EngineError> {
        let permit = match room.clone().try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => room.clone().acquire_owned().await.map_err(|_| self.ended())?,
        };
        Ok(Room(permit))
    }

    /// Sends an operation. What its sender notes down together with that cannot come apart: nothing waits here.
    pub(crate) fn post_into(&self, room: Room, operation: Operation) -> Result<(), EngineError> {
        let message = Message::Operation(self.0.port.carry(operation));
        self.send(Posted { message, _permit: Some(room.0) })
    }

    /// Sends an operation of a guest once there is room for it.
    pub(crate) async fn post(&self, caller: &Caller, operation: Operation) -> Result<(), EngineError> {
        let room = self.room(caller).await?;
        self.post_into(room, operation)
    }

    /// Sends an operation that something else bounds: one release for each context, one cancel for each question, one
    /// word on how far a run has come for each token that was given.
    pub(crate) fn post_unbounded(&self, operation: Operation) -> Result<(), EngineError> {
        self.post_message(Message::Operation(self.0.port.carry(operation)))
    }

    pub(crate) fn post_message(&self, message: Message) -> Result<(), EngineError> {
        self.send(Posted { message, _permit: None })
    }

    fn send(&self, posted: Posted) -> Result<(), EngineError> {
        // One that has said why it ends may not have closed its end yet.
        if !matches!(*self.0.state.borrow(), EngineState::Running) {
            return Err(self.ended());
        }
        self.0.messages.send(posted).map_err(|_| self.ended())
    }
}

impl Shared {
    fn callers(&self) -> MutexGuard<'_, FxHashMap<usize, Weak<Caller>>> {
        self.callers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
