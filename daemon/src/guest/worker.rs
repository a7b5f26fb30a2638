//! The process that compiles a component. It can be killed, its memory is bounded, and it ends with the daemon.
//!
//! It reads its [`WorkerTerms`] and then the component up to the end of its input. It answers with one byte, 0 for code and 1 for an error's text, the length (8 bytes, little endian)
//! and that many bytes.

use std::io::{self, Read, Write};
use std::process::ExitCode;

use super::runtime::compiling_engine;

/// The argument with which the daemon's own executable becomes the compiling process.
pub const COMPILE_WORKER: &str = "compile-worker";

pub(crate) const TAG_CODE: u8 = 0;
pub(crate) const TAG_ERROR: u8 = 1;

/// Length of the answer before its payload.
pub(crate) const ANSWER_HEADER_BYTES: usize = 9;

/// On what terms it compiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WorkerTerms {
    /// Bytes of memory that it may write to.
    pub(crate) memory_bytes: u64,
    /// The process that it ends with.
    pub(crate) parent: u32,
}

/// Length of the terms before the component.
const TERMS_BYTES: usize = 12;

impl WorkerTerms {
    /// Both, little endian, in the order of the fields.
    pub(crate) fn encode(self) -> [u8; TERMS_BYTES] {
        let mut bytes = [0; TERMS_BYTES];
        bytes[..8].copy_from_slice(&self.memory_bytes.to_le_bytes());
        bytes[8..].copy_from_slice(&self.parent.to_le_bytes());
        bytes
    }

    fn decode(bytes: [u8; TERMS_BYTES]) -> Self {
        let [memory_bytes @ .., a, b, c, d] = bytes;
        Self { memory_bytes: u64::from_le_bytes(memory_bytes), parent: u32::from_le_bytes([a, b, c, d]) }
    }
}

/// By how much compiling gives way to the daemon's other work.
#[cfg(unix)]
const NICENESS: i32 = 10;

/// Runs the compiling process over standard input and output.
#[must_use]
pub fn compile_worker_main() -> ExitCode {
    match serve(&mut io::stdin().lock(), &mut io::stdout().lock()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{COMPILE_WORKER}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(input: &mut impl Read, output: &mut impl Write) -> io::Result<()> {
    let mut terms = [0; TERMS_BYTES];
    input.read_exact(&mut terms)?;
    confine(WorkerTerms::decode(terms))?;
    answer(input, output)
}

fn answer(input: &mut impl Read, output: &mut impl Write) -> io::Result<()> {
    let mut wasm = Vec::new();
    input.read_to_end(&mut wasm)?;
    let (tag, payload) = match compile(&wasm) {
        Ok(code) => (TAG_CODE, code),
        Err(reason) => (TAG_ERROR, reason.into_bytes()),
    };
    output.write_all(&[tag])?;
    output.write_all(&(payload.len() as u64).to_le_bytes())?;
    output.write_all(&payload)?;
    output.flush()
}

fn compile(wasm: &[u8]) -> Result<Vec<u8>, String> {
    let engine = compiling_engine().map_err(|error| error.to_string())?;
    engine.precompile_component(wasm).map_err(|error| format!("{error:#}"))
}

/// Bounds the memory of this process, lowers its priority, and ends it with the daemon.
#[cfg(unix)]
fn confine(WorkerTerms { memory_bytes, parent }: WorkerTerms) -> io::Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    let lower = |resource, n: u64| {
        let n = getrlimit(resource).maximum.map_or(n, |maximum| n.min(maximum));
        setrlimit(resource, Rlimit { current: Some(n), maximum: Some(n) })
    };
    lower(Resource::Data, memory_bytes)?;
    lower(Resource::Core, 0)?;
    lower(Resource::Fsize, 0)?;
    rustix::process::nice(NICENESS)?;
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

    fn ask(wasm: &[u8]) -> (u8, Vec<u8>) {
        let mut output = Vec::new();
        answer(&mut &*wasm, &mut output).expect("memory takes all");
        let (header, payload) = output.split_at(ANSWER_HEADER_BYTES);
        assert_eq!(header[1..], (payload.len() as u64).to_le_bytes());
        (header[0], payload.to_vec())
    }

    #[test]
    fn the_terms_are_read_as_they_were_written() {
        let terms = WorkerTerms { memory_bytes: 0x0102_0304_0506_0708, parent: 0x0a0b_0c0d };
        let bytes = [8, 7, 6, 5, 4, 3, 2, 1, 0xd, 0xc, 0xb, 0xa];
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

    #[test]
    fn a_component_becomes_code_and_rubbish_an_error() {
        let (tag, code) = ask(&wat::parse_str("(component)").expect("a component"));
        assert_eq!(tag, TAG_CODE);
        assert!(wasmtime::Engine::detect_precompiled(&code).is_some());
        let (tag, reason) = ask(b"\0asm\x0d\0\x01\0rubbish");
        assert_eq!(tag, TAG_ERROR);
        assert!(!reason.is_empty());
    }
}
