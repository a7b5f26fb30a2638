//! Loads that guests cause by asking for a model: all that ask for one wait for the same load, which ends with the last of them that
//! waits.

use std::collections::HashMap;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};
use trellis_engine::ModelLease;
use trellis_engine::account::ActorId;

use super::residents::Wish;
use super::{Loader, panic_message};
use crate::daemon::DaemonError;
use crate::on_demand::{Asker, NotLoaded, Opened, Opener};
use crate::tasks::joined;

/// How often a guest tries anew because the model went in the moment in which it came.
const N_TRIES: usize = 16;

/// What comes of a load: the model, which stays as long as this is held.
type Loaded = Shared<BoxFuture<'static, Result<Arc<ModelLease>, Arc<DaemonError>>>>;

/// Loads under way.
#[derive(Default)]
pub(super) struct Demand {
    flights: Mutex<HashMap<String, Flight>>,
    /// Where loads go on, whoever waits for them.
    runtime: OnceLock<Handle>,
}

#[derive(Clone)]
struct Flight {
    progress: watch::Receiver<(u64, u64)>,
    loaded: Loaded,
    /// Held by all that wait.
    waits: Weak<DropGuard>,
    given_up: CancellationToken,
}

impl Demand {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Flight>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loads go on there from now on; `false` if that was said before.
    pub(super) fn go_on_in(&self, runtime: &Handle) -> bool {
        self.runtime.set(runtime.clone()).is_ok()
    }

    /// How many bytes of a model are loaded, and how many there are, if a guest waits for it.
    pub(super) fn progress_of(&self, name: &str) -> Option<(u64, u64)> {
        let flights = self.lock();
        let flight = flights.get(name).filter(|flight| flight.waits.strong_count() > 0)?;
        Some(*flight.progress.borrow())
    }
}

impl Loader {
    /// Holds a model of the catalog for a guest, once it is loaded.
    ///
    /// # Errors
    /// It cannot be loaded, or there is no room for it.
    async fn fetch(self: &Arc<Self>, name: &str, asker: &Asker) -> Result<ModelLease, Arc<DaemonError>> {
        let mut n_tries = 0;
        loop {
            let listing = self.models.listing();
            let loaded = listing.in_order().iter().find(|model| model.model().name == name);
            if let Some(lease) = loaded.and_then(trellis_engine::ModelHandle::try_lease) {
                self.residents.note_used(name);
                return Ok(lease);
            }
            if let Some(gone) = self.leaving.gone(name) {
                asker.loads.hear(name, 0, 0);
                let _ = gone.await;
                continue;
            }
            n_tries += 1;
            match self.loaded_for(name, asker).await {
                Ok(loaded) => {
                    if let Some(lease) = loaded.handle().try_lease() {
                        return Ok(lease);
                    }
                }
                Err(error) => {
                    let is_passing = matches!(
                        *error,
                        DaemonError::AlreadyLoaded { .. }
                            | DaemonError::Leaving { .. }
                            | DaemonError::GivenUp
                    );
                    if !is_passing || self.ending.is_cancelled() || n_tries >= N_TRIES {
                        return Err(error);
                    }
                    // It was there, or went, between the looks.
                    tokio::task::yield_now().await;
                }
            }
        }
    }

    /// Waits for the load of a model, which begins if it is not under way, and tells how far it is.
    async fn loaded_for(
        self: &Arc<Self>,
        name: &str,
        asker: &Asker,
    ) -> Result<Arc<ModelLease>, Arc<DaemonError>> {
        let (Flight { mut progress, mut loaded, .. }, _waits) = self.join(name, asker.user);
        let (done, total) = *progress.borrow_and_update();
        asker.loads.hear(name, done, total);
        loop {
            tokio::select! {
                biased;
                loaded = &mut loaded => return loaded,
                Ok(()) = progress.changed() => {
                    let (done, total) = *progress.borrow_and_update();
                    asker.loads.hear(name, done, total);
                }
            }
        }
    }

    fn join(self: &Arc<Self>, name: &str, user: ActorId) -> (Flight, Arc<DropGuard>) {
        let mut flights = self.demand.lock();
        if let Some(flight) = flights.get(name)
            && let Some(waits) = flight.waits.upgrade()
        {
            return (flight.clone(), waits);
        }
        let given_up = self.ending.child_token();
        let waits = Arc::new(given_up.clone().drop_guard());
        let (report, progress) = watch::channel((0, 0));
        let loading = self.clone().load_on_demand(name.to_owned(), user, report, given_up.clone());
        let runtime = self.demand.runtime.get().cloned().unwrap_or_else(Handle::current);
        let loaded = joined(runtime.spawn(loading)).boxed().shared();
        let flight = Flight { progress, loaded, waits: Arc::downgrade(&waits), given_up };
        flights.insert(name.to_owned(), flight.clone());
        (flight, waits)
    }

    async fn load_on_demand(
        self: Arc<Self>,
        name: String,
        user: ActorId,
        report: watch::Sender<(u64, u64)>,
        given_up: CancellationToken,
    ) -> Result<Arc<ModelLease>, Arc<DaemonError>> {
        let progress = move |done, total| {
            report.send_replace((done, total));
        };
        let loading =
            self.load_to_the_end(name.clone(), None, Box::new(progress), given_up.clone(), Wish::User(user));
        let loaded = AssertUnwindSafe(loading).catch_unwind().await.unwrap_or_else(|panic| {
            Err(DaemonError::Panicked { name: name.clone(), message: panic_message(panic.as_ref()) })
        });
        // What is asked from here on looks at what is loaded first. Another load may have begun after this one was given up.
        let mut flights = self.demand.lock();
        if !given_up.is_cancelled() {
            flights.remove(&name);
        }
        flights.retain(|_, flight| !flight.given_up.is_cancelled());
        drop(flights);
        match loaded {
            Ok(handle) => {
                let lease = handle.try_lease().map(Arc::new);
                lease.ok_or_else(|| Arc::new(DaemonError::Leaving { name }))
            }
            Err(error) => {
                tracing::warn!(model = name, uid = user.0, %error, "a model was not loaded on demand");
                Err(Arc::new(error))
            }
        }
    }
}

/// Loads what guests ask for, as long as the daemon is there.
pub(super) struct OnDemand(pub(super) Weak<Loader>);

impl fmt::Debug for OnDemand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnDemand")
    }
}

impl Opener for OnDemand {
    fn open(&self, name: &str, asker: Asker) -> BoxFuture<'static, Result<Opened, NotLoaded>> {
        let (loader, name) = (self.0.upgrade(), name.to_owned());
        async move {
            let ended = || NotLoaded { reason: "the daemon ends".to_owned(), is_retryable: true };
            let loader = loader.ok_or_else(ended)?;
            let lease = loader.fetch(&name, &asker).await.map_err(|error| told(&error))?;
            Ok(Opened { model: lease.handle().clone(), claim: Box::new(lease) })
        }
        .boxed()
    }
}

/// What any user may hear of why a model was not loaded: where files are, and what is wrong with them, is for the log.
fn told(error: &DaemonError) -> NotLoaded {
    let (reason, is_retryable) = match error {
        DaemonError::NoRoomNow { .. } | DaemonError::Leaving { .. } | DaemonError::GivenUp => {
            (error.to_string(), true)
        }
        DaemonError::NoRoom { .. } | DaemonError::KvTooSmall { .. } => (error.to_string(), false),
        DaemonError::Engine { source, .. } => (error.to_string(), source.is_retryable()),
        _ => ("it cannot be; the daemon's log says why".to_owned(), false),
    };
    NotLoaded { reason, is_retryable }
}

#[cfg(test)]
mod tests;
