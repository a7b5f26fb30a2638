//! What the daemon lets go of where memory is short: what it can compute or read again, and of that a bounded part each time, so
//! that nobody who presses makes others do more than that again.
//!
//! KV in host memory goes first, then compiled components that no guest runs. What is freed of the heap goes back to the system
//! within some seconds by the allocator's own thread.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::HostService;
use crate::metrics::Exposition;

/// Bytes that go of one kind at most, each time.
const RELIEF_BYTES: u64 = 64 << 20;

/// How long an engine may take. One that does not come round lets go of it later.
const ANSWER_TIME: Duration = Duration::from_secs(5);

/// How often memory was short, and what went.
#[derive(Debug, Default)]
pub(super) struct Reliefs {
    n_events: AtomicU64,
    kv_bytes: AtomicU64,
    program_bytes: AtomicU64,
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
        let mut kv_bytes = 0;
        for device in self.loader.models().listing().devices() {
            let asked = device.engine.relieve(RELIEF_BYTES.saturating_sub(kv_bytes));
            if let Ok(Ok(n_bytes)) = tokio::time::timeout(ANSWER_TIME, asked).await {
                kv_bytes += n_bytes;
            }
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
