//! The linear memory and tables of a guest, summed over all its instances.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use wasmtime::ResourceLimiter;

use super::limits::GuestLimits;

/// What of memory outlives the store: how much is used, and what was denied.
#[derive(Debug, Default)]
pub(crate) struct MemoryGauge {
    n_bytes: AtomicU64,
    denied: Mutex<Option<Denied>>,
}

/// A growth that was denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Denied {
    /// Linear memory would have come to so many bytes.
    Memory(u64),
    /// Tables would have come to so many elements.
    Table(u64),
}

impl MemoryGauge {
    /// Bytes of linear memory.
    pub(crate) fn n_bytes(&self) -> u64 {
        self.n_bytes.load(Ordering::Relaxed)
    }

    /// The last growth that was denied.
    pub(crate) fn denied(&self) -> Option<Denied> {
        *self.denied.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deny(&self, denied: Denied) {
        *self.denied.lock().unwrap_or_else(PoisonError::into_inner) = Some(denied);
    }
}

/// Decides whether a guest's memories and tables may grow.
#[derive(Debug)]
pub(crate) struct MemoryLimiter {
    gauge: std::sync::Arc<MemoryGauge>,
    n_bytes_max: usize,
    n_elements: usize,
    n_elements_max: usize,
    n_instances_max: usize,
    n_tables_max: usize,
    n_memories_max: usize,
    /// What the growth in progress adds, to be taken back if it fails after all.
    growing: Growing,
}

#[derive(Clone, Copy, Debug, Default)]
struct Growing {
    n_bytes: usize,
    n_elements: usize,
}

impl MemoryLimiter {
    pub(crate) fn new(limits: &GuestLimits, gauge: std::sync::Arc<MemoryGauge>) -> Self {
        Self {
            gauge,
            n_bytes_max: limits.memory_bytes,
            n_elements: 0,
            n_elements_max: limits.n_table_elements,
            n_instances_max: limits.n_instances as usize,
            n_tables_max: limits.n_tables as usize,
            n_memories_max: limits.n_memories as usize,
            growing: Growing::default(),
        }
    }
}

impl ResourceLimiter for MemoryLimiter {
    fn memory_growing(
        &mut self,
        current: usize,
        desired: usize,
        maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        self.growing.n_bytes = 0;
        // What the module itself rules out is no denial of ours.
        if maximum.is_some_and(|maximum| desired > maximum) && desired <= self.n_bytes_max {
            return Ok(false);
        }
        let n_added = desired.saturating_sub(current);
        let n_total = (self.gauge.n_bytes() as usize).saturating_add(n_added);
        if n_total > self.n_bytes_max {
            self.gauge.deny(Denied::Memory(n_total as u64));
            return Ok(false);
        }
        self.growing.n_bytes = n_added;
        self.gauge.n_bytes.store(n_total as u64, Ordering::Relaxed);
        Ok(true)
    }

    fn memory_grow_failed(&mut self, _: wasmtime::Error) -> wasmtime::Result<()> {
        let n_added = std::mem::take(&mut self.growing.n_bytes);
        self.gauge.n_bytes.fetch_sub(n_added as u64, Ordering::Relaxed);
        Ok(())
    }

    fn table_growing(
        &mut self,
        current: usize,
        desired: usize,
        maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        self.growing.n_elements = 0;
        if maximum.is_some_and(|maximum| desired > maximum) && desired <= self.n_elements_max {
            return Ok(false);
        }
        let n_added = desired.saturating_sub(current);
        let n_total = self.n_elements.saturating_add(n_added);
        if n_total > self.n_elements_max {
            self.gauge.deny(Denied::Table(n_total as u64));
            return Ok(false);
        }
        self.growing.n_elements = n_added;
        self.n_elements = n_total;
        Ok(true)
    }

    fn table_grow_failed(&mut self, _: wasmtime::Error) -> wasmtime::Result<()> {
        self.n_elements -= std::mem::take(&mut self.growing.n_elements);
        Ok(())
    }

    fn instances(&self) -> usize {
        self.n_instances_max
    }

    fn tables(&self) -> usize {
        self.n_tables_max
    }

    fn memories(&self) -> usize {
        self.n_memories_max
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    const PAGE: usize = 65_536;

    #[test]
    fn memories_are_summed() {
        let limits = GuestLimits { memory_bytes: 10 * PAGE, ..GuestLimits::default() };
        let gauge = Arc::new(MemoryGauge::default());
        let mut limiter = MemoryLimiter::new(&limits, gauge.clone());
        assert!(limiter.memory_growing(0, 6 * PAGE, None).expect("no trap"));
        assert!(limiter.memory_growing(0, 4 * PAGE, None).expect("no trap"));
        assert_eq!(gauge.denied(), None);
        assert!(!limiter.memory_growing(4 * PAGE, 5 * PAGE, None).expect("no trap"));
        assert_eq!(gauge.denied(), Some(Denied::Memory(11 * PAGE as u64)));
        assert_eq!(gauge.n_bytes(), 10 * PAGE as u64);
    }

    #[test]
    fn a_growth_that_fails_is_taken_back() {
        let limits = GuestLimits { memory_bytes: 10 * PAGE, ..GuestLimits::default() };
        let gauge = Arc::new(MemoryGauge::default());
        let mut limiter = MemoryLimiter::new(&limits, gauge.clone());
        assert!(limiter.memory_growing(0, 6 * PAGE, None).expect("no trap"));
        limiter.memory_grow_failed(wasmtime::format_err!("no memory")).expect("no trap");
        assert_eq!(gauge.n_bytes(), 0);
    }
}
