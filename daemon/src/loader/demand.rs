//! Loads that guests cause by asking for a model: all that ask for one wait for the same load, which ends with the last of them that
//! waits.

use std::collections::HashMap;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use trellis_engine::account::ActorId;
use trellis_engine::{EngineError, ModelHandle, ModelLease, SavedName};

use super::errand::{Errand, Lack, Patience};
use super::residents::Wish;
use super::setbacks::Files;
use super::{Loader, panic_message};
use crate::daemon::DaemonError;
use crate::on_demand::{Again, Asker, NotLoaded, Opened, Opener};
use crate::tasks::joined;

/// How often a guest tries anew because the model went in the moment in which it came.
const N_TRIES: usize = 16;

/// What comes of a load: the model, which stays as long as this is held.
type Loaded = Shared<BoxFuture<'static, Result<Arc<ModelLease>, Arc<DaemonError>>>>;

/// Loads under way.
#[derive(Default)]
pub(super) struct Demand {
    flights: Mutex<HashMap<String, Flight>>,
    /// Held by the one load of each model that is at its files. One that is given up may be at them for long, where nothing answers.
    turns: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
    /// Where loads go on, whoever waits for them.
    runtime: OnceLock<Handle>,
    /// Whether no load begins any more.
    is_over: AtomicBool,
    /// Whether loads wait until devices are opened again.
    is_paused: watch::Sender<bool>,
}

/// No model is loaded on demand as long as this is there.
pub(super) struct Pause<'a>(&'a Demand);

impl Drop for Pause<'_> {
    fn drop(&mut self) {
        self.0.is_paused.send_replace(false);
    }
}

#[derive(Clone)]
struct Flight {
    progress: watch::Receiver<(u64, u64)>,
    lacks: watch::Receiver<Option<Lack>>,
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

    /// Gives up the loads under way, of which guests wait for the next one, and lets none begin for as long.
    pub(super) fn pause(&self) -> Pause<'_> {
        // Before the look: what begins after it waits.
        self.is_paused.send_replace(true);
        self.lock().values().for_each(|flight| flight.given_up.cancel());
        Pause(self)
    }

    #[cfg(test)]
    pub(super) fn is_paused(&self) -> bool {
        *self.is_paused.borrow()
    }

    fn turn(&self, name: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        turns.entry(name.to_owned()).or_default().clone()
    }

    fn runtime(&self) -> Handle {
        self.runtime.get().cloned().unwrap_or_else(Handle::current)
    }
}

impl Loader {
    /// No load begins on demand from now on, since the daemon ends. What is loaded is there as before.
    pub(crate) fn load_no_more(&self) {
        self.demand.is_over.store(true, Ordering::Relaxed);
    }

    /// Holds a model of the catalog for a guest, once it is loaded.
    ///
    /// # Errors
    /// It cannot be loaded, or there is no room for it.
    async fn fetch(self: &Arc<Self>, name: &str, asker: &Asker) -> Result<ModelLease, Arc<DaemonError>> {
        let patience = Patience::begin(Duration::from_millis(self.config.model_wait_ms));
        let (mut n_tries, mut is_renewed) = (0, false);
        loop {
            let listing = self.models.listing();
            let loaded = listing.in_order().iter().find(|model| model.model().name == name);
            if let Some(failed) = loaded.filter(|model| model.device_failure().is_none())
                && let Some(failure) = failed.failure()
            {
                if is_renewed {
                    let (name, source) = (name.to_owned(), EngineError::Failed(failure));
                    return Err(Arc::new(DaemonError::Engine { name, source }));
                }
                is_renewed = true;
                self.send_off_failed(failed);
            } else if loaded.is_some() && self.is_shut(name, asker) {
                asker.loads.hear(name, 0, 0);
                tokio::select! {
                    biased;
                    () = self.gates.opened(name, asker.guest) => continue,
                    () = patience.over() => {
                        return Err(Arc::new(DaemonError::MakesRoom { name: name.to_owned() }));
                    }
                }
            } else if let Some(lease) = loaded.and_then(ModelHandle::try_lease) {
                self.residents.note_used(name);
                return Ok(lease);
            }
            if let Some(gone) = self.leaving.gone(name) {
                asker.loads.hear(name, 0, 0);
                tokio::select! {
                    biased;
                    _ = gone => continue,
                    () = patience.over() => {
                        return Err(Arc::new(DaemonError::Leaving { name: name.to_owned() }));
                    }
                }
            }
            if let Some(error) = self.setback(name).await {
                return Err(error);
            }
            n_tries += 1;
            match self.loaded_for(name, asker, patience).await {
                Ok(loaded) => {
                    if let Some(lease) = loaded.handle().try_lease() {
                        return Ok(lease);
                    }
                }
                Err(error) => {
                    if self.ending.is_cancelled() {
                        return Err(Arc::new(DaemonError::Ending));
                    }
                    let is_worth_another_try = matches!(
                        *error,
                        DaemonError::AlreadyLoaded { .. }
                            | DaemonError::Leaving { .. }
                            | DaemonError::GivenUp
                    );
                    if !is_worth_another_try || n_tries >= N_TRIES {
                        return Err(error);
                    }
                    // It was there, or went, between the looks.
                    tokio::task::yield_now().await;
                }
            }
        }
    }

    /// Whether a guest does not get a model that is loaded, because a load waits until it goes.
    fn is_shut(&self, name: &str, asker: &Asker) -> bool {
        self.gates.shut_until(name, asker.guest, Instant::now()).is_some()
    }

    /// Unloads a model of which nothing more is computed, although its device works: it is loaded again as any other.
    fn send_off_failed(self: &Arc<Self>, failed: &ModelHandle) {
        let runtime = self.demand.runtime();
        let _entered = runtime.enter();
        let _ = self.leaving.begin(|| {
            let source = EngineError::Failed(failed.failure()?);
            let model = self.models.send_off_this(failed)?;
            let name = &model.model().name;
            let error = Arc::new(DaemonError::Engine { name: name.clone(), source });
            let delay = self.setbacks.note_failed(name, error, Instant::now());
            tracing::warn!(
                model = name,
                "a model that has failed is loaded again after {} s",
                delay.as_secs()
            );
            Some(self.see_off(model, Instant::now()))
        });
    }

    /// Waits for the load of a model, which begins if it is not under way, and tells how far it is. Whoever comes late to one that
    /// waits for room has as much patience as the first.
    async fn loaded_for(
        self: &Arc<Self>,
        name: &str,
        asker: &Asker,
        patience: Patience,
    ) -> Result<Arc<ModelLease>, Arc<DaemonError>> {
        let (Flight { mut progress, lacks, mut loaded, .. }, _waits) = self.join(name, asker.user)?;
        let mut late = pin!(patience.over_for(lacks));
        let (done, total) = *progress.borrow_and_update();
        asker.loads.hear(name, done, total);
        loop {
            tokio::select! {
                biased;
                loaded = &mut loaded => return loaded,
                error = &mut late => return Err(Arc::new(error)),
                Ok(()) = progress.changed() => {
                    let (done, total) = *progress.borrow_and_update();
                    asker.loads.hear(name, done, total);
                }
            }
        }
    }

    fn join(
        self: &Arc<Self>,
        name: &str,
        user: ActorId,
    ) -> Result<(Flight, Arc<DropGuard>), Arc<DaemonError>> {
        let mut flights = self.demand.lock();
        if let Some(flight) = flights.get(name).filter(|flight| !flight.given_up.is_cancelled())
            && let Some(waits) = flight.waits.upgrade()
        {
            return Ok((flight.clone(), waits));
        }
        if self.demand.is_over.load(Ordering::Relaxed) {
            return Err(Arc::new(DaemonError::Ending));
        }
        let given_up = self.ending.child_token();
        let waits = Arc::new(given_up.clone().drop_guard());
        let (report, progress) = watch::channel((0, 0));
        let (errand, lacks) = Errand::new(Wish::User(user), given_up.clone());
        let loading = self.clone().load_on_demand(name.to_owned(), user, report, errand);
        let loaded = joined(self.demand.runtime().spawn(loading)).boxed().shared();
        let flight = Flight { progress, lacks, loaded, waits: Arc::downgrade(&waits), given_up };
        flights.insert(name.to_owned(), flight.clone());
        Ok((flight, waits))
    }

    async fn load_on_demand(
        self: Arc<Self>,
        name: String,
        user: ActorId,
        report: watch::Sender<(u64, u64)>,
        errand: Errand,
    ) -> Result<Arc<ModelLease>, Arc<DaemonError>> {
        let progress = move |done, total| {
            report.send_replace((done, total));
        };
        let given_up = errand.given_up.clone();
        let (turn, mut is_paused) = (self.demand.turn(&name), self.demand.is_paused.subscribe());
        let mut files = Files::default();
        let loading = async {
            let its_turn = async {
                let turn = turn.lock().await;
                // The sender is held by the loader.
                let _ = is_paused.wait_for(|is_paused| !is_paused).await;
                turn
            };
            let _turn = tokio::select! {
                biased;
                () = given_up.cancelled() => return Err(Arc::new(DaemonError::GivenUp)),
                turn = its_turn => turn,
            };
            files = self.files_of(&name).await;
            let loaded = self.load_to_the_end(name.clone(), None, Box::new(progress), errand).await;
            loaded.map(Arc::new).map_err(Arc::new)
        };
        let loaded = AssertUnwindSafe(loading).catch_unwind().await.unwrap_or_else(|panic| {
            let message = panic_message(panic.as_ref());
            Err(Arc::new(DaemonError::Panicked { name: name.clone(), message }))
        });
        self.note_outcome(&name, files, loaded.as_ref().err());
        // What is asked from here on looks at what is loaded first. Another load may have begun after this one was given up.
        let mut flights = self.demand.lock();
        if !given_up.is_cancelled() {
            flights.remove(&name);
        }
        flights.retain(|_, flight| !flight.given_up.is_cancelled());
        drop(flights);
        if let Err(error) = &loaded {
            tracing::warn!(model = name, uid = user.0, %error, "a model was not loaded on demand");
        }
        loaded
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
            let loader = loader.ok_or_else(|| told(&DaemonError::Ending))?;
            let lease = loader.fetch(&name, &asker).await.map_err(|error| told(&error))?;
            let (model, claim) = (lease.handle().clone(), loader.gates.hold(asker.guest, lease));
            Ok(Opened { model, claim: Box::new(claim) })
        }
        .boxed()
    }

    fn forget(&self, name: &str, asker: Asker) -> BoxFuture<'static, bool> {
        let keepers = self.0.upgrade().and_then(|loader| loader.keepers().cloned());
        let name = SavedName { actor: asker.user, name: name.to_owned() };
        async move {
            match keepers {
                Some(keepers) => keepers.forget(name).await,
                None => false,
            }
        }
        .boxed()
    }
}

/// What any user may hear of why a model was not loaded: where files are, and what is wrong with them, is for the log.
fn told(error: &DaemonError) -> NotLoaded {
    let (reason, again) = match error {
        DaemonError::Ending => (error.to_string(), Again::NextDaemon),
        DaemonError::NoRoomNow { .. }
        | DaemonError::MakesRoom { .. }
        | DaemonError::Leaving { .. }
        | DaemonError::GivenUp => (error.to_string(), Again::Later),
        DaemonError::NoRoom { .. } | DaemonError::KvTooSmall { .. } => (error.to_string(), Again::Never),
        DaemonError::Engine { source, .. } if source.is_retryable() => (error.to_string(), Again::Later),
        DaemonError::Engine { .. } => (error.to_string(), Again::Never),
        _ => ("it cannot be; the daemon's log says why".to_owned(), Again::Never),
    };
    NotLoaded { reason, again }
}

#[cfg(test)]
mod tests;
