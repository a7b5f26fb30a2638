//! The steps that a guest was in, for whoever looks on.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Notes that wait to be taken.
const N_NOTES_MAX: usize = 1 << 13;

/// A step of the device that had rows of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepNote {
    /// When the engine took in what it computed.
    pub ended: Instant,
    /// How long the device was at it, with the rows of others.
    pub elapsed: Duration,
    /// Rows of the guest.
    pub n_rows: u32,
    /// Tokens in them.
    pub n_tokens: u32,
}

/// The steps of one guest, the oldest first, until they are taken.
#[derive(Debug, Default)]
pub struct StepLog(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    notes: Vec<StepNote>,
    n_lost: u64,
}

impl StepLog {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A row of the guest was in a step. Those of one step come one after the other.
    pub(crate) fn note_row(&self, ended: Instant, elapsed: Duration, n_tokens: usize) {
        let n_tokens = u32::try_from(n_tokens).unwrap_or(u32::MAX);
        let mut inner = self.lock();
        let has_room = inner.notes.len() < N_NOTES_MAX;
        match inner.notes.last_mut() {
            Some(last) if (last.ended, last.elapsed) == (ended, elapsed) => {
                last.n_rows += 1;
                last.n_tokens = last.n_tokens.saturating_add(n_tokens);
            }
            _ if has_room => {
                inner.notes.push(StepNote { ended, elapsed, n_rows: 1, n_tokens });
            }
            _ => inner.n_lost += 1,
        }
    }

    /// A step of which an engine of another process has told.
    pub fn note(&self, step: StepNote) {
        let mut inner = self.lock();
        if inner.notes.len() < N_NOTES_MAX {
            inner.notes.push(step);
        } else {
            inner.n_lost += 1;
        }
    }

    /// The steps since this was called last, and how many rows there was no room for.
    pub fn take(&self) -> (Vec<StepNote>, u64) {
        let mut inner = self.lock();
        (std::mem::take(&mut inner.notes), std::mem::take(&mut inner.n_lost))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_one_step_are_one_note_and_too_many_are_counted() {
        let (log, now, ms) = (StepLog::default(), Instant::now(), Duration::from_millis(1));
        for n_tokens in [1, 5] {
            log.note_row(now, ms, n_tokens);
        }
        log.note_row(now + ms, ms, 2);
        let (notes, n_lost) = log.take();
        assert_eq!(
            notes.iter().map(|note| (note.n_rows, note.n_tokens)).collect::<Vec<_>>(),
            [(2, 6), (1, 2)]
        );
        assert_eq!(n_lost, 0);
        for idx in 0..N_NOTES_MAX as u32 + 3 {
            log.note_row(now + ms * idx, ms, 1);
        }
        let (notes, n_lost) = log.take();
        assert_eq!((notes.len(), n_lost), (N_NOTES_MAX, 3));
    }
}
