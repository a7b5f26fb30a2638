//! An instance of the policy: each call bounded, none after one that failed.

use std::sync::Arc;
use std::time::Duration;

use trellis_engine::account::Account;
use trellis_engine::model::Tokenizer;
use wasmtime::component::ResourceTable;
use wasmtime::{Store, Trap, UpdateDeadline};

use super::bindings::Policy as World;
use super::bindings::trellis::host::policies as wit;
use super::state::{PolicyState, PolicyTokenizer};
use super::{Policy, PolicyFailure};
use crate::guest::io::{GuestOutput, output_channel};
use crate::guest::limits::GuestLimits;
use crate::guest::log::LogSink;
use crate::guest::memory::{Denied, MemoryGauge, MemoryLimiter};
use crate::guest::names::{REASON_BYTES_MAX, cut};
use crate::guest::ticker::TICK;
use crate::guest::wasi;

/// By how much longer a call may take by the clock than it may compute: what it may wait for is the processor alone.
const N_CLOCKS: u32 = 10;

/// Credit of the lines of one call, which are read after it.
const LINES_BYTES: usize = 1 << 20;

/// A call that computed for too long.
#[derive(Debug, thiserror::Error)]
#[error("the policy computed for {n_ticks} ticks")]
struct OutOfTime {
    n_ticks: u64,
}

/// An instance, of one guest or for one model.
pub(super) struct Instance {
    policy: Arc<Policy>,
    store: Store<PolicyState>,
    /// None before the first call, and after one that failed.
    world: Option<World>,
    /// What others than the operator are told of the call that failed.
    first_failure: Option<String>,
}

impl Instance {
    /// An instance whose memory is charged to this account.
    pub(super) async fn new(policy: Arc<Policy>, account: &Arc<Account>) -> Result<Self, PolicyFailure> {
        let settings = policy.settings();
        let limits = GuestLimits { memory_bytes: settings.memory_bytes, ..policy.guest_limits.clone() };
        let (output, lines) = output_channel(LINES_BYTES);
        let log = Arc::new(LogSink::new(output, settings.log_bytes));
        let gauge = Arc::new(MemoryGauge::default());
        let mut table = ResourceTable::new();
        table.set_max_capacity(limits.n_handles);
        let state = PolicyState {
            table,
            // Whatever it draws is known: what has to be secret stands in its settings.
            wasi: wasi::context(0, None, &log, &limits, None),
            memory: MemoryLimiter::new(&limits, gauge.clone(), account),
            gauge,
            log,
            lines,
            n_ticks: 0,
            n_ticks_max: 0,
        };
        let mut store = Store::new(policy.pre.engine(), state);
        store.limiter(|state| &mut state.memory);
        store.set_hostcall_fuel(settings.reply_bytes);
        store.set_epoch_deadline(1);
        store.epoch_deadline_callback(|mut context| {
            let state = context.data_mut();
            state.n_ticks += 1;
            if state.n_ticks > state.n_ticks_max {
                return Err(OutOfTime { n_ticks: state.n_ticks }.into());
            }
            Ok(UpdateDeadline::YieldCustom(1, Box::pin(tokio::task::yield_now())))
        });
        let mut instance = Self { policy, store, world: None, first_failure: None };
        let (pre, load_ms) = (instance.policy.pre.clone(), instance.policy.settings().load_ms);
        let world =
            instance.bounded("begin", load_ms, async |store| pre.instantiate_async(store).await).await?;
        instance.world = Some(world);
        Ok(instance)
    }

    pub(super) async fn begin(&mut self, settings: &[(String, String)]) -> Result<(), PolicyFailure> {
        let load_ms = self.policy.settings().load_ms;
        let begun = self.call("begin", load_ms, async |store, world| {
            world.trellis_host_policing().call_begin(store, settings).await
        });
        said("begin", begun.await?)
    }

    pub(super) async fn front(
        &mut self,
        model: &str,
        tokenizer: &Arc<Tokenizer>,
    ) -> Result<wit::Front, PolicyFailure> {
        let load_ms = self.policy.settings().load_ms;
        let tokenizer = PolicyTokenizer(tokenizer.clone());
        let front = self.call("put-in-front", load_ms, async |store, world| {
            let tokenizer = store.data_mut().table.push(tokenizer)?;
            let lent = wasmtime::component::Resource::new_borrow(tokenizer.rep());
            let front = world.trellis_host_policing().call_put_in_front(&mut *store, model, lent).await;
            store.data_mut().table.delete(tokenizer)?;
            front
        });
        said("put-in-front", front.await?)
    }

    pub(super) async fn emitted(
        &mut self,
        guest: &wit::GuestInfo,
        output: &wit::Output,
    ) -> Result<wit::Verdict, PolicyFailure> {
        let call_ms = self.policy.settings().call_ms;
        self.call("emitted", call_ms, async |store, world| {
            world.trellis_host_policing().call_emitted(store, guest, output).await
        })
        .await
    }

    pub(super) async fn received(
        &mut self,
        guest: &wit::GuestInfo,
        input: &wit::Input,
    ) -> Result<wit::Ruling, PolicyFailure> {
        let call_ms = self.policy.settings().call_ms;
        self.call("received", call_ms, async |store, world| {
            world.trellis_host_policing().call_received(store, guest, input).await
        })
        .await
    }

    pub(super) async fn ended(
        &mut self,
        guest: &wit::GuestInfo,
        used: wit::Used,
        outcome: &wit::Outcome,
    ) -> Result<Vec<wit::Output>, PolicyFailure> {
        let call_ms = self.policy.settings().call_ms;
        self.call("ended", call_ms, async |store, world| {
            world.trellis_host_policing().call_ended(store, guest, used, outcome).await
        })
        .await
    }

    async fn call<T>(
        &mut self,
        call: &'static str,
        limit_ms: u64,
        make: impl AsyncFnOnce(&mut Store<PolicyState>, &World) -> wasmtime::Result<T>,
    ) -> Result<T, PolicyFailure> {
        // A call that fails, or is given up as it waits, leaves no world behind: the store is in an unknown state.
        let Some(world) = self.world.take() else {
            let first = self.first_failure.clone().unwrap_or_else(|| "a call was given up".to_owned());
            return Err(PolicyFailure::Spent { first });
        };
        let made = self.bounded(call, limit_ms, async |store| make(store, &world).await).await;
        match &made {
            Ok(_) => self.world = Some(world),
            Err(failure) => self.first_failure = Some(failure.told()),
        }
        made
    }

    async fn bounded<T>(
        &mut self,
        call: &'static str,
        limit_ms: u64,
        make: impl AsyncFnOnce(&mut Store<PolicyState>) -> wasmtime::Result<T>,
    ) -> Result<T, PolicyFailure> {
        let _ticking = self.policy.ticker.keep_going();
        let state = self.store.data_mut();
        state.n_ticks = 0;
        state.n_ticks_max = limit_ms / u64::try_from(TICK.as_millis()).unwrap_or(1).max(1);
        self.store.set_epoch_deadline(1);
        let clock = Duration::from_millis(limit_ms).saturating_mul(N_CLOCKS);
        let made = tokio::time::timeout(clock, make(&mut self.store)).await;
        self.write_lines();
        match made {
            Err(_) => Err(PolicyFailure::TooSlow { call, limit_ms: clock.as_millis() as u64 }),
            Ok(made) => made.map_err(|error| self.failure(call, limit_ms, &error)),
        }
    }

    /// Writes what it has said to the daemon's log.
    fn write_lines(&mut self) {
        let lines = &mut self.store.data_mut().lines;
        while let Some(output) = lines.try_recv() {
            lines.grant(output.credit_bytes());
            if let GuestOutput::Log { line, .. } = output {
                tracing::info!(target: "trellis::policy", "{line}");
            }
        }
    }

    fn failure(&self, call: &'static str, limit_ms: u64, error: &wasmtime::Error) -> PolicyFailure {
        if error.is::<OutOfTime>() {
            return PolicyFailure::TooSlow { call, limit_ms };
        }
        match self.store.data().gauge.denied() {
            Some(Denied::Memory(needed_bytes)) => {
                let limit_bytes = self.policy.settings().memory_bytes as u64;
                return PolicyFailure::Memory { call, needed_bytes, limit_bytes };
            }
            Some(Denied::Budget(exceeded)) => return PolicyFailure::OverBudget { call, exceeded },
            Some(Denied::Table(_)) | None => {}
        }
        let reason = match error.downcast_ref::<Trap>() {
            Some(trap) => trap.to_string(),
            None => error.root_cause().to_string(),
        };
        // The runtime's own error for this is private; its text is all there is.
        if reason.contains("fuel allocated for hostcalls") {
            return PolicyFailure::TooLarge { call, limit_bytes: self.policy.settings().reply_bytes as u64 };
        }
        let words = self.store.data().log.panic().unwrap_or(reason);
        PolicyFailure::Trapped { call, reason: cut(&words, REASON_BYTES_MAX) }
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.store.data().log.close();
        self.write_lines();
    }
}

fn said<T>(call: &'static str, said: Result<T, String>) -> Result<T, PolicyFailure> {
    said.map_err(|reason| PolicyFailure::Said { call, reason: cut(&reason, REASON_BYTES_MAX) })
}
