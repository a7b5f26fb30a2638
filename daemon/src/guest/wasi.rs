//! The part of WASI that the standard library needs: nothing in it reaches outside the guest.
//!
//! No arguments, no environment, no folders, no sockets. Standard output and error become log lines, clocks
//! are coarse, randomness comes from the guest's seed.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use tokio::io::AsyncWrite;
use wasmtime::component::Linker;
use wasmtime_wasi::cli::{IsTerminal, StdoutStream, WasiCli, WasiCliView as _};
use wasmtime_wasi::filesystem::{WasiFilesystem, WasiFilesystemView as _};
use wasmtime_wasi::p2::bindings::{cli, filesystem, random};
use wasmtime_wasi::p2::{OutputStream, Pollable, StreamResult};
use wasmtime_wasi::random::WasiRandom;
use wasmtime_wasi::{HostMonotonicClock, HostWallClock, WasiCtx, WasiCtxView, WasiView};

use super::io::LogLevel;
use super::limits::GuestLimits;
use super::log::{LINE_BYTES_MAX, LogSink};
use super::store::GuestState;

/// Resolution of the monotonic clock: too coarse to time the host's caches.
const MONOTONIC_RESOLUTION: Duration = Duration::from_millis(1);

/// Resolution of the wall clock.
const WALL_RESOLUTION: Duration = Duration::from_millis(10);

/// Bytes that one write to standard output may hold.
const WRITE_BYTES_MAX: usize = 64 << 10;

/// The interfaces that `add_to_linker` links, all of version 0.2.
pub(crate) const INTERFACES: [&str; 20] = [
    "wasi:cli/environment",
    "wasi:cli/exit",
    "wasi:cli/stderr",
    "wasi:cli/stdin",
    "wasi:cli/stdout",
    "wasi:cli/terminal-input",
    "wasi:cli/terminal-output",
    "wasi:cli/terminal-stderr",
    "wasi:cli/terminal-stdin",
    "wasi:cli/terminal-stdout",
    "wasi:clocks/monotonic-clock",
    "wasi:clocks/wall-clock",
    "wasi:filesystem/preopens",
    "wasi:filesystem/types",
    "wasi:io/error",
    "wasi:io/poll",
    "wasi:io/streams",
    "wasi:random/insecure",
    "wasi:random/insecure-seed",
    "wasi:random/random",
];

/// Links what guests of the standard library import. Sockets are left out, so that a guest which wants them
/// is refused by name.
pub(crate) fn add_to_linker(linker: &mut Linker<GuestState>) -> wasmtime::Result<()> {
    // Streams, polling, clocks, random and the three standard streams.
    wasmtime_wasi::p2::add_to_linker_proxy_interfaces_async(linker)?;
    let linker_cli = linker;
    cli::environment::add_to_linker::<GuestState, WasiCli>(linker_cli, GuestState::cli)?;
    cli::exit::add_to_linker::<GuestState, WasiCli>(linker_cli, GuestState::cli)?;
    cli::terminal_input::add_to_linker::<GuestState, WasiCli>(linker_cli, GuestState::cli)?;
    cli::terminal_output::add_to_linker::<GuestState, WasiCli>(linker_cli, GuestState::cli)?;
    cli::terminal_stdin::add_to_linker::<GuestState, WasiCli>(linker_cli, GuestState::cli)?;
    cli::terminal_stdout::add_to_linker::<GuestState, WasiCli>(linker_cli, GuestState::cli)?;
    cli::terminal_stderr::add_to_linker::<GuestState, WasiCli>(linker_cli, GuestState::cli)?;
    let linker = linker_cli;
    filesystem::types::add_to_linker::<GuestState, WasiFilesystem>(linker, GuestState::filesystem)?;
    filesystem::preopens::add_to_linker::<GuestState, WasiFilesystem>(linker, GuestState::filesystem)?;
    random::insecure::add_to_linker::<GuestState, WasiRandom>(linker, |state| state.ctx().ctx.random())?;
    random::insecure_seed::add_to_linker::<GuestState, WasiRandom>(linker, |state| state.ctx().ctx.random())
}

impl WasiView for GuestState {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        WasiCtxView { ctx: &mut self.wasi, table: &mut self.table }
    }
}

/// What one guest sees of WASI.
pub(crate) fn context(seed: u64, log: &Arc<LogSink>, limits: &GuestLimits) -> WasiCtx {
    let mut seed_bytes = [0; 16];
    SeededBytes::new("trellis guest insecure seed", seed).fill(&mut seed_bytes);
    WasiCtx::builder()
        .stdout(LineLog::new(LogLevel::Info, log.clone()))
        .stderr(LineLog::new(LogLevel::Warn, log.clone()))
        .secure_random(SeededBytes::new("trellis guest random", seed))
        .insecure_random(SeededBytes::new("trellis guest insecure random", seed))
        .insecure_random_seed(u128::from_le_bytes(seed_bytes))
        .max_random_size(limits.call_bytes as u64)
        .monotonic_clock(CoarseMonotonic { start: Instant::now() })
        .wall_clock(CoarseWall)
        .allow_ip_name_lookup(false)
        .allow_tcp(false)
        .allow_udp(false)
        .build()
}

/// Random bytes that depend on nothing but a purpose and the seed.
struct SeededBytes(Box<blake3::OutputReader>);

impl SeededBytes {
    fn new(purpose: &str, seed: u64) -> Self {
        Self(Box::new(blake3::Hasher::new_derive_key(purpose).update(&seed.to_le_bytes()).finalize_xof()))
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        self.0.fill(bytes);
    }
}

impl rand_core::TryRng for SeededBytes {
    type Error = Infallible;

    fn try_next_u32(&mut self) -> Result<u32, Infallible> {
        let mut bytes = [0; 4];
        self.fill(&mut bytes);
        Ok(u32::from_le_bytes(bytes))
    }

    fn try_next_u64(&mut self) -> Result<u64, Infallible> {
        let mut bytes = [0; 8];
        self.fill(&mut bytes);
        Ok(u64::from_le_bytes(bytes))
    }

    fn try_fill_bytes(&mut self, bytes: &mut [u8]) -> Result<(), Infallible> {
        self.fill(bytes);
        Ok(())
    }
}

struct CoarseMonotonic {
    start: Instant,
}

impl HostMonotonicClock for CoarseMonotonic {
    fn resolution(&self) -> u64 {
        MONOTONIC_RESOLUTION.as_nanos() as u64
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_millis() as u64 * self.resolution()
    }
}

struct CoarseWall;

impl HostWallClock for CoarseWall {
    fn resolution(&self) -> Duration {
        WALL_RESOLUTION
    }

    fn now(&self) -> Duration {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let step_ms = WALL_RESOLUTION.as_millis();
        Duration::from_millis((now.as_millis() / step_ms * step_ms) as u64)
    }
}

/// A standard stream that becomes log lines.
#[derive(Clone)]
struct LineLog(Arc<Mutex<Lines>>);

struct Lines {
    level: LogLevel,
    log: Arc<LogSink>,
    unfinished: Vec<u8>, // at most LINE_BYTES_MAX bytes without a line feed
}

impl LineLog {
    fn new(level: LogLevel, log: Arc<LogSink>) -> Self {
        Self(Arc::new(Mutex::new(Lines { level, log, unfinished: Vec::new() })))
    }

    fn write_bytes(&self, bytes: &[u8]) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write(bytes);
    }
}

impl Lines {
    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.split_inclusive(|&byte| byte == b'\n') {
            let (text, is_finished) = match part.strip_suffix(b"\n") {
                Some(text) => (text, true),
                None => (part, false),
            };
            self.unfinished.extend_from_slice(text);
            if is_finished || self.unfinished.len() >= LINE_BYTES_MAX {
                self.finish();
            }
        }
    }

    fn finish(&mut self) {
        self.log.write(self.level, &String::from_utf8_lossy(&self.unfinished));
        self.unfinished.clear();
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        if !self.unfinished.is_empty() {
            self.finish();
        }
    }
}

impl IsTerminal for LineLog {
    fn is_terminal(&self) -> bool {
        false
    }
}

impl StdoutStream for LineLog {
    fn async_stream(&self) -> Box<dyn AsyncWrite + Send + Sync> {
        Box::new(self.clone())
    }

    fn p2_stream(&self) -> Box<dyn OutputStream> {
        Box::new(self.clone())
    }
}

#[wasmtime_wasi::async_trait]
impl Pollable for LineLog {
    async fn ready(&mut self) {}
}

impl OutputStream for LineLog {
    fn write(&mut self, bytes: Bytes) -> StreamResult<()> {
        self.write_bytes(&bytes);
        Ok(())
    }

    fn flush(&mut self) -> StreamResult<()> {
        Ok(())
    }

    fn check_write(&mut self) -> StreamResult<usize> {
        Ok(WRITE_BYTES_MAX)
    }
}

impl AsyncWrite for LineLog {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.write_bytes(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use rand_core::Rng as _;

    use super::super::io::{GuestOutput, output_channel};
    use super::*;

    #[test]
    fn randomness_depends_on_the_seed_and_the_purpose_alone() {
        let draw = |purpose, seed| SeededBytes::new(purpose, seed).next_u64();
        assert_eq!(draw("a", 1), draw("a", 1));
        assert_ne!(draw("a", 1), draw("a", 2));
        assert_ne!(draw("a", 1), draw("b", 1));
    }

    #[tokio::test]
    async fn output_comes_as_whole_lines() {
        let (output, mut client) = output_channel(1 << 20);
        let log = Arc::new(LogSink::new(output, 1 << 20));
        let stdout = LineLog::new(LogLevel::Info, log.clone());
        for part in ["one ", "line\ntwo", "\n", "rest"] {
            stdout.write_bytes(part.as_bytes());
        }
        drop((stdout, log));
        let mut lines = Vec::new();
        while let Some(GuestOutput::Log { line, level }) = client.recv().await {
            assert_eq!(level, LogLevel::Info);
            lines.push(line);
        }
        assert_eq!(lines, ["one line", "two", "rest"]);
    }
}
