//! How guests of a process come to models that are loaded on demand: the daemon loads them, and keeps them for each guest that got
//! one until the guest has let go of it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::sync::oneshot;
use trellis_engine::ModelHandle;
use trellis_engine::account::GuestId;

use super::message::{FromGuests, ModelNumber};
use super::teller::Up;
use crate::on_demand::{Again, Asker, Claim, NotLoaded, Opened, Opener};

/// Guests that wait, each for one answer.
#[derive(Debug)]
struct Waiting<T>(Mutex<HashMap<GuestId, oneshot::Sender<T>>>);

impl<T> Default for Waiting<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Waiting<T> {
    fn lock(&self) -> MutexGuard<'_, HashMap<GuestId, oneshot::Sender<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One that waits from now on.
    fn begin(self: &Arc<Self>, guest: GuestId) -> Waiter<T> {
        let (answer, answered) = oneshot::channel();
        self.lock().insert(guest, answer);
        Waiter { waiting: self.clone(), guest, answered }
    }

    /// Gives one the answer. A guest that has ended is given none: what is in it is let go of.
    fn answer(&self, guest: GuestId, answer: T) {
        let waiting = self.lock().remove(&guest);
        if let Some(waiting) = waiting {
            let _ = waiting.send(answer);
        }
    }
}

/// Asks the daemon.
#[derive(Debug)]
pub(super) struct FarOpener {
    up: Arc<Up>,
    opening: Arc<Waiting<Result<Opened, NotLoaded>>>,
    forgetting: Arc<Waiting<bool>>,
}

/// A guest that waits until this is dropped.
struct Waiter<T> {
    waiting: Arc<Waiting<T>>,
    guest: GuestId,
    answered: oneshot::Receiver<T>,
}

impl<T> Waiter<T> {
    /// None where the daemon is gone.
    async fn answered(mut self) -> Option<T> {
        (&mut self.answered).await.ok()
    }
}

impl<T> Drop for Waiter<T> {
    fn drop(&mut self) {
        self.waiting.lock().remove(&self.guest);
    }
}

/// What the daemon keeps for a guest.
#[derive(Debug)]
struct FarClaim {
    up: Arc<Up>,
    guest: GuestId,
    model: ModelNumber,
}

impl Claim for FarClaim {}

impl Drop for FarClaim {
    fn drop(&mut self) {
        self.up.say(&FromGuests::LetGo { guest: self.guest, model: self.model });
    }
}

impl FarOpener {
    pub(super) fn new(up: Arc<Up>) -> Arc<Self> {
        Arc::new(Self { up, opening: Arc::default(), forgetting: Arc::default() })
    }

    /// The daemon has forgotten what was saved under a name, if anything was.
    pub(super) fn note_forgotten(&self, guest: GuestId, was_there: bool) {
        self.forgetting.answer(guest, was_there);
    }

    /// The daemon has answered, with a model that the process knows, or did.
    pub(super) fn note_opened(
        &self,
        guest: GuestId,
        opened: Result<Option<(ModelNumber, ModelHandle)>, NotLoaded>,
    ) {
        let opened = opened.and_then(|known| {
            let (model, handle) = known.ok_or_else(|| NotLoaded {
                reason: "it was unloaded as soon as it was there".to_owned(),
                again: Again::Later,
            })?;
            let claim = FarClaim { up: self.up.clone(), guest, model };
            Ok(Opened { model: handle, claim: Box::new(claim) })
        });
        self.opening.answer(guest, opened);
    }
}

impl Opener for FarOpener {
    fn open(&self, name: &str, asker: Asker) -> BoxFuture<'static, Result<Opened, NotLoaded>> {
        let waiter = self.opening.begin(asker.guest);
        self.up.say(&FromGuests::Open { guest: asker.guest, name: name.to_owned() });
        let lost = || NotLoaded { reason: "the daemon is gone".to_owned(), again: Again::NextDaemon };
        async move { waiter.answered().await.unwrap_or_else(|| Err(lost())) }.boxed()
    }

    fn forget(&self, name: &str, asker: Asker) -> BoxFuture<'static, bool> {
        let waiter = self.forgetting.begin(asker.guest);
        self.up.say(&FromGuests::Forget { guest: asker.guest, name: name.to_owned() });
        async move { waiter.answered().await.unwrap_or(false) }.boxed()
    }
}
