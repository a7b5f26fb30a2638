//! Which thread takes the signals that tell a daemon something.

use std::io;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use nix::sys::signal::{SigSet, Signal};

/// Signals that tell a daemon something.
fn signals() -> SigSet {
    [Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM, Signal::SIGUSR2].into_iter().collect()
}

/// Has signals wait that the calling thread would take, and the threads that it starts from then on. Where all threads do, they wait
/// for the next program.
pub(crate) fn hold_signals() {
    if let Err(error) = signals().thread_block() {
        tracing::warn!(%error, "a signal may be lost while a program takes the place of another");
    }
}

/// Has the calling thread take signals, also those that came while one program took the place of another. Once they are watched for:
/// an untimely one would end the process.
pub(crate) fn let_signals_through() {
    if let Err(error) = signals().thread_unblock() {
        tracing::warn!(%error, "signals do not reach the daemon");
    }
}

/// The one thread of a daemon that takes signals, where all others hold them: they are started by threads that do. Once it has ended,
/// what comes waits for the next program.
#[derive(Debug)]
pub(crate) struct Signals {
    end: mpsc::Sender<()>,
    thread: JoinHandle<()>,
}

impl Signals {
    /// Begins to take signals, which have been held until now and are watched for.
    ///
    /// # Errors
    /// The system has no thread for it.
    pub(crate) fn take() -> io::Result<Self> {
        let (end, ended) = mpsc::channel();
        let take = move || {
            let_signals_through();
            // Nothing is ever sent.
            let _ = ended.recv();
        };
        let thread = thread::Builder::new().name("signals".to_owned()).spawn(take)?;
        Ok(Self { end, thread })
    }

    /// Has them wait from here on.
    pub(crate) fn hold(self) {
        let Self { end, thread } = self;
        drop(end);
        if thread.join().is_err() {
            tracing::warn!("the thread that takes signals has panicked");
        }
    }
}
