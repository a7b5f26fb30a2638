//! The part of WASI that the standard library needs: nothing in it reaches outside the guest.
//!
//! No environment, no folders, no network, and arguments for a `main` alone. Standard output and error become log lines, clocks
//! are coarse, randomness comes from the guest's seed. Sockets are there by name, as the runtimes of languages such as Python import
//! them whether their programs do or not: none can be made, and no name is looked up.

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
use wasmtime_wasi::p2::bindings::{cli, filesystem, random, sockets};
use wasmtime_wasi::p2::{OutputStream, Pollable, StreamResult};
use wasmtime_wasi::random::WasiRandom;
use wasmtime_wasi::sockets::{WasiSockets, WasiSocketsView as _};
use wasmtime_wasi::{HostMonotonicClock, HostWallClock, WasiCtx, WasiCtxView, WasiView};

use super::io::LogLevel;
use super::limits::GuestLimits;
use super::log::{LINE_BYTES_MAX, LogSink};
use super::store::GuestState;
use super::tape::Tape;
use crate::recording::Value;

/// Resolution of the monotonic clock: too coarse to time the host's caches.
const MONOTONIC_RESOLUTION: Duration = Duration::from_millis(1);

/// Resolution of the wall clock.
const WALL_RESOLUTION: Duration = Duration::from_millis(10);

/// What a `main` finds before its arguments.
const PROGRAM_NAME: &str = "guest";

/// Bytes that one write to standard output may hold.
const WRITE_BYTES_MAX: usize = 64 << 10;

/// Random bytes of one call: what is drawn in well below a millisecond, in which no other guest has the thread.
const RANDOM_BYTES_MAX: u64 = 64 << 10;

/// Random bytes that are drawn together.
const RANDOM_BLOCK_BYTES: usize = 1 << 10;

/// The interfaces that `add_to_linker` links, all of version 0.2.
pub(crate) const INTERFACES: [&str; 27] = [
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
    "wasi:sockets/instance-network",
    "wasi:sockets/ip-name-lookup",
    "wasi:sockets/network",
    "wasi:sockets/tcp",
    "wasi:sockets/tcp-create-socket",
    "wasi:sockets/udp",
    "wasi:sockets/udp-create-socket",
];

/// Links what guests of the standard libraries import. What would make a socket, or look up a name, is refused by [`context`].
pub(crate) fn add_to_linker<T: WasiView + 'static>(linker: &mut Linker<T>) -> wasmtime::Result<()> {
    // Streams, polling, clocks, random and the three standard streams.
    wasmtime_wasi::p2::add_to_linker_proxy_interfaces_async(linker)?;
    let linker_cli = linker;
    cli::environment::add_to_linker::<T, WasiCli>(linker_cli, T::cli)?;
    cli::exit::add_to_linker::<T, WasiCli>(linker_cli, T::cli)?;
    cli::terminal_input::add_to_linker::<T, WasiCli>(linker_cli, T::cli)?;
    cli::terminal_output::add_to_linker::<T, WasiCli>(linker_cli, T::cli)?;
    cli::terminal_stdin::add_to_linker::<T, WasiCli>(linker_cli, T::cli)?;
    cli::terminal_stdout::add_to_linker::<T, WasiCli>(linker_cli, T::cli)?;
    cli::terminal_stderr::add_to_linker::<T, WasiCli>(linker_cli, T::cli)?;
    let linker = linker_cli;
    filesystem::types::add_to_linker::<T, WasiFilesystem>(linker, T::filesystem)?;
    filesystem::preopens::add_to_linker::<T, WasiFilesystem>(linker, T::filesystem)?;
    random::insecure::add_to_linker::<T, WasiRandom>(linker, |state| state.ctx().ctx.random())?;
    random::insecure_seed::add_to_linker::<T, WasiRandom>(linker, |state| state.ctx().ctx.random())?;
    sockets::instance_network::add_to_linker::<T, WasiSockets>(linker, T::sockets)?;
    sockets::ip_name_lookup::add_to_linker::<T, WasiSockets>(linker, T::sockets)?;
    sockets::network::add_to_linker::<T, WasiSockets>(linker, &Default::default(), T::sockets)?;
    sockets::tcp::add_to_linker::<T, WasiSockets>(linker, T::sockets)?;
    sockets::tcp_create_socket::add_to_linker::<T, WasiSockets>(linker, T::sockets)?;
    sockets::udp::add_to_linker::<T, WasiSockets>(linker, T::sockets)?;
    sockets::udp_create_socket::add_to_linker::<T, WasiSockets>(linker, T::sockets)
}

impl WasiView for GuestState {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        WasiCtxView { ctx: &mut self.wasi, table: &mut self.table }
    }
}

/// What one guest sees of WASI. Where it has a `main`, `arguments` are those of that.
pub(crate) fn context(
    seed: u64,
    arguments: Option<&[String]>,
    log: &Arc<LogSink>,
    limits: &GuestLimits,
    tape: Option<&Arc<Tape>>,
) -> WasiCtx {
    let seeded = |purpose| SeededBytes::new(purpose, seed, tape);
    let lines = |name, level| LineLog::new(name, level, log.clone(), tape);
    let mut seed_bytes = [0; 16];
    seeded("trellis guest insecure seed").fill(&mut seed_bytes);
    let mut builder = WasiCtx::builder();
    if let Some(arguments) = arguments {
        builder.arg(PROGRAM_NAME).args(&taped_arguments(arguments, tape));
    }
    builder
        .stdout(lines("stdout.write", LogLevel::Info))
        .stderr(lines("stderr.write", LogLevel::Warn))
        .secure_random(seeded("trellis guest random"))
        .insecure_random(seeded("trellis guest insecure random"))
        .insecure_random_seed(u128::from_le_bytes(seed_bytes))
        .max_random_size(RANDOM_BYTES_MAX.min(limits.call_bytes as u64))
        .monotonic_clock(CoarseMonotonic { start: Instant::now(), tape: tape.cloned() })
        .wall_clock(CoarseWall { tape: tape.cloned() })
        .allow_ip_name_lookup(false)
        .allow_tcp(false)
        .allow_udp(false)
        .build()
}

/// The arguments, or those that the recorded guest had.
fn taped_arguments(arguments: &[String], tape: Option<&Arc<Tape>>) -> Vec<String> {
    let Some(tape) = tape else { return arguments.to_vec() };
    let list = || Value::List(arguments.iter().cloned().map(Value::Text).collect());
    let Some(Value::List(list)) = tape.call("environment.get-arguments", Vec::new(), list) else {
        // The guest ends with its next call.
        return Vec::new();
    };
    let text = |value| if let Value::Text(text) = value { Some(text) } else { None };
    list.into_iter().filter_map(text).collect()
}

/// Random bytes that depend on nothing but a purpose and the seed.
struct SeededBytes {
    reader: Box<blake3::OutputReader>,
    tape: Option<Arc<Tape>>,
    /// Those that come next. The host of WASI draws byte by byte, which would cost a block of the hash each time.
    next: Box<[u8; RANDOM_BLOCK_BYTES]>,
    n_used: usize,
}

impl SeededBytes {
    fn new(purpose: &str, seed: u64, tape: Option<&Arc<Tape>>) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key(purpose);
        let reader = Box::new(hasher.update(&seed.to_le_bytes()).finalize_xof());
        let next = Box::new([0; RANDOM_BLOCK_BYTES]);
        Self { reader, tape: tape.cloned(), next, n_used: RANDOM_BLOCK_BYTES }
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            if self.n_used == RANDOM_BLOCK_BYTES {
                let mut next = std::mem::replace(&mut self.next, Box::new([0; RANDOM_BLOCK_BYTES]));
                self.draw(&mut next[..]);
                (self.next, self.n_used) = (next, 0);
            }
            let n = rest.len().min(RANDOM_BLOCK_BYTES - self.n_used);
            let (now, later) = rest.split_at_mut(n);
            now.copy_from_slice(&self.next[self.n_used..self.n_used + n]);
            self.n_used += n;
            rest = later;
        }
    }

    fn draw(&mut self, bytes: &mut [u8]) {
        let Some(tape) = &self.tape else { return self.reader.fill(bytes) };
        let filled = tape.call("random.bytes", vec![Value::Number(bytes.len() as u64)], || {
            self.reader.fill(bytes);
            Value::Bytes(bytes.to_vec())
        });
        match filled {
            Some(Value::Bytes(filled)) if filled.len() == bytes.len() => bytes.copy_from_slice(&filled),
            // The guest ends with its next call.
            _ => bytes.fill(0),
        }
    }
}

/// What a clock says, or said.
fn taped_time(tape: Option<&Arc<Tape>>, clock: &'static str, now: impl FnOnce() -> u64) -> u64 {
    let Some(tape) = tape else { return now() };
    match tape.call(clock, Vec::new(), || Value::Number(now())) {
        Some(Value::Number(time)) => time,
        // The guest ends with its next call.
        _ => 0,
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
    tape: Option<Arc<Tape>>,
}

impl HostMonotonicClock for CoarseMonotonic {
    fn resolution(&self) -> u64 {
        MONOTONIC_RESOLUTION.as_nanos() as u64
    }

    fn now(&self) -> u64 {
        taped_time(self.tape.as_ref(), "monotonic-clock.now", || {
            self.start.elapsed().as_millis() as u64 * self.resolution()
        })
    }
}

struct CoarseWall {
    tape: Option<Arc<Tape>>,
}

impl HostWallClock for CoarseWall {
    fn resolution(&self) -> Duration {
        WALL_RESOLUTION
    }

    fn now(&self) -> Duration {
        let now_ms = taped_time(self.tape.as_ref(), "wall-clock.now", || {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            let step_ms = WALL_RESOLUTION.as_millis();
            (now.as_millis() / step_ms * step_ms) as u64
        });
        Duration::from_millis(now_ms)
    }
}

/// A standard stream that becomes log lines.
#[derive(Clone)]
struct LineLog {
    /// What a write is called on the tape.
    name: &'static str,
    lines: Arc<Mutex<Lines>>,
    tape: Option<Arc<Tape>>,
}

struct Lines {
    level: LogLevel,
    log: Arc<LogSink>,
    unfinished: Vec<u8>, // at most LINE_BYTES_MAX bytes without a line feed
}

impl LineLog {
    fn new(name: &'static str, level: LogLevel, log: Arc<LogSink>, tape: Option<&Arc<Tape>>) -> Self {
        let lines = Arc::new(Mutex::new(Lines { level, log, unfinished: Vec::new() }));
        Self { name, lines, tape: tape.cloned() }
    }

    fn write_bytes(&self, bytes: &[u8]) {
        let write = || self.lines.lock().unwrap_or_else(PoisonError::into_inner).write(bytes);
        let Some(tape) = &self.tape else { return write() };
        // A guest that has left its recording ends with its next call.
        let _ = tape.call(self.name, vec![Value::Bytes(bytes.to_vec())], || {
            write();
            Value::Unit
        });
    }
}

impl Lines {
    fn write(&mut self, bytes: &[u8]) {
        if self.log.is_spent() {
            return self.log.drop_lines(bytes);
        }
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
        let draw = |purpose, seed| SeededBytes::new(purpose, seed, None).next_u64();
        assert_eq!(draw("a", 1), draw("a", 1));
        assert_ne!(draw("a", 1), draw("a", 2));
        assert_ne!(draw("a", 1), draw("b", 1));
    }

    #[tokio::test]
    async fn output_comes_as_whole_lines() {
        let (output, mut client) = output_channel(1 << 20);
        let log = Arc::new(LogSink::new(output, 1 << 20));
        let stdout = LineLog::new("stdout.write", LogLevel::Info, log.clone(), None);
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
