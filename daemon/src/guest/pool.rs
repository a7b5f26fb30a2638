//! Runs guests: each on the threads of all, in a store of its own, on the list while it lives.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Instant;

use futures_util::FutureExt as _;
use tokio::sync::oneshot;
use tokio_util::sync::{CancellationToken, DropGuard};
use trellis_engine::Causes;
use trellis_engine::account::{Account, ActorId, BudgetExceeded, GuestId, HostCharge, Resource, SessionId};

use super::amounts::{Amounts, log_end};
use super::beside::Beside;
use super::component::Program;
use super::cpu::CpuClock;
use super::drain::Drain;
use super::error::{GuestEnd, GuestError};
use super::guest_models::GuestModels;
use super::io::GuestIo;
use super::limits::GuestLimits;
use super::memory::MemoryGauge;
use super::profile::Profile;
use super::run::{Birth, Vitals, live, panic_message};
use super::runtime::Runtime;
use super::tape::Tape;
use super::threads::{GuestThreads, Lookout};
use super::trials::Trials;
use crate::models::Models;
use crate::on_demand::{Asker, LoadListener};

/// What a guest takes of host memory beside its linear memory and its arguments: its stack, its instances, its tables.
pub(crate) const GUEST_BYTES: usize = 128 << 10;

/// What users have been charged for the code that their guests run.
type Codes = HashMap<(ActorId, blake3::Hash), Weak<HostCharge>>;

/// Where guests run.
pub(crate) struct GuestPool {
    limits: Arc<GuestLimits>,
    models: Models,
    pub(super) runtime: Runtime,
    running: Mutex<BTreeMap<GuestId, Arc<Vitals>>>,
    codes: Option<Mutex<Codes>>,
    threads: GuestThreads,
    beside: Beside,
    /// Where grammars are tried out first, if not here.
    trials: Option<Arc<Trials>>,
    drain: Drain,
}

impl std::fmt::Debug for GuestPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GuestPool").field("limits", &self.limits).finish_non_exhaustive()
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
    /// How many guests the user may run at once.
    pub n_guests_of_user: u32,
    /// What the client gives to the guest.
    pub arguments: Vec<String>,
    /// The name of the model that the guest gets when it names none; the daemon's default when `None`.
    pub model: Option<String>,
    /// Hears how far a model is that is loaded for the guest.
    pub loads: LoadListener,
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

impl GuestEnding {
    /// Of a guest whose end comes from there.
    pub(crate) fn new(end: oneshot::Receiver<GuestEnd>, stop: CancellationToken) -> Self {
        Self { end, _stop: stop.drop_guard() }
    }
}

impl GuestStop {
    pub(crate) fn new(stop: CancellationToken) -> Self {
        Self(stop)
    }
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
    /// KV pages of its contexts that made room, and are in host memory.
    pub n_pages_on_host: u64,
    /// The most of that, within what its session and its user may use.
    pub limits: Amounts,
    /// What was computed for it.
    pub used: Used,
    /// Tokens of its prompts that are being computed, and those of them that are left.
    pub n_prompt_tokens: (u64, u64),
}

/// What was computed for a guest, at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Used {
    /// Tokens, those decoded ahead, or guessed, in vain included.
    pub n_tokens: u64,
    /// Tokens of prompts that the prefix cache held already.
    pub n_tokens_cached: u64,
    /// Tokens that were guessed and verified.
    pub n_tokens_guessed: u64,
    /// Those of them that were right.
    pub n_tokens_guessed_right: u64,
    /// Tokens of saved contexts that it opened whose KV came back from disk.
    pub n_tokens_reopened: u64,
    /// Bytes of that KV.
    pub reopened_bytes: u64,
    /// Microseconds that it waited until such contexts were there.
    pub reopened_us: u64,
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
            n_tokens_guessed: account.n_tokens_guessed(),
            n_tokens_guessed_right: account.n_tokens_guessed_right(),
            n_tokens_reopened: account.n_tokens_restored(),
            reopened_bytes: account.n_bytes_restored(),
            reopened_us: account.restoring_us(),
            causes: account.causes(),
        }
    }
}

/// Takes a guest off the list when dropped.
struct Listed {
    pool: Arc<GuestPool>,
    id: GuestId,
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.pool.running().remove(&self.id);
    }
}

impl GuestPool {
    /// Sets up the wasm runtime. `charges_code` where users pay for the code that their guests run.
    ///
    /// # Errors
    /// The runtime or its threads cannot start.
    pub(crate) fn new(
        limits: Arc<GuestLimits>,
        models: Models,
        charges_code: bool,
        trials: Option<Arc<Trials>>,
    ) -> Result<Arc<Self>, GuestError> {
        let no_threads = |error| GuestError::Runtime { reason: format!("no threads for guests: {error}") };
        let threads = GuestThreads::start().map_err(no_threads)?;
        let runtime = Runtime::new(&limits, threads.look())?;
        let (running, beside) = (Mutex::default(), Beside::new());
        let codes = charges_code.then(Mutex::default);
        let drain = Drain::default();
        Ok(Arc::new(Self { limits, models, runtime, running, codes, threads, beside, trials, drain }))
    }

    /// Has threads without a guest be on the lookout for what guests wait for.
    pub(crate) fn listen_when_idle(&self, lookout: Arc<dyn Lookout>) {
        self.threads.look_out(lookout);
    }

    /// Tells guests that the daemon goes on until then.
    pub(crate) fn drain(&self, until: Instant) {
        self.drain.begin(until);
    }

    /// What components are loaded into.
    pub(crate) fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    fn running(&self) -> MutexGuard<'_, BTreeMap<GuestId, Arc<Vitals>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a guest under a number that no other has had, on an account of its own inside that of its session, with its
    /// timers on the current tokio runtime.
    ///
    /// # Errors
    /// Too many guests run, the arguments are too long, or a budget has no memory for one more.
    pub(crate) fn start(
        self: &Arc<Self>,
        id: GuestId,
        account: Arc<Account>,
        launch: Launch,
        io: GuestIo,
        tape: Option<Arc<Tape>>,
    ) -> Result<RunningGuest, GuestError> {
        let limits = &self.limits;
        let n_bytes = limits.check_arguments(&launch.arguments)?.saturating_add(GUEST_BYTES) as u64;
        let charge = HostCharge::new(&launch.account, n_bytes).map_err(GuestError::OverBudget)?;
        let code = self.pay_for_code(&launch).map_err(GuestError::OverBudget)?;
        let io = GuestIo { output: io.output.paid_by(launch.account.clone()), ..io };
        let stop = CancellationToken::new();
        let asker = Asker { guest: id, user: launch.actor, loads: launch.loads };
        let models = Arc::new(GuestModels::new(self.models.clone(), launch.model).asking(asker));
        let vitals = Arc::new(Vitals {
            id,
            name: launch.name,
            hash: launch.program.hash(),
            actor: launch.actor,
            session: launch.session,
            account,
            started: Instant::now(),
            cpu: Arc::new(CpuClock::default()),
            memory: Arc::new(MemoryGauge::default()),
            models: models.clone(),
            stop: stop.clone(),
            held_last: OnceLock::new(),
        });
        let profile = launch.is_profiled.then(|| Profile::new(&vitals));
        let listed = self.list(vitals.clone(), launch.n_guests_of_user)?;
        let ticking = self.runtime.ticker.keep_going();
        let account = vitals.account.clone();
        let (owner, cpu) = (vitals.owner(), vitals.cpu.clone());
        let birth = Birth {
            vitals: vitals.clone(),
            program: launch.program,
            limits: limits.clone(),
            beside: self.beside.clone(),
            trials: self.trials.clone(),
            arguments: launch.arguments,
            seed: launch.seed,
            client_deadline_ms: launch.deadline_ms,
            drain: self.drain.watch(),
            io,
            tape,
            profile,
        };
        let (ended, end) = oneshot::channel();
        self.threads.spawn(&owner, &cpu, async move {
            let end = {
                let _alive = (listed, ticking, charge, code);
                let end = AssertUnwindSafe(live(birth)).catch_unwind().await;
                let end =
                    end.unwrap_or_else(|panic| GuestEnd::Panicked { message: panic_message(panic.as_ref()) });
                log_end(&vitals, &end);
                end
            };
            // Its session may be gone.
            let _ = ended.send(end);
        });
        let end = GuestEnding::new(end, stop.clone());
        Ok(RunningGuest { id, end, stop: GuestStop(stop), account, models })
    }

    /// Charges a user for the memory of a program, once for all guests of the user that run it; nothing in a process of the user's
    /// guests, which has room for code beside what its budgets promise.
    fn pay_for_code(&self, launch: &Launch) -> Result<Option<Arc<HostCharge>>, BudgetExceeded> {
        let Some(codes) = &self.codes else { return Ok(None) };
        let mut codes = codes.lock().unwrap_or_else(PoisonError::into_inner);
        codes.retain(|_, held| held.strong_count() > 0);
        let key = (launch.actor, launch.program.hash());
        if let Some(held) = codes.get(&key).and_then(Weak::upgrade) {
            return Ok(Some(held));
        }
        let n_bytes = launch.program.memory_bytes() as u64;
        let held = Arc::new(HostCharge::new(launch.account.user(), n_bytes)?);
        codes.insert(key, Arc::downgrade(&held));
        Ok(Some(held))
    }

    /// Puts a guest on the list, if there is room for one of a user who may have so many.
    fn list(self: &Arc<Self>, vitals: Arc<Vitals>, of_user: u32) -> Result<Listed, GuestError> {
        let mut running = self.running();
        let n_all = running.len() as u32;
        let n_user = running.values().filter(|guest| guest.actor == vitals.actor).count() as u32;
        self.limits.check_numbers(of_user, n_user, n_all)?;
        let id = vitals.id;
        running.insert(id, vitals);
        Ok(Listed { pool: self.clone(), id })
    }

    /// The guests that run, oldest first.
    pub(crate) fn guests(&self) -> Vec<GuestInfo> {
        self.running().values().map(|vitals| info(vitals, &self.limits)).collect()
    }

    /// Guests of a user that run, and those of all.
    pub(crate) fn n_guests(&self, actor: ActorId) -> (u64, u64) {
        let running = self.running();
        let n_theirs = running.values().filter(|guest| guest.actor == actor).count();
        (n_theirs as u64, running.len() as u64)
    }

    /// Stops a guest, which has to be this user's where one is given.
    ///
    /// # Errors
    /// No such guest runs.
    pub(crate) fn stop(&self, id: GuestId, of: Option<ActorId>) -> Result<(), GuestError> {
        let running = self.running();
        let theirs = running.get(&id).filter(|vitals| of.is_none_or(|user| vitals.actor == user));
        let vitals = theirs.ok_or(GuestError::NotRunning { id })?;
        vitals.stop.cancel();
        Ok(())
    }
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
        n_pages_on_host: vitals.account.used(Resource::HostPages),
        limits: Amounts::limits(limits, &vitals.account),
        used: Used::of(&vitals.account),
        n_prompt_tokens: vitals.account.prompts().now(),
    }
}
