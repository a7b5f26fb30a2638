//! How guests of a process come to models that are loaded on demand: the daemon loads them, and keeps them for each guest that got
//! one until the guest has let go of it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::sync::oneshot;
use trellis_engine::ModelHandle;
use trellis_engine::account::GuestId;

use super::message::{FromGuests, ModelNumber};
use super::teller::Up;
use crate::on_demand::{Again, Asker, Claim, NotLoaded, Opened, Opener};

/// Guests that wait, each for one model.
type Waiting = Mutex<HashMap<GuestId, oneshot::Sender<Result<Opened, NotLoaded>>>>;

/// Asks the daemon.
#[derive(Debug)]
pub(super) struct FarOpener {
    up: Arc<Up>,
    waiting: Arc<Waiting>,
}

/// A guest that waits until this is dropped.
struct Waiter {
    waiting: Arc<Waiting>,
    guest: GuestId,
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.guest);
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
        Arc::new(Self { up, waiting: Arc::default() })
    }

    /// The daemon has answered, with a model that the process knows, or did.
    pub(super) fn note_opened(
        &self,
        guest: GuestId,
        opened: Result<Option<(ModelNumber, ModelHandle)>, NotLoaded>,
    ) {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&guest);
        let opened = opened.and_then(|known| {
            let (model, handle) = known.ok_or_else(|| NotLoaded {
                reason: "it was unloaded as soon as it was there".to_owned(),
                again: Again::Later,
            })?;
            let claim = FarClaim { up: self.up.clone(), guest, model };
            Ok(Opened { model: handle, claim: Box::new(claim) })
        });
        if let Some(waiting) = waiting {
            // A guest that has ended lets go of it with this.
            let _ = waiting.send(opened);
        }
    }
}

impl Opener for FarOpener {
    fn open(&self, name: &str, asker: Asker) -> BoxFuture<'static, Result<Opened, NotLoaded>> {
        let (answer, answered) = oneshot::channel();
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(asker.guest, answer);
        self.up.say(&FromGuests::Open { guest: asker.guest, name: name.to_owned() });
        let lost = || NotLoaded { reason: "the daemon is gone".to_owned(), again: Again::NextDaemon };
        let waiter = Waiter { waiting: self.waiting.clone(), guest: asker.guest };
        async move {
            let opened = answered.await.unwrap_or_else(|_| Err(lost()));
            drop(waiter);
            opened
        }
        .boxed()
    }
}
