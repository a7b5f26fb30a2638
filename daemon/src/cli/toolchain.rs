//! The Rust target that guests are built for.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use tokio::process::Command;

use super::cargo::pass_on;
use super::error::CliError;
use super::output::{Format, note};

/// The target that makes components.
pub(crate) const WASM_TARGET: &str = "wasm32-wasip2";

/// Makes sure that the toolchain that builds in `folder` has the target, and adds it if it has not.
///
/// # Errors
/// There is no Rust, or the target is missing and cannot be added.
pub(crate) async fn ensure_target(folder: &Path, format: Format) -> Result<(), CliError> {
    if has_target(folder).await? {
        return Ok(());
    }
    note(format, &format!("the Rust target {WASM_TARGET} is missing; adding it with rustup"));
    let mut rustup = Command::new("rustup");
    rustup.args(["target", "add", WASM_TARGET]).current_dir(folder).stdin(Stdio::null());
    // Its progress belongs beside the output.
    rustup.stdout(Stdio::null()).kill_on_drop(true);
    match rustup.status().await {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(CliError::TargetNotAdded { target: WASM_TARGET, status }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(CliError::NoRustup { target: WASM_TARGET })
        }
        Err(source) => Err(CliError::Io { doing: "run rustup".to_owned(), source }),
    }
}

/// Looks into the toolchain itself: it need not be one of rustup's.
async fn has_target(folder: &Path) -> Result<bool, CliError> {
    let mut rustc = Command::new("rustc");
    rustc.args(["--print", "sysroot"]).current_dir(folder).stdin(Stdio::null());
    let mut child =
        rustc.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true).spawn().map_err(|source| {
            match source.kind() {
                io::ErrorKind::NotFound => CliError::NoCargo,
                _ => CliError::Io { doing: "run rustc".to_owned(), source },
            }
        })?;
    // The crate names its toolchain, and errors repeat the name.
    let stderr = child.stderr.take().expect("piped");
    let (output, passed) = tokio::join!(child.wait_with_output(), pass_on(stderr));
    let output = passed.and(output).map_err(CliError::io("read what rustc says"))?;
    let sysroot = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    Ok(output.status.success() && sysroot.join("lib/rustlib").join(WASM_TARGET).is_dir())
}
