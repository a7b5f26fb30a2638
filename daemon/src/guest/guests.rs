//! The house of all guests: compiles, starts, lists and stops them.

use std::collections::BTreeMap;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use futures_util::FutureExt as _;
use tokio::sync::{oneshot, watch};
use tokio_util::sync::{CancellationToken, DropGuard};
use trellis_engine::account::{Account, ActorId, GuestId, HostCharge, Resource, SessionId};
use trellis_engine::{Causes, ModelHandle};

use super::amounts::{Amounts, log_end};
use super::beside::Beside;
use super::cache::{CacheLimits, CodeCache};
use super::compile::{CompileProgress, Compiler, ProgramSource};
use super::component::{Program, check_kind};
use super::cpu::CpuClock;
use super::error::{GuestEnd, GuestError};
use super::flights::{Flights, Joined, PendingPermit, QueueFull};
use super::guest_models::GuestModels;
use super::io::GuestIo;
use super::limits::GuestLimits;
use super::memory::MemoryGauge;
use super::profile::Profile;
use super::programs::Programs;
use super::run::{Birth, Vitals, live, panic_message};
use super::runtime::Runtime;
use super::tape::Tape;
use super::threads::GuestThreads;
use crate::models::Models;
use crate::tasks::blocking;

/// Files of compiled code that are read at once, each of many megabytes.
const N_LOADS: usize = 2;

/// What a guest takes of host memory beside its linear memory and its arguments: its stack, its instances, its tables.
const GUEST_BYTES: usize = 128 << 10;

/// What comes of compiling a component.
type Compiled = Result<(Program, ProgramSource), Arc<GuestError>>;

/// What a host for guests needs.
#[derive(Debug)]
pub struct GuestHostConfig {
    /// What guests may use.
    pub limits: GuestLimits,
    /// A folder of the daemon's own for compiled components; made with mode 0700 if it is not there.
    pub cache_dir: PathBuf,
    /// The executable that becomes the compiling process with the argument [`COMPILE_WORKER`]; the running
    /// executable when `None`.
    ///
    /// [`COMPILE_WORKER`]: super::COMPILE_WORKER
    pub compile_exe: Option<PathBuf>,
    /// The loaded models; the first is the default.
    pub(crate) models: Models,
}

/// Compiles, starts, lists and stops guests.
pub struct GuestHost {
    limits: Arc<GuestLimits>,
    models: Models,
    runtime: Runtime,
    compiler: Compiler,
    cache: CodeCache,
    programs: Mutex<Programs>,
    loads: Arc<Flights<Option<(Program, ProgramSource)>, ()>>,
    compiles: Arc<Flights<Compiled, CompileProgress>>,
    running: Mutex<BTreeMap<GuestId, Arc<Vitals>>>,
    threads: GuestThreads,
    beside: Beside,
    n_started: AtomicU64,
}

impl std::fmt::Debug for GuestHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GuestHost").field("limits", &self.limits).finish_non_exhaustive()
    }
}

/// A guest to start.
#[derive(Debug)]
pub struct Launch {
    /// What to run.
    pub program: Program,
    /// What people call it.
    pub name: String,
    /// The user that asks.
    pub actor: ActorId,
    /// On which connection.
    pub session: SessionId,
    /// The session's account, inside its user's.
    pub account: Arc<Account>,
    /// What the client gives to the guest.
    pub arguments: Vec<String>,
    /// The name of the model that the guest gets when it names none; the daemon's default when `None`.
    pub model: Option<String>,
    /// For everything random in the guest.
    pub seed: u64,
    /// The most time from its start to its end, by the clock.
    pub deadline_ms: Option<u64>,
    /// Whether to send a recording of it to the client.
    pub is_recorded: bool,
    /// Whether to send a profile of it to the client.
    pub is_profiled: bool,
}

/// A guest that was started.
#[derive(Debug)]
pub struct RunningGuest {
    /// Its number, unique while the daemon runs.
    pub id: GuestId,
    /// How it ends. Dropping this stops the guest.
    pub end: GuestEnding,
    /// Stops it.
    pub stop: GuestStop,
    /// What it uses.
    pub account: Arc<Account>,
    /// The models as it sees them.
    pub(crate) models: Arc<GuestModels>,
}

/// Stops a guest. Cheap to clone.
#[derive(Clone, Debug)]
pub struct GuestStop(CancellationToken);

impl GuestStop {
    /// Stops the guest; nothing happens when it has ended already.
    pub fn stop(&self) {
        self.0.cancel();
    }
}

/// The end of a guest, once it has come: all that the guest held is freed then. Dropping it stops the guest.
#[derive(Debug)]
pub struct GuestEnding {
    end: oneshot::Receiver<GuestEnd>,
    _stop: DropGuard,
}

impl Future for GuestEnding {
    type Output = GuestEnd;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<GuestEnd> {
        // Without a word it goes down with the runtime.
        Pin::new(&mut self.end).poll(cx).map(|end| end.unwrap_or(GuestEnd::Stopped))
    }
}

/// What a guest does at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestActivity {
    /// It computes.
    Running,
    /// It waits for the engine, its client or time.
    Waiting,
}

/// A guest that runs, as it is listed.
#[derive(Clone, Debug)]
pub struct GuestInfo {
    /// Its number.
    pub id: GuestId,
    /// What people call it.
    pub name: String,
    /// The BLAKE3 hash of its component.
    pub hash: blake3::Hash,
    /// The user that started it.
    pub actor: ActorId,
    /// On which connection.
    pub session: SessionId,
    /// What it does at this moment.
    pub activity: GuestActivity,
    /// The names of the models that it holds something of.
    pub models: Vec<String>,
    /// Time since its start.
    pub elapsed_ms: u64,
    /// What it uses of what it is bounded in.
    pub amounts: Amounts,
    /// The most of that, within what its session and its user may use.
    pub limits: Amounts,
    /// What was computed for it.
    pub used: Used,
}

/// What was computed for a guest, at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Used {
    /// Tokens, those decoded ahead, or guessed, in vain included.
    pub n_tokens: u64,
    /// Tokens of prompts that the prefix cache held already.
    pub n_tokens_cached: u64,
    /// What was in vain and what it waited for, by cause.
    pub causes: Causes,
}

impl Used {
    /// That of the guest with this account.
    #[must_use]
    pub fn of(account: &Account) -> Self {
        Self {
            n_tokens: account.used(Resource::Tokens),
            n_tokens_cached: account.n_tokens_cached(),
            causes: account.causes(),
        }
    }
}

/// Takes a guest off the list when dropped.
struct Listed {
    host: Arc<GuestHost>,
    id: GuestId,
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.host.running().remove(&self.id);
    }
}

impl GuestHost {
    /// Sets up the wasm runtime and opens the cache.
    ///
    /// # Errors
    /// There is no engine, the cache folder is not this user's alone, or the runtime cannot start.
    pub fn new(config: GuestHostConfig) -> Result<Arc<Self>, GuestError> {
        if config.models.now().is_empty() {
            return Err(GuestError::NoModel);
        }
        Self::for_replays(config)
    }

    /// As [`GuestHost::new`]; without models guests can only be replayed.
    pub(crate) fn for_replays(config: GuestHostConfig) -> Result<Arc<Self>, GuestError> {
        let limits = Arc::new(config.limits);
        let no_threads = |error| GuestError::Runtime { reason: format!("no threads for guests: {error}") };
        let threads = GuestThreads::start().map_err(no_threads)?;
        let runtime = Runtime::new(&limits, threads.look())?;
        let cache_limits =
            CacheLimits { n_bytes: limits.cache_bytes, n_code_bytes: limits.compiled_bytes as u64 };
        let cache = CodeCache::open(&config.cache_dir, &runtime.engine, cache_limits)?;
        let exe = match config.compile_exe {
            Some(exe) => exe,
            None => std::env::current_exe()
                .map_err(|source| GuestError::Compiler { exe: "the running executable".into(), source })?,
        };
        Ok(Arc::new(Self {
            compiler: Compiler::new(exe, limits.clone()),
            programs: Mutex::new(Programs::new(limits.n_programs, limits.program_bytes)),
            // How many wait for a load is bounded by the requests in flight.
            loads: Flights::new(N_LOADS, usize::MAX, usize::MAX),
            compiles: Flights::new(
                limits.n_compiles,
                limits.n_compiles_queued,
                limits.n_compiles_queued_per_user(),
            ),
            models: config.models,
            running: Mutex::default(),
            threads,
            beside: Beside::new(),
            n_started: AtomicU64::new(0),
            limits,
            runtime,
            cache,
        }))
    }

    /// What guests may use.
    #[must_use]
    pub fn limits(&self) -> &GuestLimits {
        &self.limits
    }

    /// The loaded models; the first is the default.
    #[must_use]
    pub fn models(&self) -> Vec<ModelHandle> {
        self.models.now()
    }

    fn programs(&self) -> MutexGuard<'_, Programs> {
        self.programs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running(&self) -> MutexGuard<'_, BTreeMap<GuestId, Arc<Vitals>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The program of a component that was compiled before, from memory or from the cache. A call for one that is
    /// being loaded waits for the same load.
    pub async fn find(self: &Arc<Self>, actor: ActorId, hash: blake3::Hash) -> Option<Program> {
        self.locate(actor, hash).await.map(|(program, _)| program)
    }

    async fn locate(
        self: &Arc<Self>,
        actor: ActorId,
        hash: blake3::Hash,
    ) -> Option<(Program, ProgramSource)> {
        if let Some(program) = self.programs().get(&hash) {
            return Some((program, ProgramSource::Memory));
        }
        let host = self.clone();
        let loading = self.loads.join(hash, actor, (), |permit, _| async move {
            let permit = permit.granted().await;
            let load = move || {
                // A file that is being read cannot be let go: it keeps its permit until it is.
                let _permit = permit;
                host.load(&hash)
            };
            blocking(load).await
        });
        loading.unwrap_or_else(|_| unreachable!("loads wait without a limit of their own")).await
    }

    fn load(&self, hash: &blake3::Hash) -> Option<(Program, ProgramSource)> {
        // It may have come into memory while this waited for its permit.
        if let Some(program) = self.programs().get(hash) {
            return Some((program, ProgramSource::Memory));
        }
        let code = self.cache.load(hash)?;
        let program = Program::load(&self.runtime, &self.limits, *hash, &code).ok()?;
        self.programs().insert(program.clone());
        Some((program, ProgramSource::Disk))
    }

    /// Makes a component of this user ready to start: from memory, from the cache, or by compiling it in a
    /// process of its own. A call for one that is being compiled waits for the same process; when the last
    /// future of these calls is dropped, the process is killed.
    ///
    /// # Errors
    /// The component is none, is broken, does not fit the host, or is too much to compile; or too many
    /// components wait to be compiled.
    pub async fn compile(
        self: &Arc<Self>,
        actor: ActorId,
        wasm: Bytes,
        mut progress: impl FnMut(CompileProgress) + Send,
    ) -> Result<Program, Arc<GuestError>> {
        check_kind(&wasm, &self.limits)?;
        let hash = blake3::hash(&wasm);
        if let Some((program, source)) = self.locate(actor, hash).await {
            progress(CompileProgress::Done { source });
            return Ok(program);
        }
        let host = self.clone();
        let joined = self.compiles.join(hash, actor, CompileProgress::Queued, |permit, progress| {
            host.compile_once(actor, hash, wasm, permit, progress)
        });
        let full = |QueueFull { n_queued, limit }| GuestError::CompileQueueFull { n_queued, limit };
        follow(joined.map_err(full)?, progress).await
    }

    async fn compile_once(
        self: Arc<Self>,
        actor: ActorId,
        hash: blake3::Hash,
        wasm: Bytes,
        permit: PendingPermit<Compiled, CompileProgress>,
        progress: watch::Sender<CompileProgress>,
    ) -> Compiled {
        let permit = permit.granted().await;
        // Another call may have had the same component compiled meanwhile.
        if let Some(found) = self.locate(actor, hash).await {
            return Ok(found);
        }
        let mut report = |state| {
            progress.send_replace(state);
        };
        let code = self.compiler.compile(&wasm, &mut report).await?;
        let load = move || {
            let _permit = permit;
            let program = Program::load(&self.runtime, &self.limits, hash, &code)?;
            if let Err(error) = self.cache.store(&hash, &code) {
                // The program is there; only the next start of the daemon pays for this.
                tracing::warn!(%error, "cannot keep a compiled component");
            }
            self.programs().insert(program.clone());
            Ok((program, ProgramSource::Compiler))
        };
        blocking(load).await
    }

    /// Components that are being compiled or loaded, or wait to be.
    #[must_use]
    pub fn n_compiles(&self) -> usize {
        self.compiles.n_under_way() + self.loads.n_under_way()
    }

    /// Starts a guest, whose timers are those of the current tokio runtime.
    ///
    /// # Errors
    /// Too many guests run, the arguments are too long, or a budget has no memory for one more.
    pub fn start(self: &Arc<Self>, launch: Launch, io: GuestIo) -> Result<RunningGuest, GuestError> {
        let tape = launch.is_recorded.then(|| Tape::record(launch.program.hash(), &self.limits));
        self.start_with(launch, io, tape)
    }

    /// As [`GuestHost::start`], with this tape.
    pub(crate) fn start_with(
        self: &Arc<Self>,
        launch: Launch,
        io: GuestIo,
        tape: Option<Arc<Tape>>,
    ) -> Result<RunningGuest, GuestError> {
        let limits = &self.limits;
        let n_bytes = launch.arguments.iter().map(String::len).sum();
        if n_bytes > limits.argument_bytes {
            return Err(GuestError::ArgumentsTooLarge { n_bytes, limit_bytes: limits.argument_bytes });
        }
        let n_bytes = n_bytes.saturating_add(GUEST_BYTES) as u64;
        let charge = HostCharge::new(&launch.account, n_bytes).map_err(GuestError::OverBudget)?;
        let io = GuestIo { output: io.output.paid_by(launch.account.clone()), ..io };
        let stop = CancellationToken::new();
        let models = Arc::new(GuestModels::new(self.models.clone(), launch.model));
        let vitals = Arc::new(Vitals {
            id: GuestId(self.n_started.fetch_add(1, Ordering::Relaxed) + 1),
            name: launch.name,
            hash: launch.program.hash(),
            actor: launch.actor,
            session: launch.session,
            account: Account::new("guest", limits.budget(), Some(launch.account)),
            started: Instant::now(),
            cpu: Arc::new(CpuClock::default()),
            memory: Arc::new(MemoryGauge::default()),
            models: models.clone(),
            stop: stop.clone(),
            held_last: OnceLock::new(),
        });
        let profile = launch.is_profiled.then(|| Profile::new(&vitals));
        let listed = self.list(vitals.clone())?;
        let ticking = self.runtime.ticker.keep_going();
        let (id, account) = (vitals.id, vitals.account.clone());
        let (owner, cpu) = (vitals.owner(), vitals.cpu.clone());
        let birth = Birth {
            vitals: vitals.clone(),
            program: launch.program,
            limits: limits.clone(),
            beside: self.beside.clone(),
            arguments: launch.arguments,
            seed: launch.seed,
            client_deadline_ms: launch.deadline_ms,
            io,
            tape,
            profile,
        };
        let (ended, end) = oneshot::channel();
        self.threads.spawn(&owner, &cpu, async move {
            let end = {
                let _alive = (listed, ticking, charge);
                let end = AssertUnwindSafe(live(birth)).catch_unwind().await;
                let end =
                    end.unwrap_or_else(|panic| GuestEnd::Panicked { message: panic_message(panic.as_ref()) });
                log_end(&vitals, &end);
                end
            };
            // Its session may be gone.
            let _ = ended.send(end);
        });
        let end = GuestEnding { end, _stop: stop.clone().drop_guard() };
        Ok(RunningGuest { id, end, stop: GuestStop(stop), account, models })
    }

    /// Puts a guest on the list, if there is room.
    fn list(self: &Arc<Self>, vitals: Arc<Vitals>) -> Result<Listed, GuestError> {
        let mut running = self.running();
        let n_all = running.len() as u32;
        let n_user = running.values().filter(|guest| guest.actor == vitals.actor).count() as u32;
        let checks =
            [("daemon", n_all, self.limits.n_guests), ("user", n_user, self.limits.n_guests_per_user)];
        for (level, running, limit) in checks {
            if running >= limit {
                return Err(GuestError::TooManyGuests { level, running, limit });
            }
        }
        let id = vitals.id;
        running.insert(id, vitals);
        Ok(Listed { host: self.clone(), id })
    }

    /// The guests that run, oldest first.
    #[must_use]
    pub fn guests(&self) -> Vec<GuestInfo> {
        self.running().values().map(|vitals| info(vitals, &self.limits)).collect()
    }

    /// Guests of a user that run, and those of all.
    pub(crate) fn n_guests(&self, actor: ActorId) -> (u64, u64) {
        let running = self.running();
        let n_theirs = running.values().filter(|guest| guest.actor == actor).count();
        (n_theirs as u64, running.len() as u64)
    }

    /// Components that are ready to start, and the bytes of their code.
    pub(crate) fn programs_ready(&self) -> (u64, u64) {
        self.programs().ready()
    }

    /// Stops a guest.
    ///
    /// # Errors
    /// No such guest runs.
    pub fn stop(&self, id: GuestId) -> Result<(), GuestError> {
        let running = self.running();
        let vitals = running.get(&id).ok_or(GuestError::NotRunning { id })?;
        vitals.stop.cancel();
        Ok(())
    }
}

/// Waits for a component that is being compiled, and reports how far that is.
async fn follow(
    mut joined: Joined<Compiled, CompileProgress>,
    mut report: impl FnMut(CompileProgress) + Send,
) -> Result<Program, Arc<GuestError>> {
    let mut progress = joined.progress();
    let state = *progress.borrow_and_update();
    report(state);
    let compiled = loop {
        tokio::select! {
            biased;
            compiled = &mut joined => break compiled,
            Ok(()) = progress.changed() => {
                let state = *progress.borrow_and_update();
                report(state);
            }
        }
    };
    let (program, source) = compiled?;
    report(CompileProgress::Done { source });
    Ok(program)
}

fn info(vitals: &Vitals, limits: &GuestLimits) -> GuestInfo {
    let activity = if vitals.cpu.is_running() { GuestActivity::Running } else { GuestActivity::Waiting };
    GuestInfo {
        id: vitals.id,
        name: vitals.name.clone(),
        hash: vitals.hash,
        actor: vitals.actor,
        session: vitals.session,
        activity,
        models: vitals.models.names_held(),
        elapsed_ms: vitals.started.elapsed().as_millis() as u64,
        amounts: vitals.amounts(),
        limits: Amounts::limits(limits, &vitals.account),
        used: Used::of(&vitals.account),
    }
}

#[cfg(test)]
mod tests;
