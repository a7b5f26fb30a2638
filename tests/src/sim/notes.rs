//! What happens in a scene: each event in its moment, faults by kind, and the first thing that must not be.

use std::fmt::{Arguments, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::mutation::Mutation;

macro_rules! faults {
    ($($(#[$doc:meta])* $fault:ident = $name:literal,)*) => {
        /// A fault that is injected.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Fault { $($(#[$doc])* $fault,)* }

        impl Fault {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$fault,)*];

            /// What it is called in a summary.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$fault => $name,)* }
            }
        }
    };
}

faults! {
    /// A connection ends in the middle of whatever it carries.
    Cut = "connections cut",
    /// A connection carries nothing more, and does not say so.
    Silence = "connections fallen silent",
    /// A client reads nothing for a while.
    SlowReader = "slow readers",
    /// A client cancels a request.
    Cancel = "cancels",
    /// A client drops a request's handle.
    Drop = "requests dropped",
    /// A client leaves with requests under way.
    Leave = "clients gone early",
    /// A client breaks the protocol.
    Broken = "protocol broken",
    /// A user stops a guest of another connection.
    Stop = "guests stopped",
    /// A guest's future is dropped where it waits.
    Kill = "guests killed",
    /// A guest forsakes a question.
    Forsake = "questions forsaken",
    /// A budget refuses.
    Budget = "budgets refused",
    /// A step or a copy of pages fails, and the device goes on.
    Step = "steps failed",
    /// A device has no memory for a step, or for pages.
    Memory = "allocations failed",
    /// The device is lost.
    Device = "devices lost",
    /// A step takes much longer than others.
    Stall = "steps stalled",
    /// A model is unloaded.
    Unload = "models unloaded",
    /// The daemon goes down in an orderly way.
    Shutdown = "shutdowns",
    /// A detached guest is read over another connection than before.
    Reattach = "detached guests attached",
    /// A reader of a detached guest has another take its place.
    TakenOver = "readers taken over",
    /// The daemon's sessions are dropped where they wait.
    Crash = "sessions dropped",
}

/// Faults by kind.
pub type Tally = [u64; Fault::ALL.len()];

/// What is noted of one scene.
#[derive(Debug)]
pub(super) struct Notes {
    begun: Instant,
    written: Mutex<Written>,
    faults: [AtomicU64; Fault::ALL.len()],
    violation: watch::Sender<Option<String>>,
    mutation: Option<Mutation>,
}

#[derive(Debug)]
struct Written {
    hasher: blake3::Hasher,
    n_events: u64,
    line: String,
    lines: Option<Vec<String>>,
}

impl Notes {
    /// Of a scene that begins now. Lines are kept if they are wanted.
    pub(super) fn new(mutation: Option<Mutation>, keeps_lines: bool) -> Self {
        let written = Written {
            hasher: blake3::Hasher::new(),
            n_events: 0,
            line: String::new(),
            lines: keeps_lines.then(Vec::new),
        };
        Self {
            begun: Instant::now(),
            written: Mutex::new(written),
            faults: Default::default(),
            violation: watch::Sender::new(None),
            mutation,
        }
    }

    /// Notes an event.
    pub(super) fn event(&self, event: Arguments<'_>) {
        let at = self.elapsed();
        let mut written = self.lock();
        let Written { hasher, n_events, line, lines } = &mut *written;
        line.clear();
        let micros = at.as_micros();
        writeln!(line, "{:>6}.{:03} {event}", micros / 1000, micros % 1000).expect("a string takes all");
        hasher.update(line.as_bytes());
        *n_events += 1;
        if let Some(lines) = lines {
            lines.push(line.clone());
        }
    }

    /// Notes a fault that is injected now.
    pub(super) fn fault(&self, fault: Fault) {
        self.faults[fault as usize].fetch_add(1, Ordering::Relaxed);
        self.event(format_args!("fault: {}", fault.name()));
    }

    /// Whether there was such a fault.
    pub(super) fn has(&self, fault: Fault) -> bool {
        self.faults[fault as usize].load(Ordering::Relaxed) > 0
    }

    /// Notes what must not be. The scene ends.
    pub(super) fn violation(&self, violation: String) {
        self.event(format_args!("violation: {violation}"));
        self.violation.send_if_modified(|first| {
            let is_first = first.is_none();
            if is_first {
                *first = Some(violation);
            }
            is_first
        });
    }

    /// Notes that what must hold does not.
    pub(super) fn expect(&self, holds: bool, else_say: impl FnOnce() -> String) {
        if !holds {
            self.violation(else_say());
        }
    }

    /// Waits for the first violation.
    pub(super) async fn violated(&self) {
        let mut violation = self.violation.subscribe();
        // The sender is held here.
        let _ = violation.wait_for(Option::is_some).await;
    }

    /// The first violation.
    pub(super) fn first_violation(&self) -> Option<String> {
        self.violation.borrow().clone()
    }

    /// Whether this mistake is to be made.
    pub(super) fn makes(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }

    /// Virtual time since the scene began.
    pub(super) fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Faults by kind.
    pub(super) fn tally(&self) -> Tally {
        std::array::from_fn(|idx| self.faults[idx].load(Ordering::Relaxed))
    }

    /// The digest of all events, how many there were, and their lines.
    pub(super) fn finish(&self) -> (blake3::Hash, u64, Vec<String>) {
        let mut written = self.lock();
        let lines = written.lines.take().unwrap_or_default();
        (written.hasher.finalize(), written.n_events, lines)
    }

    fn lock(&self) -> MutexGuard<'_, Written> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
