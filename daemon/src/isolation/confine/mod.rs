//! What a guests' process does to itself before it handles anything, so that it is of little use to whoever takes it over.
//!
//! - Comes in: [`ConfineSettings`], from the daemon.
//! - Goes out: a [`Confinement`], which says what the kernel enforces.
//! - Layers: no capabilities and none to come; no files, sockets or signals to others (`landlock`); no system calls but those that
//!   threads, memory and clocks take (`calls`, `filter`); limits of the system on memory and descriptors; death with the parent.
//! - Must not happen: a process that goes on where its system calls cannot be filtered; a layer that is missing and not told of;
//!   a thread that was there before and is not confined.

mod calls;
mod error;
mod files;
mod filter;

use std::fs;

use rustix::process::{DumpableBehavior, Resource, Rlimit, Signal, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};
use serde::{Deserialize, Serialize};

pub use error::ConfineError;
pub use files::{FileRules, Lacking};

/// The first to be killed when the machine has no memory left.
const OOM_SCORE: &str = "1000";

/// Threads of a process that is to be confined. The program of unit tests has one more, which waits for its test to end.
const N_THREADS: usize = if cfg!(test) { 2 } else { 1 };

/// What a guests' process is confined to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfineSettings {
    /// Bytes of data, used or only set aside, beyond which the system gives it no more.
    pub data_bytes: u64,
    /// Descriptors that it may have open.
    pub n_descriptors: u64,
    /// The process that it dies with.
    pub parent: i32,
}

/// How a process is confined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confinement {
    /// What the kernel enforces of the rules about files and sockets.
    pub files: FileRules,
    /// Whether it is the first to be killed when the machine has no memory left.
    pub is_first_to_die: bool,
}

/// Confines this process for good.
///
/// # Errors
/// It has other threads, its parent is gone, or the system refuses something that has to be.
pub fn confine(settings: &ConfineSettings) -> Result<Confinement, ConfineError> {
    // What is confined is the calling thread and those that it starts.
    let n_threads = fs::read_dir("/proc/self/task").map_err(ConfineError::Proc)?.count();
    if n_threads != N_THREADS {
        return Err(ConfineError::Threads { n_threads });
    }
    die_with(settings.parent)?;
    let is_first_to_die = fs::write("/proc/self/oom_score_adj", OOM_SCORE).is_ok();
    limit(settings)?;
    let step = |what| move |errno| ConfineError::Refused { what, errno };
    let none = CapabilitySet::empty();
    let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
    rustix::thread::set_capabilities(None, none).map_err(step("giving up capabilities"))?;
    rustix::thread::set_no_new_privs(true).map_err(step("giving up privileges to come"))?;
    // Neither a core file nor a debugger: what is in memory are the prompts of a user.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(step("being closed to debuggers"))?;
    let files = files::forbid()?;
    filter::apply()?;
    Ok(Confinement { files, is_first_to_die })
}

/// Ends this process with its parent.
fn die_with(parent: i32) -> Result<(), ConfineError> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|errno| ConfineError::Refused { what: "dying with the parent", errno })?;
    // A parent that died before that sends no signal.
    let is_there = rustix::process::getppid().is_some_and(|pid| pid.as_raw_pid() == parent);
    if is_there { Ok(()) } else { Err(ConfineError::ParentIsGone { parent }) }
}

fn limit(settings: &ConfineSettings) -> Result<(), ConfineError> {
    let limits = [
        (Resource::Core, 0),
        (Resource::Fsize, 0),
        (Resource::Memlock, 0),
        (Resource::Msgqueue, 0),
        (Resource::Nofile, settings.n_descriptors),
        (Resource::Data, settings.data_bytes),
    ];
    for (resource, n) in limits {
        let n = getrlimit(resource).maximum.map_or(n, |maximum| n.min(maximum));
        setrlimit(resource, Rlimit { current: Some(n), maximum: Some(n) })
            .map_err(|errno| ConfineError::Refused { what: "lowering a limit", errno })?;
    }
    Ok(())
}
