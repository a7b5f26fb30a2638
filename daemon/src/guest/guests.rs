//! The house of all guests: compiles, starts, lists and stops them.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytes::Bytes;
use tokio::sync::watch;
use trellis_engine::ModelHandle;
use trellis_engine::account::{Account, ActorId, GuestId};

use super::cache::{CacheLimits, CodeCache};
use super::code_key::{BroughtBy, Wanted};
use super::compile::{CompileProgress, Compiler, ProgramSource};
use super::component::{Program, check_kind, check_modules};
use super::error::GuestError;
use super::flights::{Flights, Joined, PendingPermit, QueueFull};
use super::io::GuestIo;
use super::limits::GuestLimits;
#[cfg(not(target_os = "linux"))]
use super::no_processes::GuestProcesses;
use super::pool::{GuestInfo, GuestPool, Launch, RunningGuest};
use super::programs::Programs;
use super::tape::Tape;
use super::trials::Trials;
use crate::accounts::Accounts;
use crate::config::Isolation;
#[cfg(target_os = "linux")]
use crate::isolation::GuestProcesses;
use crate::models::Models;
use crate::tasks::blocking;

/// Files of compiled code that are read at once, each of many megabytes.
const N_LOADS: usize = 2;

/// What comes of compiling a component.
type Compiled = Result<(Program, ProgramSource), Arc<GuestError>>;

/// What becomes the daemon's children: what is told, or else the running executable.
fn child_exe(told: Option<PathBuf>) -> Result<PathBuf, GuestError> {
    let own = || {
        crate::spawner::own_program()
            .map_err(|source| GuestError::Compiler { exe: "the running executable".into(), source })
    };
    told.map_or_else(own, Ok)
}

/// What a host for guests needs.
#[derive(Debug)]
pub struct GuestHostConfig {
    /// What guests may use.
    pub limits: GuestLimits,
    /// A folder of the daemon's own for compiled components; made with mode 0700 if it is not there.
    pub cache_dir: PathBuf,
    /// The executable that becomes the daemon's children, with arguments such as [`COMPILE_WORKER`](super::COMPILE_WORKER); the running
    /// executable when `None`.
    pub compile_exe: Option<PathBuf>,
    /// Whether guests run in the daemon's process or in one of their user's.
    pub isolation: Isolation,
    /// The loaded models; the first is the default.
    pub(crate) models: Models,
}

/// Compiles, starts, lists and stops guests.
pub struct GuestHost {
    limits: Arc<GuestLimits>,
    models: Models,
    pool: Arc<GuestPool>,
    /// Where guests run, if not in the pool.
    processes: Option<Arc<GuestProcesses>>,
    compiler: Compiler,
    cache: CodeCache,
    programs: Mutex<Programs>,
    loads: Arc<Flights<Option<(Program, ProgramSource)>, ()>>,
    compiles: Arc<Flights<Compiled, CompileProgress>>,
    n_started: AtomicU64,
}

impl std::fmt::Debug for GuestHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GuestHost").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl Drop for GuestHost {
    fn drop(&mut self) {
        // What attends to processes holds them, not the host.
        if let Some(processes) = &self.processes {
            processes.end();
        }
    }
}

impl GuestHost {
    /// Sets up the wasm runtime and opens the cache.
    ///
    /// # Errors
    /// There is no engine, the cache folder is not this user's alone, or the runtime cannot start.
    pub fn new(config: GuestHostConfig) -> Result<Arc<Self>, GuestError> {
        if config.models.known().is_empty() {
            return Err(GuestError::NoModel);
        }
        Self::for_replays(config)
    }

    /// As [`GuestHost::new`]; without models guests can only be replayed.
    pub(crate) fn for_replays(config: GuestHostConfig) -> Result<Arc<Self>, GuestError> {
        let limits = Arc::new(config.limits);
        let cache_limits =
            CacheLimits { n_bytes: limits.cache_bytes, n_code_bytes: limits.compiled_bytes as u64 };
        let exe = child_exe(config.compile_exe)?;
        let trials = Arc::new(Trials::new(exe.clone(), limits.clone()));
        let pool = GuestPool::new(limits.clone(), config.models.clone(), true, Some(trials))?;
        let cache = CodeCache::open(&config.cache_dir, &pool.runtime().engine, cache_limits)?;
        let processes = match config.isolation {
            Isolation::Auto | Isolation::Thread => None,
            Isolation::Process => {
                Some(GuestProcesses::new(exe.clone(), limits.clone(), config.models.clone())?)
            }
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
            n_started: AtomicU64::new(0),
            limits,
            pool,
            processes,
            cache,
        }))
    }

    /// What guests may use.
    #[must_use]
    pub fn limits(&self) -> &GuestLimits {
        &self.limits
    }

    /// Where guests run.
    #[must_use]
    pub fn isolation(&self) -> Isolation {
        if self.processes.is_some() { Isolation::Process } else { Isolation::Thread }
    }

    /// Says in whose accounts those of guests lie.
    pub(crate) fn set_accounts(&self, accounts: &Arc<Accounts>) {
        if let Some(processes) = &self.processes {
            processes.set_accounts(accounts);
        }
    }

    /// Where guests run in processes of their own: what the kernel enforces of the rules about their files, as far as that is known.
    pub(crate) fn file_rules(&self) -> Option<&'static str> {
        self.processes.as_ref().and_then(|processes| processes.file_rules())
    }

    /// Asks what a start would of a daemon with this isolation, whose children become of this executable. Blocks.
    ///
    /// # Errors
    /// This machine cannot confine processes of guests.
    pub(crate) fn check_isolation(isolation: Isolation, exe: Option<&Path>) -> Result<(), GuestError> {
        if isolation != Isolation::Process {
            return Ok(());
        }
        let exe = child_exe(exe.map(Path::to_owned))?;
        GuestProcesses::try_out(&exe).map(drop)
    }

    /// The loaded models; the first is the default.
    #[must_use]
    pub fn models(&self) -> Vec<ModelHandle> {
        self.models.now()
    }

    fn programs(&self) -> MutexGuard<'_, Programs> {
        self.programs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The program of a component that was compiled before, for this user where it is his, from memory or from the cache. A call for
    /// one that is being loaded waits for the same load.
    pub async fn find(
        self: &Arc<Self>,
        actor: ActorId,
        brought: BroughtBy,
        hash: blake3::Hash,
    ) -> Option<Program> {
        self.locate(Wanted::new(actor, brought, hash)).await.map(|(program, _)| program)
    }

    async fn locate(self: &Arc<Self>, wanted: Wanted) -> Option<(Program, ProgramSource)> {
        if let Some(program) = self.programs().get(&wanted.key) {
            return Some((program, ProgramSource::Memory));
        }
        let host = self.clone();
        let loading = self.loads.join(wanted.key, wanted.actor, (), |permit, _| async move {
            let permit = permit.granted().await;
            let load = move || {
                // A file that is being read cannot be let go: it keeps its permit until it is.
                let _permit = permit;
                host.load(&wanted)
            };
            blocking(load).await
        });
        loading.unwrap_or_else(|_| unreachable!("loads wait without a limit of their own")).await
    }

    fn load(&self, &Wanted { actor, hash, key }: &Wanted) -> Option<(Program, ProgramSource)> {
        // It may have come into memory while this waited for its permit.
        if let Some(program) = self.programs().get(&key) {
            return Some((program, ProgramSource::Memory));
        }
        let code = self.cache.load(&key)?;
        let program = self.ready(hash, &code).ok()?;
        self.programs().insert(key, program.clone(), actor);
        Some((program, ProgramSource::Disk))
    }

    fn ready(&self, hash: blake3::Hash, code: &[u8]) -> Result<Program, GuestError> {
        let program = Program::load(self.pool.runtime(), &self.limits, hash, code)?;
        Ok(if self.processes.is_some() { program.with_code(code.into()) } else { program })
    }

    /// Makes a component ready to start for this user: from memory, from the cache, or by compiling it in a
    /// process of its own. A call for one that is being compiled for the same user, or is the operator's, waits for the same process;
    /// when the last future of these calls is dropped, the process is killed.
    ///
    /// # Errors
    /// The component is none, is broken, does not fit the host, or is too much to compile; or too many
    /// components wait to be compiled.
    pub async fn compile(
        self: &Arc<Self>,
        actor: ActorId,
        brought: BroughtBy,
        wasm: Bytes,
        mut progress: impl FnMut(CompileProgress) + Send,
    ) -> Result<Program, Arc<GuestError>> {
        check_kind(&wasm, &self.limits)?;
        let wanted = Wanted::new(actor, brought, blake3::hash(&wasm));
        if let Some((program, source)) = self.locate(wanted).await {
            progress(CompileProgress::Done { source });
            return Ok(program);
        }
        let host = self.clone();
        let joined = self.compiles.join(wanted.key, actor, CompileProgress::Queued, |permit, progress| {
            host.compile_once(wanted, wasm, permit, progress)
        });
        let full = |QueueFull { n_queued, limit }| GuestError::CompileQueueFull { n_queued, limit };
        follow(joined.map_err(full)?, progress).await
    }

    /// As [`GuestHost::compile`], in this process: for a fuzzer, which makes its components itself and many in a second.
    #[cfg(feature = "fuzzing")]
    pub(crate) fn compile_here(&self, actor: ActorId, wasm: &[u8]) -> Result<(), GuestError> {
        check_kind(wasm, &self.limits)?;
        check_modules(wasm, &self.limits)?;
        let invalid =
            |reason: Vec<u8>| GuestError::Invalid { reason: String::from_utf8_lossy(&reason).into_owned() };
        let code = super::worker::compile(wasm).map_err(invalid)?;
        let Wanted { actor, hash, key } = Wanted::new(actor, BroughtBy::User, blake3::hash(wasm));
        let program = self.ready(hash, &code)?;
        self.programs().insert(key, program, actor);
        Ok(())
    }

    async fn compile_once(
        self: Arc<Self>,
        wanted: Wanted,
        wasm: Bytes,
        permit: PendingPermit<Compiled, CompileProgress>,
        progress: watch::Sender<CompileProgress>,
    ) -> Compiled {
        let permit = permit.granted().await;
        // Another call may have had the same component compiled meanwhile.
        if let Some(found) = self.locate(wanted).await {
            return Ok(found);
        }
        let mut report = |state| {
            progress.send_replace(state);
        };
        let (bytes, limits) = (wasm.clone(), self.limits.clone());
        blocking(move || check_modules(&bytes, &limits)).await?;
        let code = self.compiler.compile(&wasm, &mut report).await?;
        let load = move || {
            let _permit = permit;
            let Wanted { actor, hash, key } = wanted;
            let program = self.ready(hash, &code)?;
            if let Err(error) = self.cache.store(&key, &code) {
                // The program is there; only the next start of the daemon pays for this.
                tracing::warn!(%error, "cannot keep a compiled component");
            }
            self.programs().insert(key, program.clone(), actor);
            Ok((program, ProgramSource::Compiler))
        };
        blocking(load).await
    }

    /// Tells guests that the daemon goes on until then.
    pub(crate) fn drain(&self, until: Instant) {
        self.pool.drain(until);
        if let Some(processes) = &self.processes {
            processes.drain(until);
        }
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
    pub fn start(&self, launch: Launch, io: GuestIo) -> Result<RunningGuest, GuestError> {
        self.start_as(self.next_id(), launch, io)
    }

    /// A number for a guest that is to start.
    pub(crate) fn next_id(&self) -> GuestId {
        GuestId(self.n_started.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// As [`GuestHost::start`], a guest of this number.
    pub(crate) fn start_as(
        &self,
        id: GuestId,
        launch: Launch,
        io: GuestIo,
    ) -> Result<RunningGuest, GuestError> {
        if let Some(processes) = &self.processes {
            return processes.start(id, launch, io);
        }
        let record = || Tape::record(launch.program.hash(), &self.limits, &launch.account);
        let tape = launch.is_recorded.then(record);
        self.start_here(id, launch, io, tape)
    }

    /// As [`GuestHost::start`], in this process, with this tape.
    pub(crate) fn start_with(
        &self,
        launch: Launch,
        io: GuestIo,
        tape: Option<Arc<Tape>>,
    ) -> Result<RunningGuest, GuestError> {
        self.start_here(self.next_id(), launch, io, tape)
    }

    fn start_here(
        &self,
        id: GuestId,
        launch: Launch,
        io: GuestIo,
        tape: Option<Arc<Tape>>,
    ) -> Result<RunningGuest, GuestError> {
        let account = Account::new("guest", self.limits.budget(), Some(launch.account.clone()));
        self.pool.start(id, account, launch, io, tape)
    }

    /// The guests that run, oldest first.
    #[must_use]
    pub fn guests(&self) -> Vec<GuestInfo> {
        self.processes.as_ref().map_or_else(|| self.pool.guests(), |processes| processes.guests())
    }

    /// Guests of a user that run, and those of all.
    pub(crate) fn n_guests(&self, actor: ActorId) -> (u64, u64) {
        match &self.processes {
            Some(processes) => processes.n_guests(actor),
            None => self.pool.n_guests(actor),
        }
    }

    /// The process that this user's guests run in, if they have one of their own.
    #[must_use]
    pub fn process_of(&self, actor: ActorId) -> Option<u32> {
        self.processes.as_ref().and_then(|processes| processes.pid_of(actor))
    }

    /// Stops a guest, which has to be this user's where one is given. Cheap: no list is made.
    ///
    /// # Errors
    /// No such guest runs.
    pub fn stop(&self, id: GuestId, of: Option<ActorId>) -> Result<(), GuestError> {
        match &self.processes {
            Some(processes) if processes.stop(id, of) => Ok(()),
            Some(_) => Err(GuestError::NotRunning { id }),
            None => self.pool.stop(id, of),
        }
    }

    /// Lets go of components that are ready to start and that no guest runs, of so many bytes at most, or one that has more; they are
    /// read again from the cache. Returns the bytes.
    pub(crate) fn let_go_of_programs(&self, n_bytes_max: u64) -> u64 {
        let taken = self.programs().take_unused(usize::try_from(n_bytes_max).unwrap_or(usize::MAX));
        // Code goes back to the system here, while others find what there is.
        taken.iter().map(|program| program.memory_bytes() as u64).sum()
    }

    /// Components that are ready to start, and the bytes of their code.
    pub(crate) fn programs_ready(&self) -> (u64, u64) {
        self.programs().ready()
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

#[cfg(test)]
mod tests;
