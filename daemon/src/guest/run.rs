//! One guest's life, from its first instruction to its end.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use futures_util::FutureExt as _;
use tokio_util::sync::CancellationToken;
use trellis_engine::account::{Account, ActorId, GuestId, Owner, SessionId};
use trellis_engine::model::Date;
use wasmtime::component::ResourceTable;
use wasmtime::{Store, Trap, UpdateDeadline, WasmBacktrace};

use super::amounts::{Amounts, Holding};
use super::beside::Beside;
use super::component::Program;
use super::cpu::CpuClock;
use super::deadline::Deadline;
use super::drain::DrainWatch;
use super::error::{GuestEnd, GuestFault};
use super::guest_models::GuestModels;
use super::io::{GuestIo, OutputSender};
use super::limits::GuestLimits;
use super::log::LogSink;
use super::memory::{Denied, MemoryGauge, MemoryLimiter};
use super::names::{NAME_BYTES_MAX, cut};
use super::profile::Profile;
use super::store::GuestState;
use super::tape::Tape;
use super::trials::Trials;
use super::wasi;

/// Bytes of a message that a guest leaves behind: its error, or the names in its backtrace.
const MESSAGE_BYTES_MAX: usize = 16 << 10;

/// How many times longer than it may be a call is that gets an error; one that is longer still ends its guest.
const N_CALLS_LOOKED_AT: usize = 16;

/// Functions of a backtrace that a trap's reason names.
const N_FUNCTIONS_MAX: usize = 4;

/// A trap after which the guest's own words of a panic are in its log.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Panicked(String);

/// What can be seen of a guest from outside while it runs.
#[derive(Debug)]
pub(crate) struct Vitals {
    pub(crate) id: GuestId,
    pub(crate) name: String,
    pub(crate) hash: blake3::Hash,
    pub(crate) actor: ActorId,
    pub(crate) session: SessionId,
    pub(crate) account: Arc<Account>,
    pub(crate) started: Instant,
    pub(crate) cpu: Arc<CpuClock>,
    pub(crate) memory: Arc<MemoryGauge>,
    pub(crate) models: Arc<GuestModels>,
    pub(crate) stop: CancellationToken,
    /// What it held before all was freed.
    pub(crate) held_last: OnceLock<Amounts>,
}

impl Vitals {
    /// The account around the guest's own.
    fn session_account(&self) -> &Arc<Account> {
        self.account.parent().unwrap_or(&self.account)
    }

    /// On whose behalf the guest asks.
    pub(crate) fn owner(&self) -> Owner {
        let Self { id, actor, session, account, .. } = self;
        Owner { actor: *actor, session: *session, guest: *id, account: account.clone() }
    }
}

/// All that a guest needs to live.
pub(crate) struct Birth {
    pub(crate) vitals: Arc<Vitals>,
    pub(crate) program: Program,
    pub(crate) limits: Arc<GuestLimits>,
    pub(crate) beside: Beside,
    pub(crate) trials: Option<Arc<Trials>>,
    pub(crate) arguments: Vec<String>,
    pub(crate) seed: u64,
    pub(crate) client_deadline_ms: Option<u64>,
    pub(crate) drain: DrainWatch,
    pub(crate) io: GuestIo,
    /// Where its calls are noted, or read.
    pub(crate) tape: Option<Arc<Tape>>,
    /// Where its time is noted.
    pub(crate) profile: Option<Arc<Profile>>,
}

/// Runs a guest. When this returns, all that the guest held is freed.
pub(crate) async fn live(mut birth: Birth) -> GuestEnd {
    let (limits, output, tape) = (birth.limits.clone(), birth.io.output.clone(), birth.tape.clone());
    let profile = birth.profile.clone();
    birth.io.output = output.clone().with_tape(tape.clone());
    let models = birth.vitals.models.clone();
    let end = models.cause_of(live_to_the_end(birth).await);
    if let Some(tape) = tape {
        tape.finish(&end, &output, limits.output_piece_bytes()).await;
    }
    if let Some(profile) = profile {
        profile.finish(&output, limits.output_piece_bytes()).await;
    }
    end
}

async fn live_to_the_end(birth: Birth) -> GuestEnd {
    let vitals = birth.vitals.clone();
    let (limits, output) = (birth.limits.clone(), birth.io.output.clone());
    let deadline = Arc::new(Deadline::new(vitals.started, birth.client_deadline_ms, &limits));
    let run = AssertUnwindSafe(execute(birth, deadline.clone())).catch_unwind();
    let end = tokio::select! {
        biased;
        () = vitals.stop.cancelled() => return GuestEnd::Stopped,
        end = deadline.over() => return end,
        end = run => end,
    };
    match end {
        Ok(Ok(Ok(()))) => GuestEnd::Finished,
        Ok(Ok(Err(_))) if output.is_closed() => GuestEnd::ClientGone,
        Ok(Ok(Err(message))) => GuestEnd::Failed { message: cut(&message, MESSAGE_BYTES_MAX) },
        Ok(Err(error)) => end_of(&error, &vitals, &limits, &output),
        Err(panic) => GuestEnd::Panicked { message: panic_message(panic.as_ref()) },
    }
}

async fn execute(birth: Birth, deadline: Arc<Deadline>) -> wasmtime::Result<Result<(), String>> {
    let Birth { vitals, program, limits, beside, trials, arguments, seed, drain, io, tape, profile, .. } =
        birth;
    let log = Arc::new(LogSink::new(io.output.clone(), limits.log_bytes));
    let mut table = ResourceTable::new();
    table.set_max_capacity(limits.n_handles);
    let owner = vitals.owner();
    let now_s = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let of_main = program.is_command().then_some(arguments.as_slice());
    let state = GuestState {
        table,
        wasi: wasi::context(seed, of_main, &log, &limits, tape.as_ref()),
        memory: MemoryLimiter::new(&limits, vitals.memory.clone(), vitals.session_account()),
        models: vitals.models.clone(),
        owner,
        output: io.output,
        input: io.input,
        log: log.clone(),
        arguments,
        seed,
        deadline,
        drain,
        date: Date::from_unix_s(now_s),
        n_run_keys: 0,
        answer: Vec::new(),
        tape,
        profile: profile.clone(),
        limits: limits.clone(),
        cpu: vitals.cpu.clone(),
        beside,
        trials,
    };
    let mut store = Store::new(program.engine(), state);
    store.limiter(|state| &mut state.memory);
    // What is longer than a call may be is refused with an error once it is seen; this bounds what is looked at.
    store.set_hostcall_fuel(limits.call_bytes.saturating_mul(N_CALLS_LOOKED_AT));
    store.set_epoch_deadline(1);
    let cpu_max = Duration::from_millis(limits.cpu_ms);
    // Dropped before the store, also where this is dropped as it waits.
    let holding = Holding(vitals.clone());
    let sampled = profile.clone();
    store.epoch_deadline_callback(move |context| {
        if let Some(profile) = &sampled {
            profile.note_sample(&WasmBacktrace::force_capture(context));
        }
        let used = vitals.cpu.used_now();
        if used > cpu_max {
            return Err(GuestFault::Cpu { used_ms: whole_ms(used) }.into());
        }
        Ok(UpdateDeadline::YieldCustom(1, Box::pin(tokio::task::yield_now())))
    });
    if let Some(profile) = profile {
        profile.note_begin();
    }
    let result = program.run(&mut store).await;
    drop(holding);
    // The last lines are in the streams of the store.
    drop(store);
    log.close();
    let Err(error) = result else { return result };
    // The guest's own words for what is else an `unreachable` somewhere.
    let is_panic = error.downcast_ref::<Trap>() == Some(&Trap::UnreachableCodeReached);
    Err(match log.panic().filter(|_| is_panic) {
        Some(panic) => error.context(Panicked(panic)),
        None => error,
    })
}

/// Rounded up: what is above a limit in milliseconds stays above it.
pub(crate) fn whole_ms(time: Duration) -> u64 {
    time.as_nanos().div_ceil(1_000_000) as u64
}

/// What an error that came out of wasm means.
fn end_of(error: &wasmtime::Error, vitals: &Vitals, limits: &GuestLimits, output: &OutputSender) -> GuestEnd {
    match error.downcast_ref::<GuestFault>() {
        Some(GuestFault::Cpu { used_ms }) => {
            return GuestEnd::CpuExceeded { used_ms: *used_ms, limit_ms: limits.cpu_ms };
        }
        Some(GuestFault::CallBytes) => {
            return GuestEnd::CallBytesExceeded { limit_bytes: limits.call_bytes as u64 };
        }
        Some(GuestFault::Handles) => return GuestEnd::HandlesExceeded { limit: limits.n_handles as u64 },
        Some(GuestFault::HostBytes(exceeded)) => return GuestEnd::HostBytesExceeded(exceeded.clone()),
        Some(GuestFault::Recording { waiting_bytes }) => {
            let (waiting_bytes, limit_bytes) = (*waiting_bytes as u64, limits.recording_bytes as u64);
            return GuestEnd::RecordingExceeded { waiting_bytes, limit_bytes };
        }
        None => {}
    }
    match error.downcast_ref::<wasmtime_wasi::I32Exit>() {
        Some(wasmtime_wasi::I32Exit(0)) => return GuestEnd::Finished,
        Some(wasmtime_wasi::I32Exit(code)) => return GuestEnd::Exited { code: *code },
        None => {}
    }
    // A guest that is denied memory mostly aborts; the trap says less than the denial.
    match vitals.memory.denied() {
        Some(Denied::Memory(requested_bytes)) => {
            return GuestEnd::MemoryExceeded { requested_bytes, limit_bytes: limits.memory_bytes as u64 };
        }
        Some(Denied::Budget(exceeded)) => return GuestEnd::HostBytesExceeded(exceeded),
        Some(Denied::Table(requested)) => {
            return GuestEnd::TableExceeded { requested, limit: limits.n_table_elements as u64 };
        }
        None => {}
    }
    if let Some(Panicked(words)) = error.downcast_ref::<Panicked>() {
        return GuestEnd::Trapped { reason: words.clone() };
    }
    let reason = trap_reason(error);
    // The runtime's own error for this is private; its text is all there is.
    if reason.contains("fuel allocated for hostcalls") {
        return GuestEnd::CallBytesExceeded { limit_bytes: limits.call_bytes as u64 };
    }
    if output.is_closed() {
        return GuestEnd::ClientGone;
    }
    GuestEnd::Trapped { reason }
}

fn trap_reason(error: &wasmtime::Error) -> String {
    let cause = match error.downcast_ref::<Trap>() {
        Some(trap) => trap.to_string(),
        None => error.root_cause().to_string(),
    };
    let names = error.downcast_ref::<WasmBacktrace>().map(|backtrace| {
        let names = backtrace.frames().iter().filter_map(|frame| frame.func_name());
        let names = names.map(|name| format!("{:#}", rustc_demangle::demangle(name)));
        names.take(N_FUNCTIONS_MAX).map(|name| cut(&name, NAME_BYTES_MAX)).collect::<Vec<_>>().join(" < ")
    });
    match names {
        Some(names) if !names.is_empty() => format!("{} in {names}", cut(&cause, MESSAGE_BYTES_MAX)),
        _ => cut(&cause, MESSAGE_BYTES_MAX),
    }
}

pub(crate) fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    cut(text.unwrap_or("a panic without a message"), MESSAGE_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_above_a_limit_stay_above_it() {
        assert_eq!(whole_ms(Duration::from_millis(2_000)), 2_000);
        assert_eq!(whole_ms(Duration::from_millis(2_000) + Duration::from_nanos(1)), 2_001);
    }
}
