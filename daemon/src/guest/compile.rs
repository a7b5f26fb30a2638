//! Compiling in a child process.

use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};

use super::error::GuestError;
use super::limits::GuestLimits;
use super::names::{REASON_BYTES_MAX, cut};
use super::worker::{Answer, COMPILE_WORKER, WorkerTerms, read_answer};
use crate::allocator::OF_BOUNDED_CHILDREN;
use crate::{descriptors, machine, spawner};

/// How often the caller hears that compiling goes on.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Threads of one compiling process; the stack of each is of its memory, which is bounded.
const N_WORKER_THREADS: &str = "4";

/// Bytes of the child's complaints that end up in an error.
const STDERR_BYTES_MAX: u64 = 2 << 10;

/// How far compiling has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompileProgress {
    /// Other components are compiled first.
    Queued,
    /// The component is being compiled.
    Compiling {
        /// Since compiling began.
        elapsed_ms: u64,
    },
    /// The component is ready.
    Done {
        /// Where it came from.
        source: ProgramSource,
    },
}

/// Where a compiled component came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramSource {
    /// It was in memory.
    Memory,
    /// It was in the cache on disk.
    Disk,
    /// It was compiled now.
    Compiler,
}

/// Starts compiling processes.
#[derive(Debug)]
pub(crate) struct Compiler {
    exe: PathBuf,
    limits: Arc<GuestLimits>,
    /// What one process may write to.
    memory_bytes: u64,
}

impl Compiler {
    pub(crate) fn new(exe: PathBuf, limits: Arc<GuestLimits>) -> Self {
        let memory_bytes = limits.process_bytes(machine::memory_bytes()).compile;
        Self { exe, limits, memory_bytes }
    }

    /// Compiles a component to the code that the daemon's engine loads. Dropping the future kills the process.
    pub(crate) async fn compile(
        &self,
        wasm: &[u8],
        progress: &mut (dyn FnMut(CompileProgress) + Send),
    ) -> Result<Vec<u8>, GuestError> {
        let start = Instant::now();
        let mut child = self.spawn().await?;
        let limit_ms = self.limits.compile_ms;
        let work = tokio::time::timeout(self.limits.compile_time(), self.talk(&mut child, wasm));
        let mut work = std::pin::pin!(work);
        let mut ticks = tokio::time::interval(PROGRESS_INTERVAL);
        loop {
            tokio::select! {
                answer = &mut work => return answer.map_err(|_| GuestError::CompileTimeout { limit_ms })?,
                _ = ticks.tick() => {
                    progress(CompileProgress::Compiling { elapsed_ms: start.elapsed().as_millis() as u64 });
                }
            }
        }
    }

    async fn spawn(&self) -> Result<Child, GuestError> {
        let mut command = Command::new(&self.exe);
        command
            .arg(COMPILE_WORKER)
            .env_clear()
            .envs(OF_BOUNDED_CHILDREN)
            .env("RAYON_NUM_THREADS", N_WORKER_THREADS)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        spawner::start(command).await.map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> GuestError {
        if descriptors::are_used_up(&source) {
            return GuestError::NoDescriptors;
        }
        tracing::error!(exe = %self.exe.display(), error = %source, "the compiler cannot be run");
        GuestError::Compiler { exe: self.exe.clone(), source }
    }

    async fn talk(&self, child: &mut Child, wasm: &[u8]) -> Result<Vec<u8>, GuestError> {
        let mut stdin = child.stdin.take().expect("piped");
        let mut stdout = child.stdout.take().expect("piped");
        let stderr = child.stderr.take().expect("piped");
        let ask = async {
            // A child that dies early breaks the pipe; its end says more than that.
            // Its time is that of the clock.
            let terms =
                WorkerTerms { memory_bytes: self.memory_bytes, cpu_ms: 0, parent: std::process::id() };
            let _ = stdin.write_all(&terms.encode()).await;
            let _ = stdin.write_all(wasm).await;
            drop(stdin);
        };
        let complain = async {
            let mut text = Vec::new();
            let _ = stderr.take(STDERR_BYTES_MAX).read_to_end(&mut text).await;
            text
        };
        let answer = read_answer(&mut stdout, self.limits.compiled_bytes);
        let ((), complaint, answer) = tokio::join!(ask, complain, answer);
        match answer {
            Ok(Answer::Result(code)) => Ok(code),
            Ok(Answer::Error(reason)) => {
                let reason = cut(&String::from_utf8_lossy(&reason), REASON_BYTES_MAX);
                Err(GuestError::Invalid { reason })
            }
            Ok(Answer::TooLong(needed)) => {
                let limit = self.limits.compiled_bytes as u64;
                Err(GuestError::NeedsTooMuch { what: "bytes of compiled code", needed, limit })
            }
            Err(_) => {
                let status = child.wait().await.map_err(|source| self.failed(source))?;
                let complaint = String::from_utf8_lossy(&complaint);
                let status = match complaint.lines().find(|line| !line.trim().is_empty()) {
                    Some(line) => format!("{status}: {}", line.trim()),
                    None => status.to_string(),
                };
                Err(GuestError::CompilerDied { status, limit_bytes: self.memory_bytes })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[tokio::test]
    async fn a_compiler_that_dies_or_hangs_is_an_error() {
        // A compiler that dies is given ample time; one that hangs uses up whatever it is given.
        let compile = |exe: &str, compile_ms| {
            let limits = GuestLimits { compile_ms, ..GuestLimits::default() };
            let compiler = Compiler::new(exe.into(), Arc::new(limits));
            async move { compiler.compile(b"\0asm", &mut |_| ()).await }
        };
        let error = compile("/bin/false", 120_000).await.expect_err("says nothing");
        assert!(matches!(error, GuestError::CompilerDied { .. }), "{error}");
        let error = compile("/no/such/file", 120_000).await.expect_err("is not there");
        assert!(matches!(error, GuestError::Compiler { .. }), "{error}");
        let dir = tempfile::tempdir().expect("a folder");
        let script = dir.path().join("hang");
        std::fs::write(&script, "#!/bin/sh\nexec /bin/sleep 600\n").expect("written");
        use std::os::unix::fs::PermissionsExt as _;
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o700)).expect("executable");
        let error = compile(script.to_str().expect("text"), 200).await.expect_err("hangs");
        assert!(matches!(error, GuestError::CompileTimeout { limit_ms: 200 }), "{error}");
    }
}
