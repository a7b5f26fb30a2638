//! The way to an engine's thread.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustc_hash::FxHashMap;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};

use crate::account::{N_OPERATIONS_MAX, Owner, n_permits};
use crate::archive::FromArchive;
use crate::backend::Backend;
use crate::command::{ModelId, Operation};
use crate::completion::{CallerId, Done, Tag};
use crate::engine::Newcomer;
use crate::error::{EngineError, EngineFailure};
use crate::mailbox::{Mailbox, Postbox, Ticket};
use crate::mask_threads::MaskThreads;
use crate::model_handle::ModelHandle;
use crate::port::Port;

/// The caller in whose name the handle itself asks.
pub(crate) const DESK: CallerId = CallerId(0);

/// What goes to the engine's thread.
pub(crate) enum Message {
    /// A guest that asks from now on, and where it is answered.
    Enter { caller: CallerId, owner: Owner, postbox: Postbox },
    /// A guest that has asked its last.
    Leave { caller: CallerId },
    /// What a guest asks.
    Operation(Operation),
    /// A model that was loaded, and where to say that it has failed.
    Add { newcomer: Newcomer, failure: watch::Sender<Option<EngineFailure>> },
    /// All models together are to have so many bytes of KV memory.
    SetKvBytes { kv_bytes: u64, tag: Tag },
    /// So many bytes of KV in host memory at most are to be given up.
    Relieve { n_bytes: u64, tag: Tag },
    /// An archive has something for a model, or wants something of it.
    FromArchive { model: ModelId, what: FromArchive },
    /// A model is to go, and its backend to the caller that asked for that.
    Remove { model: ModelId, to: oneshot::Sender<Box<dyn Backend>> },
    /// The end.
    Shutdown,
}

/// A message, its sender and, if it counts against the bounds, the room it takes until the engine has read it.
pub(crate) struct Posted {
    pub(crate) from: CallerId,
    pub(crate) message: Message,
    _permits: Option<Permits>,
}

impl Posted {
    /// A message that needs no room.
    pub(crate) fn new(from: CallerId, message: Message) -> Self {
        Self { from, message, _permits: None }
    }
}

/// Room for one operation of a guest.
#[derive(Debug)]
pub(crate) struct Room {
    from: CallerId,
    permits: Permits,
}

/// Of what a guest may have unread, and of what its user may.
type Permits = (OwnedSemaphorePermit, Option<OwnedSemaphorePermit>);

/// The permits of a guest and of its user for an operation with so many tokens. Where there is a user, tokens count with that:
/// what a guest has of its own is for the number of its operations, so that one with long prompts may still ask.
fn shares(n_tokens: usize, has_user: bool) -> (u32, u32) {
    match has_user {
        true => (1, n_permits(n_tokens)),
        false => (n_permits(n_tokens), 0),
    }
}

/// A guest as this engine knows it: its id, its owner and its mailbox. The engine forgets it when this is dropped.
#[derive(Debug)]
pub(crate) struct Caller {
    id: CallerId,
    owner: Owner,
    mailbox: Arc<Mailbox>,
    engine: Weak<Link>,
}

impl Caller {
    pub(crate) fn id(&self) -> CallerId {
        self.id
    }

    pub(crate) fn owner(&self) -> &Owner {
        &self.owner
    }

    /// A ticket for one more question.
    pub(crate) fn ticket(&self) -> Ticket {
        self.mailbox.ticket()
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        if let Some(engine) = self.engine.upgrade() {
            let key = account_key(&self.owner);
            let mut callers = engine.callers();
            // Another may have taken its place by now.
            if callers.get(&key).is_some_and(|caller| caller.strong_count() == 0) {
                callers.remove(&key);
            }
            drop(callers);
            // A stopped engine has forgotten it.
            let _ = engine.post_from(self.id, Message::Leave { caller: self.id });
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

/// Sees whether an engine works, also while no model is on it. Holds nothing of its device. Cheap to clone.
#[derive(Clone, Debug)]
pub struct EngineWatch(Arc<Link>);

impl EngineWatch {
    pub(crate) fn new(engine: Arc<Link>) -> Self {
        Self(engine)
    }

    pub(crate) fn link(&self) -> &Arc<Link> {
        &self.0
    }

    /// Why the engine has failed, if it has.
    #[must_use]
    pub fn failure(&self) -> Option<EngineFailure> {
        self.0.failure()
    }

    /// Waits for the engine's failure; for ever, if it is stopped before it fails.
    pub async fn failed(&self) -> EngineFailure {
        self.0.failed().await
    }

    /// Gives host memory of pages that are not in use back to the system, and where that is less than so many bytes, gives up KV in as
    /// many more at most, of what is missed least: it is computed again when a guest asks about it. Returns how many bytes went back;
    /// none where the backends cannot give them back, and then nothing is given up.
    ///
    /// # Errors
    /// The engine has failed or stopped.
    pub async fn relieve(&self, n_bytes: u64) -> Result<u64, EngineError> {
        let place = self.0.desk.ticket();
        self.0.post_message(Message::Relieve { n_bytes, tag: place.tag() })?;
        match place.take().await {
            Some(Done::Relieved(n_bytes)) => Ok(n_bytes),
            Some(other) => unreachable!("asked for relief, answered with {other:?}"),
            None => Err(self.0.ended()),
        }
    }

    /// Whether both watch one engine.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether this is the engine of that model.
    #[must_use]
    pub fn is_of(&self, model: &ModelHandle) -> bool {
        Arc::ptr_eq(&self.0, model.link())
    }
}

/// The engine thread's side of a handle.
pub(crate) struct Served {
    pub(crate) messages: mpsc::UnboundedReceiver<Posted>,
    pub(crate) state: watch::Sender<EngineState>,
    pub(crate) desk: Arc<Mailbox>,
}

/// How messages come to the engine.
#[derive(Debug)]
enum Way {
    /// To its thread.
    Here(mpsc::UnboundedSender<Posted>),
    /// To its process.
    Far(Arc<dyn Inward>),
}

/// Brings messages to an engine of another process, in the order in which they come.
pub(crate) trait Inward: std::fmt::Debug + Send + Sync {
    /// Brings one there.
    fn bring(&self, posted: Posted);
}

/// The way to one engine, which the models on it share.
#[derive(Debug)]
pub(crate) struct Link {
    way: Way,
    /// For what the handle itself asks.
    room: Arc<Semaphore>,
    /// Where masks are worked out.
    masks: MaskThreads,
    desk: Arc<Mailbox>,
    port: Port,
    /// The guests that have something here, by their accounts.
    callers: Mutex<FxHashMap<usize, Weak<Caller>>>,
    n_callers: AtomicU64,
    state: watch::Receiver<EngineState>,
}

impl Link {
    pub(crate) fn new(port: Port) -> (Arc<Self>, Served) {
        let (messages, receiver) = mpsc::unbounded_channel();
        let (link, state) = Self::over(Way::Here(messages), port, DESK.0);
        let desk = link.desk.clone();
        (link, Served { messages: receiver, state, desk })
    }

    /// The way to an engine of another process, for guests with ids above the first; and what says how the engine is.
    pub(crate) fn far(inward: Arc<dyn Inward>, first: u64) -> (Arc<Self>, watch::Sender<EngineState>) {
        Self::over(Way::Far(inward), Port::Direct, first)
    }

    fn over(way: Way, port: Port, first: u64) -> (Arc<Self>, watch::Sender<EngineState>) {
        let (sender, state) = watch::channel(EngineState::Running);
        let link = Self {
            way,
            room: Arc::new(Semaphore::new(N_OPERATIONS_MAX)),
            masks: MaskThreads::default(),
            desk: Arc::default(),
            port,
            callers: Mutex::default(),
            n_callers: AtomicU64::new(first),
            state,
        };
        (Arc::new(link), sender)
    }

    /// Where masks are worked out.
    pub(crate) fn masks(&self) -> &MaskThreads {
        &self.masks
    }

    /// Whether the engine works, and if not, why.
    pub(crate) fn state(&self) -> EngineState {
        self.state.borrow().clone()
    }

    /// Why the engine has failed, if it has.
    pub(crate) fn failure(&self) -> Option<EngineFailure> {
        match self.state() {
            EngineState::Failed(failure) => Some(failure),
            EngineState::Running | EngineState::Stopped => None,
        }
    }

    /// Waits for the engine's failure; for ever, if it is stopped before it fails.
    pub(crate) async fn failed(&self) -> EngineFailure {
        let mut state = self.state.clone();
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

    /// Asks something of the handle itself, not of a guest.
    pub(crate) async fn ask(&self, operation: impl FnOnce(Tag) -> Operation) -> Result<Done, EngineError> {
        let place = self.desk.ticket();
        let room = self.take_room(DESK, &self.room, None, 0).await?;
        self.post_into(room, operation(place.tag()))?;
        place.take().await.ok_or_else(|| self.ended())
    }

    /// Says how many bytes of KV memory all models together are to have; what is returned waits until they have.
    pub(crate) fn share(
        self: &Arc<Self>,
        kv_bytes: u64,
    ) -> Result<impl Future<Output = Result<(), EngineError>> + use<>, EngineError> {
        let (link, place) = (self.clone(), self.desk.ticket());
        self.post_message(Message::SetKvBytes { kv_bytes, tag: place.tag() })?;
        Ok(async move {
            match place.take().await {
                Some(Done::Shared(shared)) => shared,
                Some(other) => unreachable!("asked to share, answered with {other:?}"),
                None => Err(link.ended()),
            }
        })
    }

    /// The guest of this account, as this engine knows it.
    ///
    /// # Errors
    /// The engine has failed or stopped.
    pub(crate) fn caller(self: &Arc<Self>, owner: &Owner) -> Result<Arc<Caller>, EngineError> {
        let mut callers = self.callers();
        let known = callers.entry(account_key(owner)).or_default();
        if let Some(caller) = known.upgrade() {
            return Ok(caller);
        }
        let id = CallerId(self.n_callers.fetch_add(1, Ordering::Relaxed) + 1);
        let mailbox = Arc::<Mailbox>::default();
        let postbox = Postbox::Here(mailbox.clone());
        self.post_message(Message::Enter { caller: id, owner: owner.clone(), postbox })?;
        let caller = Arc::new(Caller { id, owner: owner.clone(), mailbox, engine: Arc::downgrade(self) });
        *known = Arc::downgrade(&caller);
        Ok(caller)
    }

    /// Waits until there is room for one more operation of a guest, with so many tokens.
    pub(crate) async fn room(&self, caller: &Caller, n_tokens: usize) -> Result<Room, EngineError> {
        let account = &caller.owner.account;
        self.take_room(caller.id, account.operations(), account.operations_of_user(), n_tokens).await
    }

    /// Room for one more operation of a guest of another process, with so many tokens, if there is some.
    pub(crate) fn try_room(&self, from: CallerId, owner: &Owner, n_tokens: usize) -> Option<Room> {
        let permits = |room: &Arc<Semaphore>, n| room.clone().try_acquire_many_owned(n).ok();
        let of_user = owner.account.operations_of_user();
        let (n_of_guest, n_of_user) = shares(n_tokens, of_user.is_some());
        let of_guest = permits(owner.account.operations(), n_of_guest)?;
        let of_user = match of_user {
            Some(room) => Some(permits(room, n_of_user)?),
            None => None,
        };
        Some(Room { from, permits: (of_guest, of_user) })
    }

    async fn take_room(
        &self,
        from: CallerId,
        of_guest: &Arc<Semaphore>,
        of_user: Option<&Arc<Semaphore>>,
        n_tokens: usize,
    ) -> Result<Room, EngineError> {
        let (n_of_guest, n_of_user) = shares(n_tokens, of_user.is_some());
        let of_guest = self.permits(of_guest, n_of_guest).await?;
        let of_user = match of_user {
            Some(room) => Some(self.permits(room, n_of_user).await?),
            None => None,
        };
        Ok(Room { from, permits: (of_guest, of_user) })
    }

    async fn permits(&self, room: &Arc<Semaphore>, n: u32) -> Result<OwnedSemaphorePermit, EngineError> {
        match room.clone().try_acquire_many_owned(n) {
            Ok(permits) => Ok(permits),
            Err(_) => room.clone().acquire_many_owned(n).await.map_err(|_| self.ended()),
        }
    }

    /// Sends an operation. What its sender notes down together with that cannot come apart: nothing waits here.
    pub(crate) fn post_into(&self, room: Room, operation: Operation) -> Result<(), EngineError> {
        let message = Message::Operation(self.port.carry(operation));
        self.send(Posted { from: room.from, message, _permits: Some(room.permits) })
    }

    /// Sends a message of the handle itself that takes the room of an operation until the engine has read it.
    pub(crate) fn post_message_into(&self, room: Room, message: Message) -> Result<(), EngineError> {
        self.send(Posted { from: DESK, message, _permits: Some(room.permits) })
    }

    /// Sends an operation that something else bounds: one release for each context, one cancel for each question, one
    /// word on how far a run has come for each token that was given.
    pub(crate) fn post_unbounded(&self, from: CallerId, operation: Operation) -> Result<(), EngineError> {
        self.post_from(from, Message::Operation(self.port.carry(operation)))
    }

    /// Sends a message of the handle itself, not of a guest.
    pub(crate) fn post_message(&self, message: Message) -> Result<(), EngineError> {
        self.post_from(DESK, message)
    }

    /// Sends a message in its order among those of a guest.
    pub(crate) fn post_from(&self, from: CallerId, message: Message) -> Result<(), EngineError> {
        self.send(Posted::new(from, message))
    }

    fn send(&self, posted: Posted) -> Result<(), EngineError> {
        // One that has said why it ends may not have closed its end yet.
        if !matches!(*self.state.borrow(), EngineState::Running) {
            return Err(self.ended());
        }
        match &self.way {
            Way::Here(messages) => messages.send(posted).map_err(|_| self.ended()),
            Way::Far(inward) => {
                inward.bring(posted);
                Ok(())
            }
        }
    }

    fn callers(&self) -> MutexGuard<'_, FxHashMap<usize, Weak<Caller>>> {
        self.callers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
