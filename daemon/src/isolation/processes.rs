//! The processes of guests, one for each user whose guests run.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::{Handle, Runtime};
use tokio::sync::oneshot;
use trellis_engine::account::{Account, ActorId, GuestId, HostCharge, Owner};
use trellis_engine::remote::Numbers;

use super::confine::{Confinement, FileRules, Lacking};
use super::error::SpawnError;
use super::far_guest::{Beginning, FarGuest};
use super::keeper::Keeper;
use super::message::Start;
use super::spawn::{GuestProcess, LOOK_INTERVAL, ProcessEnd, ProcessSettings};
use super::together::{Excess, Together, Use};
use super::trial::confinement;
use crate::guest::{
    GUEST_BYTES, GuestEnding, GuestError, GuestInfo, GuestIo, GuestLimits, GuestModels, GuestStop, Launch,
    RunningGuest,
};
use crate::machine;
use crate::models::Models;

/// How long a process without guests is kept, so that the next guest of its user finds it.
const KEPT: Duration = Duration::from_secs(60);

/// The longest message: the code of a component, or a tokenizer, and what is around it.
const FRAME_BYTES_MAX: usize = 256 << 20;

/// The same of what guests say: as many values as a message has at most, and what is around them.
const FRAME_BYTES_OF_GUESTS_MAX: usize = 64 << 20;

/// Starts processes of guests, and guests in them.
#[derive(Debug)]
pub(crate) struct GuestProcesses {
    exe: PathBuf,
    limits: Arc<GuestLimits>,
    models: Models,
    keepers: Mutex<HashMap<ActorId, Arc<Keeper>>>,
    /// How long the daemon goes on, once it is on its way out.
    drained: OnceLock<Instant>,
    n_begun: AtomicU64,
    together: Together,
    /// What the kernel enforces of the rules about files; not known where no process could be tried.
    file_rules: Option<FileRules>,
    runtime: OwnRuntime,
}

/// Runs what attends to the processes, whoever starts guests: they outlive any caller's runtime.
#[derive(Debug)]
struct OwnRuntime(Option<Runtime>);

impl OwnRuntime {
    fn start() -> std::io::Result<Self> {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        Ok(Self(Some(runtime.worker_threads(1).thread_name("guests-keep").enable_all().build()?)))
    }

    fn handle(&self) -> &Handle {
        self.0.as_ref().expect("it lives as long as this").handle()
    }
}

impl Drop for OwnRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            // It may be dropped within another runtime, which must not wait. The processes die with it.
            runtime.shutdown_background();
        }
    }
}

impl GuestProcesses {
    /// `exe` is what becomes a process of guests. Blocks until one has been tried.
    ///
    /// # Errors
    /// This machine cannot confine them, or has no thread to attend to them.
    pub(crate) fn new(
        exe: PathBuf,
        limits: Arc<GuestLimits>,
        models: Models,
    ) -> Result<Arc<Self>, GuestError> {
        let file_rules = Self::try_out(&exe)?;
        if let Some(Lacking { said, .. }) = file_rules.and_then(FileRules::lacking) {
            tracing::warn!("guests run in processes of their own, and {said}");
        }
        let no_runtime = |error| GuestError::Runtime { reason: format!("no thread for processes: {error}") };
        let runtime = OwnRuntime::start().map_err(no_runtime)?;
        let (keepers, drained, n_begun) = (Mutex::default(), OnceLock::new(), AtomicU64::new(0));
        let together = Together::new(limits.process_bytes(machine::memory_bytes()).all_guests);
        Ok(Arc::new(Self { exe, limits, models, keepers, drained, n_begun, together, file_rules, runtime }))
    }

    /// What this machine's kernel enforces of the rules about files in a process of this executable; nothing where there is no
    /// process to find out, for a reason that may pass: guests are told of it then.
    ///
    /// # Errors
    /// Such a process cannot be confined here.
    pub(crate) fn try_out(exe: &Path) -> Result<Option<FileRules>, GuestError> {
        of_trial(confinement(exe))
    }

    /// What the kernel enforces of the rules about files, for clients.
    pub(crate) fn file_rules(&self) -> Option<&'static str> {
        self.file_rules.map(FileRules::name)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ActorId, Arc<Keeper>>> {
        self.keepers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a guest in the process of its user, which begins if there is none.
    ///
    /// # Errors
    /// Too many guests run, a budget has no memory for one more, or the system has no process for them.
    pub(crate) fn start(
        self: &Arc<Self>,
        id: GuestId,
        launch: Launch,
        io: GuestIo,
    ) -> Result<RunningGuest, GuestError> {
        let limits = &self.limits;
        let n_bytes = limits.check_arguments(&launch.arguments)?.saturating_add(GUEST_BYTES) as u64;
        let charge = HostCharge::new(&launch.account, n_bytes).map_err(GuestError::OverBudget)?;
        let code = launch.program.code().expect("the daemon keeps code where guests have processes").clone();
        let actor = launch.actor;
        let account = Account::new("guest", limits.budget(), Some(launch.account.clone()));
        let (end, ended) = oneshot::channel();
        let hash = launch.program.hash();
        let guest = FarGuest::new(Beginning {
            id,
            name: launch.name.clone(),
            hash,
            owner: Owner { actor, session: launch.session, guest: id, account: account.clone() },
            output: io.output.paid_by(launch.account.clone()),
            charge,
            is_recorded: launch.is_recorded,
            is_profiled: launch.is_profiled,
            loads: launch.loads,
            end,
        });
        let stop = guest.stop.clone();
        let start = Start {
            guest: id,
            hash: *hash.as_bytes(),
            name: launch.name,
            session: launch.session,
            arguments: launch.arguments,
            model: launch.model,
            seed: launch.seed,
            deadline_ms: launch.deadline_ms,
            is_recorded: launch.is_recorded,
            is_profiled: launch.is_profiled,
            lent: Vec::new(),
        };
        // No process is given up as idle in between, and nobody else starts one.
        let mut keepers = self.lock();
        let (n_user, n_all) = counted(actor, keepers.values());
        self.limits.check_numbers(launch.n_guests_of_user, n_user as u32, n_all as u32)?;
        self.keeper(&mut keepers, actor, &launch.account, launch.n_guests_of_user)
            .start(guest, &code, start, io.input);
        drop(keepers);
        Ok(RunningGuest {
            id,
            end: GuestEnding::new(ended, stop.clone()),
            stop: GuestStop::new(stop),
            account,
            // What it holds is held in its name by its process.
            models: Arc::new(GuestModels::new(self.models.clone(), None)),
        })
    }

    fn keeper(
        self: &Arc<Self>,
        keepers: &mut HashMap<ActorId, Arc<Keeper>>,
        actor: ActorId,
        session: &Arc<Account>,
        n_guests_per_user: u32,
    ) -> Arc<Keeper> {
        if let Some(keeper) = keepers.get(&actor).filter(|keeper| keeper.is_alive()) {
            return keeper.clone();
        }
        let numbers = Numbers::of(self.n_begun.fetch_add(1, Ordering::Relaxed));
        let keeper = Keeper::new(
            actor,
            numbers,
            Arc::new(GuestLimits { n_guests_per_user, ..(*self.limits).clone() }),
            session,
            self.models.clone(),
            self.runtime.handle().clone(),
        );
        if let Some(until) = self.drained.get() {
            keeper.tell_of_drain(*until);
        }
        self.runtime.handle().spawn(self.clone().keep(actor, keeper.clone()));
        keepers.insert(actor, keeper.clone());
        keeper
    }

    /// Runs the process, and sees to it that it goes with its guests, or the guests with it.
    async fn keep(self: Arc<Self>, actor: ActorId, keeper: Arc<Keeper>) {
        let reason = self.run(actor, &keeper).await;
        keeper.fall(reason);
        let mut keepers = self.lock();
        if keepers.get(&actor).is_some_and(|other| Arc::ptr_eq(other, &keeper)) {
            keepers.remove(&actor);
        }
    }

    /// Says why it has ended.
    async fn run(&self, actor: ActorId, keeper: &Arc<Keeper>) -> String {
        let memory_bytes = self.limits.process_bytes(machine::memory_bytes()).guests;
        let settings = ProcessSettings {
            user: actor.0.to_string(),
            memory_bytes,
            data_bytes: keeper.limits().process_data_bytes(memory_bytes),
            frame_bytes_max: FRAME_BYTES_MAX,
            ..ProcessSettings::default()
        };
        let (mut process, sender, receiver) = match GuestProcess::spawn(&self.exe, &settings).await {
            Ok(begun) => begun,
            Err(error) => return format!("it does not begin: {error}"),
        };
        if let Err(error) = keeper.serve(process.pid(), sender, receiver.of_frames(FRAME_BYTES_OF_GUESTS_MAX))
        {
            return format!("it has no threads: {error}");
        }
        let counted = process.pid().map(|pid| Counted { together: &self.together, pid });
        let mut idle_since = None;
        // Dropping the process kills it.
        loop {
            tokio::select! {
                ended = process.wait() => {
                    return describe(ended, process.refused_memory(), process.last_complaint());
                }
                reason = keeper.lost() => return reason,
                () = tokio::time::sleep(LOOK_INTERVAL) => {}
            }
            let is_idle = keeper.guests().is_empty();
            let own = Use { is_idle, used_bytes: process.used_bytes() };
            if let Some(Err(excess)) = counted.as_ref().map(|counted| counted.note(own)) {
                return excess.to_string();
            }
            if !is_idle {
                idle_since = None;
            } else if idle_since.get_or_insert_with(Instant::now).elapsed() >= KEPT {
                // None starts in it from here on, since that takes the same lock.
                let mut keepers = self.lock();
                if keeper.guests().is_empty() {
                    keepers.remove(&actor);
                    return "it was idle".to_owned();
                }
            }
        }
    }

    /// The guests that run, oldest first.
    pub(crate) fn guests(&self) -> Vec<GuestInfo> {
        let keepers: Vec<Arc<Keeper>> = self.lock().values().cloned().collect();
        let all = keepers.iter().flat_map(|keeper| keeper.guests());
        let mut guests: Vec<GuestInfo> = all.map(|guest| guest.info(&self.limits)).collect();
        guests.sort_by_key(|guest| guest.id);
        guests
    }

    /// Guests of a user that run, and those of all.
    pub(crate) fn n_guests(&self, actor: ActorId) -> (u64, u64) {
        counted(actor, self.lock().values())
    }

    /// The process of this user's guests, if there is one.
    pub(crate) fn pid_of(&self, actor: ActorId) -> Option<u32> {
        self.lock().get(&actor).and_then(|keeper| keeper.pid())
    }

    /// Tells all guests that the daemon goes on until then.
    pub(crate) fn drain(&self, until: Instant) {
        // No process begins in between and hears nothing.
        let keepers = self.lock();
        if self.drained.set(until).is_ok() {
            keepers.values().for_each(|keeper| keeper.tell_of_drain(until));
        }
    }

    /// Ends all processes, and their guests with them.
    pub(crate) fn end(&self) {
        let keepers: Vec<Arc<Keeper>> = self.lock().values().cloned().collect();
        for keeper in keepers {
            keeper.fall("the daemon ends".to_owned());
        }
    }

    /// Stops a guest, which has to be this user's where one is given; says whether it runs.
    pub(crate) fn stop(&self, id: GuestId, of: Option<ActorId>) -> bool {
        let keepers = self.lock();
        let guest = match of {
            Some(user) => keepers.get(&user).and_then(|keeper| keeper.guest(id).ok()),
            None => keepers.values().find_map(|keeper| keeper.guest(id).ok()),
        };
        drop(keepers);
        if let Some(guest) = &guest {
            guest.stop.cancel();
        }
        guest.is_some()
    }
}

/// What a process that was tried says of those to come.
fn of_trial(tried: Result<Confinement, SpawnError>) -> Result<Option<FileRules>, GuestError> {
    match tried {
        Ok(confinement) => Ok(Some(confinement.files)),
        Err(SpawnError::NotConfined { reason }) => Err(GuestError::NotConfined { reason }),
        Err(error) => {
            tracing::warn!(%error, "it is not known how guests are confined");
            Ok(None)
        }
    }
}

/// Guests of a user in these processes, and all.
fn counted<'a>(actor: ActorId, keepers: impl Iterator<Item = &'a Arc<Keeper>>) -> (u64, u64) {
    keepers.fold((0, 0), |(n_theirs, n_all), keeper| {
        let n = keeper.n_guests() as u64;
        (n_theirs + if keeper.actor() == actor { n } else { 0 }, n_all + n)
    })
}

/// A process that is counted with the others until it is gone.
struct Counted<'a> {
    together: &'a Together,
    pid: u32,
}

impl Counted<'_> {
    fn note(&self, own: Use) -> Result<(), Excess> {
        self.together.note(self.pid, own)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.together.forget(self.pid);
    }
}

/// How a process has ended, in words for the clients of its guests. `refused` is what it may have, where it was refused memory: no
/// signal and no status would tell.
fn describe(
    ended: Result<ProcessEnd, SpawnError>,
    refused: Option<String>,
    complaint: Option<String>,
) -> String {
    let is_failure = matches!(ended, Ok(ProcessEnd::Exited { code: 1.. } | ProcessEnd::Killed { .. }));
    let refused = refused.filter(|_| is_failure);
    let ended = refused.unwrap_or_else(|| match ended {
        Ok(ProcessEnd::Exited { code }) => format!("it exited with status {code}"),
        Ok(ProcessEnd::Killed { signal }) => format!("it was killed by signal {signal}"),
        Ok(ProcessEnd::TooMuchMemory { used_bytes, limit_bytes }) => {
            format!("it used {used_bytes} bytes of memory, the limit is {limit_bytes}")
        }
        Ok(ProcessEnd::TooManyThreads { n_threads, limit }) => {
            format!("it had {n_threads} threads, the limit is {limit}")
        }
        Err(error) => error.to_string(),
    });
    // What it wrote is for the operator.
    if let Some(complaint) = complaint {
        tracing::warn!(complaint, "a process of guests has said this before it ended");
    }
    ended
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_processes_cannot_be_confined_there_are_none_and_the_remedy_is_told() {
        let reason = "the kernel does not filter system calls (seccomp)".to_owned();
        let refused = of_trial(Err(SpawnError::NotConfined { reason: reason.clone() }));
        let said = refused.expect_err("no guest would start").to_string();
        assert!(said.contains(&reason) && said.contains("`isolation = \"thread\"`"), "{said}");
        let without = Confinement { files: FileRules::Missing, is_first_to_die: true };
        assert_eq!(of_trial(Ok(without)).expect("it is confined"), Some(FileRules::Missing));
        assert_eq!(of_trial(Err(SpawnError::Late { limit_ms: 1 })).expect("it may pass"), None);
    }

    #[test]
    fn an_end_for_want_of_memory_says_so() {
        let refused = || Some("the system refused it memory".to_owned());
        let aborted = || Ok(ProcessEnd::Killed { signal: 6 });
        assert_eq!(describe(aborted(), refused(), None), "the system refused it memory");
        assert_eq!(
            describe(Ok(ProcessEnd::Exited { code: 1 }), refused(), None),
            "the system refused it memory"
        );
        assert_eq!(describe(aborted(), None, None), "it was killed by signal 6");
        assert_eq!(describe(Ok(ProcessEnd::Exited { code: 0 }), refused(), None), "it exited with status 0");
        let seen = ProcessEnd::TooMuchMemory { used_bytes: 9, limit_bytes: 8 };
        assert_eq!(describe(Ok(seen), refused(), None), "it used 9 bytes of memory, the limit is 8");
    }
}
