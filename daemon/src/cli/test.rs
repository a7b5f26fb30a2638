//! `trellis test`: runs the tests of a guest's crate next to the real host.

use std::process::Stdio;
use std::time::Duration;

use clap::Args;
use tokio::process::Command;

use super::error::CliError;
use super::interrupt::Interrupts;
use super::output::Format;
use super::resolve;
use super::seconds::some_seconds;
use super::seed::seed;
use super::toolchain::{WASM_TARGET, ensure_target};

const EXAMPLES: &str = "\
Examples:
  trellis test my-guest                     all tests of the crate
  trellis test                              those of the crate in this folder
  trellis test my-guest -- sums             those with \"sums\" in their names
  trellis test my-guest -- --nocapture      and what they print and emit
  trellis test --seed 8 my-guest            as if the guest were started with another seed

Each test is a guest of its own on the CPU with the bundled model `tiny`, several at a time, and may call the whole host API;
there is no client, so that `receive` says that no message comes. Tests in documentation are left out.
A crate whose tests lie in its folder `tests` has crate-type = [\"cdylib\", \"rlib\"]. `#[should_panic]` tests are ignored:
a panic ends a guest.

Exit status: 0 all passed, 101 some failed, as of cargo.";

/// The seed that tests see.
const SEED: &str = "1";

/// Run the tests of a guest's crate, each as a guest with the model `tiny`
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct TestArgs {
    /// The crate's folder, or an example's name
    #[arg(value_name = "FOLDER", default_value = ".")]
    folder: String,
    /// The seed that each test sees
    #[arg(long, value_name = "N", value_parser = seed, default_value = SEED, allow_negative_numbers = true)]
    seed: u64,
    /// Stop each test after so many seconds
    #[arg(long, value_name = "SECONDS", value_parser = some_seconds, default_value = "60", allow_negative_numbers = true)]
    timeout: Duration,
    /// What to run and how: a part of a name, --exact, --skip, --ignored, --include-ignored, --nocapture, --list
    #[arg(last = true, value_name = "ARGS")]
    arguments: Vec<String>,
}

pub(crate) async fn test(args: TestArgs, format: Format) -> Result<(), CliError> {
    let interrupts = Interrupts::watch()?;
    let folder = resolve::crate_folder(&args.folder)?;
    let folder = folder.canonicalize().map_err(CliError::io(format!("find {}", folder.display())))?;
    let status = interrupts
        .stop(async {
            ensure_target(&folder, format).await?;
            let runner = runner(args.seed, args.timeout, format)?;
            let mut cargo = Command::new("cargo");
            cargo
                .args(["test", "--tests", "--target", WASM_TARGET, "--config", &runner])
                .arg("--manifest-path");
            cargo.arg(folder.join("Cargo.toml")).arg("--").args(&args.arguments);
            // The toolchain file of the crate is found from here.
            cargo.current_dir(&folder).stdin(Stdio::null()).kill_on_drop(true);
            cargo.status().await.map_err(|source| match source.kind() {
                std::io::ErrorKind::NotFound => CliError::NoCargo,
                _ => CliError::Io { doing: "run cargo".to_owned(), source },
            })
        })
        .await?;
    // Cargo, or a test, has said what is wrong.
    if status.success() { Ok(()) } else { Err(CliError::TestsFailed) }
}

/// This program as what cargo runs test programs with, as a line of cargo's configuration.
fn runner(seed: u64, timeout: Duration, format: Format) -> Result<String, CliError> {
    let exe = std::env::current_exe().map_err(CliError::io("find this program".to_owned()))?;
    let exe = exe.display().to_string();
    let mut words = vec![exe, "test-runner".to_owned(), "--seed".to_owned(), seed.to_string()];
    words.extend(["--timeout".to_owned(), timeout.as_secs_f64().to_string()]);
    if format == Format::Json {
        words.push("--json".to_owned());
    }
    let words: Vec<toml::Value> = words.into_iter().map(toml::Value::String).collect();
    Ok(format!("target.{WASM_TARGET}.runner = {}", toml::Value::Array(words)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runner_is_a_line_that_cargo_takes() {
        let line = runner(7, Duration::from_secs(60), Format::Json).expect("this program is there");
        let config: toml::Value = toml::from_str(&line).expect("TOML");
        let words = config["target"][WASM_TARGET]["runner"].as_array().expect("a list");
        let words: Vec<&str> = words.iter().map(|word| word.as_str().expect("a text")).collect();
        assert_eq!(words[1..], ["test-runner", "--seed", "7", "--timeout", "60", "--json"]);
    }
}
