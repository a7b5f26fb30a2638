//! Signs of a daemon that does not answer: for those who wait for one that starts, is replaced by another program, or ends while the next
//! one is to come.
//!
//! - Comes in: the sockets on which a daemon may listen.
//! - Goes out: what it says of itself, for how long there was no sign of it, and how many starts have come to nothing.
//! - What is seen is the lock beside a socket, with what the daemon writes there while it starts. A user who may not read that sees when
//!   it was last written, and on Linux which process has the lock.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use crate::lock::{self, Owner, Phase, Seen};
use crate::starts::Starts;

/// After so many starts that came to nothing a daemon is not waited for any more, whatever the next one says of itself.
pub const N_FAILED_STARTS_MAX: u32 = 3;

/// What can be seen of a daemon that does not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sign {
    /// What it says of itself, where this user may read it.
    said: Option<String>,
    /// When it last did.
    written: Option<SystemTime>,
}

impl Sign {
    fn of(socket: &Path) -> Self {
        let said = lock::owner_of(socket).map(|Owner { phase, .. }| match phase {
            Phase::Starting(Some(progress)) => progress,
            Phase::Starting(None) => "it starts".to_owned(),
            Phase::Ready => "it has much to do, or stands still".to_owned(),
            Phase::Ending => "it comes to its end".to_owned(),
        });
        let written = fs::metadata(lock::path(socket)).and_then(|metadata| metadata.modified());
        Self { said, written: written.ok() }
    }
}

/// The signs that were seen in one wait.
#[derive(Clone, Debug, Default)]
pub struct Signs {
    /// The last ones, of each socket on which a daemon may listen, and when they were first seen.
    last: Option<(Instant, Vec<(PathBuf, Sign)>)>,
    starts: Vec<(PathBuf, Starts)>,
}

/// What a look has shown.
#[derive(Clone, Debug)]
pub struct Shown {
    /// What a daemon says of itself.
    pub said: Option<String>,
    /// The first socket on which one may listen.
    pub socket: Option<PathBuf>,
    /// Whether that, or when it was said, is not what it was at the look before.
    pub has_changed: bool,
    /// For how long nothing has changed.
    pub silent_for: Duration,
    /// Starts that have come to nothing since the first look, at the socket that has most.
    pub n_failed_starts: u32,
    /// That socket, where there were any.
    pub failing: Option<PathBuf>,
}

impl Shown {
    /// Whether too many starts have come to nothing.
    #[must_use]
    pub fn is_hopeless(&self) -> bool {
        self.n_failed_starts >= N_FAILED_STARTS_MAX
    }
}

impl Signs {
    /// Looks at these sockets, at which a daemon is looked for.
    pub fn look(&mut self, sockets: &[PathBuf]) -> Shown {
        let now = Instant::now();
        // One on which nobody listens any more may lie beside that of a daemon which loads.
        let signs: Vec<_> = watched(sockets).map(|path| (path.clone(), Sign::of(path))).collect();
        let unchanged = self.last.take().filter(|(_, last)| *last == signs).map(|(since, _)| since);
        let (has_changed, since) = (unchanged.is_none(), unchanged.unwrap_or(now));
        let said = signs.iter().find_map(|(_, sign)| sign.said.clone());
        let socket = signs.first().map(|(path, _)| path.clone());
        self.last = Some((since, signs));
        let silent_for = now.duration_since(since);
        let (n_failed_starts, failing) = self.failed_starts(sockets);
        Shown { said, socket, has_changed, silent_for, n_failed_starts, failing }
    }

    /// The most starts at one of these sockets that have come to nothing, and at which, if any have.
    fn failed_starts(&mut self, sockets: &[PathBuf]) -> (u32, Option<PathBuf>) {
        let looked = sockets.iter().map(|socket| {
            let known = self.starts.iter().position(|(path, _)| path == socket);
            let at = known.unwrap_or_else(|| {
                self.starts.push((socket.clone(), Starts::default()));
                self.starts.len() - 1
            });
            (self.starts[at].1.look(socket), socket)
        });
        match looked.max_by_key(|(n_failed, _)| *n_failed) {
            Some((n_failed, socket)) if n_failed > 0 => (n_failed, Some(socket.clone())),
            _ => (0, None),
        }
    }
}

/// Those of these sockets on which a daemon may listen: a process has the lock, or this user cannot tell.
pub fn watched(sockets: &[PathBuf]) -> impl Iterator<Item = &PathBuf> {
    sockets.iter().filter(|socket| matches!(lock::look(socket), Seen::Held { .. } | Seen::Closed))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;

    use super::*;

    /// What a daemon leaves at a socket: its number, and what it says.
    fn write(socket: &Path, text: &str) -> File {
        let mut file = File::create(lock::path(socket)).expect("a free place");
        file.write_all(text.as_bytes()).expect("written");
        file
    }

    #[test]
    fn a_daemon_that_comes_on_is_not_silent_and_one_that_starts_over_and_over_is_hopeless() {
        let folder = tempfile::tempdir().expect("a folder");
        let sockets = [folder.path().join("none.sock"), folder.path().join("t.sock")];
        let mut signs = Signs::default();
        for start in 1..=N_FAILED_STARTS_MAX {
            for percent in [0, 50] {
                let file = write(&sockets[1], &format!("{start}\nloading big: {percent}% of 2.1 GB\n"));
                file.try_lock().expect("nobody has it");
                let shown = signs.look(&sockets);
                assert_eq!(shown.said, Some(format!("loading big: {percent}% of 2.1 GB")));
                assert_eq!(shown.socket.as_ref(), Some(&sockets[1]));
                assert_eq!((shown.silent_for, shown.n_failed_starts), (Duration::ZERO, start - 1));
                assert!(!shown.is_hopeless());
                let again = signs.look(&sockets);
                assert!(again.silent_for > Duration::ZERO, "nothing has changed");
            }
        }
        let gone = signs.look(&sockets);
        assert!(gone.is_hopeless() && gone.said.is_none(), "{gone:?}");
        assert_eq!(gone.failing.as_ref(), Some(&sockets[1]));
    }

    #[test]
    fn the_socket_whose_starts_fail_is_told_from_one_at_which_a_daemon_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let sockets = ["stands.sock", "fails.sock"].map(|name| folder.path().join(name));
        let stands = write(&sockets[0], "1\nready\n");
        stands.try_lock().expect("nobody has it");
        let mut signs = Signs::default();
        let start = write(&sockets[1], "2\n");
        start.try_lock().expect("nobody has it");
        assert_eq!(signs.look(&sockets).failing, None);
        drop(start);
        let shown = signs.look(&sockets);
        assert_eq!((shown.n_failed_starts, shown.failing.as_ref()), (1, Some(&sockets[1])));
        assert_eq!(shown.socket.as_ref(), Some(&sockets[0]));
    }
}
