//! What the daemon lets go of where memory is short: what it can compute or read again, and of that a bounded part each time, so
//! that nobody who presses makes others do more than that again.
//!
//! Host memory for KV goes first, what is free of it before KV is given up, then compiled components that no guest runs. What is
//! freed of the heap goes back to the system within some seconds by the allocator's own thread.

use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::timeout;
use trellis_engine::{EngineError, EngineWatch};

use super::HostService;
use crate::metrics::Exposition;

/// Bytes that go of one kind at most, each time.
const RELIEF_BYTES: u64 = 64 << 20;

/// How long an engine may take. One that does not come round lets go of it later, and is asked for no more before it has.
const ANSWER_TIME: Duration = Duration::from_secs(5);

/// How often memory was short, and what went.
#[derive(Debug, Default)]
pub(super) struct Reliefs {
    n_events: AtomicU64,
    kv_bytes: AtomicU64,
    program_bytes: AtomicU64,
    unanswered: Unanswered<EngineWatch>,
}

/// Who was asked and has not answered in time.
#[derive(Debug)]
struct Unanswered<T>(Mutex<Vec<(T, Asked)>>);

/// How many bytes went.
type Asked = JoinHandle<Result<u64, EngineError>>;

impl<T> Default for Unanswered<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Unanswered<T> {
    /// Those that have answered by now.
    fn take_answered(&self) -> Vec<Asked> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (answered, left): (Vec<_>, Vec<_>) =
            mem::take(&mut *all).into_iter().partition(|(_, asked)| asked.is_finished());
        *all = left;
        answered.into_iter().map(|(_, asked)| asked).collect()
    }

    fn has(&self, is_it: impl Fn(&T) -> bool) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().any(|(of, _)| is_it(of))
    }

    /// Waits for so long; how many bytes went, if that is known by then.
    async fn wait(&self, of: T, mut asked: Asked, at_most: Duration) -> u64 {
        match timeout(at_most, &mut asked).await {
            Ok(told) => n_bytes(told),
            Err(_) => {
                self.0.lock().unwrap_or_else(PoisonError::into_inner).push((of, asked));
                0
            }
        }
    }

    /// What went of those that were not waited for any more.
    async fn late(&self) -> u64 {
        let mut n_late = 0;
        for asked in self.take_answered() {
            n_late += n_bytes(asked.await);
        }
        n_late
    }
}

/// None of an engine that has ended.
fn n_bytes(told: Result<Result<u64, EngineError>, tokio::task::JoinError>) -> u64 {
    told.ok().and_then(Result::ok).unwrap_or(0)
}

impl Reliefs {
    pub(super) fn add_to(&self, exposition: &mut Exposition) {
        let number = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
        exposition.add("trellis_memory_pressure_events", [([], number(&self.n_events))]);
        exposition.add(
            "trellis_memory_pressure_released_bytes",
            [(["kv"], number(&self.kv_bytes)), (["programs"], number(&self.program_bytes))],
        );
    }
}

impl HostService {
    /// Lets go of a part of what can be had again: memory is short.
    pub(crate) async fn relieve(&self) {
        let unanswered = &self.reliefs.unanswered;
        let mut kv_bytes = unanswered.late().await;
        for device in self.loader.models().listing().devices() {
            if unanswered.has(|engine| engine.is_same(&device.engine)) {
                continue;
            }
            let (engine, n_bytes) = (device.engine.clone(), RELIEF_BYTES.saturating_sub(kv_bytes));
            let asked = tokio::spawn(async move { engine.relieve(n_bytes).await });
            kv_bytes += unanswered.wait(device.engine.clone(), asked, ANSWER_TIME).await;
        }
        let program_bytes = self.host.let_go_of_programs(RELIEF_BYTES);
        for (counter, n) in [
            (&self.reliefs.n_events, 1),
            (&self.reliefs.kv_bytes, kv_bytes),
            (&self.reliefs.program_bytes, program_bytes),
        ] {
            counter.fetch_add(n, Ordering::Relaxed);
        }
        if kv_bytes + program_bytes > 0 {
            tracing::info!(kv_bytes, program_bytes, "memory is short: what can be had again was let go of");
        } else {
            tracing::debug!("memory is short, and there is nothing that could be had again");
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn who_has_not_answered_is_known_until_it_has() {
        let unanswered = Unanswered::default();
        let (tell, told) = oneshot::channel();
        let asked = tokio::spawn(async move { Ok(told.await.expect("it is told")) });
        assert_eq!(unanswered.wait("slow", asked, Duration::from_millis(1)).await, 0);
        let fast = tokio::spawn(async { Ok(5) });
        assert_eq!(unanswered.wait("fast", fast, Duration::from_secs(60)).await, 5);
        assert_eq!(unanswered.late().await, 0);
        assert!(unanswered.has(|name| *name == "slow") && !unanswered.has(|name| *name == "fast"));
        tell.send(7).expect("it listens");
        while !unanswered.0.lock().expect("no panic").iter().all(|(_, asked)| asked.is_finished()) {
            tokio::task::yield_now().await;
        }
        assert_eq!(unanswered.late().await, 7);
        assert!(!unanswered.has(|_| true), "it may be asked again");
    }
}
