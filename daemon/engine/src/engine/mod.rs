//! The engine: a value that takes commands and answers them (`core`), its loop (`turns`), and the thread that drives it
//! (`thread`).
//!
//! - Comes in: what guests ask, models that come and go, how much memory they may have (`inbox`).
//! - Goes out: completions, into the line of each guest, which is woken once for a turn.
//! - Must not happen: that the thread waits for a guest, or that what one guest asks keeps others waiting.
//!
//! A model on a device is a `resident`; what guests of one that has gone ask is answered by `gone`.

mod core;
#[cfg(test)]
mod costs;
#[cfg(feature = "fuzzing")]
pub(crate) mod driven;
mod gone;
mod inbox;
mod post;
mod resident;
mod thread;
mod turns;

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use tokio::sync::watch;

pub(crate) use self::core::Newcomer;
use crate::archive::{Archive, ArchiveOf};
use crate::backend::{Backend, PAGE_LEN};
use crate::command::ModelId;
use crate::error::EngineError;
use crate::handle::{EngineWatch, Link, Message};
use crate::kv::{PrefixScope, SegmentLengths};
use crate::model::Model;
use crate::model_handle::ModelHandle;
use crate::port::Port;
use crate::sampling::Operator;
use crate::scheduler::SchedulerSettings;

/// How an engine schedules.
#[derive(Clone, Debug)]
pub struct EngineSettings {
    /// Between which guests the prefix cache shares prompts.
    pub prefix_scope: PrefixScope,
    /// Tokens up to which prompts fill a step, and guesses beside them: more compute prompts faster and make the next
    /// token of every stream wait longer. Contexts that decode may be more, and beside those prompts get as many tokens,
    /// as far as the backend's limits go.
    pub n_step_tokens: usize,
    /// The latency target: how many times as long a step may last, while contexts decode, as it would without prompts.
    /// At least 1.
    pub latency_multiple: f64,
    /// How what guests ask, and are answered, travels.
    pub port: Port,
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self {
            prefix_scope: PrefixScope::default(),
            n_step_tokens: 512,
            latency_multiple: 1.7,
            port: Port::Direct,
        }
    }
}

/// What is put around a model.
#[derive(Clone, Debug, Default)]
pub struct ModelFittings {
    /// What all its samplers stand behind.
    pub operator: Option<Arc<Operator>>,
    /// What keeps its saved contexts when the engine does not.
    pub archive: Option<Arc<dyn Archive>>,
}

/// How many pages a model may have while it shares a device with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvBounds {
    /// The least: what its longest context needs, so that this comes to its end whatever others do.
    pub n_pages_min: usize,
    /// The most that it has use for.
    pub n_pages_max: usize,
}

impl KvBounds {
    /// Of a model that never has more than it came with.
    #[must_use]
    pub fn of(backend: &dyn Backend) -> Self {
        let n_pages_min = backend.limits().n_positions_max.div_ceil(PAGE_LEN);
        Self { n_pages_min, n_pages_max: backend.n_pages() }
    }
}

/// A running engine: one thread that owns the backends of all models on one device. Dropping it stops the thread after
/// the step in hand.
#[derive(Debug)]
pub struct Engine {
    link: Arc<Link>,
    settings: EngineSettings,
    places: Mutex<ModelPlaces>,
    thread: Option<JoinHandle<()>>,
}

/// Places of models on the device.
#[derive(Debug, Default)]
struct ModelPlaces {
    /// The next models of places that are free.
    free: Vec<ModelId>,
    n: u16,
}

impl Engine {
    /// Starts the thread. There are no models on it yet.
    ///
    /// # Panics
    /// The operating system cannot start a thread.
    #[must_use]
    pub fn start(settings: EngineSettings) -> Self {
        let (link, served) = Link::new(settings.port);
        link.masks().begin_first().expect("a thread can be started");
        let port = settings.port;
        let thread = std::thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || thread::live(served, port))
            .expect("a thread can be started");
        Self { link, settings, places: Mutex::default(), thread: Some(thread) }
    }

    /// Puts a model on it whose backend computes on the engine's device. It keeps the pages that it has, as long as no other
    /// model needs them more.
    ///
    /// # Errors
    /// The engine has failed or stopped.
    pub fn add(
        &self,
        model: Arc<Model>,
        backend: Box<dyn Backend>,
        bounds: KvBounds,
    ) -> Result<ModelHandle, EngineError> {
        self.add_with(ModelFittings::default(), model, backend, bounds)
    }

    /// As [`Self::add`], with what is put around the model.
    ///
    /// # Errors
    /// The engine has failed or stopped.
    pub fn add_with(
        &self,
        fittings: ModelFittings,
        model: Arc<Model>,
        backend: Box<dyn Backend>,
        bounds: KvBounds,
    ) -> Result<ModelHandle, EngineError> {
        let ModelFittings { operator, archive } = fittings;
        let id = self.take_place();
        let settings = SchedulerSettings {
            place: usize::from(id.place),
            model_fingerprint: model.fingerprint,
            prefix_scope: self.settings.prefix_scope,
            n_step_tokens: self.settings.n_step_tokens,
            latency_multiple: self.settings.latency_multiple,
            segments: SegmentLengths::default(),
            operator: operator.clone(),
            is_archived: archive.is_some(),
        };
        let archive = archive.map(|archive| ArchiveOf::new(archive, Arc::downgrade(&self.link), id));
        let (failure, failed) = watch::channel(None);
        let handle = ModelHandle::new(self.link.clone(), id, model, backend.as_ref(), operator, failed);
        self.link.post_message(Message::Add {
            newcomer: Newcomer { id, settings, bounds, backend, archive },
            failure,
        })?;
        Ok(handle)
    }

    /// Gives all models together so many bytes of KV memory. As long as they have more, parts of it are given up, of what
    /// is missed least; what is left is given out. How much each model has follows from then on what guests ask. A step is
    /// never held up for longer than some megabytes take to move.
    ///
    /// The models are told at once; what is returned waits until that is done. Of two that are under way the later one
    /// counts.
    ///
    /// # Errors
    /// It is less than the models need, or there is no memory, or the engine has failed or stopped.
    pub fn share(
        &self,
        kv_bytes: u64,
    ) -> Result<impl Future<Output = Result<(), EngineError>> + use<>, EngineError> {
        self.link.share(kv_bytes)
    }

    /// Unloads a model: everything that guests have of it ends with [`EngineError::Unloaded`], and saved contexts are
    /// forgotten. Returns the backend; letting go of it gives its memory back, and may take long.
    ///
    /// # Errors
    /// It was unloaded before, or the engine has failed or stopped.
    pub async fn remove(&self, model: &ModelHandle) -> Result<Box<dyn Backend>, EngineError> {
        let backend = model.remove().await?;
        let ModelId { place, generation } = model.id();
        self.places().free.push(ModelId { place, generation: generation + 1 });
        Ok(backend)
    }

    /// Tells whether it works, and when it ends.
    #[must_use]
    pub fn watch(&self) -> EngineWatch {
        EngineWatch::new(self.link.clone())
    }

    fn take_place(&self) -> ModelId {
        let mut places = self.places();
        places.free.pop().unwrap_or_else(|| {
            places.n += 1;
            ModelId { place: places.n - 1, generation: 0 }
        })
    }

    fn places(&self) -> std::sync::MutexGuard<'_, ModelPlaces> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // An engine that has stopped by itself no longer reads commands.
        let _ = self.link.post_message(Message::Shutdown);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the engine thread panicked");
        }
    }
}

/// An engine with one model, for callers that need no more.
#[derive(Debug)]
pub struct OneModel {
    handle: ModelHandle,
    engine: Engine,
}

impl OneModel {
    /// Starts an engine and puts the model on it.
    ///
    /// # Panics
    /// The operating system cannot start a thread.
    #[must_use]
    pub fn start(model: Arc<Model>, backend: Box<dyn Backend>, settings: EngineSettings) -> Self {
        let engine = Engine::start(settings);
        let bounds = KvBounds::of(backend.as_ref());
        let handle = engine.add(model, backend, bounds).expect("an engine that has just begun takes a model");
        Self { handle, engine }
    }

    /// The engine, on which there is room for more models.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// A way to the model.
    #[must_use]
    pub fn handle(&self) -> &ModelHandle {
        &self.handle
    }
}
