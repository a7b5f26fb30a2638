//! Writes the guide as a site that needs no server: `cargo run -p trellis-tests --bin guide -- FOLDER`.

use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(out), None) = (arguments.next().map(PathBuf::from), arguments.next()) else {
        eprintln!("usage: guide FOLDER");
        return ExitCode::from(2);
    };
    trellis_tests::guide::build(&out);
    println!("{}", out.join("index.html").display());
    ExitCode::SUCCESS
}
