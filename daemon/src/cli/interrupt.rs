//! Ctrl-C, and what a service manager sends.

use std::io;
use std::sync::{Arc, OnceLock};

use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::error::{CliError, INTERRUPTED};

/// Hang-ups that are no end of a terminal: who sends one wants something else.
pub(crate) struct HangUps(mpsc::UnboundedReceiver<()>);

impl HangUps {
    /// The next one; several that come at once may be one.
    pub(crate) async fn next(&mut self) {
        if self.0.recv().await.is_none() {
            std::future::pending::<()>().await;
        }
        while self.0.try_recv().is_ok() {}
    }
}

/// Signals that have another program take the place of the daemon's: SIGUSR2.
#[cfg(unix)]
pub(crate) struct UpgradeSignals(tokio::signal::unix::Signal);

#[cfg(unix)]
impl UpgradeSignals {
    /// Starts to watch.
    ///
    /// # Errors
    /// The system does not let signals be watched.
    pub(crate) fn watch() -> Result<Self, CliError> {
        let signal = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::user_defined2());
        Ok(Self(signal.map_err(CliError::io("watch for signals"))?))
    }

    /// The next one; several that come at once may be one.
    pub(crate) async fn next(&mut self) {
        if self.0.recv().await.is_none() {
            std::future::pending::<()>().await;
        }
    }
}

/// Watches for interrupts: the first asks the command to end, the second ends the process, or where a command waits for that one as
/// well ([`Self::second`]), the third. A hang-up, which comes when the terminal closes, is one that asks and none of the others: the
/// shell and the system may both send it.
#[derive(Clone, Debug)]
pub(crate) struct Interrupts {
    first: CancellationToken,
    /// There once a command waits for the second.
    second: Arc<OnceLock<CancellationToken>>,
    /// Who is answered once no signal is left that came before.
    asked: mpsc::UnboundedSender<oneshot::Sender<()>>,
}

impl Interrupts {
    /// Starts to watch. From here on an interrupt no longer kills the process by itself.
    ///
    /// # Errors
    /// The system does not let signals be watched.
    pub(crate) fn watch() -> Result<Self, CliError> {
        Ok(Self::of(Signals::new().map_err(CliError::io("watch for interrupts"))?))
    }

    /// As [`Self::watch`], for a command that runs without a terminal too: a hang-up is an interrupt only where the terminal is gone
    /// that the command was started from. The others are told apart.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn watch_beside_hang_ups() -> Result<(Self, HangUps), CliError> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let signals = Signals::new().map_err(CliError::io("watch for interrupts"))?;
        Ok((Self::of(signals.passing_on(sender)), HangUps(receiver)))
    }

    fn of(mut signals: Signals) -> Self {
        let (asked, mut asks) = mpsc::unbounded_channel::<oneshot::Sender<()>>();
        let interrupts = Self { first: CancellationToken::new(), second: Arc::default(), asked };
        let (first, second) = (interrupts.first.clone(), interrupts.second.clone());
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    // First: what has come is heard of before that is said.
                    biased;
                    () = signals.first() => break,
                    Some(ask) = asks.recv() => {
                        // Who asked may have gone.
                        let _ = ask.send(());
                    }
                }
            }
            // Who waits for an answer has it.
            drop(asks);
            first.cancel();
            signals.second().await;
            if let Some(second) = second.get() {
                second.cancel();
                signals.second().await;
            }
            // The command may be stuck in a write that is never read; nothing can be cleaned up any more.
            std::process::exit(i32::from(INTERRUPTED));
        });
        interrupts
    }

    /// Resolves with the first interrupt, and at once after it.
    pub(crate) async fn first(&self) {
        self.first.cancelled().await;
    }

    /// Whether the first one has come.
    pub(crate) fn has_come(&self) -> bool {
        self.first.is_cancelled()
    }

    /// Waits until every signal is heard of ([`Self::has_come`]) that this process was given before.
    ///
    /// A signal is on its way from the thread that was given it to the runtime, and from there to who watches. One more of another kind
    /// is sent after it, which ends nothing and which the runtime hears of no sooner.
    #[cfg(unix)]
    pub(crate) async fn heard_all(&self) {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut last) = signal(SignalKind::window_change())
            && nix::sys::signal::raise(nix::sys::signal::Signal::SIGWINCH).is_ok()
        {
            last.recv().await;
        }
        let (answer, answered) = oneshot::channel();
        // Where the first has come nobody answers any more.
        if self.asked.send(answer).is_ok() {
            let _ = answered.await;
        }
    }

    /// Resolves with the second interrupt, which from this call on does not end the process.
    pub(crate) fn second(&self) -> impl Future<Output = ()> + use<> {
        self.second.get_or_init(CancellationToken::new).clone().cancelled_owned()
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

/// What a conversation is told from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Press {
    /// Ctrl-C.
    Interrupt,
    /// It is to end, or its terminal is gone.
    End,
}

/// Watches for interrupts where none of them ends the command.
pub(crate) struct Presses {
    signals: Signals,
    has_ended: bool,
}

impl Presses {
    /// Starts to watch. From here on an interrupt no longer kills the process by itself.
    ///
    /// # Errors
    /// The system does not let signals be watched.
    pub(crate) fn watch() -> Result<Self, CliError> {
        let signals = Signals::new().map_err(CliError::io("watch for interrupts"))?;
        Ok(Self { signals, has_ended: false })
    }

    /// The next one; several that come at once are one, and after an end there are only ends.
    pub(crate) async fn next(&mut self) -> Press {
        if !self.has_ended {
            let press = self.signals.next().await;
            self.has_ended = press == Press::End;
        }
        if self.has_ended { Press::End } else { Press::Interrupt }
    }

    /// Whether there are only ends.
    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Runs a future to its end, or drops it when something comes.
    ///
    /// # Errors
    /// [`CliError::Interrupted`], or what the future ends with.
    pub(crate) async fn stop<T>(
        &mut self,
        work: impl Future<Output = Result<T, CliError>>,
    ) -> Result<T, CliError> {
        tokio::select! {
            biased;
            _ = self.next() => Err(CliError::Interrupted),
            result = work => result,
        }
    }
}

#[cfg(unix)]
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
    /// Not where the process was started to outlive its terminal, as by `nohup`.
    hang_up: Option<tokio::signal::unix::Signal>,
    /// Where hang-ups go while the terminal is there, or where there was none.
    others: Option<mpsc::UnboundedSender<()>>,
    had_terminal: bool,
}

#[cfg(unix)]
impl Signals {
    fn new() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        let hang_up = match is_ignored(SignalKind::hangup()) {
            true => None,
            false => Some(signal(SignalKind::hangup())?),
        };
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hang_up,
            others: None,
            had_terminal: has_terminal(),
        })
    }

    fn passing_on(self, others: mpsc::UnboundedSender<()>) -> Self {
        Self { others: Some(others), ..self }
    }

    async fn first(&mut self) {
        self.next().await;
    }

    async fn next(&mut self) -> Press {
        let (others, had_terminal) = (&self.others, self.had_terminal);
        let hang_up = async {
            let Some(hang_up) = &mut self.hang_up else { return std::future::pending().await };
            while hang_up.recv().await.is_some() {
                match others {
                    // Nobody listens any more once the command is about to end.
                    Some(others) if !had_terminal || has_terminal() => drop(others.send(())),
                    _ => break,
                }
            }
        };
        tokio::select! {
            _ = self.interrupt.recv() => Press::Interrupt,
            _ = self.terminate.recv() => Press::End,
            _ = hang_up => Press::End,
        }
    }

    async fn second(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// Whether the process has a terminal that it is controlled from. One that has hung up is none.
#[cfg(unix)]
fn has_terminal() -> bool {
    std::fs::File::open("/dev/tty").map_or_else(|error| !is_gone(&error), |_| true)
}

/// Whether that the terminal cannot be opened means that it is gone. Else it may well be there, as where files are used up: a daemon
/// is not to end for that.
#[cfg(unix)]
fn is_gone(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(Errno::from_io_error(error), Some(Errno::NXIO | Errno::IO))
}

/// Whether the process was started with a signal ignored; watching for it would undo that. Where the system does not tell, it
/// counts as not ignored.
#[cfg(unix)]
fn is_ignored(kind: tokio::signal::unix::SignalKind) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default();
    ignored >> (kind.as_raw_value() - 1) & 1 == 1
}

#[cfg(windows)]
struct Signals(tokio::signal::windows::CtrlC);

#[cfg(windows)]
impl Signals {
    fn new() -> io::Result<Self> {
        tokio::signal::windows::ctrl_c().map(Self)
    }

    /// There are no hang-ups.
    fn passing_on(self, _: mpsc::UnboundedSender<()>) -> Self {
        self
    }

    async fn first(&mut self) {
        self.next().await;
    }

    async fn next(&mut self) -> Press {
        self.0.recv().await;
        Press::Interrupt
    }

    async fn second(&mut self) {
        self.0.recv().await;
    }
}

#[cfg(all(test, unix))]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_signal_that_was_taken_is_heard_of() {
        use tokio::signal::unix::{SignalKind, signal};
        // One that no other test of this process watches for.
        let watch = || signal(SignalKind::user_defined1()).expect("signals are watched");
        let signals = Signals {
            interrupt: watch(),
            terminate: watch(),
            hang_up: None,
            others: None,
            had_terminal: false,
        };
        let interrupts = Interrupts::of(signals);
        interrupts.heard_all().await;
        assert!(!interrupts.has_come());
        nix::sys::signal::raise(nix::sys::signal::Signal::SIGUSR1).expect("it is this process's");
        interrupts.heard_all().await;
        assert!(interrupts.has_come());
        interrupts.heard_all().await;
    }

    #[test]
    fn a_terminal_is_gone_only_where_the_system_says_so() {
        for (errno, gone) in [
            (Errno::NXIO, true),
            (Errno::IO, true),
            (Errno::MFILE, false),
            (Errno::NFILE, false),
            (Errno::NOENT, false),
        ] {
            assert_eq!(is_gone(&errno.into()), gone, "{errno:?}");
        }
    }
}
