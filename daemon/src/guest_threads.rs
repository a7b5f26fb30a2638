//! The threads of the runtime, as the engine knows them.

use std::sync::Arc;

use tokio::runtime::Handle;
use trellis_engine::{GuestThreads, Vigil};

/// A runtime whose threads run guests.
#[derive(Debug)]
pub(crate) struct RuntimeThreads(Handle);

impl RuntimeThreads {
    /// Those of the runtime that calls, if one does.
    pub(crate) fn current() -> Option<Arc<dyn GuestThreads>> {
        Some(Arc::new(Self(Handle::try_current().ok()?)))
    }
}

impl GuestThreads for RuntimeThreads {
    fn n(&self) -> usize {
        self.0.metrics().num_workers()
    }

    fn keep(&self, vigil: Arc<Vigil>) {
        self.0.spawn(async move { vigil.keep() });
    }
}
