//! Compiling in a child process.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::error::GuestError;
use super::limits::GuestLimits;
use super::names::{REASON_BYTES_MAX, cut};
use super::worker::{Answer, COMPILE_WORKER};
use super::workers::{Asked, Workers, clock};
use crate::{descriptors, machine};

/// How often the caller hears that compiling goes on.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// The part of a processor that one gets at least, or its component is refused for now: others wait for its place.
const N_PARTS: u32 = 3;

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

/// Compiles in processes of their own.
#[derive(Debug)]
pub(crate) struct Compiler {
    workers: Workers,
    limits: Arc<GuestLimits>,
}

impl Compiler {
    pub(crate) fn new(exe: PathBuf, limits: Arc<GuestLimits>) -> Self {
        let cpu = Duration::from_millis(limits.compile_ms);
        let workers = Workers {
            exe,
            argument: COMPILE_WORKER,
            memory_bytes: limits.process_bytes(machine::memory_bytes()).compile,
            cpu,
            clock: clock(cpu, N_PARTS),
            answer_bytes_max: limits.compiled_bytes,
        };
        Self { workers, limits }
    }

    /// Compiles a component to the code that the daemon's engine loads. Dropping the future ends the process.
    pub(crate) async fn compile(
        &self,
        wasm: &[u8],
        progress: &mut (dyn FnMut(CompileProgress) + Send),
    ) -> Result<Vec<u8>, GuestError> {
        let start = Instant::now();
        let mut work = std::pin::pin!(self.workers.ask(wasm));
        let mut ticks = tokio::time::interval(PROGRESS_INTERVAL);
        loop {
            tokio::select! {
                asked = &mut work => return self.code(asked),
                _ = ticks.tick() => {
                    progress(CompileProgress::Compiling { elapsed_ms: start.elapsed().as_millis() as u64 });
                }
            }
        }
    }

    fn code(&self, asked: io::Result<Asked>) -> Result<Vec<u8>, GuestError> {
        let answer = match asked {
            Ok(Asked::Answered(answer)) => answer,
            Ok(Asked::OutOfTime) => {
                return Err(GuestError::CompileTimeout { limit_ms: self.limits.compile_ms });
            }
            Ok(Asked::Late) => {
                return Err(GuestError::CompileLate { seconds: self.workers.clock.as_secs() });
            }
            Ok(Asked::Ended { status, complaint }) => {
                let status = match complaint {
                    Some(complaint) => format!("{status}: {complaint}"),
                    None => status.to_string(),
                };
                return Err(GuestError::CompilerDied { status, limit_bytes: self.workers.memory_bytes });
            }
            Err(source) => return Err(self.failed(source)),
        };
        match answer {
            Answer::Result(code) => Ok(code),
            Answer::Error(reason) => {
                let reason = cut(&String::from_utf8_lossy(&reason), REASON_BYTES_MAX);
                Err(GuestError::Invalid { reason })
            }
            Answer::TooLong(needed) => {
                let limit = self.limits.compiled_bytes as u64;
                Err(GuestError::NeedsTooMuch { what: "bytes of compiled code", needed, limit })
            }
        }
    }

    fn failed(&self, source: io::Error) -> GuestError {
        if descriptors::are_used_up(&source) {
            return GuestError::NoDescriptors;
        }
        let exe = self.workers.exe.clone();
        tracing::error!(exe = %exe.display(), error = %source, "the compiler cannot be run");
        GuestError::Compiler { exe, source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[tokio::test]
    async fn a_compiler_that_dies_or_is_not_there_is_an_error() {
        let compile =
            async |exe: &str| Compiler::new(exe.into(), Arc::default()).compile(b"\0asm", &mut |_| ()).await;
        let error = compile("/bin/false").await.expect_err("says nothing");
        assert!(matches!(error, GuestError::CompilerDied { .. }), "{error}");
        let error = compile("/no/such/file").await.expect_err("is not there");
        assert!(matches!(error, GuestError::Compiler { .. }), "{error}");
    }
}
