//! The Rust target that guests are built for.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

use super::error::CliError;
use super::output::{Format, escaped_line, note};

/// The target that makes components.
pub(crate) const WASM_TARGET: &str = "wasm32-wasip2";

/// Makes sure that the toolchain that builds in `folder` has the target, and adds it if it has not.
///
/// # Errors
/// There is no Rust, or the target is missing and cannot be added.
pub(crate) async fn ensure_target(folder: &Path, format: Format) -> Result<(), CliError> {
    if has_target(folder, format).await? {
        return Ok(());
    }
    note(format, &format!("the Rust target {WASM_TARGET} is missing; adding it with rustup"));
    let mut rustup = Command::new("rustup");
    rustup.args(["target", "add", WASM_TARGET]).current_dir(folder).stdin(Stdio::null());
    match rustup.kill_on_drop(true).output().await {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            let (status, reason) = (output.status, reason(&output.stderr));
            Err(CliError::TargetNotAdded { target: WASM_TARGET, status, reason })
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(CliError::NoRustup { target: WASM_TARGET })
        }
        Err(source) => Err(CliError::Io { doing: "run rustup".to_owned(), source }),
    }
}

/// After so long it is said what rustup is at, which installs the toolchain that a crate names where it can.
const SILENCE_MAX: Duration = Duration::from_secs(2);

/// Looks into the toolchain itself: it need not be one of rustup's.
async fn has_target(folder: &Path, format: Format) -> Result<bool, CliError> {
    let mut rustc = Command::new("rustc");
    rustc.args(["--print", "sysroot"]).current_dir(folder).stdin(Stdio::null()).kill_on_drop(true);
    let mut asked = pin!(rustc.output());
    let output = match tokio::time::timeout(SILENCE_MAX, &mut asked).await {
        Ok(output) => output,
        Err(_) => {
            note(format, &format!("waiting for the Rust toolchain of {}", folder.display()));
            asked.await
        }
    };
    let output = output.map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => CliError::NoCargo,
        _ => CliError::Io { doing: "run rustc".to_owned(), source },
    })?;
    if !output.status.success() {
        return Err(CliError::NoToolchain { path: folder.to_owned(), reason: reason(&output.stderr) });
    }
    let sysroot = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    Ok(sysroot.join("lib/rustlib").join(WASM_TARGET).is_dir())
}

/// The first error of what a tool says, of which rustup says much; its last line where it calls nothing an error.
fn reason(said: &[u8]) -> String {
    let said = String::from_utf8_lossy(said);
    let mut lines = said.lines().map(str::trim).filter(|line| !line.is_empty());
    let error = lines.clone().find_map(|line| line.strip_prefix("error: "));
    // The crate names its toolchain, and errors repeat the name.
    escaped_line(error.or_else(|| lines.next_back()).unwrap_or("it says no reason")).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_all_that_rustup_says_the_first_error_is_the_reason() {
        let said = "info: syncing channel updates for '1.97'\n\nerror: could not download file\nCaused by:\n  0: dns\n";
        assert_eq!(reason(said.as_bytes()), "could not download file");
        assert_eq!(reason(b"rustc: not\x1b[2J for you\n"), "rustc: not\\u{1b}[2J for you");
        assert_eq!(reason(b""), "it says no reason");
    }
}
