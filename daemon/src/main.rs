//! The `trellis` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    trellis::cli::main()
}
