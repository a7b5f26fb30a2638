//! The daemon's side of a process that does one piece of work ([`worker`](super::worker)): it is started, asked, and ended.

use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, Command};

use super::worker::{Answer, WorkerTerms, read_answer};
use crate::allocator::OF_BOUNDED_CHILDREN;
use crate::spawner;

/// Threads of such a process; the stack of each is of its memory, which is bounded.
const N_THREADS: &str = "4";

/// Bytes of its complaints that end up in an error.
const COMPLAINT_BYTES_MAX: u64 = 2 << 10;

/// What it takes to start one on a machine that has much else to do.
const START_TIME: Duration = Duration::from_secs(10);

/// Processes for one kind of work.
#[derive(Debug)]
pub(super) struct Workers {
    /// The executable that becomes the process.
    pub(super) exe: PathBuf,
    /// The argument with which it does.
    pub(super) argument: &'static str,
    /// Bytes of memory that one may write to.
    pub(super) memory_bytes: u64,
    /// What one may have of processors, in whole seconds upwards.
    pub(super) cpu: Duration,
    /// What one may take by the clock: more than that, as it gives way to others.
    pub(super) clock: Duration,
    /// Bytes of an answer, at most.
    pub(super) answer_bytes_max: usize,
}

/// What came of asking one.
#[derive(Debug)]
pub(super) enum Asked {
    /// It answered.
    Answered(Answer),
    /// It was ended: it has had its time of processors.
    OutOfTime,
    /// It was ended: the machine has not given it that in time.
    Late,
    /// It ended before it answered, with the first of its complaints.
    Ended { status: ExitStatus, complaint: Option<String> },
}

/// The time by the clock of one that may compute for so long, and gets at least one part of so many of a processor.
pub(super) fn clock(cpu: Duration, n_parts: u32) -> Duration {
    cpu.saturating_mul(n_parts).saturating_add(START_TIME)
}

impl Workers {
    /// Has one do a piece of work. Dropping the future ends the process.
    ///
    /// # Errors
    /// No process can be started.
    pub(super) async fn ask(&self, work: &[u8]) -> io::Result<Asked> {
        let mut child = self.start().await?;
        match tokio::time::timeout(self.clock, self.talk(&mut child, work)).await {
            Ok(asked) => asked,
            Err(_) => Ok(Asked::Late),
        }
    }

    async fn start(&self) -> io::Result<Child> {
        let mut command = Command::new(&self.exe);
        command
            .arg(self.argument)
            .env_clear()
            .envs(OF_BOUNDED_CHILDREN)
            .env("RAYON_NUM_THREADS", N_THREADS)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // What interrupts the daemon in its terminal is not for its children.
            .process_group(0)
            .kill_on_drop(true);
        spawner::start(command).await
    }

    async fn talk(&self, child: &mut Child, work: &[u8]) -> io::Result<Asked> {
        let mut stdin = child.stdin.take().expect("piped");
        let mut stdout = child.stdout.take().expect("piped");
        let stderr = child.stderr.take().expect("piped");
        let cpu_ms = u64::try_from(self.cpu.as_millis()).unwrap_or(u64::MAX).max(1);
        let terms = WorkerTerms { memory_bytes: self.memory_bytes, cpu_ms, parent: std::process::id() };
        let ask = async {
            // A child that dies early breaks the pipe; its end says more than that.
            let _ = stdin.write_all(&terms.encode()).await;
            let _ = stdin.write_all(work).await;
            drop(stdin);
            std::future::pending::<Infallible>().await
        };
        let complain = async {
            let mut text = Vec::new();
            let _ = stderr.take(COMPLAINT_BYTES_MAX).read_to_end(&mut text).await;
            text
        };
        let answer = read_answer(&mut stdout, self.answer_bytes_max);
        let talk = async {
            let answer = tokio::select! {
                answer = answer => answer,
                never = ask => match never {},
            };
            if answer.is_ok() {
                // One that has more to say, or does not read, would wait for ever, and its complaints would not end.
                let _ = child.start_kill();
            }
            answer
        };
        let (answer, complaint) = tokio::join!(talk, complain);
        if let Ok(answer) = answer {
            return Ok(Asked::Answered(answer));
        }
        let status = child.wait().await?;
        if is_out_of_time(status) {
            return Ok(Asked::OutOfTime);
        }
        let complaint = String::from_utf8_lossy(&complaint);
        let complaint = complaint.lines().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned);
        Ok(Asked::Ended { status, complaint })
    }
}

#[cfg(unix)]
fn is_out_of_time(status: ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt as _;
    status.signal() == Some(rustix::process::Signal::XCPU.as_raw())
}

/// Elsewhere the clock is the only bound.
#[cfg(not(unix))]
fn is_out_of_time(_: ExitStatus) -> bool {
    false
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[tokio::test]
    async fn what_does_not_answer_is_ended() {
        let dir = tempfile::tempdir().expect("a folder");
        let ask = async |name: &str, does: &str, clock| {
            let exe = dir.path().join(name);
            std::fs::write(&exe, format!("#!/bin/sh\n{does}\n")).expect("written");
            std::fs::set_permissions(&exe, std::fs::Permissions::from_mode(0o700)).expect("executable");
            let cpu = Duration::from_secs(1);
            let workers =
                Workers { exe, argument: "work", memory_bytes: 1 << 30, cpu, clock, answer_bytes_max: 8 };
            workers.ask(&[0; 1 << 20]).await.expect("it is started")
        };
        let ample = Duration::from_secs(120);
        assert!(matches!(ask("sleeps", "exec sleep 600", Duration::from_millis(200)).await, Asked::Late));
        let asked = ask("computes", "ulimit -S -t 1; while :; do :; done", ample).await;
        assert!(matches!(asked, Asked::OutOfTime), "{asked:?}");
        let Asked::Ended { status, complaint } = ask("fails", "echo; echo ' why ' >&2; exit 3", ample).await
        else {
            panic!("it has not answered")
        };
        assert_eq!((status.code(), complaint.as_deref()), (Some(3), Some("why")));
        // They read nothing, and have more to say than is read; at once, long before the clock.
        let begun = std::time::Instant::now();
        let long = "printf '\\000\\011\\000\\000\\000\\000\\000\\000\\000'; exec cat /dev/zero";
        let asked = ask("talks", long, ample).await;
        assert!(matches!(asked, Asked::Answered(Answer::TooLong(9))), "{asked:?}");
        let complains =
            "printf '\\001\\001\\000\\000\\000\\000\\000\\000\\000x'; while :; do echo no >&2; done";
        let Asked::Answered(Answer::Error(error)) = ask("complains", complains, ample).await else {
            panic!("it answers")
        };
        assert_eq!(error, b"x");
        assert!(begun.elapsed() < ample / 2, "{:?}", begun.elapsed());
    }
}
