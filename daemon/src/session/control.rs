use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::service::StopReason;

/// What a client tells a request that is under way. Whatever comes is merged, so that no queue can grow.
#[derive(Debug, Default)]
pub(crate) struct Control {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    stop: Option<StopReason>,
    granted_bytes: u64,
    /// Granted and not yet used.
    credit_bytes: u64,
}

/// What changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    Stop(StopReason),
    Granted(u64),
}

impl Control {
    pub(crate) fn with_credit(credit_bytes: u64) -> Self {
        let state = State { credit_bytes, ..State::default() };
        Self { state: Mutex::new(state), changed: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the request to end; the first reason stays.
    pub(crate) fn stop(&self, reason: StopReason) {
        self.lock().stop.get_or_insert(reason);
        self.changed.notify_one();
    }

    /// Grants credit; false if more than `credit_bytes_max` would be open.
    pub(crate) fn grant(&self, n_bytes: u64, credit_bytes_max: u64) -> bool {
        let mut state = self.lock();
        let is_within = n_bytes <= credit_bytes_max - state.credit_bytes.min(credit_bytes_max);
        if is_within {
            state.credit_bytes += n_bytes;
            state.granted_bytes += n_bytes;
            self.changed.notify_one();
        }
        is_within
    }

    /// Counts output that has been sent.
    pub(crate) fn spend(&self, n_bytes: u64) {
        let mut state = self.lock();
        state.credit_bytes = state.credit_bytes.saturating_sub(n_bytes);
    }

    /// Waits for the next change. Dropping the future loses nothing.
    pub(crate) async fn changed(&self) -> Signal {
        loop {
            let notified = self.changed.notified();
            if let Some(signal) = self.take() {
                return signal;
            }
            notified.await;
        }
    }

    /// Waits until the request is asked to end.
    pub(crate) async fn stopped(&self) -> StopReason {
        loop {
            let notified = self.changed.notified();
            if let Some(reason) = self.lock().stop {
                return reason;
            }
            notified.await;
        }
    }

    fn take(&self) -> Option<Signal> {
        let mut state = self.lock();
        if let Some(reason) = state.stop {
            return Some(Signal::Stop(reason));
        }
        match std::mem::take(&mut state.granted_bytes) {
            0 => None,
            n_bytes => Some(Signal::Granted(n_bytes)),
        }
    }
}
