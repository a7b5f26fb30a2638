//! What the fuzzers of `tests/fuzz` run, as an ordinary library.
//!
//! Each target is a module with a function that takes any bytes, makes an input of them, gives it to the code under test and
//! panics where something does not hold that has to. The generators are deterministic: what was found is found again from the
//! bytes alone. `tests/replay.rs` runs all that is kept in `tests/fuzz`, and inputs by chance, on a stable toolchain.

mod bundled;
pub mod chat;
#[cfg(feature = "daemon")]
pub mod components;
pub mod config;
mod folder;
pub mod frames;
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

/// Bytes by chance: of this length at most, and the same for the same seed.
#[must_use]
pub fn random_input(seed: u64, n_bytes_max: usize) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        // SplitMix64.
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    };
    let n_bytes = next() as usize % (n_bytes_max + 1);
    let mut bytes: Vec<u8> = (0..n_bytes.div_ceil(8)).flat_map(|_| next().to_le_bytes()).collect();
    bytes.truncate(n_bytes);
    bytes
}
