//! Starts of a daemon that come to nothing, seen by those who wait for one.

use std::fs;
use std::path::Path;
use std::time::SystemTime;

use crate::holder::holder;
use crate::lock::{self, Phase, Said};

/// What is seen of a socket's daemon at one moment.
#[derive(Clone, Copy, Debug)]
struct Look {
    /// The process that has the lock.
    runs: Option<u32>,
    /// When something was last written beside the lock.
    written: Option<SystemTime>,
    /// Whether what was written last is of a daemon that has started; not known to a user who may not read it.
    has_served: Option<bool>,
}

impl Look {
    /// Nothing, where this user cannot tell.
    fn at(socket: &Path) -> Option<Self> {
        if let Ok(Said { is_held, owner, metadata }) = lock::said(socket) {
            // A process that has the lock may not have said yet which it is.
            let owner = owner?;
            let has_served = !matches!(owner.phase, Phase::Starting(_));
            let runs = is_held.then_some(owner.pid);
            return Some(Self { runs, written: metadata.modified().ok(), has_served: Some(has_served) });
        }
        let metadata = fs::metadata(lock::path(socket)).ok()?;
        let runs = holder(&metadata).ok()?;
        Some(Self { runs, written: metadata.modified().ok(), has_served: None })
    }
}

/// The starts at one socket.
#[derive(Clone, Debug, Default)]
pub(crate) struct Starts {
    last: Option<Last>,
    /// Whether a process with the lock would be seen: the kernel's list does not name those of other containers.
    sees_runs: bool,
    n_failed: u32,
}

/// What was seen last.
#[derive(Clone, Debug)]
struct Last {
    runs: Option<Run>,
    written: Option<SystemTime>,
}

/// A process that has the lock.
#[derive(Clone, Debug)]
struct Run {
    pid: u32,
    /// Its end is the end of no start: it has served, or may have done so before anybody looked.
    has_served: bool,
}

impl Starts {
    /// Looks again; how many starts have come to nothing since the first look.
    pub(crate) fn look(&mut self, socket: &Path) -> u32 {
        if let Some(look) = Look::at(socket) {
            self.note(look);
        }
        self.n_failed
    }

    fn note(&mut self, look: Look) {
        let served = look.has_served == Some(true);
        self.sees_runs |= look.runs.is_some() || look.has_served.is_some();
        let is_first = self.last.is_none();
        let Last { runs, written } = self.last.take().unwrap_or(Last { runs: None, written: look.written });
        let (goes_on, has_failed) = match (&runs, look.runs) {
            (Some(run), Some(pid)) if run.pid == pid => (run.has_served, false),
            (Some(run), Some(_)) => (false, !run.has_served),
            (Some(run), None) => (false, !run.has_served && !served),
            (None, Some(_)) => (false, false),
            // One that was over between two looks.
            (None, None) => (false, self.sees_runs && look.written != written && !served),
        };
        self.n_failed += u32::from(has_failed);
        let has_served = goes_on || served || is_first && look.has_served.is_none();
        let runs = look.runs.map(|pid| Run { pid, has_served });
        self.last = Some(Last { runs, written: look.written });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn look(runs: Option<u32>, written_s: u64, has_served: Option<bool>) -> Look {
        Look { runs, written: Some(SystemTime::UNIX_EPOCH + Duration::from_secs(written_s)), has_served }
    }

    fn n_failed(looks: &[Look]) -> u32 {
        let mut starts = Starts::default();
        for look in looks {
            starts.note(*look);
        }
        starts.n_failed
    }

    #[test]
    fn a_start_has_failed_when_its_process_is_gone_and_has_never_served() {
        let loads = Some(false);
        // One that loads for long, and then serves and ends.
        assert_eq!(n_failed(&[look(Some(7), 1, loads), look(Some(7), 2, loads), look(Some(7), 3, loads)]), 0);
        assert_eq!(
            n_failed(&[look(Some(7), 1, loads), look(Some(7), 2, Some(true)), look(None, 3, Some(true))]),
            0
        );
        // It goes and nobody comes; it makes way for another at once, or for one of the same number, as in a container.
        assert_eq!(n_failed(&[look(Some(7), 1, loads), look(None, 1, loads), look(None, 1, loads)]), 1);
        assert_eq!(n_failed(&[look(Some(7), 1, loads), look(Some(8), 2, loads), look(Some(9), 3, loads)]), 2);
        let same =
            [look(Some(1), 1, loads), look(None, 1, loads), look(Some(1), 2, loads), look(None, 2, loads)];
        assert_eq!(n_failed(&same), 2);
        // What is over between two looks has written something, and what was over before the first look says nothing.
        assert_eq!(n_failed(&[look(None, 1, loads), look(None, 1, loads), look(None, 2, loads)]), 1);
        assert_eq!(n_failed(&[look(None, 1, Some(true)), look(None, 2, Some(true))]), 0);
        // A program that takes the place of one that served.
        assert_eq!(
            n_failed(&[look(Some(7), 1, Some(true)), look(Some(7), 2, loads), look(Some(8), 3, loads)]),
            0
        );
    }

    #[test]
    fn who_may_not_read_what_a_daemon_says_counts_by_its_process_alone() {
        let looks = [(Some(7), 1), (Some(7), 2), (Some(8), 3), (None, 3), (Some(9), 4), (None, 5), (None, 6)];
        let looks = looks.map(|(runs, written_s)| look(runs, written_s, None));
        assert_eq!(n_failed(&looks[..3]), 0, "the first may have served");
        assert_eq!(n_failed(&looks[..4]), 1);
        assert_eq!(n_failed(&looks), 3);
        let unseen = [1, 2, 3, 4].map(|written_s| look(None, written_s, None));
        assert_eq!(n_failed(&unseen), 0, "one that loads, whose process cannot be seen");
    }
}
