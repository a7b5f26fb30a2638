//! What the fuzzers of `tests/fuzz` run, as an ordinary library.
//!
//! Each target is a module with a function that takes any bytes, makes an input of them, gives it to the code under test and
//! panics where something does not hold that has to. The generators are deterministic: what was found is found again from the
//! bytes alone. `tests/replay.rs` runs all that is kept in `tests/fuzz`, and inputs by chance, on a stable toolchain.

mod bundled;
mod chance;
pub mod chat;
#[cfg(feature = "daemon")]
pub mod components;
pub mod config;
mod folder;
pub mod frames;
pub mod gguf;
#[path = "../../../daemon/engine/tests/gguf/files/writer.rs"]
pub mod gguf_writer;
pub mod grammars;
#[cfg(feature = "daemon")]
mod held;
#[cfg(feature = "daemon")]
pub mod host;
mod json;
pub mod operations;
mod panics;
pub mod programs;
#[cfg(feature = "daemon")]
pub mod recordings;
pub mod safetensors;
pub mod scheduler;
pub mod tokenizer;

pub use chance::{mutated_input, random_input};
pub use panics::prepare;

/// Something to fuzz.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name: that of the binary, and of its folders.
    pub name: &'static str,
    /// What it is given.
    pub about: &'static str,
    /// Checks one input.
    ///
    /// # Panics
    /// Something does not hold: a finding.
    pub check: fn(&[u8]),
    /// Bytes of the longest input that is worth trying.
    pub input_bytes_max: usize,
}

/// All targets of this build.
pub const TARGETS: &[Target] = &[
    Target {
        name: "frames",
        about: "hellos, frames and messages of the wire, as they come and as they are written",
        check: frames::check,
        input_bytes_max: 4096,
    },
    #[cfg(feature = "daemon")]
    Target {
        name: "recordings",
        about: "recordings: files, and forged ones whose seals are right",
        check: recordings::check,
        input_bytes_max: 4096,
    },
    Target {
        name: "safetensors",
        about: "headers of weights, and indices of several files",
        check: safetensors::check,
        input_bytes_max: 4096,
    },
    Target {
        name: "gguf",
        about: "GGUF files: headers, vocabularies, and blocks of each type",
        check: gguf::check,
        input_bytes_max: 4096,
    },
    Target { name: "config", about: "config.json", check: config::check, input_bytes_max: 2048 },
    Target {
        name: "tokenizer",
        about: "tokenizer.json, and texts that it cuts",
        check: tokenizer::check,
        input_bytes_max: 8192,
    },
    Target {
        name: "chat",
        about: "chat templates over messages of strangers",
        check: chat::check,
        input_bytes_max: 2048,
    },
    Target {
        name: "programs",
        about: "logit programs, on the interpreter and on one written down from the definition",
        check: programs::check,
        input_bytes_max: 1024,
    },
    Target {
        name: "grammars",
        about: "grammars, JSON schemas and regular expressions, and walks through them",
        check: grammars::check,
        input_bytes_max: 1024,
    },
    Target {
        name: "scheduler",
        about: "operations on contexts, against a model without pages, batches or run-ahead",
        check: scheduler::check,
        input_bytes_max: 2048,
    },
    Target {
        name: "operations",
        about: "operations of a process that runs other code than guests do, beside honest ones",
        check: operations::check,
        input_bytes_max: 1024,
    },
    #[cfg(feature = "daemon")]
    Target {
        name: "host",
        about: "calls of the host API, right ones and wrong ones, by a guest in a daemon",
        check: host::check,
        input_bytes_max: 512,
    },
    #[cfg(feature = "daemon")]
    Target {
        name: "components",
        about: "components made of the bytes, with calls of the host API in any order, beside another user",
        check: components::check,
        input_bytes_max: 512,
    },
];

/// A seed for inputs that nobody has tried yet: what `TRELLIS_FUZZ_SEED` says, or of the clock. Whoever takes it says it, so that the
/// same is tried again.
///
/// # Panics
/// The variable is no number.
#[must_use]
pub fn fresh_seed() -> u64 {
    let told = std::env::var("TRELLIS_FUZZ_SEED").ok();
    told.map_or_else(
        || std::time::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos() as u64),
        |seed| seed.parse().expect("TRELLIS_FUZZ_SEED is a number"),
    )
}
