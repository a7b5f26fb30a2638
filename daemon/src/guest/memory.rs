//! The linear memory and tables of a guest, summed over all its instances.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use trellis_engine::account::{Account, BudgetExceeded, HostCharge};
use wasmtime::ResourceLimiter;

use super::limits::GuestLimits;

/// What of memory outlives the store: how much is used, and what was denied.
#[derive(Debug, Default)]
pub(crate) struct MemoryGauge {
    n_bytes: AtomicU64,
    denied: Mutex<Option<Denied>>,
}

/// A growth that was denied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Denied {
    /// Linear memory would have come to so many bytes.
    Memory(u64),
    /// A budget around the guest's own has no room for more.
    Budget(BudgetExceeded),
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
        self.denied.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn deny(&self, denied: Denied) {
        *self.denied.lock().unwrap_or_else(PoisonError::into_inner) = Some(denied);
    }
}

/// Decides whether a guest's memories and tables may grow.
#[derive(Debug)]
pub(crate) struct MemoryLimiter {
    gauge: Arc<MemoryGauge>,
    /// What linear memory takes of the budgets around the guest's own.
    charge: HostCharge,
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
    /// For a guest of this session.
    pub(crate) fn new(limits: &GuestLimits, gauge: Arc<MemoryGauge>, session: &Arc<Account>) -> Self {
        Self {
            gauge,
            charge: HostCharge::none(session),
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

impl MemoryLimiter {
    /// Bytes of linear memory.
    pub(crate) fn n_bytes(&self) -> u64 {
        self.gauge.n_bytes()
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
        if let Err(exceeded) = self.charge.resize(n_total as u64) {
            self.gauge.deny(Denied::Budget(exceeded));
            return Ok(false);
        }
        self.growing.n_bytes = n_added;
        self.gauge.n_bytes.store(n_total as u64, Ordering::Relaxed);
        Ok(true)
    }

    fn memory_grow_failed(&mut self, _: wasmtime::Error) -> wasmtime::Result<()> {
        let n_added = std::mem::take(&mut self.growing.n_bytes) as u64;
        let n_bytes = self.gauge.n_bytes.fetch_sub(n_added, Ordering::Relaxed) - n_added;
        self.charge.resize(n_bytes).expect("less fits where more did");
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
    use trellis_engine::account::{Budget, Resource};

    use super::*;

    const PAGE: usize = 65_536;

    fn session(host_bytes: u64) -> Arc<Account> {
        Account::new("session", Budget { host_bytes, ..Budget::UNLIMITED }, None)
    }

    #[test]
    fn guests_of_a_session_share_its_budget() {
        let limits = GuestLimits { memory_bytes: 10 * PAGE, ..GuestLimits::default() };
        let session = session(12 * PAGE as u64);
        let limiter = || {
            let gauge = Arc::<MemoryGauge>::default();
            (MemoryLimiter::new(&limits, gauge.clone(), &session), gauge)
        };
        let ((mut one, _), (mut two, of_two)) = (limiter(), limiter());
        assert!(one.memory_growing(0, 8 * PAGE, None).expect("no trap"));
        assert!(!two.memory_growing(0, 5 * PAGE, None).expect("no trap"));
        let Some(Denied::Budget(exceeded)) = of_two.denied() else { panic!("{:?}", of_two.denied()) };
        assert_eq!((exceeded.level, exceeded.requested), ("session", 5 * PAGE as u64));
        drop(one);
        assert!(two.memory_growing(0, 5 * PAGE, None).expect("no trap"));
        assert_eq!(session.used(Resource::HostBytes), 5 * PAGE as u64);
        drop(two);
        assert_eq!(session.used(Resource::HostBytes), 0);
    }

    #[test]
    fn memories_are_summed() {
        let limits = GuestLimits { memory_bytes: 10 * PAGE, ..GuestLimits::default() };
        let gauge = Arc::new(MemoryGauge::default());
        let mut limiter = MemoryLimiter::new(&limits, gauge.clone(), &session(u64::MAX));
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
        let mut limiter = MemoryLimiter::new(&limits, gauge.clone(), &session(u64::MAX));
        assert!(limiter.memory_growing(0, 6 * PAGE, None).expect("no trap"));
        limiter.memory_grow_failed(wasmtime::format_err!("no memory")).expect("no trap");
        assert_eq!(gauge.n_bytes(), 0);
    }
}
