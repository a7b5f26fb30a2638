//! Which panics are findings.

use std::panic;
use std::process;

/// Where the sources of other people's crates lie, and those of the standard library.
const OTHERS: [&str; 2] = ["/registry/src/", "/rustc/"];

/// Sets the process up for a fuzzer: it ends at once where code of this repository panics, on whatever thread and whoever
/// would catch it. A panic of a library is left to the code that called it: some are expected, and caught; one that is not
/// caught ends the process as well.
pub fn prepare() {
    let print = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        let is_of_others = info
            .location()
            .is_some_and(|location| OTHERS.iter().any(|others| location.file().contains(others)));
        if !is_of_others {
            print(info);
            process::abort();
        }
    }));
}
