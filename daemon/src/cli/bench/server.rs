//! A daemon in a process and on a socket of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use tokio::io::AsyncReadExt;
use tokio::process::{Child, Command};
use trellis_client::Client;

use super::BenchError;
use crate::cli::connect;
use crate::cli::error::CliError;
use crate::config::{Config, Served};

/// How often a start is looked at: a small part of the time that it may take.
const POLL: Duration = Duration::from_millis(1);

/// How long a daemon may take to start or to stop.
const PATIENCE: Duration = Duration::from_secs(120);

/// A folder of this process, removed when dropped.
#[derive(Debug)]
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// # Errors
    /// The folder cannot be made.
    pub(crate) fn new() -> Result<Self, CliError> {
        let path = std::env::temp_dir().join(format!("trellis-bench-{}", std::process::id()));
        let mut builder = fs::DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(&path).map_err(CliError::io(format!("make {}", path.display())))?;
        Ok(Self(path))
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What cannot be removed lies in the folder that the system cleans.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A running daemon; killed when dropped.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
    pub(crate) client: Client,
    /// From the start of the process to the first connection.
    pub(crate) ready: Duration,
}

impl Server {
    /// Runs this very executable as a daemon and connects to it as soon as it lets.
    ///
    /// # Errors
    /// It does not start.
    pub(crate) async fn start(config: &Config, scratch: &Scratch) -> Result<Self, CliError> {
        let file = scratch.path().join("trellis.toml");
        // Root measures as any other user does: nobody else comes to this socket.
        let config = Config { isolation: config.isolation.of(Served::Own), ..config.clone() };
        let text = toml::to_string(&config).expect("settings serialise");
        fs::write(&file, text).map_err(CliError::io(format!("write {}", file.display())))?;
        let socket = config.socket.as_deref().expect("the benchmark's daemon has a socket of its own");
        let exe = std::env::current_exe().map_err(CliError::io("find this executable"))?;
        let mut command = Command::new(exe);
        command.args(["serve", "--log", "error", "--config"]).arg(&file);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let started = Instant::now();
        let mut child = command.spawn().map_err(CliError::io("start the daemon"))?;
        let client = loop {
            match Client::connect_to(socket).await {
                Ok(client) => break client,
                Err(trellis_client::Error::NotRunning { .. }) => {}
                Err(error) => return Err(error.into()),
            }
            let exited = child.try_wait().map_err(CliError::io("watch the daemon"))?;
            if exited.is_some() || started.elapsed() > PATIENCE {
                return Err(BenchError::Server { said: last_words(child).await }.into());
            }
            tokio::time::sleep(POLL).await;
        };
        Ok(Self { child, client, ready: started.elapsed() })
    }

    /// Bytes of memory that the process holds now.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub(crate) async fn resident_bytes(&self) -> Result<u64, CliError> {
        Ok(self.client.info().await?.resident_bytes)
    }

    /// Asks the daemon to stop and waits until it has.
    ///
    /// # Errors
    /// It does not stop, or not well.
    pub(crate) async fn stop(mut self) -> Result<(), CliError> {
        connect::shut_down(&self.client).await?;
        match tokio::time::timeout(PATIENCE, self.child.wait()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            _ => Err(BenchError::Server { said: last_words(self.child).await }.into()),
        }
    }
}

async fn last_words(mut child: Child) -> String {
    // Its standard error ends when it does.
    let _ = child.start_kill();
    let mut said = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        let _ = stderr.read_to_string(&mut said).await;
    }
    said.trim().to_owned()
}
