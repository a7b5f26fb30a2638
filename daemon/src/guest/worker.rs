//! The process that compiles a component. It can be killed, and its memory is bounded.
//!
//! It reads the bound on its memory (8 bytes, little endian) and then the component up to the end of its
//! input. It answers with one byte, 0 for code and 1 for an error's text, the length (8 bytes, little endian)
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
    let mut memory_bytes = [0; 8];
    input.read_exact(&mut memory_bytes)?;
    confine(u64::from_le_bytes(memory_bytes))?;
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

/// Bounds the memory of this process, lowers its priority, and ends it with its parent.
#[cfg(unix)]
fn confine(memory_bytes: u64) -> io::Result<()> {
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
    Ok(())
}

/// Elsewhere the parent's time limit is the only bound.
#[cfg(not(unix))]
fn confine(_: u64) -> io::Result<()> {
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
    fn a_component_becomes_code_and_rubbish_an_error() {
        let (tag, code) = ask(&wat::parse_str("(component)").expect("a component"));
        assert_eq!(tag, TAG_CODE);
        assert!(wasmtime::Engine::detect_precompiled(&code).is_some());
        let (tag, reason) = ask(b"\0asm\x0d\0\x01\0rubbish");
        assert_eq!(tag, TAG_ERROR);
        assert!(!reason.is_empty());
    }
}
