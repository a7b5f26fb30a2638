//! Building a guest's crate into a component.

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{ChildStdout, Command};

use super::error::CliError;
use super::output::{Format, escaped_but_colors};
use super::toolchain::{WASM_TARGET, ensure_target};

/// Builds the crate in `folder` and returns where its component is. Cargo's own words go to standard error; a
/// build that has nothing to do says nothing.
///
/// # Errors
/// There is no Rust, the crate does not build, or it builds no component.
pub(crate) async fn build(folder: &Path, format: Format) -> Result<PathBuf, CliError> {
    let folder = folder.canonicalize().map_err(CliError::io(format!("find {}", folder.display())))?;
    ensure_target(&folder, format).await?;
    let manifest = folder.join("Cargo.toml");
    let color = if io::stderr().is_terminal() { "always" } else { "auto" };
    let mut cargo = Command::new("cargo");
    cargo
        .args(["build", "--release", "--target", WASM_TARGET, "--color", color])
        .args(["--message-format", "json-render-diagnostics", "--manifest-path"])
        .arg(&manifest)
        // The toolchain file of the crate is found from here.
        .current_dir(&folder)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut child = cargo.spawn().map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => CliError::NoCargo,
        _ => CliError::Io { doing: "run cargo".to_owned(), source },
    })?;
    let (stdout, stderr) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
    let doing = CliError::io("read what cargo says");
    let (component, passed) = tokio::join!(find_component(stdout, &manifest), pass_on(stderr));
    let component = passed.and(component).map_err(doing)?;
    let status = child.wait().await.map_err(CliError::io("wait for cargo"))?;
    if !status.success() {
        return Err(CliError::BuildFailed { path: folder, status });
    }
    component.ok_or(CliError::NoComponent { path: folder })
}

/// One of the lines that cargo prints for programs.
#[derive(Deserialize)]
struct CargoMessage {
    reason: String,
    #[serde(default)]
    manifest_path: PathBuf,
    #[serde(default)]
    filenames: Vec<PathBuf>,
}

async fn find_component(stdout: ChildStdout, manifest: &Path) -> io::Result<Option<PathBuf>> {
    let mut lines = BufReader::new(stdout).lines();
    let mut component = None;
    while let Some(line) = lines.next_line().await? {
        component = component_in(&line, manifest).or(component);
    }
    Ok(component)
}

/// The component of this very crate, not of one that it depends on.
fn component_in(line: &str, manifest: &Path) -> Option<PathBuf> {
    let message: CargoMessage = serde_json::from_str(line).ok()?;
    if message.reason != "compiler-artifact" || message.manifest_path != manifest {
        return None;
    }
    message.filenames.into_iter().find(|file| file.extension().is_some_and(|extension| extension == "wasm"))
}

/// Shows what a tool says of a crate, whose author is not trusted. Cargo sums up even when there was nothing to do; all
/// else is worth showing.
async fn pass_on(stderr: impl AsyncRead + Unpin) -> io::Result<()> {
    let mut lines = BufReader::new(stderr).split(b'\n');
    while let Some(line) = lines.next_segment().await? {
        let line = String::from_utf8_lossy(&line);
        if !is_summary(&line) {
            eprintln!("{}", escaped_but_colors(&line));
        }
    }
    Ok(())
}

fn is_summary(line: &str) -> bool {
    line.contains("Finished") && line.contains("target(s) in ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_crates_own_component_counts() {
        let manifest = Path::new("/guests/chat/Cargo.toml");
        let line = |reason: &str, manifest: &str, file: &str| {
            format!(r#"{{"reason":"{reason}","manifest_path":"{manifest}","filenames":["/t/x.d","{file}"]}}"#)
        };
        let own = line("compiler-artifact", "/guests/chat/Cargo.toml", "/t/chat.wasm");
        assert_eq!(component_in(&own, manifest), Some(PathBuf::from("/t/chat.wasm")));
        for other in [
            line("compiler-artifact", "/guests/beam/Cargo.toml", "/t/beam.wasm"),
            line("compiler-artifact", "/guests/chat/Cargo.toml", "/t/libchat.rlib"),
            line("build-script-executed", "/guests/chat/Cargo.toml", "/t/chat.wasm"),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
            "not JSON".to_owned(),
        ] {
            assert_eq!(component_in(&other, manifest), None, "{other}");
        }
    }

    #[test]
    fn only_the_summary_is_left_out() {
        assert!(is_summary("    Finished `release` profile [optimized] target(s) in 0.03s"));
        assert!(is_summary(
            "\u{1b}[92m    Finished\u{1b}[0m `release` profile [optimized] target(s) in 1m 2s"
        ));
        assert!(!is_summary("   Compiling chat v0.1.0"));
        assert!(!is_summary("error: it has Finished"));
        assert!(!is_summary(""));
    }
}
