//! Panics that the guest's author can read, and where there is no host.

use std::fmt::Display;
use std::panic::PanicHookInfo;

use crate::LogLevel;
use crate::bindings::trellis::host::session as raw;

/// Bytes of a panic's words that are told.
const N_BYTES_MAX: usize = 16 << 10;

/// What `main!` runs: a function that returns a `Result`.
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "the function of `trellis_guest::main!` returns `{Self}`",
    label = "this returns something else than `Result<(), E>` with an `E` that can be displayed",
    note = "`fn run() -> trellis_guest::Result` is the usual one"
)]
pub trait Outcome {
    fn into_outcome(self) -> Result<(), String>;
}

impl<E: Display> Outcome for Result<(), E> {
    fn into_outcome(self) -> Result<(), String> {
        self.map_err(|error| error.to_string())
    }
}

/// Has a panic leave one entry in the log, which the host takes for the reason of the guest's end.
#[doc(hidden)]
pub fn report_panics() {
    std::panic::set_hook(Box::new(|info| raw::log(LogLevel::Error, &told(info))));
}

/// `panicked at src/lib.rs:8:5: index out of bounds`
pub(crate) fn told(info: &PanicHookInfo<'_>) -> String {
    let place = info.location().map(ToString::to_string).unwrap_or_default();
    let words = info.payload_as_str().unwrap_or("a value that is no text");
    // Values that were compared may be long, and a call that is too long would hide the panic.
    format!("panicked at {place}: {}", &words[..words.floor_char_boundary(N_BYTES_MAX)])
}

/// Panics in a program that no host runs, such as a plain `cargo test`: the functions of the host would end all of it.
pub(crate) fn expect_host() {
    #[cfg(not(target_family = "wasm"))]
    panic!("there is no Trellis host in this program: `trellis test` runs the tests of a guest next to one");
}

#[cfg(test)]
mod tests {
    use crate::{Args, Model, Sampler, emit, seed};

    /// Whatever a test does first of what needs a host.
    #[test]
    fn without_a_host_the_first_call_panics_and_says_what_runs_tests() {
        let calls: [fn(); 5] = [
            || drop(Model::open_default()),
            || drop(Sampler::greedy()),
            || _ = seed(),
            || drop(emit("text")),
            || drop(Args::of_session("usage").text()),
        ];
        for call in calls {
            let panic = std::panic::catch_unwind(call).expect_err("there is no host");
            let text = panic.downcast_ref::<&str>().expect("a text");
            assert!(text.contains("`trellis test`"), "{text}");
        }
    }
}
