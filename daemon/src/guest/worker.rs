//! Processes that do one piece of work: they compile a component, or try out a grammar. Such a process can be killed, its memory
//! is bounded, and it ends with the daemon.
//!
//! It reads its [`WorkerTerms`] and then what it works on, up to the end of its input. It answers with one byte, 0 for a result
//! and 1 for an error, the length (8 bytes, little endian) and that many bytes.

use std::io::{self, Read, Write};
use std::process::ExitCode;

use tokio::io::{AsyncRead, AsyncReadExt as _};

use super::runtime::compiling_engine;
use super::trials::try_out;

/// The argument with which the daemon's own executable becomes the process that compiles a component.
pub const COMPILE_WORKER: &str = "compile-worker";

/// The argument with which it becomes the process that tries out a grammar.
pub const TRIAL_WORKER: &str = "trial-worker";

const TAG_RESULT: u8 = 0;
const TAG_ERROR: u8 = 1;

/// Length of the answer before its payload.
const ANSWER_HEADER_BYTES: usize = 9;

/// On what terms it works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WorkerTerms {
    /// Bytes of memory that it may write to.
    pub(crate) memory_bytes: u64,
    /// Time that it may have of processors, in whole seconds upwards.
    pub(crate) cpu_ms: u64,
    /// The process that it ends with.
    pub(crate) parent: u32,
}

/// Length of the terms before what is worked on.
const TERMS_BYTES: usize = 20;

impl WorkerTerms {
    /// All, little endian, in the order of the fields.
    pub(crate) fn encode(self) -> [u8; TERMS_BYTES] {
        let mut bytes = [0; TERMS_BYTES];
        bytes[..8].copy_from_slice(&self.memory_bytes.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.cpu_ms.to_le_bytes());
        bytes[16..].copy_from_slice(&self.parent.to_le_bytes());
        bytes
    }

    fn decode(bytes: [u8; TERMS_BYTES]) -> Self {
        let n = |at: std::ops::Range<usize>| {
            bytes[at].iter().rev().fold(0_u64, |n, &byte| n << 8 | u64::from(byte))
        };
        Self { memory_bytes: n(0..8), cpu_ms: n(8..16), parent: n(16..20) as u32 }
    }
}

/// What such a process does with what it reads: a result, or an error.
type Work = fn(&[u8]) -> Result<Vec<u8>, Vec<u8>>;

/// By how much it gives way to the daemon's other work.
#[cfg(unix)]
const NICENESS: i32 = 10;

/// Runs the process that compiles over standard input and output.
#[must_use]
pub fn compile_worker_main() -> ExitCode {
    main(COMPILE_WORKER, compile)
}

/// Runs the process that tries out a grammar over standard input and output.
#[must_use]
pub fn trial_worker_main() -> ExitCode {
    main(TRIAL_WORKER, try_out)
}

fn main(name: &str, work: Work) -> ExitCode {
    match serve(&mut io::stdin().lock(), &mut io::stdout().lock(), work) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{name}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(input: &mut impl Read, output: &mut impl Write, work: Work) -> io::Result<()> {
    let mut terms = [0; TERMS_BYTES];
    input.read_exact(&mut terms)?;
    confine(WorkerTerms::decode(terms))?;
    answer(input, output, work)
}

fn answer(input: &mut impl Read, output: &mut impl Write, work: Work) -> io::Result<()> {
    let mut given = Vec::new();
    input.read_to_end(&mut given)?;
    let (tag, payload) = match work(&given) {
        Ok(result) => (TAG_RESULT, result),
        Err(error) => (TAG_ERROR, error),
    };
    output.write_all(&[tag])?;
    output.write_all(&(payload.len() as u64).to_le_bytes())?;
    output.write_all(&payload)?;
    output.flush()
}

/// The code of a component, or what is wrong with it.
pub(super) fn compile(wasm: &[u8]) -> Result<Vec<u8>, Vec<u8>> {
    let engine = compiling_engine().map_err(|error| error.to_string())?;
    Ok(engine.precompile_component(wasm).map_err(|error| format!("{error:#}"))?)
}

/// What such a process answers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Result(Vec<u8>),
    Error(Vec<u8>),
    /// It has so many bytes, and was not read.
    TooLong(u64),
}

/// Reads an answer.
///
/// # Errors
/// The process ended before.
pub(crate) async fn read_answer(
    stdout: &mut (impl AsyncRead + Unpin),
    n_bytes_max: usize,
) -> io::Result<Answer> {
    let mut header = [0; ANSWER_HEADER_BYTES];
    stdout.read_exact(&mut header).await?;
    let [tag, length @ ..] = header;
    let n_bytes = u64::from_le_bytes(length);
    if n_bytes > n_bytes_max as u64 {
        return Ok(Answer::TooLong(n_bytes));
    }
    let mut payload = vec![0; n_bytes as usize];
    stdout.read_exact(&mut payload).await?;
    match tag {
        TAG_RESULT => Ok(Answer::Result(payload)),
        TAG_ERROR => Ok(Answer::Error(payload)),
        tag => Err(io::Error::new(io::ErrorKind::InvalidData, format!("tag {tag}"))),
    }
}

/// Bounds the memory and the time of this process, lowers its priority, and ends it with the daemon.
#[cfg(unix)]
fn confine(WorkerTerms { memory_bytes, cpu_ms, parent }: WorkerTerms) -> io::Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    let lower_to = |resource, n: u64, n_max: u64| {
        let most = |n: u64| Some(getrlimit(resource).maximum.map_or(n, |maximum| n.min(maximum)));
        setrlimit(resource, Rlimit { current: most(n), maximum: most(n_max) })
    };
    let lower = |resource, n| lower_to(resource, n, n);
    lower(Resource::Data, memory_bytes)?;
    // By the first the system sends SIGXCPU, which says what it is for; by the second SIGKILL.
    let cpu_s = cpu_ms.div_ceil(1_000);
    lower_to(Resource::Cpu, cpu_s, cpu_s + 1)?;
    lower(Resource::Core, 0)?;
    lower(Resource::Fsize, 0)?;
    rustix::process::nice(NICENESS)?;
    // A bound of 0 for core files does not keep a system from handing them to a program of its own.
    #[cfg(target_os = "linux")]
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)?;
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    // A parent that died before that sends no signal.
    check_parent(parent)
}

#[cfg(unix)]
fn check_parent(parent: u32) -> io::Result<()> {
    let now = rustix::process::getppid().map(|pid| pid.as_raw_pid().cast_unsigned());
    if now == Some(parent) { Ok(()) } else { Err(io::Error::other(format!("process {parent} is gone"))) }
}

/// Elsewhere the parent's time limit is the only bound.
#[cfg(not(unix))]
fn confine(_: WorkerTerms) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(wasm: &[u8]) -> Vec<u8> {
        let mut output = Vec::new();
        answer(&mut &*wasm, &mut output, compile).expect("memory takes all");
        output
    }

    #[test]
    fn the_terms_are_read_as_they_were_written() {
        let terms = WorkerTerms { memory_bytes: 0x0102_0304_0506_0708, cpu_ms: 0x0e0f, parent: 0x0a0b_0c0d };
        let bytes = [8, 7, 6, 5, 4, 3, 2, 1, 0xf, 0xe, 0, 0, 0, 0, 0, 0, 0xd, 0xc, 0xb, 0xa];
        assert_eq!(terms.encode(), bytes);
        assert_eq!(WorkerTerms::decode(bytes), terms);
    }

    #[cfg(unix)]
    #[test]
    fn a_worker_whose_daemon_is_gone_does_not_begin() {
        // No process is its own parent.
        let error = check_parent(std::process::id()).expect_err("refused");
        assert!(error.to_string().contains("is gone"), "{error}");
    }

    #[tokio::test]
    async fn a_component_becomes_code_and_rubbish_an_error() {
        let answer = ask(&wat::parse_str("(component)").expect("a component"));
        let Ok(Answer::Result(code)) = read_answer(&mut &*answer, 1 << 30).await else { panic!("no code") };
        assert!(wasmtime::Engine::detect_precompiled(&code).is_some());
        let answer = ask(b"\0asm\x0d\0\x01\0rubbish");
        let Ok(Answer::Error(reason)) = read_answer(&mut &*answer, 1 << 30).await else { panic!("no error") };
        assert!(!reason.is_empty());
    }

    #[tokio::test]
    async fn answers_are_framed_and_bounded() {
        let result = [&[TAG_RESULT][..], &3_u64.to_le_bytes(), b"abc"].concat();
        let read = async |mut bytes: &[u8], n_bytes_max| read_answer(&mut bytes, n_bytes_max).await;
        assert_eq!(read(&result, 3).await.expect("whole"), Answer::Result(b"abc".to_vec()));
        assert_eq!(read(&result, 2).await.expect("whole"), Answer::TooLong(3));
        read(&result[..11], 3).await.expect_err("cut short");
        let error = [&[TAG_ERROR][..], &3_u64.to_le_bytes(), b"bad"].concat();
        assert_eq!(read(&error, 3).await.expect("whole"), Answer::Error(b"bad".to_vec()));
        read(&[2, 0, 0, 0, 0, 0, 0, 0, 0], 3).await.expect_err("another tag");
    }
}
