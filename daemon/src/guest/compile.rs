//! Compiling in a child process.

use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};

use super::error::GuestError;
use super::limits::GuestLimits;
use super::names::{REASON_BYTES_MAX, cut};
use super::worker::{ANSWER_HEADER_BYTES, COMPILE_WORKER, TAG_CODE, TAG_ERROR, WorkerTerms};
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
            let terms = WorkerTerms { memory_bytes: self.memory_bytes, parent: std::process::id() };
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
            Ok(answer) => answer,
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

async fn read_answer(
    stdout: &mut (impl AsyncRead + Unpin),
    n_bytes_max: usize,
) -> io::Result<Result<Vec<u8>, GuestError>> {
    let mut header = [0; ANSWER_HEADER_BYTES];
    stdout.read_exact(&mut header).await?;
    let [tag, length @ ..] = header;
    let n_bytes = u64::from_le_bytes(length);
    if n_bytes > n_bytes_max as u64 {
        let limit = n_bytes_max as u64;
        return Ok(Err(GuestError::NeedsTooMuch { what: "bytes of compiled code", needed: n_bytes, limit }));
    }
    let mut payload = vec![0; n_bytes as usize];
    stdout.read_exact(&mut payload).await?;
    match tag {
        TAG_CODE => Ok(Ok(payload)),
        TAG_ERROR => {
            let reason = cut(&String::from_utf8_lossy(&payload), REASON_BYTES_MAX);
            Ok(Err(GuestError::Invalid { reason }))
        }
        tag => Err(io::Error::new(io::ErrorKind::InvalidData, format!("tag {tag}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn answers_are_framed_and_bounded() {
        let code = [&[TAG_CODE][..], &3_u64.to_le_bytes(), b"abc"].concat();
        let read = read_answer(&mut code.as_slice(), 3).await.expect("whole");
        assert_eq!(read.expect("code"), b"abc");
        let read = read_answer(&mut code.as_slice(), 2).await.expect("whole");
        assert!(matches!(read, Err(GuestError::NeedsTooMuch { needed: 3, limit: 2, .. })));
        read_answer(&mut &code[..11], 3).await.expect_err("cut short");
        let error = [&[TAG_ERROR][..], &3_u64.to_le_bytes(), b"bad"].concat();
        let read = read_answer(&mut error.as_slice(), 3).await.expect("whole");
        assert!(matches!(read, Err(GuestError::Invalid { reason }) if reason == "bad"));
    }

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
