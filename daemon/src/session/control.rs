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

    /// Grants credit; asks the request to end if more than `limit_bytes` would be open.
    pub(crate) fn grant(&self, n_bytes: u64, limit_bytes: u64) {
        let mut state = self.lock();
        let open_bytes = state.credit_bytes.saturating_add(n_bytes);
        if open_bytes > limit_bytes {
            state.stop.get_or_insert(StopReason::Overdrawn { open_bytes, limit_bytes });
        } else {
            state.credit_bytes = open_bytes;
            state.granted_bytes += n_bytes;
        }
        self.changed.notify_one();
    }

    /// Waits until as much credit is left as an event takes, which need not be told again with [`Self::changed`].
    ///
    /// # Errors
    /// The request is asked to end.
    pub(crate) async fn credit(&self, n_bytes: u64) -> Result<(), StopReason> {
        loop {
            let notified = self.changed.notified();
            {
                let state = self.lock();
                if let Some(reason) = state.stop {
                    return Err(reason);
                }
                if state.credit_bytes >= n_bytes {
                    return Ok(());
                }
            }
            notified.await;
        }
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
