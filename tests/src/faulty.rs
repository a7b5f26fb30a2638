//! Backends that fail when a test tells them to.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use trellis::daemon::BackendWrap;
use trellis_engine::KeptRow;
use trellis_engine::backend::{
    Backend, BackendError, Collected, Damage, KvBytes, Limits, OldestStep, WeightsInfo,
};
use trellis_engine::batch::{Batch, CellMove, HostPageId, LateMask, PageId};

/// Tells [`wrap_from_environment`] what is to fail: `MODEL N_BEFORE FAULT`, as in `tiny 3 device`.
pub const ENVIRONMENT: &str = "TRELLIS_TEST_FAULT";

/// How a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// This one, and nothing is lost but what it should have done.
    Call,
    /// The device is lost.
    Device,
    /// The backend panics.
    Panic,
    /// It never comes back.
    Hang,
}

#[derive(Debug)]
struct Planned {
    n_before: usize,
    n_times: usize,
    fault: Fault,
}

#[derive(Debug, Default)]
struct Shared {
    planned: Mutex<Option<Planned>>,
    n_faults: AtomicUsize,
}

/// What is to fail in the backends that were wrapped with it, counted over all of them.
#[derive(Clone, Debug, Default)]
pub struct Faults(Arc<Shared>);

impl Faults {
    /// After `n_before` more calls, steps and moves alike, `n_times` calls fail.
    pub fn inject(&self, n_before: usize, n_times: usize, fault: Fault) {
        let planned = Planned { n_before, n_times, fault };
        *self.0.planned.lock().unwrap_or_else(PoisonError::into_inner) = Some(planned);
    }

    /// Calls that have failed so far.
    #[must_use]
    pub fn n_faults(&self) -> usize {
        self.0.n_faults.load(Ordering::Relaxed)
    }

    /// A backend that fails when this says so.
    #[must_use]
    pub fn wrap(&self, backend: Box<dyn Backend>) -> Box<dyn Backend> {
        Box::new(Faulty { backend, faults: self.clone() })
    }

    /// Wraps the backend of the model of this name, and of no other.
    #[must_use]
    pub fn of_model(&self, name: &str) -> BackendWrap {
        let (faults, name) = (self.clone(), name.to_owned());
        Arc::new(move |model, backend| if model == name { faults.wrap(backend) } else { backend })
    }

    fn call(&self, call: &'static str) -> Result<(), BackendError> {
        let mut planned = self.0.planned.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(next) = planned.as_mut().filter(|planned| planned.n_times > 0) else { return Ok(()) };
        if next.n_before > 0 {
            next.n_before -= 1;
            return Ok(());
        }
        next.n_times -= 1;
        let fault = next.fault;
        drop(planned);
        self.0.n_faults.fetch_add(1, Ordering::Relaxed);
        let error = |damage| {
            let (device, reason) = ("a faulty device".to_owned(), "injected".to_owned());
            Err(BackendError::Device { device, call, reason, damage })
        };
        match fault {
            Fault::Call => error(Damage::Call),
            Fault::Device => error(Damage::Device),
            Fault::Panic => panic!("an injected panic in {call}"),
            Fault::Hang => loop {
                std::thread::park();
            },
        }
    }
}

/// The wrap that the environment asks for, if it asks for one.
///
/// # Panics
/// It asks for something else.
#[must_use]
pub fn wrap_from_environment() -> Option<BackendWrap> {
    let text = std::env::var(ENVIRONMENT).ok()?;
    let words: Vec<&str> = text.split(' ').collect();
    let [model, n_before, fault] = words[..] else { panic!("{ENVIRONMENT}={text:?}") };
    let fault = match fault {
        "call" => Fault::Call,
        "device" => Fault::Device,
        "panic" => Fault::Panic,
        "hang" => Fault::Hang,
        _ => panic!("{ENVIRONMENT}={text:?}"),
    };
    let faults = Faults::default();
    faults.inject(n_before.parse().expect("a number of calls"), 1, fault);
    Some(faults.of_model(model))
}

/// A backend in front of another. A call that fails is not passed on: its pages keep whatever was in them.
struct Faulty {
    backend: Box<dyn Backend>,
    faults: Faults,
}

impl Backend for Faulty {
    fn limits(&self) -> &Limits {
        self.backend.limits()
    }

    fn weights(&self) -> WeightsInfo {
        self.backend.weights()
    }

    fn device(&self) -> &str {
        self.backend.device()
    }

    fn keep_row(&mut self) -> Option<KeptRow> {
        self.backend.keep_row()
    }

    fn submit(&mut self, batch: &Batch<'_>) -> Result<(), BackendError> {
        self.faults.call("submit")?;
        self.backend.submit(batch)
    }

    fn collect(&mut self) -> Result<Collected, BackendError> {
        let collected = self.backend.collect()?;
        self.faults.call("collect")?;
        Ok(collected)
    }

    fn supply(&mut self, masks: &[LateMask<'_>]) -> Result<Vec<usize>, BackendError> {
        self.faults.call("supply")?;
        self.backend.supply(masks)
    }

    fn oldest_step(&mut self) -> OldestStep {
        self.backend.oldest_step()
    }

    fn waits_for_masks(&mut self) -> Result<bool, BackendError> {
        self.backend.waits_for_masks()
    }

    fn n_pages(&self) -> usize {
        self.backend.n_pages()
    }

    fn resize(&mut self, n_pages: usize) -> Result<(), BackendError> {
        self.faults.call("resize")?;
        self.backend.resize(n_pages)
    }

    fn move_pages(&mut self, moves: &[(PageId, PageId)]) -> Result<(), BackendError> {
        self.faults.call("move_pages")?;
        self.backend.move_pages(moves)
    }

    fn move_cells(&mut self, moves: &[CellMove]) -> Result<(), BackendError> {
        self.faults.call("move_cells")?;
        self.backend.move_cells(moves)
    }

    fn swap_out(&mut self, moves: &[(PageId, HostPageId)]) -> Result<(), BackendError> {
        self.faults.call("swap_out")?;
        self.backend.swap_out(moves)
    }

    fn swap_in(&mut self, moves: &[(HostPageId, PageId)]) -> Result<(), BackendError> {
        self.faults.call("swap_in")?;
        self.backend.swap_in(moves)
    }

    fn take_waited_for_host_pages(&mut self) -> bool {
        self.backend.take_waited_for_host_pages()
    }

    fn is_moving(&mut self) -> bool {
        self.backend.is_moving()
    }

    fn can_release_host_pages(&self) -> bool {
        self.backend.can_release_host_pages()
    }

    fn release_host_pages(&mut self, free: &[HostPageId], at_most: u64) -> u64 {
        self.backend.release_host_pages(free, at_most)
    }

    fn keeps_host_memory(&self) -> bool {
        self.backend.keeps_host_memory()
    }

    fn gather_host_pages(&mut self, free: &[HostPageId], at_most: u64) -> Vec<(HostPageId, HostPageId)> {
        self.backend.gather_host_pages(free, at_most)
    }

    fn kv_bytes(&mut self) -> Option<&mut dyn KvBytes> {
        self.backend.kv_bytes()
    }
}
