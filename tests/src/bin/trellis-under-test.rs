//! The `trellis` binary, built beside the tests that start it. Where the environment says so, its backends fail, its loads are held
//! up, or it is of another version, which those of the released one never do.

use std::process::ExitCode;

use trellis::cli::TestBuild;
use trellis_tests::{builds, faulty, held};

fn main() -> ExitCode {
    let wrap = held::wrap_from_environment(faulty::wrap_from_environment());
    trellis::cli::main_of(TestBuild { wrap, ..builds::from_environment() })
}
