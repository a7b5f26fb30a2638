//! Ctrl-C, and what a service manager sends.

use std::io;

use tokio_util::sync::CancellationToken;

use super::error::{CliError, INTERRUPTED};

/// Watches for interrupts: the first asks the command to end, the second ends the process.
#[derive(Clone, Debug)]
pub(crate) struct Interrupts(CancellationToken);

impl Interrupts {
    /// Starts to watch. From here on an interrupt no longer kills the process by itself.
    ///
    /// # Errors
    /// The system does not let signals be watched.
    pub(crate) fn watch() -> Result<Self, CliError> {
        let failed = |source| CliError::Io { doing: "watch for interrupts".to_owned(), source };
        let mut signals = Signals::new().map_err(failed)?;
        let first = CancellationToken::new();
        let token = first.clone();
        tokio::spawn(async move {
            signals.next().await;
            token.cancel();
            signals.next().await;
            // The command may be stuck in a write that is never read; nothing can be cleaned up any more.
            std::process::exit(i32::from(INTERRUPTED));
        });
        Ok(Self(first))
    }

    /// Resolves with the first interrupt, and at once after it.
    pub(crate) async fn first(&self) {
        self.0.cancelled().await;
    }

    /// Runs a future to its end, or drops it at the first interrupt.
    ///
    /// # Errors
    /// [`CliError::Interrupted`], or what the future ends with.
    pub(crate) async fn stop<T>(
        &self,
        work: impl Future<Output = Result<T, CliError>>,
    ) -> Result<T, CliError> {
        tokio::select! {
            biased;
            () = self.first() => Err(CliError::Interrupted),
            result = work => result,
        }
    }
}

#[cfg(unix)]
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn new() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

#[cfg(windows)]
struct Signals(tokio::signal::windows::CtrlC);

#[cfg(windows)]
impl Signals {
    fn new() -> io::Result<Self> {
        tokio::signal::windows::ctrl_c().map(Self)
    }

    async fn next(&mut self) {
        self.0.recv().await;
    }
}
