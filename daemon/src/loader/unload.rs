//! How models go: those that are unloaded, and those whose load was given up.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::Instant;
use trellis_engine::ModelHandle;

use super::{Loader, OpenDevice, panic_message, watches};
use crate::daemon::DaemonError;
use crate::leaving::{Leaver, drained};
use crate::models::names;
use crate::tasks::{blocking, joined};

impl Loader {
    /// Unloads a model: no new contexts are opened, those that are there have so much time to come to their end, then
    /// they end. One that is on its way out already goes by the sooner of both times. Once begun it goes on, even if the
    /// future is dropped.
    ///
    /// Returns the name of the model that is the default now.
    ///
    /// # Errors
    /// No model of that name is loaded, or the device has failed.
    pub(crate) async fn unload(
        self: &Arc<Self>,
        name: &str,
        drain: Duration,
    ) -> Result<Option<String>, Arc<DaemonError>> {
        let until = Instant::now() + drain;
        let gone = self.leaving.hurry_or(name, until, || {
            let model = self.models.send_off(name).ok_or_else(|| self.not_loaded(name))?;
            tracing::info!(model = name, default = self.default_now(), "a model is being unloaded");
            Ok(self.see_off(model, until))
        });
        gone?.await?;
        Ok(names(&self.models.now()).into_iter().next())
    }

    fn not_loaded(&self, name: &str) -> DaemonError {
        DaemonError::NotLoaded { name: name.to_owned(), known: names(&self.models.now()) }
    }

    /// Drains a model that was sent off, beside others that come and go, and takes it off its device.
    pub(super) fn see_off(self: &Arc<Self>, model: ModelHandle, until: Instant) -> Leaver {
        model.close();
        let (until, moment) = watch::channel(until);
        let (loader, leaver) = (self.clone(), model.clone());
        let unloading = tokio::spawn(async move {
            drained(&leaver, moment).await;
            loader.take_off(&leaver).await
        });
        let (loader, leaver) = (self.clone(), model.clone());
        let gone = tokio::spawn(async move {
            let unloaded = unloading.await;
            // Guests do not find it any more, however that went.
            loader.models.remove(&leaver);
            loader.leaving.remove(&leaver);
            // Where its device was opened again meanwhile, or has failed, this is what was seen of it last.
            loader.totals.close(&leaver, None);
            match &unloaded {
                Ok(Ok(())) => tracing::info!(model = leaver.model().name, "a model was unloaded"),
                Ok(Err(error)) => {
                    tracing::warn!(model = leaver.model().name, %error, "a model was not unloaded")
                }
                Err(_) => {}
            }
            match unloaded.map_err(tokio::task::JoinError::try_into_panic) {
                Ok(unloaded) => unloaded.map_err(Arc::new),
                Err(Ok(panic)) => {
                    let (name, message) = (leaver.model().name.clone(), panic_message(panic.as_ref()));
                    Err(Arc::new(DaemonError::Panicked { name, message }))
                }
                // The runtime ends, and this task with it.
                Err(Err(_)) => std::future::pending().await,
            }
        });
        Leaver { model, until, gone: joined(gone).boxed().shared() }
    }

    /// Takes a model off its device, which others then share anew. Its guests end before, whatever else comes or goes on
    /// the device.
    async fn take_off(&self, model: &ModelHandle) -> Result<(), DaemonError> {
        model.end();
        // What its guests saved is still there to be taken.
        self.settle_saved_of(model).await;
        let mut devices = self.devices.lock().await;
        self.clear(&mut devices, model).await
    }

    /// Gives the place of a model to the others on its device, and closes the device if there are none.
    pub(super) async fn clear(
        &self,
        devices: &mut Vec<OpenDevice>,
        model: &ModelHandle,
    ) -> Result<(), DaemonError> {
        let idx_of = |open: &OpenDevice| open.tenants.iter().position(|tenant| tenant.handle.is_same(model));
        // Where the device was opened again meanwhile, the model is gone already.
        let Some((open, idx)) = devices.iter_mut().find_map(|open| idx_of(open).map(|idx| (open, idx)))
        else {
            return Ok(());
        };
        open.tenants.remove(idx);
        self.changes.send_modify(|n_changes| *n_changes += 1);
        // One whose device has failed has nothing more to tell.
        let last = model.stats().await.ok();
        let removed = open.engine.remove(model).await;
        open.past.note_busy(last.as_ref().map(|stats| stats.device_busy).unwrap_or_default());
        self.totals.close(model, last.as_ref());
        let backend =
            removed.map_err(|source| DaemonError::Engine { name: model.model().name.clone(), source })?;
        blocking(move || drop(backend)).await;
        open.settle(&self.config).await;
        self.close_idle(devices).await;
        Ok(())
    }

    /// Lets go of devices that have no models, but for the first, and for those that have failed: that is to be seen.
    pub(super) async fn close_idle(&self, devices: &mut Vec<OpenDevice>) {
        let is_idle = |(idx, open): (usize, &OpenDevice)| {
            idx > 0
                && open.tenants.is_empty()
                && open.coming.is_empty()
                && open.engine.watch().failure().is_none()
        };
        while let Some(idx) = devices.iter().enumerate().position(is_idle) {
            let idle = devices.remove(idx);
            blocking(move || drop(idle)).await;
        }
        self.models.set_devices(watches(devices));
    }
}

/// A model that was just loaded and not handed over yet: it is unloaded if this is dropped.
pub(super) struct Fresh {
    pub(super) loader: Arc<Loader>,
    pub(super) handle: Option<ModelHandle>,
}

impl Fresh {
    pub(super) fn keep(mut self) -> ModelHandle {
        self.handle.take().expect("it is kept once")
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        // At the end of the runtime the engines stop as well.
        let (Some(handle), Ok(_)) = (self.handle.take(), Handle::try_current()) else { return };
        let _ = self.loader.leaving.begin(|| {
            // It is not found from here on. If another call has sent it off meanwhile, it goes already.
            let model = self.loader.models.send_off_this(&handle)?;
            tracing::info!(model = model.model().name, "a load was cancelled");
            Some(self.loader.see_off(model, Instant::now()))
        });
    }
}
