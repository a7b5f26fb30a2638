//! The nightly toolchain and cargo-fuzz.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use trellis_oracles::{Target, host};

use super::Plan;
use crate::{guests, pack};

/// Targets that need wasmtime.
const OF_THE_DAEMON: [&str; 3] = ["recordings", HOST, COMPONENTS];

/// The target that needs a guest, and a program that compiles it.
const HOST: &str = "host";

/// The target that makes its guests itself, and needs a program that tries out their grammars.
const COMPONENTS: &str = "components";

/// The features of a build without the targets of the daemon.
const WITHOUT_DAEMON: [&str; 3] = ["--no-default-features", "--features", "libfuzzer"];

/// What is missing, or does not build.
#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    /// There is no nightly toolchain.
    #[error(
        "fuzzing needs a nightly toolchain, whose compiler counts what is reached:\n  rustup toolchain install nightly"
    )]
    NoNightly,
    /// There is no cargo-fuzz.
    #[error("fuzzing needs cargo-fuzz:\n  cargo install cargo-fuzz")]
    NoCargoFuzz,
    /// The guest cannot be put where the fuzzer looks for it.
    #[error("{}: {source}", path.display())]
    Guest {
        /// Where.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The targets do not build.
    #[error("the targets do not build; {command}")]
    Build {
        /// The command that failed.
        command: String,
    },
}

/// Whether a target needs wasmtime.
pub(super) fn is_of_the_daemon(name: &str) -> bool {
    OF_THE_DAEMON.contains(&name)
}

/// What runs and builds targets.
#[derive(Debug)]
pub(super) struct Tools {
    has_daemon: bool,
    target_dir: PathBuf,
}

/// Where the targets' crate is.
pub(super) fn folder() -> PathBuf {
    pack::root().join("tests/fuzz")
}

/// A command of cargo's nightly, with nothing of the build that this program is of.
fn cargo() -> Command {
    let mut command = Command::new("cargo");
    guests::clean(&mut command).env_remove("RUSTUP_TOOLCHAIN").arg("+nightly").current_dir(pack::root());
    command
}

impl Tools {
    /// # Errors
    /// A tool is missing.
    pub(super) fn find(plan: &Plan) -> Result<Self, ToolError> {
        let answers = |arguments: &[&str]| {
            let mut command = cargo();
            command.args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
            command.status().is_ok_and(|status| status.success())
        };
        if !answers(&["--version"]) {
            return Err(ToolError::NoNightly);
        }
        if !answers(&["fuzz", "--version"]) {
            return Err(ToolError::NoCargoFuzz);
        }
        let given = plan.target_dir.clone().or_else(|| env::var_os("CARGO_TARGET_DIR").map(PathBuf::from));
        let here = env::current_dir().unwrap_or_default();
        let target_dir = given.map_or_else(|| folder().join("target"), |given| here.join(given));
        Ok(Self { has_daemon: plan.has_daemon, target_dir })
    }

    /// Where builds lie.
    pub(super) fn target_dir(&self) -> &Path {
        &self.target_dir
    }

    /// `cargo fuzz ACTION` with what all of them are told. Nearly all code under test is safe Rust: its bounds, overflows and
    /// debug assertions are checked as they are, and an address sanitizer would halve the speed.
    pub(super) fn fuzz(&self, action: &str) -> Command {
        let mut command = cargo();
        command.args(["fuzz", action, "--fuzz-dir"]).arg(folder());
        command.args(["--sanitizer", "none", "--target-dir"]).arg(&self.target_dir);
        if !self.has_daemon {
            command.args(WITHOUT_DAEMON);
        }
        command.envs(self.environment());
        command
    }

    /// What the targets of the host API are told.
    fn environment(&self) -> [(&'static str, PathBuf); 2] {
        let compiler = env::current_exe().unwrap_or_default();
        [(host::COMPILER, compiler), (host::GUEST, self.guest())]
    }

    fn guest(&self) -> PathBuf {
        self.target_dir.join("fuzz").join("hostile.wasm")
    }

    /// Builds all targets, or the one that is asked for.
    pub(super) fn build(&self, targets: &[&Target]) -> Result<(), ToolError> {
        println!("building, which takes minutes at first");
        if targets.iter().any(|target| target.name == HOST) {
            let write = || {
                fs::create_dir_all(self.target_dir.join("fuzz"))?;
                fs::write(self.guest(), guests::hostile())
            };
            write().map_err(|source| ToolError::Guest { path: self.guest(), source })?;
        }
        let mut command = self.fuzz("build");
        if let [target] = targets {
            command.arg(target.name);
        }
        match command.status() {
            Ok(status) if status.success() => Ok(()),
            _ => Err(ToolError::Build { command: format!("{command:?}") }),
        }
    }

    /// The command with which a person runs one input.
    pub(super) fn reproduce(&self, name: &str, input: &Path) -> String {
        let features = if self.has_daemon { String::new() } else { format!(" {}", WITHOUT_DAEMON.join(" ")) };
        let environment: String = match name {
            HOST | COMPONENTS => {
                self.environment().iter().map(|(name, path)| format!("{name}={} ", path.display())).collect()
            }
            _ => String::new(),
        };
        format!(
            "{environment}cargo +nightly fuzz run --fuzz-dir tests/fuzz --sanitizer none{features} --target-dir {} {name} {}",
            self.target_dir.display(),
            input.display()
        )
    }
}
