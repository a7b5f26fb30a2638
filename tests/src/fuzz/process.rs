//! One target that runs.

use std::collections::VecDeque;
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use trellis_oracles::Target;

use super::corpus::Folders;
use super::progress::Progress;
use super::tools::Tools;

/// An input that takes longer is a finding.
const INPUT_SECONDS_MAX: u64 = 60;
/// More memory is a finding.
const MEMORY_MIB_MAX: u64 = 4096;
/// Lines that a finding shows.
const N_TAIL_LINES: usize = 40;
/// How often it is looked whether another target has ended all.
const LOOKED_EVERY: Duration = Duration::from_millis(500);
/// Inputs that are tried to make one smaller.
const N_SMALLER_MAX: &str = "2000";

/// A target under way. Killed when dropped.
pub(super) struct Running {
    child: Child,
    lines: Receiver<String>,
    artifacts: PathBuf,
}

/// How one ended by itself.
pub(super) struct Ended {
    pub(super) status: ExitStatus,
    /// The input that it failed for.
    pub(super) artifact: Option<PathBuf>,
    pub(super) tail: String,
}

impl Running {
    pub(super) fn start(tools: &Tools, target: &Target, folders: &Folders, minutes: u64) -> io::Result<Self> {
        let mut command = tools.fuzz("run");
        command.arg(target.name).arg(&folders.found).args(&folders.kept).arg("--");
        command.args([
            format!("-max_total_time={}", 60 * minutes),
            format!("-max_len={}", target.input_bytes_max),
            format!("-timeout={INPUT_SECONDS_MAX}"),
            format!("-report_slow_units={INPUT_SECONDS_MAX}"),
            format!("-rss_limit_mb={MEMORY_MIB_MAX}"),
            "-print_final_stats=1".to_owned(),
        ]);
        let (child, lines) = spawn(command)?;
        Ok(Self { child, lines, artifacts: folders.artifacts.clone() })
    }

    /// Tells how far it is now and then, until it ends; none where another has ended all.
    pub(super) fn follow(
        &mut self,
        name: &str,
        told_every: Duration,
        has_ended: impl Fn() -> bool,
    ) -> io::Result<Option<Ended>> {
        let begun = Instant::now();
        let (mut progress, mut tail, mut artifact) = (Progress::default(), VecDeque::new(), None);
        let mut next_told = told_every;
        loop {
            match self.lines.recv_timeout(LOOKED_EVERY) {
                Ok(line) => {
                    progress = Progress::of(&line).unwrap_or(progress);
                    artifact = artifact.or_else(|| artifact_in(&line, &self.artifacts));
                    tail.push_back(line);
                    if tail.len() > N_TAIL_LINES {
                        tail.pop_front();
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if has_ended() {
                return Ok(None);
            }
            if begun.elapsed() >= next_told {
                next_told += told_every;
                println!("{}", progress.tell(name, begun.elapsed().as_secs() / 60));
            }
        }
        let status = self.child.wait()?;
        println!("{}", progress.tell(name, begun.elapsed().as_secs().div_ceil(60)));
        Ok(Some(Ended { status, artifact, tail: Vec::from(tail).join("\n") }))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        stop(&mut self.child);
    }
}

/// Cargo runs the fuzzer in its own place or as a child: both are of one process group.
fn stop(child: &mut Child) {
    if matches!(child.try_wait(), Ok(None)) {
        let group = rustix::process::Pid::from_child(child);
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        let _ = child.wait();
    }
}

/// Starts a command of a process group of its own; all that it says comes line by line.
fn spawn(mut command: Command) -> io::Result<(Child, Receiver<String>)> {
    use std::os::unix::process::CommandExt as _;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn()?;
    let said = BufReader::new(child.stderr.take().expect("piped"));
    let (to, lines) = channel();
    thread::spawn(move || {
        for line in said.split(b'\n').map_while(Result::ok) {
            if to.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                break;
            }
        }
    });
    Ok((child, lines))
}

/// The file that a line says the input was written to.
fn artifact_in(line: &str, artifacts: &Path) -> Option<PathBuf> {
    let (_, path) = line.split_once("Test unit written to ")?;
    let path = Path::new(path.trim());
    path.starts_with(artifacts).then(|| path.to_owned())
}

/// Makes an input smaller that fails; none where it cannot.
pub(super) fn minimise(tools: &Tools, name: &str, input: &Path) -> Option<PathBuf> {
    let begun = SystemTime::now();
    let mut command = tools.fuzz("tmin");
    command.args(["--runs", N_SMALLER_MAX, name]).arg(input);
    let (mut child, lines) = spawn(command).ok()?;
    lines.iter().for_each(drop);
    child.wait().ok()?;
    // The last one that was written is the smallest.
    let written = |path: &PathBuf| path.metadata().and_then(|it| it.modified()).ok();
    let files = fs::read_dir(input.parent()?).ok()?.flatten().map(|entry| entry.path());
    let smaller = files.filter(|path| written(path).is_some_and(|at| at >= begun));
    smaller.max_by_key(written)
}
