//! The `trellis` binary, built beside the tests that start it.

use std::process::ExitCode;

fn main() -> ExitCode {
    trellis::cli::main()
}
