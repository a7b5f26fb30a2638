//! Grammars that are tried out in a process of their own, before the daemon compiles them.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use trellis_engine::account::ActorId;
use trellis_engine::constraint::{ConstraintError, STACK_BYTES, Trial};

use super::limits::GuestLimits;
use super::worker::{Answer, TRIAL_WORKER};
use super::workers::{Asked, Workers, clock};
use crate::machine;
use crate::thread_time::process_time;
use crate::user_places::UserPlaces;

/// What a process needs beside the grammar: a place for each token of the vocabulary, and itself.
const OWN_BYTES: u64 = 64 << 20;

/// What of the machine's memory those processes may have that are under way at once; two may be in any case.
const TRIALS_PART: u64 = 8;
const N_TRIALS: std::ops::RangeInclusive<u64> = 2..=8;

/// The part of a processor that one gets at least, or it fails.
const N_PARTS: u32 = 10;

/// Grammars that were tried out well and are remembered, twice: a fresh half and one before.
const N_REMEMBERED: usize = 2_048;

/// Bytes of an answer, at most: an error names a place and a reason.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// What came of a trial.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Tried {
    /// What it took of a processor.
    pub(super) time: Duration,
    /// The most memory at once, in bytes, or why the grammar is refused.
    pub(super) memory: Result<u64, ConstraintError>,
}

/// A trial as the process reads it.
#[derive(Debug)]
pub(crate) struct WrittenTrial(Vec<u8>);

impl WrittenTrial {
    pub(crate) fn new(trial: &Trial) -> Self {
        Self(rmp_serde::to_vec(trial).expect("memory takes all"))
    }
}

/// Tries out grammars: as many at once as there is memory for, of a user that is alone all but one, so that no other waits for those, and
/// of each user one where there are more.
#[derive(Debug)]
pub(crate) struct Trials {
    workers: Workers,
    limits: Arc<GuestLimits>,
    places: Semaphore,
    of_users: UserPlaces,
    remembered: Mutex<Remembered>,
}

/// The memory of grammars that were tried out well, by user: what one has compiled is no news to another.
#[derive(Debug, Default)]
struct Remembered {
    fresh: HashMap<blake3::Hash, u64>,
    before: HashMap<blake3::Hash, u64>,
}

impl Remembered {
    fn get(&mut self, trial: &blake3::Hash) -> Option<u64> {
        if let Some(n_bytes) = self.fresh.get(trial) {
            return Some(*n_bytes);
        }
        let n_bytes = self.before.remove(trial)?;
        self.insert(*trial, n_bytes);
        Some(n_bytes)
    }

    fn insert(&mut self, trial: blake3::Hash, n_bytes: u64) {
        if self.fresh.len() == N_REMEMBERED {
            self.before = std::mem::take(&mut self.fresh);
        }
        self.fresh.insert(trial, n_bytes);
    }
}

impl Trials {
    /// With the executable that becomes the process.
    pub(crate) fn new(exe: PathBuf, limits: Arc<GuestLimits>) -> Self {
        let cpu = Duration::from_millis(limits.constraint_compile_ms);
        let workers = Workers {
            exe,
            argument: TRIAL_WORKER,
            memory_bytes: limits.constraint_memory_bytes.saturating_add(STACK_BYTES as u64 + OWN_BYTES),
            cpu,
            clock: clock(cpu, N_PARTS),
            answer_bytes_max: ANSWER_BYTES_MAX,
        };
        let part = machine::memory_bytes() / TRIALS_PART;
        let n_places = (part / workers.memory_bytes).clamp(*N_TRIALS.start(), *N_TRIALS.end());
        Self {
            workers,
            limits,
            places: Semaphore::new(n_places as usize),
            of_users: UserPlaces::new(n_places as usize - 1, 1),
            remembered: Mutex::default(),
        }
    }

    /// Tries out a grammar of a user, unless it is known what it takes. Dropping the future ends the process.
    ///
    /// # Errors
    /// It was not tried out; another time it may be.
    pub(super) async fn run(&self, actor: ActorId, trial: &WrittenTrial) -> io::Result<Tried> {
        let name = blake3::Hasher::new().update(&actor.0.to_le_bytes()).update(&trial.0).finalize();
        if let Some(n_bytes) = self.remembered().get(&name) {
            return Ok(Tried { time: Duration::ZERO, memory: Ok(n_bytes) });
        }
        let _turn = self.of_users.take(actor).await;
        let _place = self.places.acquire().await.expect("it is never closed");
        let tried = self.run_now(trial).await?;
        if let Ok(n_bytes) = tried.memory {
            self.remembered().insert(name, n_bytes);
        }
        Ok(tried)
    }

    fn remembered(&self) -> MutexGuard<'_, Remembered> {
        self.remembered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn run_now(&self, trial: &WrittenTrial) -> io::Result<Tried> {
        let too_much = || Tried { time: self.workers.cpu, memory: Err(self.too_much()) };
        match self.workers.ask(&trial.0).await? {
            Asked::Answered(Answer::Result(tried)) => rmp_serde::from_slice(&tried)
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error)),
            Asked::Answered(Answer::Error(_) | Answer::TooLong(_)) => {
                Err(io::Error::other("it does not answer as agreed"))
            }
            Asked::OutOfTime => Ok(too_much()),
            Asked::Late => Err(io::Error::other("the machine had no time for it")),
            // A signal is the system's, for memory; whatever else ends it is no matter of the grammar.
            Asked::Ended { status, .. } if status.code().is_none() => {
                tracing::debug!(%status, "a grammar was more than it may be");
                Ok(too_much())
            }
            Asked::Ended { status, complaint } => {
                let complaint = complaint.unwrap_or_default();
                Err(io::Error::other(format!("it ended without an answer ({status}) {complaint}")))
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

/// What the process does: compiles, and says what that took.
pub(super) fn try_out(trial: &[u8]) -> Result<Vec<u8>, Vec<u8>> {
    let trial: Trial = rmp_serde::from_slice(trial).expect("the daemon wrote it");
    let before = machine::own_peak_bytes();
    let result = trial.run();
    let memory = result.map(|()| machine::own_peak_bytes().saturating_sub(before));
    let tried = Tried { time: process_time(), memory };
    Ok(rmp_serde::to_vec(&tried).expect("memory takes all"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_again_is_remembered_longest() {
        let name = |n: usize| blake3::hash(&n.to_le_bytes());
        let mut remembered = Remembered::default();
        for n in 0..3 * N_REMEMBERED {
            remembered.insert(name(n), n as u64);
            assert_eq!(remembered.get(&name(0)), Some(0));
        }
        assert_eq!(remembered.get(&name(1)), None);
        assert_eq!(remembered.get(&name(3 * N_REMEMBERED - 1)), Some(3 * N_REMEMBERED as u64 - 1));
        assert!(remembered.fresh.len() <= N_REMEMBERED && remembered.before.len() <= N_REMEMBERED);
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn a_process_that_is_killed_is_a_refusal_and_one_that_fails_is_not() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().expect("a folder");
        let write = |name: &str, does: &str| {
            let script = dir.path().join(name);
            std::fs::write(&script, format!("#!/bin/sh\n{does}\n")).expect("written");
            std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o700)).expect("executable");
            script
        };
        let script = write("dies", "kill -9 $$");
        let try_with = async |exe: &str| {
            let trials = Trials::new(exe.into(), Arc::default());
            let tried = trials.run(ActorId(1), &WrittenTrial(vec![0; 1 << 20])).await;
            assert!(trials.remembered().fresh.is_empty());
            tried
        };
        let tried = try_with(script.to_str().expect("text")).await.expect("it was tried out");
        let Err(ConstraintError::Refused { reason, .. }) = tried.memory else { panic!("it is taken") };
        assert!(reason.contains("more than 4000 ms of a processor"), "{reason}");
        assert_eq!(tried.time, Duration::from_millis(4_000), "it is spent");
        // The last says that it has more to say than is read.
        let talks =
            write("talks", "printf '\\000\\000\\000\\001\\000\\000\\000\\000\\000'; exec cat /dev/zero");
        for exe in ["/bin/false", "/no/such/file", talks.to_str().expect("text")] {
            assert!(try_with(exe).await.is_err(), "{exe}");
        }
        // One that nobody waits for any more is ended.
        let pid_file = dir.path().join("pid");
        let script = write("hangs", &format!("echo $$ > {}\nexec /bin/sleep 600", pid_file.display()));
        let trial = WrittenTrial(Vec::new());
        let trials = Trials::new(script, Arc::default());
        let is_there = async || loop {
            match std::fs::read_to_string(&pid_file).ok().and_then(|pid| pid.trim().parse::<i32>().ok()) {
                Some(pid) => break pid,
                None => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        };
        let pid = tokio::select! {
            tried = trials.run(ActorId(1), &trial) => panic!("{tried:?}"),
            pid = is_there() => rustix::process::Pid::from_raw(pid).expect("a process"),
        };
        while rustix::process::test_kill_process(pid).is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
