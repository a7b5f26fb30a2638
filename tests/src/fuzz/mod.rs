//! Runs the targets of `tests/fuzz`.
//!
//! - Comes in: a [`Plan`]: which targets, for how long, how many at a time.
//! - Goes out: lines of progress, and the first [`Finding`], if there is one.
//! - On the way: `tools` sees that what it needs is there and builds; `process` runs one target and follows what libFuzzer
//!   says; `corpus` is where inputs lie: those that are kept in the repository are read, those that are found are written
//!   beside the build. `on_device` needs none of these tools: it runs logit programs on a CUDA device, beside the processor.

mod corpus;
pub mod on_device;
mod process;
mod progress;
mod tools;

use std::collections::VecDeque;
use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use trellis_oracles::{TARGETS, Target};

pub use self::tools::ToolError;

use self::corpus::Corpora;
use self::process::{Ended, Running};
use self::tools::Tools;

/// How often progress is told.
const TOLD_EVERY: Duration = Duration::from_secs(60);

/// What is to be fuzzed.
#[derive(Debug)]
pub struct Plan {
    /// Names of targets; all when there are none.
    pub targets: Vec<String>,
    /// How long each runs.
    pub minutes: u64,
    /// How many run at a time.
    pub n_at_once: NonZeroUsize,
    /// Whether the targets of the daemon are built.
    pub has_daemon: bool,
    /// Whether the kept corpora are written anew.
    pub keeps: bool,
    /// Where builds and corpora lie.
    pub target_dir: Option<PathBuf>,
}

/// Why nothing was fuzzed, or not to the end.
#[derive(Debug, thiserror::Error)]
pub enum FuzzError {
    /// There is no such target.
    #[error("there is no target {found:?}; there are {known}")]
    UnknownTarget {
        /// What was asked for.
        found: String,
        /// Those that there are.
        known: String,
    },
    /// A tool is missing, or the targets do not build.
    #[error(transparent)]
    Tools(#[from] ToolError),
    /// A target could not be run.
    #[error("{name}: {source}")]
    Run {
        /// The target.
        name: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// A target ended before its time without an input that it fails for.
    #[error("{name} ended with {status} and no input; its last lines:\n{tail}")]
    NoInput {
        /// The target.
        name: &'static str,
        /// Its exit status.
        status: std::process::ExitStatus,
        /// What it said last.
        tail: String,
    },
}

/// An input for which something does not hold.
#[derive(Debug)]
pub struct Finding {
    name: &'static str,
    input: PathBuf,
    /// The smallest that was found for the same; the input itself where there is none.
    smallest: PathBuf,
    /// What the target said last.
    tail: String,
    reproduce: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, input, smallest, tail, reproduce } = self;
        write!(
            f,
            "{tail}\n\na finding of {name}\n  the input    {}\n  the smallest {}\n  see it again {reproduce}\n  \
             once it is mended, keep it: cp {} {}",
            input.display(),
            smallest.display(),
            smallest.display(),
            corpus::regressions(name).display(),
        )
    }
}

/// Builds and runs targets; the first finding ends all.
///
/// # Errors
/// A tool is missing, a target does not build, or one cannot be run.
///
/// # Panics
/// A thread of this function has panicked.
pub fn run(plan: &Plan) -> Result<Option<Finding>, FuzzError> {
    let targets = chosen(plan)?;
    let tools = Tools::find(plan)?;
    let corpora = Corpora::beside(tools.target_dir());
    tools.build(&targets)?;
    if targets.iter().any(|target| target.name == on_device::TARGET) {
        println!("{}: on the processor; left out is the device, which --device runs", on_device::TARGET);
    }

    let waiting = Mutex::new(VecDeque::from(targets));
    let ended: Mutex<Option<Result<Finding, FuzzError>>> = Mutex::new(None);
    let has_ended = || ended.lock().expect("no panic").is_some();
    let work = || {
        while !has_ended() {
            let Some(target) = waiting.lock().expect("no panic").pop_front() else { break };
            let outcome = one(plan, &tools, &corpora, target, has_ended);
            if let Some(outcome) = outcome.transpose() {
                ended.lock().expect("no panic").get_or_insert(outcome);
            }
        }
    };
    thread::scope(|scope| (0..plan.n_at_once.get()).for_each(|_| drop(scope.spawn(work))));
    ended.into_inner().expect("no panic").transpose()
}

fn chosen(plan: &Plan) -> Result<Vec<&'static Target>, FuzzError> {
    let may = |target: &&Target| plan.has_daemon || !tools::is_of_the_daemon(target.name);
    let known: Vec<&'static Target> = TARGETS.iter().filter(may).collect();
    if plan.targets.is_empty() {
        return Ok(known);
    }
    let find = |name: &String| {
        known.iter().find(|target| target.name == *name).copied().ok_or_else(|| FuzzError::UnknownTarget {
            found: name.clone(),
            known: known.iter().map(|target| target.name).collect::<Vec<_>>().join(", "),
        })
    };
    plan.targets.iter().map(find).collect()
}

/// Runs one target for its time, or until another has ended all.
fn one(
    plan: &Plan,
    tools: &Tools,
    corpora: &Corpora,
    target: &'static Target,
    has_ended: impl Fn() -> bool,
) -> Result<Option<Finding>, FuzzError> {
    let failed = |source| FuzzError::Run { name: target.name, source };
    let folders = corpora.of(target.name).map_err(failed)?;
    let mut running = Running::start(tools, target, &folders, plan.minutes).map_err(failed)?;
    let Some(Ended { status, artifact, tail }) =
        running.follow(target.name, TOLD_EVERY, has_ended).map_err(failed)?
    else {
        return Ok(None);
    };
    let Some(input) = artifact else {
        if !status.success() {
            return Err(FuzzError::NoInput { name: target.name, status, tail });
        }
        if plan.keeps {
            corpora.keep(tools, target).map_err(failed)?;
        }
        return Ok(None);
    };
    println!("{}: an input fails; it is made small", target.name);
    let smallest = process::minimise(tools, target.name, &input).unwrap_or_else(|| input.clone());
    let reproduce = tools.reproduce(target.name, &smallest);
    Ok(Some(Finding { name: target.name, input, smallest, tail, reproduce }))
}
