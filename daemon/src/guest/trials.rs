//! Grammars that are tried out in a process of their own, before the daemon compiles them.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use tokio::sync::Semaphore;
use trellis_engine::account::ActorId;
use trellis_engine::constraint::{ConstraintError, STACK_BYTES, Trial};

use super::limits::GuestLimits;
use super::worker::{Answer, TRIAL_WORKER, WorkerTerms, read_answer};
use crate::allocator::OF_BOUNDED_CHILDREN;
use crate::{machine, spawner};

/// What a process needs beside the grammar: a place for each token of the vocabulary, and itself.
const OWN_BYTES: u64 = 64 << 20;

/// What of the machine's memory those processes have that are under way at once.
const TRIALS_PART: u64 = 16;
const N_TRIALS_MAX: u64 = 8;

/// Grammars that were tried out well and are remembered, twice: a fresh half and one before.
const N_REMEMBERED: usize = 2_048;

/// Bytes of an answer, at most: an error names a place and a reason.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// What it took to compile a grammar.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TrialCost {
    /// The most memory at once.
    pub(super) n_bytes: u64,
    /// Of a processor.
    pub(super) time: Duration,
}

/// Why a grammar is not compiled.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TrialError {
    /// It is refused.
    #[error(transparent)]
    Constraint(#[from] ConstraintError),
    /// It was not tried out; another time it may be.
    #[error("the process that tries out grammars: {0}")]
    Process(#[from] io::Error),
}

/// A trial as the process reads it.
#[derive(Debug)]
pub(crate) struct WrittenTrial(Vec<u8>);

impl WrittenTrial {
    pub(crate) fn new(trial: &Trial) -> Self {
        Self(rmp_serde::to_vec(trial).expect("memory takes all"))
    }
}

/// Tries out grammars: one of each user at a time, and so many of all as there is memory for.
#[derive(Debug)]
pub(crate) struct Trials {
    exe: PathBuf,
    limits: Arc<GuestLimits>,
    places: Semaphore,
    of_users: Mutex<HashMap<ActorId, Weak<Semaphore>>>,
    remembered: Mutex<Remembered>,
}

/// What grammars took that were tried out well, by user: what one has compiled is no news to another.
#[derive(Debug, Default)]
struct Remembered {
    fresh: HashMap<blake3::Hash, TrialCost>,
    before: HashMap<blake3::Hash, TrialCost>,
}

impl Remembered {
    fn get(&mut self, trial: &blake3::Hash) -> Option<TrialCost> {
        if let Some(cost) = self.fresh.get(trial) {
            return Some(*cost);
        }
        let cost = self.before.remove(trial)?;
        self.insert(*trial, cost);
        Some(cost)
    }

    fn insert(&mut self, trial: blake3::Hash, cost: TrialCost) {
        if self.fresh.len() == N_REMEMBERED {
            self.before = std::mem::take(&mut self.fresh);
        }
        self.fresh.insert(trial, cost);
    }
}

impl Trials {
    /// With the executable that becomes the process.
    pub(crate) fn new(exe: PathBuf, limits: Arc<GuestLimits>) -> Self {
        let part = machine::memory_bytes() / TRIALS_PART;
        let n_places = (part / limits.constraint_memory_bytes.max(1)).clamp(1, N_TRIALS_MAX);
        Self {
            exe,
            limits,
            places: Semaphore::new(n_places as usize),
            of_users: Mutex::default(),
            remembered: Mutex::default(),
        }
    }

    /// Tries out a grammar of a user, unless it is known what it takes. Dropping the future ends the process.
    pub(super) async fn cost_of(
        &self,
        actor: ActorId,
        trial: &WrittenTrial,
    ) -> Result<TrialCost, TrialError> {
        let name = blake3::Hasher::new().update(&actor.0.to_le_bytes()).update(&trial.0).finalize();
        if let Some(cost) = self.remembered().get(&name) {
            // It is not spent another time.
            return Ok(TrialCost { time: Duration::ZERO, ..cost });
        }
        let of_user = self.of_user(actor);
        let _turn = of_user.acquire().await.expect("it is never closed");
        let _place = self.places.acquire().await.expect("it is never closed");
        let cost = self.run(trial).await?;
        self.remembered().insert(name, cost);
        Ok(cost)
    }

    fn remembered(&self) -> MutexGuard<'_, Remembered> {
        self.remembered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn of_user(&self, actor: ActorId) -> Arc<Semaphore> {
        let mut of_users = self.of_users.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(turns) = of_users.get(&actor).and_then(Weak::upgrade) {
            return turns;
        }
        of_users.retain(|_, turns| turns.strong_count() > 0);
        let turns = Arc::new(Semaphore::new(1));
        of_users.insert(actor, Arc::downgrade(&turns));
        turns
    }

    async fn run(&self, trial: &WrittenTrial) -> Result<TrialCost, TrialError> {
        let mut command = Command::new(&self.exe);
        command
            .arg(TRIAL_WORKER)
            .env_clear()
            .envs(OF_BOUNDED_CHILDREN)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        let mut child = spawner::start(command).await?;
        let mut stdin = child.stdin.take().expect("piped");
        let mut stdout = child.stdout.take().expect("piped");
        let terms = WorkerTerms {
            memory_bytes: self.limits.constraint_memory_bytes + STACK_BYTES as u64 + OWN_BYTES,
            cpu_ms: self.limits.constraint_compile_ms,
            parent: std::process::id(),
        };
        let ask = async {
            // A child that dies early breaks the pipe; its end says more than that.
            let _ = stdin.write_all(&terms.encode()).await;
            let _ = stdin.write_all(&trial.0).await;
            drop(stdin);
        };
        let ((), answer) = tokio::join!(ask, read_answer(&mut stdout, ANSWER_BYTES_MAX));
        match answer {
            Ok(Answer::Result(cost)) => Ok(decode(&cost)?),
            Ok(Answer::Error(error)) => Err(decode::<ConstraintError>(&error)?.into()),
            Ok(Answer::TooLong(_)) | Err(_) => {
                let status = child.wait().await?;
                // A signal is the system's, for time or memory; whatever else ends it is no matter of the grammar.
                if status.code().is_some() {
                    return Err(io::Error::other(format!("it ended without an answer ({status})")).into());
                }
                tracing::debug!(%status, "a grammar was more than it may be");
                Err(self.too_much().into())
            }
        }
    }

    fn too_much(&self) -> ConstraintError {
        let GuestLimits { constraint_compile_ms: ms, constraint_memory_bytes: bytes, .. } = &*self.limits;
        ConstraintError::Refused {
            place: "the whole of it".to_owned(),
            reason: format!(
                "to compile it takes more than {ms} ms of a processor, or than {bytes} bytes of memory"
            ),
        }
    }
}

fn decode<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    rmp_serde::from_slice(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// What the process does: compiles, and says what it took.
pub(super) fn try_out(trial: &[u8]) -> Result<Vec<u8>, Vec<u8>> {
    let trial: Trial = rmp_serde::from_slice(trial).expect("the daemon wrote it");
    let before = machine::own_peak_bytes();
    trial.run().map_err(|error| rmp_serde::to_vec(&error).expect("memory takes all"))?;
    let n_bytes = machine::own_peak_bytes().saturating_sub(before);
    let cost = TrialCost { n_bytes, time: crate::thread_time::process_time() };
    Ok(rmp_serde::to_vec(&cost).expect("memory takes all"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_again_is_remembered_longest() {
        let name = |n: usize| blake3::hash(&n.to_le_bytes());
        let cost = |n: usize| TrialCost { n_bytes: n as u64, time: Duration::ZERO };
        let mut remembered = Remembered::default();
        for n in 0..3 * N_REMEMBERED {
            remembered.insert(name(n), cost(n));
            assert_eq!(remembered.get(&name(0)), Some(cost(0)));
        }
        assert_eq!(remembered.get(&name(1)), None);
        assert_eq!(remembered.get(&name(3 * N_REMEMBERED - 1)), Some(cost(3 * N_REMEMBERED - 1)));
        assert!(remembered.fresh.len() <= N_REMEMBERED && remembered.before.len() <= N_REMEMBERED);
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn a_process_that_is_killed_is_a_refusal_and_one_that_fails_is_not() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().expect("a folder");
        let script = dir.path().join("dies");
        std::fs::write(&script, "#!/bin/sh\nkill -9 $$\n").expect("written");
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o700)).expect("executable");
        let try_with = async |exe: &str| {
            let trials = Trials::new(exe.into(), Arc::default());
            let error = trials.cost_of(ActorId(1), &WrittenTrial(vec![0; 1 << 20])).await;
            assert!(trials.remembered().fresh.is_empty());
            error.expect_err("there is no answer")
        };
        let error = try_with(script.to_str().expect("text")).await;
        let TrialError::Constraint(ConstraintError::Refused { reason, .. }) = error else {
            panic!("{error}")
        };
        assert!(reason.contains("more than 4000 ms of a processor"), "{reason}");
        for exe in ["/bin/false", "/no/such/file"] {
            let error = try_with(exe).await;
            assert!(matches!(error, TrialError::Process(_)), "{error}");
        }
    }
}
