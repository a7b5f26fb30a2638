//! The `trellis` binary, built beside the tests that start it. Its backends fail when the environment says so, which
//! those of the released one never do.

use std::process::ExitCode;

fn main() -> ExitCode {
    match trellis_tests::faulty::wrap_from_environment() {
        Some(wrap) => trellis::cli::main_with(wrap),
        None => trellis::cli::main(),
    }
}
