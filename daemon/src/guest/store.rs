//! What the host keeps for one guest while it runs.

use std::sync::Arc;

use trellis_engine::RunKey;
use trellis_engine::account::{BudgetExceeded, HostCharge, Owner};
use trellis_engine::model::Date;
use wasmtime::component::{Resource, ResourceTable, ResourceTableError};
use wasmtime_wasi::WasiCtx;

use super::beside::Beside;
use super::bindings::trellis::host::types::BudgetLimit;
use super::bindings::trellis::host::types::Error as ApiError;
use super::cpu::CpuClock;
use super::deadline::Deadline;
use super::drain::DrainWatch;
use super::error::GuestFault;
use super::guest_models::GuestModels;
use super::host::types::HostError;
use super::inbox::InboxReceiver;
use super::io::OutputSender;
use super::limits::GuestLimits;
use super::log::LogSink;
use super::memory::MemoryLimiter;
use super::profile::Profile;
use super::tape::Tape;
use super::trials::Trials;

/// What a call brings or answers up to this length is on no account by itself: it is among what every guest takes.
const CALL_BYTES_UNPAID: usize = 8 << 10;

/// The state of one guest. Dropping it frees all that the guest holds.
pub(crate) struct GuestState {
    pub(crate) table: ResourceTable,
    pub(crate) wasi: WasiCtx,
    pub(crate) memory: MemoryLimiter,
    pub(crate) limits: Arc<GuestLimits>,
    pub(crate) cpu: Arc<CpuClock>,
    pub(crate) beside: Beside,
    /// Where grammars are tried out first, if not here.
    pub(crate) trials: Option<Arc<Trials>>,
    pub(crate) models: Arc<GuestModels>,
    pub(crate) owner: Owner,
    pub(crate) output: OutputSender,
    pub(crate) input: InboxReceiver,
    pub(crate) log: Arc<LogSink>,
    pub(crate) arguments: Vec<String>,
    pub(crate) seed: u64,
    pub(crate) deadline: Arc<Deadline>,
    pub(crate) drain: DrainWatch,
    /// The day on which the guest was started, for chat templates.
    pub(crate) date: Option<Date>,
    pub(crate) n_run_keys: u64,
    /// For the answer of the last call, until the guest calls again.
    pub(crate) answer: Vec<HostCharge>,
    /// Where the guest's calls are noted, or read.
    pub(crate) tape: Option<Arc<Tape>>,
    /// Where the guest's time is noted.
    pub(crate) profile: Option<Arc<Profile>>,
}

impl GuestState {
    /// A key that no stream of this guest has had.
    pub(crate) fn next_run_key(&mut self) -> RunKey {
        self.n_run_keys += 1;
        RunKey(self.n_run_keys)
    }

    /// Pays for what a call holds while it is under way, where that is long.
    ///
    /// # Errors
    /// There is not so much left.
    pub(crate) fn pay_for_call(&self, n_bytes: usize) -> Result<Option<HostCharge>, BudgetExceeded> {
        (n_bytes > CALL_BYTES_UNPAID)
            .then(|| HostCharge::new(&self.owner.account, n_bytes as u64))
            .transpose()
    }

    /// Pays for an answer, before it is made, until the guest calls again: it is held while the guest makes room for it, which takes as
    /// long as the guest likes.
    ///
    /// # Errors
    /// There is not so much left.
    pub(crate) fn pay_for_answer(&mut self, n_bytes: usize) -> Result<(), BudgetExceeded> {
        self.let_go_of_answer();
        let charge = self.pay_for_call(n_bytes)?;
        self.answer.extend(charge);
        Ok(())
    }

    /// The guest calls again: it has the answer of the call before.
    pub(crate) fn let_go_of_answer(&mut self) {
        self.answer.clear();
    }

    /// Gives the guest an object, if it may have one more.
    pub(crate) fn give<T: Send + 'static>(&mut self, object: T) -> Result<Resource<T>, HostError> {
        let limit = self.limits.n_handles as u64;
        self.table.push(object).map_err(|error| match error {
            ResourceTableError::Full => HostError::Refused(ApiError::BudgetExceeded(BudgetLimit {
                what: "host objects of the guest".to_owned(),
                used: limit,
                requested: 1,
                limit,
            })),
            error => HostError::Fault(error.into()),
        })
    }

    /// As [`GuestState::give`], where the host API has no error to return.
    pub(crate) fn give_or_trap<T: Send + 'static>(&mut self, object: T) -> wasmtime::Result<Resource<T>> {
        self.table.push(object).map_err(|error| match error {
            ResourceTableError::Full => GuestFault::Handles.into(),
            error => error.into(),
        })
    }
}
