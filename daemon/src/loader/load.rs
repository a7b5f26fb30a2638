//! How a model comes to those that are there: it gets its place on a device, is read, and is put there. Only the first and
//! the last hold the devices: what is read may lie where nothing answers, and must keep no other load waiting.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::MutexGuard;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use trellis_engine::model::Model;
use trellis_engine::{ModelHandle, ModelLease};

use super::errand::{Errand, Lack, Patience};
use super::queue::Ticket;
use super::residents::{Evictable, Wish};
use super::room::Room;
use super::unload::Fresh;
use super::{
    Candidate, Fittings, Loader, OpenDevice, Read, load_backend, open_device, panic_message, watches,
};
use crate::config::{Config, Device};
use crate::daemon::{DaemonError, open_model};
use crate::device::{Chosen, Kv};
use crate::shares::Needs;
use crate::tasks::{blocking, joined};

/// Hears how many bytes of a model are loaded, and how many there are.
pub(super) type ProgressFn = Box<dyn Fn(u64, u64) + Send + Sync>;

/// A model whose place on a device is kept while it is read. There is one of a name.
pub(super) struct Coming {
    name: String,
    /// With just the KV memory that it comes with.
    needs: Needs,
    /// When the first of those came in whose place it is loaded.
    came: Option<Instant>,
}

impl Coming {
    /// What is kept for it, which others cannot make smaller.
    pub(super) fn needs(&self) -> Needs {
        self.needs
    }
}

/// Where a model is read to.
struct Destination {
    chosen: Chosen,
    kv: Kv,
}

/// What became of the wish for a place.
enum Kept {
    /// It is kept.
    Place(Box<(Destination, Candidate)>),
    /// There may be one for so much once those that are coming are there or have failed to come.
    Later(Needs),
    /// There may be one once this has happened.
    Room(Room),
}

/// Unwinds out of a load whose caller has stopped waiting.
struct Unwanted;

impl Loader {
    /// Loads a model while others go on. They give up KV memory for its longest context; which has more follows from then on
    /// what guests ask. If the future is dropped, no more of the model is read and all that it took comes back.
    ///
    /// # Errors
    /// The model or the device cannot be used, or the model does not fit.
    pub(crate) async fn load(
        self: &Arc<Self>,
        choice: String,
        device: Option<Device>,
        progress: impl Fn(u64, u64) + Send + Sync + 'static,
    ) -> Result<ModelHandle, DaemonError> {
        if let Some(name) = self.models.declared().resolve(&choice) {
            self.setbacks.clear(name);
        }
        let patience = Patience::begin(Duration::from_millis(self.config.model_wait_ms));
        let given_up = self.ending.child_token();
        let waits = given_up.clone().drop_guard();
        let (errand, lacks) = Errand::new(Wish::Operator, given_up);
        let loader = self.clone();
        let loading = tokio::spawn(async move {
            let progress = Box::new(progress);
            let loaded = loader.load_to_the_end(choice.clone(), device, progress, errand).await;
            if let Err(error) = &loaded {
                tracing::warn!(model = choice, %error, "a model was not loaded");
            }
            let handle = loaded?.handle().clone();
            Ok::<_, DaemonError>(Fresh { loader, handle: Some(handle) })
        });
        let fresh = tokio::select! {
            biased;
            fresh = joined(loading) => fresh?,
            error = patience.over_for(lacks) => {
                self.news.note_failure(error.to_string());
                return Err(error);
            }
        };
        waits.disarm();
        Ok(fresh.keep())
    }

    /// As [`Self::load`], for whoever wishes it, who holds it from the moment in which others find it; ends early once it is given up.
    pub(super) async fn load_to_the_end(
        self: &Arc<Self>,
        choice: String,
        device: Option<Device>,
        progress: ProgressFn,
        errand: Errand,
    ) -> Result<ModelLease, DaemonError> {
        let under_way = self.news.begin(&choice, errand.wish == Wish::Operator);
        let heard = under_way.heard();
        let progress = Box::new(move |done_bytes, total_bytes| {
            heard.note(done_bytes, total_bytes);
            progress(done_bytes, total_bytes);
        });
        let loaded = self.load_of_news(choice, device, progress, &errand).await;
        // What passes by itself when a guest asks is no failure of the daemon.
        let is_passing = |error: &&DaemonError| errand.wish != Wish::Operator && error.is_passing();
        under_way.end(loaded.as_ref().err().filter(|error| !is_passing(error)));
        loaded
    }

    async fn load_of_news(
        self: &Arc<Self>,
        choice: String,
        device: Option<Device>,
        progress: ProgressFn,
        errand: &Errand,
    ) -> Result<ModelLease, DaemonError> {
        let given_up = &errand.given_up;
        let check_wanted = || if given_up.is_cancelled() { Err(DaemonError::GivenUp) } else { Ok(()) };
        check_wanted()?;
        let device = self.device_of(&choice, device);
        let (config, path) = (self.config.clone(), choice.clone());
        let model = blocking(move || open_model(&path, &config)).await?;
        check_wanted()?;
        let name = model.name.clone();
        tracing::info!(model = name, "a model is being loaded");
        let (place, candidate) = self.keep_place(choice, model, device, errand).await?;
        let (config, fittings, unwanted) = (self.config.clone(), self.fittings.clone(), given_up.clone());
        let reading = blocking(move || {
            let read = read(&place, &candidate.model, &config, &fittings, &progress, &unwanted)?;
            Ok::<_, DaemonError>((candidate, read))
        });
        let read = AssertUnwindSafe(reading).catch_unwind().await;
        let read = read.unwrap_or_else(|panic| {
            Err(DaemonError::Panicked { name: name.clone(), message: panic_message(panic.as_ref()) })
        });
        self.arrive((&name, errand.wish), read, given_up).await
    }

    /// Keeps a place on its device for a model. While one of its name is coming, or others for which too much is kept beside
    /// it, that is waited for: they may fail. Models of the catalog that nobody uses make place, and those that are used are waited
    /// for, as long as whoever wants it does.
    async fn keep_place(
        self: &Arc<Self>,
        choice: String,
        model: Model,
        device: Device,
        Errand { wish, given_up, lacks }: &Errand,
    ) -> Result<(Destination, Candidate), DaemonError> {
        let name = model.name.clone();
        let mut model = Some((choice, model));
        let mut ticket = Ticket::new(self, device, *wish);
        let mut came = None;
        loop {
            let mut changes = self.changes.subscribe();
            let mut devices = tokio::select! {
                biased;
                () = given_up.cancelled() => return Err(DaemonError::GivenUp),
                devices = self.devices.lock() => devices,
            };
            check_absent(&devices, &name)?;
            let mut in_the_way = None;
            if !devices.iter().flat_map(|open| &open.coming).any(|coming| coming.name == name) {
                let idx = self.open(&mut devices, device).await?;
                let open = &mut devices[idx];
                let evictable = self.residents.evictable(open, (*wish, ticket.since()), &self.config);
                let before = ticket.before();
                let keeping = open.keep_place(&mut model, &evictable, (&before, came), &self.config);
                // Also after a panic the others get back the room that they gave.
                let kept = AssertUnwindSafe(keeping).catch_unwind().await.unwrap_or_else(|panic| {
                    let message = panic_message(panic.as_ref());
                    Err(DaemonError::Panicked { name: name.clone(), message })
                });
                match kept {
                    Ok(Kept::Place(place)) => {
                        lacks.send_replace(None);
                        return Ok(*place);
                    }
                    Ok(Kept::Later(needs)) => ticket.wait(needs),
                    Ok(Kept::Room(Room::Evict(models))) => {
                        drop(devices);
                        came = came.into_iter().chain(self.residents.came(&models, *wish)).min();
                        let why = format!("{name} needs the room");
                        self.evict_all(&models, &why).await;
                        continue;
                    }
                    Ok(Kept::Room(Room::Wait(awaited))) => {
                        ticket.wait(awaited.needs);
                        in_the_way = Some(awaited);
                    }
                    Err(error) => {
                        open.coming.retain(|coming| coming.name != name);
                        open.settle(&self.config).await;
                        self.close_idle(&mut devices).await;
                        return Err(error);
                    }
                }
            }
            drop(devices);
            ticket.press(in_the_way.as_ref().map_or(&[], |awaited| &awaited.enough));
            lacks.send_replace(in_the_way.as_ref().map(|awaited| Lack {
                name: name.clone(),
                needed_bytes: awaited.needs.fixed_bytes + awaited.needs.kv_bytes_min(),
                used: awaited.names(),
            }));
            let over = async {
                match &in_the_way {
                    Some(awaited) => awaited.over().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = changes.changed() => {}
                () = over => {}
                () = ticket.over() => {}
                () = given_up.cancelled() => return Err(DaemonError::GivenUp),
            }
        }
    }

    /// The place of a device among those in use; it is opened if it is not there.
    pub(super) async fn open(
        &self,
        devices: &mut Vec<OpenDevice>,
        device: Device,
    ) -> Result<usize, DaemonError> {
        if let Some(idx) = devices.iter().position(|open| open.device.is_same(device)) {
            return Ok(idx);
        }
        let (config, cache_dir, fittings) =
            (self.config.clone(), self.cache_dir.clone(), self.fittings.clone());
        devices.push(blocking(move || open_device(device, &config, &cache_dir, &fittings)).await?);
        self.models.set_devices(watches(devices));
        Ok(devices.len() - 1)
    }

    /// Puts a model that was read in its place, which others have otherwise, and holds it: it is not to go before it was used.
    async fn arrive(
        &self,
        (name, wish): (&str, Wish),
        read: Result<(Candidate, Read), DaemonError>,
        given_up: &CancellationToken,
    ) -> Result<ModelLease, DaemonError> {
        let mut devices = self.devices.lock().await;
        let is_here = |open: &&mut OpenDevice| open.coming.iter().any(|coming| coming.name == name);
        let Some(open) = devices.iter_mut().find(is_here) else {
            // The daemon ends, and its devices are closed.
            blocking(move || drop(read)).await;
            return Err(DaemonError::GivenUp);
        };
        let came = open.coming.iter().find(|coming| coming.name == name).and_then(|coming| coming.came);
        open.coming.retain(|coming| coming.name != name);
        self.changes.send_modify(|n_changes| *n_changes += 1);
        let arrived = match read {
            Ok((candidate, read)) if !given_up.is_cancelled() => {
                open.take_in(candidate, read, &self.fittings).map(|handle| handle.lease())
            }
            Ok(unwanted) => {
                blocking(move || drop(unwanted)).await;
                Err(DaemonError::GivenUp)
            }
            Err(error) => Err(error),
        };
        open.settle(&self.config).await;
        match &arrived {
            Ok(lease) => {
                // Before anybody finds it, or may have it make room.
                self.residents.note_loaded(name, wish, came);
                self.models.add(lease.handle().clone(), &self.default);
                tracing::info!(model = name, default = self.default_now(), "a model was loaded");
            }
            Err(_) => self.close_idle(&mut devices).await,
        }
        arrived
    }

    /// The devices, once no model is coming to any of them.
    pub(super) async fn devices_at_rest(&self) -> MutexGuard<'_, Vec<OpenDevice>> {
        loop {
            let mut changes = self.changes.subscribe();
            let devices = self.devices.lock().await;
            if devices.iter().all(|open| open.coming.is_empty()) {
                return devices;
            }
            drop(devices);
            // The sender is held here.
            let _ = changes.changed().await;
        }
    }
}

/// Whether no model of this name is there.
fn check_absent(devices: &[OpenDevice], name: &str) -> Result<(), DaemonError> {
    let mut tenants = devices.iter().flat_map(|open| &open.tenants);
    let Some(tenant) = tenants.find(|tenant| tenant.handle.model().name == name) else { return Ok(()) };
    let (name, folder) = (name.to_owned(), tenant.handle.model().folder.clone());
    Err(match tenant.handle.is_closed() {
        true => DaemonError::Leaving { name },
        false => DaemonError::AlreadyLoaded { name, folder },
    })
}

impl OpenDevice {
    /// Makes room for a model and takes it for the place that is kept, if there is room or others have more than they need.
    async fn keep_place(
        &mut self,
        coming: &mut Option<(String, Model)>,
        evictable: &[Evictable],
        (before, came): (&[Needs], Option<Instant>),
        config: &Config,
    ) -> Result<Kept, DaemonError> {
        let (choice, model) = coming.take().expect("it has no place yet");
        let needs = self.chosen.needs(&model, config, self.kv_bytes_max(config))?;
        let mut candidates = [Candidate { choice, model, needs }];
        if !self.fits_without((needs, before), &[], config) {
            // That others go which nobody uses comes before shorter contexts.
            let room = self.room_for((needs, before), evictable, config);
            let not_yet = match room {
                Some(Room::Evict(_)) => room.map(Kept::Room),
                _ => (!self.coming.is_empty()).then_some(Kept::Later(needs)),
            };
            if let Some(not_yet) = not_yet {
                let [Candidate { choice, model, .. }] = candidates;
                *coming = Some((choice, model));
                return Ok(not_yet);
            }
        }
        let shares = self.shares(&mut candidates, config);
        let [candidate] = candidates;
        let wanted = (candidate.needs, before);
        let shares = match shares {
            Ok(shares) if self.fits_without(wanted, &[], config) => shares,
            not_now => {
                let room = self.room_for(wanted, evictable, config);
                let room = match not_now {
                    Err(error) => room.ok_or(error)?,
                    Ok(_) => room.expect("there is room without those before it"),
                };
                *coming = Some((candidate.choice, candidate.model));
                return Ok(Kept::Room(room));
            }
        };
        let is_alone = self.tenants.is_empty() && self.coming.is_empty();
        let n_pages = match is_alone || candidate.is_cut() {
            true => *shares.last().expect("one is coming"),
            // The others keep what they have, but for what it needs.
            false => candidate.needs.n_pages_least(),
        };
        let name = candidate.model.name.clone();
        self.coming.push(Coming { name: name.clone(), needs: candidate.needs.with_just(n_pages), came });
        let made = self.share(self.kv_bytes_of_tenants(config)).await;
        made.map_err(|source| DaemonError::Engine { name, source })?;
        let kv = Kv { n_pages, kv_bytes_max: self.kv_bytes_max(config) };
        Ok(Kept::Place(Box::new((Destination { chosen: self.chosen.clone(), kv }, candidate))))
    }
}

/// Reads a model onto its device. Once it is unwanted, that ends with the tensor, or the part of one, that is being read.
fn read(
    place: &Destination,
    model: &Model,
    config: &Config,
    fittings: &Fittings,
    progress: &ProgressFn,
    unwanted: &CancellationToken,
) -> Result<Read, DaemonError> {
    let heard = |done_bytes, total_bytes| {
        if unwanted.is_cancelled() {
            // The one way out of all backends: what they have taken they give back as after a panic.
            resume_unwind(Box::new(Unwanted));
        }
        progress(done_bytes, total_bytes);
    };
    let loading = || load_backend(&place.chosen, model, config, place.kv, fittings, &heard);
    catch_unwind(AssertUnwindSafe(loading)).unwrap_or_else(|panic| match panic.is::<Unwanted>() {
        true => Err(DaemonError::GivenUp),
        false => resume_unwind(panic),
    })
}

#[cfg(test)]
mod tests;
