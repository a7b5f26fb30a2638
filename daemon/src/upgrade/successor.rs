//! Whether a program would start in the place of this one.

use std::ffi::OsString;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::fs::{Access, access};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;

use super::CommandLine;
use super::handover::{FORMAT_VARIABLE, own_format};
use crate::spawner;

/// How long a program may take to say that it would start: it reads the settings, and the heads of all models.
const CHECK_TIME: Duration = Duration::from_secs(60);

/// What is heard of what it says.
const SAID_BYTES_MAX: u64 = 16 << 10;
/// What of that is told.
const TOLD_CHARS_MAX: usize = 1_000;

/// Why no program takes the place of this one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UpgradeError {
    /// The daemon is part of another program.
    #[error("this daemon was not started by `trellis serve`, and cannot be replaced")]
    NoProgram,
    /// Whoever has made the socket keeps clients waiting there.
    #[error(
        "the service manager keeps this daemon's socket, where clients wait while it starts another daemon, and has its own settings \
         for it: `systemctl restart` with the name of the service upgrades it, and refuses nobody"
    )]
    Lent,
    /// The daemon is about to go down, or to be replaced.
    #[error("the daemon is about to go down, or to be replaced")]
    Ending,
    /// The path depends on where the daemon was started.
    #[error("{path} is no absolute path", path = .path.display())]
    Relative {
        /// The path.
        path: PathBuf,
    },
    /// There is no such program.
    #[error("{path} cannot be started: {source}", path = .path.display())]
    NoFile {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is a folder, for one.
    #[error("{path} is no regular file", path = .path.display())]
    NotRegular {
        /// The path.
        path: PathBuf,
    },
    /// Anybody could put something else there.
    #[error("everybody may write to {path} (mode {mode:o})", path = .path.display())]
    Open {
        /// The path.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// It did not say what it is or whether it would start.
    #[error("`{program} {asked}` did not end within {} s", .limit.as_secs())]
    Late {
        /// The program.
        program: String,
        /// What it was asked.
        asked: &'static str,
        /// How long it had.
        limit: Duration,
    },
    /// It is another program, or one that does not work here.
    #[error("{program} is no trellis that works here: `--version` ended with {status} and said {said:?}")]
    NotTrellis {
        /// The program.
        program: String,
        /// How it ended.
        status: ExitStatus,
        /// What it said.
        said: String,
    },
    /// It would not start with the command line of this daemon.
    #[error("{program} ({version}) would not start as this daemon did: {said}")]
    Refused {
        /// The program.
        program: String,
        /// Its version.
        version: String,
        /// What it said of that.
        said: String,
    },
}

/// A program that has said that it would start.
#[derive(Clone, Debug)]
pub(crate) struct Successor {
    program: PathBuf,
    version: String,
    arguments: Vec<OsString>,
}

impl Successor {
    /// Looks at a program, or at what lies where this one was started from, and has it say its version and whether it would start with
    /// the arguments of this one.
    ///
    /// # Errors
    /// It would not.
    pub(super) async fn find(program: Option<PathBuf>, command: &CommandLine) -> Result<Self, UpgradeError> {
        let program = program.unwrap_or_else(|| command.program.clone());
        check_file(&program)?;
        let name = program.display().to_string();
        let said = ask(&program, "--version", &["--version".into()]).await?;
        let version = said.out.lines().next().and_then(|line| line.strip_prefix("trellis "));
        let Some(version) = version.map(str::to_owned).filter(|_| said.status.success()) else {
            let Said { status, out, err } = said;
            return Err(UpgradeError::NotTrellis { program: name, status, said: told(&(out + &err)) });
        };
        let mut arguments = command.arguments.clone();
        arguments.push("--check".into());
        let said = ask(&program, "serve --check", &arguments).await?;
        if !said.status.success() {
            return Err(UpgradeError::Refused { program: name, version, said: told(&said.err) });
        }
        Ok(Self { program, version, arguments: command.arguments.clone() })
    }

    /// The absolute path of it.
    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    /// Its version, as it says it.
    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    /// The arguments that it is started with.
    pub(super) fn arguments(&self) -> &[OsString] {
        &self.arguments
    }
}

fn check_file(program: &Path) -> Result<(), UpgradeError> {
    let path = program.to_owned();
    if !path.is_absolute() {
        return Err(UpgradeError::Relative { path });
    }
    let metadata = match std::fs::metadata(program) {
        Ok(metadata) => metadata,
        Err(source) => return Err(UpgradeError::NoFile { path, source }),
    };
    if !metadata.is_file() {
        return Err(UpgradeError::NotRegular { path });
    }
    let mode = metadata.permissions().mode() & 0o7777;
    if mode & 0o002 != 0 {
        return Err(UpgradeError::Open { path, mode });
    }
    access(program, Access::EXEC_OK).map_err(|errno| UpgradeError::NoFile { path, source: errno.into() })
}

/// What a program answers.
struct Said {
    status: ExitStatus,
    out: String,
    err: String,
}

async fn ask(program: &Path, asked: &'static str, arguments: &[OsString]) -> Result<Said, UpgradeError> {
    let failed = |source| UpgradeError::NoFile { path: program.to_owned(), source };
    let mut command = Command::new(program);
    command.args(arguments).env_remove("NOTIFY_SOCKET").kill_on_drop(true);
    command.env(FORMAT_VARIABLE, own_format().to_string());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = spawner::start(command).await.map_err(failed)?;
    let (out, err) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
    let answer = async {
        // One that says more than that is not heard to its end, and ends by itself.
        let (out, err) = tokio::join!(heard(out), heard(err));
        Ok(Said { status: child.wait().await?, out: out?, err: err? })
    };
    match tokio::time::timeout(CHECK_TIME, answer).await {
        Ok(said) => said.map_err(failed),
        Err(_) => {
            Err(UpgradeError::Late { program: program.display().to_string(), asked, limit: CHECK_TIME })
        }
    }
}

async fn heard(pipe: impl AsyncRead + Unpin) -> io::Result<String> {
    let mut bytes = Vec::new();
    pipe.take(SAID_BYTES_MAX).read_to_end(&mut bytes).await?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// In one line, without what every complaint begins with.
fn told(said: &str) -> String {
    let lines: Vec<&str> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let line = lines.join("; ");
    let line = line.strip_prefix("error: ").unwrap_or(&line);
    if line.is_empty() {
        "it does not say why".to_owned()
    } else {
        line.chars().take(TOLD_CHARS_MAX).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(folder: &Path, text: &str, mode: u32) -> PathBuf {
        let path = folder.join("trellis");
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("written");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("it is ours");
        path
    }

    async fn find(program: &Path) -> Result<Successor, UpgradeError> {
        let command = CommandLine { program: program.to_owned(), arguments: vec!["serve".into()] };
        loop {
            match Successor::find(None, &command).await {
                // What another thread has just started may have the script open for writing as its own, until it is another program.
                Err(UpgradeError::NoFile { source, .. })
                    if source.kind() == io::ErrorKind::ExecutableFileBusy => {}
                found => return found,
            }
        }
    }

    #[tokio::test]
    async fn a_program_that_would_start_is_found_and_no_other() {
        const WELL: &str =
            "case \"$*\" in --version) echo 'trellis 9.8.7';; 'serve --check') ;; *) exit 1;; esac";
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        let successor = find(&script(folder, WELL, 0o700)).await.expect("it would start");
        assert_eq!(successor.version(), "9.8.7");
        assert_eq!(successor.arguments(), ["serve"]);

        let open = find(&script(folder, WELL, 0o702)).await.expect_err("anybody may write to it");
        assert!(matches!(open, UpgradeError::Open { mode: 0o702, .. }), "{open}");
        let no_program = find(&script(folder, WELL, 0o600)).await.expect_err("it is not executable");
        assert!(matches!(no_program, UpgradeError::NoFile { .. }), "{no_program}");
        assert!(matches!(find(folder).await, Err(UpgradeError::NotRegular { .. })));
        assert!(matches!(find(Path::new("trellis")).await, Err(UpgradeError::Relative { .. })));
        assert!(matches!(find(&folder.join("none")).await, Err(UpgradeError::NoFile { .. })));

        let other = find(&script(folder, "echo 'cat 1.0'", 0o700)).await.expect_err("it is another");
        assert!(matches!(&other, UpgradeError::NotTrellis { said, .. } if said == "cat 1.0"), "{other}");
        let broken = find(&script(folder, "echo 'trellis 1.0'; exit 1", 0o700)).await.expect_err("it fails");
        assert!(matches!(broken, UpgradeError::NotTrellis { .. }), "{broken}");
        const PICKY: &str =
            "echo 'trellis 1.0'; [ $1 = --version ] || { echo 'error: no such model' >&2; exit 2; }";
        let picky = find(&script(folder, PICKY, 0o700)).await.expect_err("it would not start");
        assert!(matches!(&picky, UpgradeError::Refused { said, .. } if said == "no such model"), "{picky}");
    }
}
