//! What the processes of all users' guests have in memory together.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Counts them, and says which one has to go where that is too much.
#[derive(Debug)]
pub(crate) struct Together {
    limit_bytes: u64,
    used: Mutex<HashMap<u32, Use>>,
}

/// What a process has. One without guests goes before others, and then whichever has most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Use {
    pub(crate) is_idle: bool,
    pub(crate) used_bytes: u64,
}

/// All of them have too much, and one of them most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "it used {used_bytes} bytes of memory, the most of all; together they used {all_bytes}, the limit is {limit_bytes}"
)]
pub(crate) struct Excess {
    used_bytes: u64,
    all_bytes: u64,
    limit_bytes: u64,
}

impl Together {
    pub(crate) fn new(limit_bytes: u64) -> Self {
        Self { limit_bytes, used: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u32, Use>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A process of this number has so much.
    ///
    /// # Errors
    /// It has to go: all have more than they may, and none goes before it.
    pub(crate) fn note(&self, pid: u32, own: Use) -> Result<(), Excess> {
        let mut used = self.lock();
        used.insert(pid, own);
        let all_bytes = used.values().map(|of_one| of_one.used_bytes).sum();
        let is_first = used.values().all(|&other| other <= own);
        if all_bytes > self.limit_bytes && is_first {
            return Err(Excess { used_bytes: own.used_bytes, all_bytes, limit_bytes: self.limit_bytes });
        }
        Ok(())
    }

    /// A process has ended.
    pub(crate) fn forget(&self, pid: u32) {
        self.lock().remove(&pid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(used_bytes: u64) -> Use {
        Use { is_idle: false, used_bytes }
    }

    #[test]
    fn the_one_that_has_most_has_to_go() {
        let together = Together::new(100);
        assert_eq!(together.note(1, of(40)), Ok(()));
        assert_eq!(together.note(2, of(60)), Ok(()), "to the byte");
        assert_eq!(together.note(1, of(41)), Ok(()), "another has more");
        let excess = Excess { used_bytes: 60, all_bytes: 101, limit_bytes: 100 };
        assert_eq!(together.note(2, of(60)), Err(excess));
        together.forget(2);
        assert_eq!(together.note(1, of(100)), Ok(()), "it is alone");
    }

    #[test]
    fn one_without_guests_goes_before_those_that_have_some() {
        let together = Together::new(100);
        assert_eq!(together.note(1, of(90)), Ok(()));
        let idle = Use { is_idle: true, used_bytes: 20 };
        assert!(together.note(2, idle).is_err());
        assert_eq!(together.note(1, of(90)), Ok(()), "the other goes");
        together.forget(2);
        assert!(together.note(1, of(101)).is_err());
    }
}
