//! Models on their way out: their guests have until a moment that may be brought forward.

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::future::{BoxFuture, Shared};
use tokio::sync::watch;
use tokio::time::Instant;
use trellis_engine::ModelHandle;

use crate::daemon::DaemonError;

/// The end of a model, for all calls that wait for it.
pub(crate) type Gone = Shared<BoxFuture<'static, Result<(), Arc<DaemonError>>>>;

/// Those that guests do not find any more and that are not gone.
#[derive(Debug, Default)]
pub(crate) struct Leaving(Mutex<Vec<Leaver>>);

/// One of them.
#[derive(Debug)]
pub(crate) struct Leaver {
    pub(crate) model: ModelHandle,
    /// When its guests are ended.
    pub(crate) until: watch::Sender<Instant>,
    pub(crate) gone: Gone,
}

impl Leaving {
    /// The end of the model of this name, which comes no later than that. If it is not on its way out, `begin` sends it
    /// there: no other call comes between.
    pub(crate) fn hurry_or(
        &self,
        name: &str,
        until: Instant,
        begin: impl FnOnce() -> Result<Leaver, DaemonError>,
    ) -> Result<Gone, DaemonError> {
        let mut leaving = self.lock();
        if let Some(leaver) = leaving.iter().find(|leaver| leaver.model.model().name == name) {
            leaver.until.send_if_modified(|earlier| {
                let is_sooner = until < *earlier;
                *earlier = until.min(*earlier);
                is_sooner
            });
            return Ok(leaver.gone.clone());
        }
        let leaver = begin()?;
        let gone = leaver.gone.clone();
        leaving.push(leaver);
        Ok(gone)
    }

    /// One more, if `begin` sends one there: its end.
    pub(crate) fn begin(&self, begin: impl FnOnce() -> Option<Leaver>) -> Option<Gone> {
        let mut leaving = self.lock();
        let leaver = begin()?;
        let gone = leaver.gone.clone();
        leaving.push(leaver);
        Some(gone)
    }

    /// The end of the model of this name, if it is on its way out.
    pub(crate) fn gone(&self, name: &str) -> Option<Gone> {
        let leaving = self.lock();
        leaving.iter().find(|leaver| leaver.model.model().name == name).map(|leaver| leaver.gone.clone())
    }

    pub(crate) fn remove(&self, model: &ModelHandle) {
        self.lock().retain(|leaver| !leaver.model.is_same(model));
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Leaver>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits until no guest has anything of the model, or the time is over.
pub(crate) async fn drained(model: &ModelHandle, mut until: watch::Receiver<Instant>) {
    let mut idle = pin!(model.idle());
    loop {
        let moment = *until.borrow_and_update();
        tokio::select! {
            () = &mut idle => return,
            () = tokio::time::sleep_until(moment) => return,
            // It was brought forward.
            Ok(()) = until.changed() => {}
        }
    }
}
