//! The machine under a loader: one device, the engines that come and go on it, and the files of models.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use trellis::fuzzing::{Machine, ModelNeeds};
use trellis_engine::backend::{Backend, BackendError, PAGE_LEN};
use trellis_engine::fuzzing::EngineLoop;
use trellis_engine::model::Model;
use trellis_engine::{Engine, EngineSettings};

use super::device::{Clock, Device};
use super::draws::Draws;
use super::loads::{CATALOG, LoadsScene};
use super::mutation::Mutation;
use super::notes::{Fault, Notes};
use super::scene::{DeviceScene, N_POSITIONS, salt};
use super::world::drive;

const PAGE_BYTES: u64 = 128;
const N_GRANULE_PAGES: usize = 2;
const N_PAGES_MIN: usize = N_POSITIONS / PAGE_LEN;

/// The least KV memory of a model.
pub(super) const KV_BYTES_MIN: u64 = N_PAGES_MIN as u64 * PAGE_BYTES;

/// Pages beyond which a model has no use for more.
const N_PAGES_MOST: usize = 5 * N_PAGES_MIN;

/// What is taken of a device.
#[derive(Debug)]
pub(super) struct Meter {
    capacity_bytes: u64,
    used_bytes: Mutex<u64>,
    notes: Arc<Notes>,
}

/// What one model has taken of it, until this is dropped.
#[derive(Debug)]
pub(super) struct Taken {
    meter: Arc<Meter>,
    n_bytes: u64,
}

impl Meter {
    fn lock(&self) -> MutexGuard<'_, u64> {
        self.used_bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Taken {
    fn new(meter: Arc<Meter>, n_bytes: u64) -> Self {
        let mut taken = Self { meter, n_bytes: 0 };
        taken.resize(n_bytes);
        taken
    }

    fn resize(&mut self, n_bytes: u64) {
        let mut used_bytes = self.meter.lock();
        *used_bytes = *used_bytes - self.n_bytes + n_bytes;
        self.n_bytes = n_bytes;
        let (used, capacity) = (*used_bytes, self.meter.capacity_bytes);
        self.meter
            .notes
            .expect(used <= capacity, || format!("{used} of {capacity} bytes of the device are taken"));
    }

    /// It has so many pages now beside its weights, after so many.
    pub(super) fn resize_pages(&mut self, before: usize, now: usize) {
        self.resize(self.n_bytes - before as u64 * PAGE_BYTES + now as u64 * PAGE_BYTES);
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        *self.meter.lock() -= self.n_bytes;
    }
}

/// The machine.
pub(super) struct SimMachine {
    scene: LoadsScene,
    meter: Arc<Meter>,
    draws: Mutex<Draws>,
    notes: Arc<Notes>,
    /// Of the steps of the engine that began last.
    clock: Mutex<Clock>,
    /// Those that have not begun: their loops stay on one thread.
    engines: Mutex<VecDeque<(Engine, Clock)>>,
}

/// The loops of engines, with the clocks of their steps.
pub(super) type Loops = Vec<(EngineLoop, Clock)>;

impl fmt::Debug for SimMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SimMachine").field(&self.meter).finish()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn model(idx: usize) -> Arc<Model> {
    static OPENED: [OnceLock<Arc<Model>>; CATALOG.len()] = [const { OnceLock::new() }; CATALOG.len()];
    OPENED[idx].get_or_init(|| Arc::new(crate::models::bundled_as("draft", CATALOG[idx]))).clone()
}

fn idx_of(name: &str) -> usize {
    CATALOG.iter().position(|known| *known == name).expect("only models of the catalog are asked for")
}

impl SimMachine {
    /// One that may open its device so many times.
    pub(super) fn begin(
        scene: &LoadsScene,
        n_engines: usize,
        draws: Draws,
        notes: Arc<Notes>,
    ) -> (Arc<Self>, Loops) {
        let (mut engines, mut loops) = (VecDeque::new(), Vec::new());
        for _ in 0..n_engines {
            let (engine, turning) = EngineLoop::begin(EngineSettings::default());
            let clock = Clock::default();
            engines.push_back((engine, clock.clone()));
            loops.push((turning, clock));
        }
        let capacity_bytes = scene.capacity_bytes;
        let meter = Arc::new(Meter { capacity_bytes, used_bytes: Mutex::default(), notes: notes.clone() });
        let (draws, clock, engines) = (Mutex::new(draws), Mutex::default(), Mutex::new(engines));
        (Arc::new(Self { scene: scene.clone(), meter, draws, notes, clock, engines }), loops)
    }

    /// All that was on the device has gone.
    pub(super) fn check_empty(&self) {
        let used_bytes = *self.meter.lock();
        self.notes
            .expect(used_bytes == 0, || format!("{used_bytes} bytes are left on a device that is closed"));
    }

    /// Whether a load of a model fails now.
    fn fails(&self, idx: usize) -> bool {
        let fails = locked(&self.draws).happens(self.scene.models[idx].per_mille_failed);
        if fails {
            self.notes.fault(Fault::Load);
        }
        fails
    }
}

/// Turns engines until all have stopped.
pub(super) async fn turn(mut loops: Loops, mut draws: Draws, notes: &Notes) {
    let turning = loops.iter_mut().map(|(engine, clock)| drive(engine, clock, draws.fork(), notes));
    join_all(turning).await;
}

impl Machine for SimMachine {
    fn open_model(&self, name: &str) -> Option<Arc<Model>> {
        let idx = idx_of(name);
        let is_missing = locked(&self.draws).happens(self.scene.models[idx].per_mille_failed / 4);
        if is_missing {
            self.notes.fault(Fault::Load);
            return None;
        }
        Some(model(idx))
    }

    fn begin_engine(&self, _: EngineSettings) -> Engine {
        let (engine, clock) = locked(&self.engines).pop_front().expect("there are as many as are opened");
        *locked(&self.clock) = clock;
        engine
    }

    fn capacity_bytes(&self) -> u64 {
        self.scene.capacity_bytes
    }

    fn needs(&self, name: &str) -> ModelNeeds {
        ModelNeeds {
            weight_bytes: self.scene.models[idx_of(name)].weight_bytes,
            page_bytes: PAGE_BYTES,
            n_granule_pages: N_GRANULE_PAGES,
            n_pages_min: N_PAGES_MIN,
            n_pages_most: N_PAGES_MOST,
        }
    }

    fn load(
        &self,
        name: &str,
        n_pages: usize,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Box<dyn Backend>, BackendError> {
        let idx = idx_of(name);
        let weight_bytes = self.scene.models[idx].weight_bytes;
        let n_taken = match self.notes.makes(Mutation::UnsaidBytes) {
            true => 2 * weight_bytes,
            false => weight_bytes,
        };
        let taken = Taken::new(self.meter.clone(), n_taken + n_pages as u64 * PAGE_BYTES);
        progress(weight_bytes / 2, weight_bytes);
        if self.fails(idx) {
            let (needed_bytes, free_bytes) = (2, 1);
            return Err(BackendError::OutOfMemory { device: name.to_owned(), needed_bytes, free_bytes });
        }
        progress(weight_bytes, weight_bytes);
        let scene = DeviceScene {
            n_pages,
            n_pages_max: N_PAGES_MOST,
            n_host_pages: 0,
            n_rows_max: 4,
            n_tokens_max: 32,
            n_steps_under_way: 1,
            is_by_caller: false,
            has_states: false,
            step_time: Duration::from_millis(1),
            token_time: Duration::ZERO,
            per_mille_failed: 0,
            per_mille_lost: 0,
            per_mille_stalled: 0,
        };
        let (clock, draws) = (locked(&self.clock).clone(), locked(&self.draws).fork());
        let device = Device::new(name, salt(idx), scene, clock, draws, self.notes.clone());
        Ok(Box::new(device.metered(taken)))
    }
}
