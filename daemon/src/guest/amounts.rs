//! What a guest uses of what it is bounded in, and what it may use: the same figures for lists, for the log, and for itself.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use trellis_engine::account::{Account, ActorId, GuestId, Resource};

use super::error::GuestEnd;
use super::limits::GuestLimits;
use super::log::pieces;
use super::run::Vitals;

/// Bytes of what the log says of a guest's end.
const REASON_BYTES_MAX: usize = 200;

/// Amounts by the names of their limits in [`GuestLimits`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Amounts {
    /// Bytes of linear memory.
    pub memory_bytes: u64,
    /// Milliseconds of processor time.
    pub cpu_ms: u64,
    /// KV pages that its contexts hold.
    pub n_pages: u64,
    /// Open contexts.
    pub n_contexts: u64,
    /// Tokens computed for it.
    pub n_tokens: u64,
    /// Bytes of host memory for token lists, masks and grammars.
    pub host_bytes: u64,
}

impl Amounts {
    /// With what an account says of each resource.
    fn with(memory_bytes: u64, cpu_ms: u64, of: impl Fn(Resource) -> u64) -> Self {
        Self {
            memory_bytes,
            cpu_ms,
            n_pages: of(Resource::Pages),
            n_contexts: of(Resource::Contexts),
            n_tokens: of(Resource::Tokens),
            host_bytes: of(Resource::HostBytes),
        }
    }

    /// The most that a guest with this account may use, within what its session and its user may.
    pub(crate) fn limits(limits: &GuestLimits, account: &Account) -> Self {
        Self::with(limits.memory_bytes as u64, limits.cpu_ms, |resource| account.limit(resource))
    }
}

impl Amounts {
    /// The same with what engines count on this account.
    pub(crate) fn counted_by(self, account: &Account) -> Self {
        let (n_pages, n_tokens) = (account.used(Resource::Pages), account.used(Resource::Tokens));
        Self { n_pages, n_tokens, ..self }
    }
}

impl Vitals {
    /// What it uses at this moment.
    pub(crate) fn amounts(&self) -> Amounts {
        let cpu_ms = self.cpu.used().as_millis() as u64;
        Amounts::with(self.memory.n_bytes(), cpu_ms, |resource| self.account.used(resource))
    }
}

/// While it lives, the guest holds what it holds; notes what that is when it is dropped.
pub(crate) struct Holding(pub(crate) Arc<Vitals>);

impl Drop for Holding {
    fn drop(&mut self) {
        // It lives once; were it noted before, the first note would be of more.
        let _ = self.0.held_last.set(self.0.amounts());
    }
}

/// Tells the log how a guest has ended and what it held last: everybody if a limit ended it.
pub(crate) fn log_end(vitals: &Vitals, end: &GuestEnd) {
    let now = vitals.amounts();
    // A guest that never ran held nothing.
    let held = vitals.held_last.get().copied().unwrap_or(now);
    let last = Amounts { cpu_ms: now.cpu_ms, n_tokens: now.n_tokens, ..held };
    last.log(vitals.id, &vitals.name, vitals.actor, end);
}

impl Amounts {
    /// Tells the log of a guest's end, with these as what it held last.
    pub(crate) fn log(&self, guest: GuestId, program: &str, actor: ActorId, end: &GuestEnd) {
        let Self { memory_bytes, cpu_ms, n_pages, n_contexts, n_tokens, host_bytes } = *self;
        let reason = end.to_string();
        let reason = pieces(&reason, REASON_BYTES_MAX).next().unwrap_or_default();
        macro_rules! tell {
            ($level:ident, $($limit:tt)*) => {
                tracing::$level!(
                    guest = guest.0,
                    ?program,
                    uid = actor.0,
                    memory_bytes,
                    cpu_ms,
                    n_pages,
                    n_contexts,
                    n_tokens,
                    host_bytes,
                    // Quoted: words of a guest stay in their line.
                    reason = ?reason,
                    $($limit)*
                )
            };
        }
        match end.limit() {
            Some(limit) => tell!(info, limit, "a limit has ended a guest"),
            None => tell!(debug, "a guest has ended"),
        }
    }
}

impl GuestEnd {
    /// The limit that ended it, by its name in [`GuestLimits`].
    #[must_use]
    pub fn limit(&self) -> Option<&'static str> {
        Some(match self {
            Self::CpuExceeded { .. } => "cpu_ms",
            Self::MemoryExceeded { .. } => "memory_bytes",
            Self::HostBytesExceeded(_) => "host_bytes",
            Self::TableExceeded { .. } => "n_table_elements",
            Self::HandlesExceeded { .. } => "n_handles",
            Self::CallBytesExceeded { .. } => "call_bytes",
            Self::RecordingExceeded { .. } => "recording_bytes",
            Self::DeadlineExceeded { .. } => "deadline_ms",
            Self::IdleExceeded { .. } => "idle_ms",
            Self::Finished
            | Self::Failed { .. }
            | Self::Exited { .. }
            | Self::Trapped { .. }
            | Self::Stopped
            | Self::DeviceFailed { .. }
            | Self::ModelFailed { .. }
            | Self::ModelUnloaded { .. }
            | Self::ModelNotLoaded { .. }
            | Self::ClientGone
            | Self::Panicked { .. }
            | Self::ProcessLost { .. } => return None,
        })
    }
}
