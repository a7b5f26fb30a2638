//! The thread that moves the wasm epoch on, so that a guest that never calls the host is interrupted.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::error::GuestError;

/// Time between two epochs: how long a guest can compute before others have their turn, and how exactly its
/// processor time is bounded.
pub(crate) const TICK: Duration = Duration::from_millis(1);

/// Ticks while at least one guest runs.
#[derive(Debug)]
pub(crate) struct Ticker(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    n_running: usize,
    is_closed: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps the ticker going while it lives.
#[derive(Debug)]
pub(crate) struct Ticking(Arc<Shared>);

impl Ticker {
    /// `look` is called with each tick.
    pub(crate) fn start(
        engine: &wasmtime::Engine,
        look: impl Fn() + Send + 'static,
    ) -> Result<Self, GuestError> {
        let shared = Arc::new(Shared::default());
        let (engine, theirs) = (engine.clone(), shared.clone());
        std::thread::Builder::new()
            .name("guest-epoch".to_owned())
            .spawn(move || {
                loop {
                    let mut state = theirs.lock();
                    while state.n_running == 0 && !state.is_closed {
                        state = theirs.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                    }
                    if state.is_closed {
                        return;
                    }
                    drop(state);
                    std::thread::sleep(TICK);
                    engine.increment_epoch();
                    look();
                }
            })
            .map_err(|error| GuestError::Runtime { reason: format!("no thread for epochs: {error}") })?;
        Ok(Self(shared))
    }

    pub(crate) fn keep_going(&self) -> Ticking {
        self.0.lock().n_running += 1;
        self.0.changed.notify_one();
        Ticking(self.0.clone())
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.0.lock().is_closed = true;
        self.0.changed.notify_one();
    }
}

impl Drop for Ticking {
    fn drop(&mut self) {
        self.0.lock().n_running -= 1;
    }
}
