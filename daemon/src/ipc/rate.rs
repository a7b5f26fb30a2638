//! How often each user's sessions begin. To begin and end one takes the daemon's own time, whatever its client does with it, so
//! that connecting and leaving all the time would take much of a processor from the guests of others. A connection that is
//! turned away is accepted and told why all the same; that takes a small part of it.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::session::{Actor, SessionError};

/// How far a user's connections may be ahead of the rate: those of about a second begin at once.
const AHEAD: Duration = Duration::from_secs(1);

/// How long a connection waits for its turn at most; one that would wait longer is turned away.
const BEHIND: Duration = Duration::from_secs(1);

/// The rates of all users: a connection begins when those before it have had their time, by the generic cell rate algorithm
/// (ITU-T I.371), with room for some that wait.
#[derive(Debug)]
pub(super) struct Rate {
    n_per_s: usize,
    /// Between two connections that come evenly.
    interval: Duration,
    /// For each user that is not known to be idle, when its next connection would begin if all came evenly.
    due: HashMap<u32, Instant>,
    /// From how many users on those that are idle are forgotten.
    n_users_kept: usize,
}

/// Users that are kept whether they are idle or not.
const N_USERS_LEAST: usize = 64;

impl Rate {
    pub(super) fn new(n_per_s: usize) -> Self {
        let (interval, due) = (Duration::ZERO, HashMap::new());
        let mut rate = Self { n_per_s: 0, interval, due, n_users_kept: N_USERS_LEAST };
        rate.set(n_per_s);
        rate
    }

    /// Lets so many of each user begin in a second from now on.
    pub(super) fn set(&mut self, n_per_s: usize) {
        self.n_per_s = n_per_s.max(1);
        self.interval = Duration::from_secs(1) / u32::try_from(self.n_per_s).unwrap_or(u32::MAX);
    }

    /// When one more connection of this user, which came `now`, may begin.
    ///
    /// # Errors
    /// Too many of the user's wait already. This one is not counted.
    pub(super) fn take(&mut self, actor: Actor, now: Instant) -> Result<Instant, SessionError> {
        // One may always be ahead, and one wait.
        let (ahead, behind) = (AHEAD.max(self.interval), BEHIND.max(self.interval));
        let least = now.checked_sub(ahead).unwrap_or(now);
        if self.due.len() >= self.n_users_kept {
            self.forget_idle(now);
            self.n_users_kept = N_USERS_LEAST.max(2 * self.due.len());
        }
        let due = self.due.entry(actor.uid).or_insert(least);
        *due = (*due).max(least);
        if due.saturating_duration_since(now) > behind {
            return Err(SessionError::TooOften { uid: actor.uid, limit: self.n_per_s as u64 });
        }
        let begins = (*due).max(now);
        *due += self.interval;
        Ok(begins)
    }

    /// Forgets users whose connections are as far ahead as they may be.
    fn forget_idle(&mut self, now: Instant) {
        let ahead = AHEAD.max(self.interval);
        self.due.retain(|_, due| now.saturating_duration_since(*due) < ahead);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn many_begin_at_once_then_one_after_the_other_and_the_rest_are_turned_away() {
        let mut rate = Rate::new(100);
        let (one, other) = (Actor { uid: 1, gid: 0 }, Actor { uid: 2, gid: 0 });
        let begun = Instant::now() + Duration::from_secs(9);
        let mut waits = |actor, now: Instant| match rate.take(actor, now) {
            Ok(begins) => Some(begins.saturating_duration_since(now)),
            Err(error) => {
                assert!(matches!(error, SessionError::TooOften { limit: 100, .. }), "{error}");
                None
            }
        };
        for now in [begun, begun + Duration::from_secs(4)] {
            let at_once = (0..999).map_while(|_| waits(one, now)).collect::<Vec<_>>();
            assert_eq!(at_once.iter().filter(|wait| wait.is_zero()).count(), 101);
            assert_eq!(at_once[101..].first(), Some(&(10 * MS)));
            assert_eq!(at_once.last(), Some(&BEHIND), "no longer");
            assert_eq!(waits(other, now), Some(Duration::ZERO), "another user's do not wait");
            assert_eq!(waits(one, now), None);
            assert_eq!(waits(one, now + 10 * MS), Some(BEHIND), "one has had its turn");
            assert_eq!(waits(one, now + 10 * MS), None);
        }
    }

    #[test]
    fn one_after_the_other_at_the_rate_never_waits() {
        let mut rate = Rate::new(1000);
        let begun = Instant::now() + Duration::from_secs(9);
        for n in 0..5000 {
            let now = begun + n * MS;
            assert_eq!(rate.take(Actor { uid: 1, gid: 0 }, now).expect("its turn"), now);
        }
        rate.forget_idle(begun + 4999 * MS);
        assert_eq!(rate.due.len(), 1);
        rate.forget_idle(begun + 4999 * MS + AHEAD);
        assert!(rate.due.is_empty());
    }

    #[test]
    fn idle_users_are_forgotten_once_there_are_many() {
        let mut rate = Rate::new(10);
        let begun = Instant::now() + Duration::from_secs(9);
        for uid in 0..10_000 {
            let now = begun + 10 * uid * MS;
            rate.take(Actor { uid, gid: 0 }, now).expect("its first");
        }
        // Each is ahead for a second after its first connection, and so are the hundred before it.
        assert!(rate.due.len() <= 2 * 110, "{} are kept", rate.due.len());
    }

    #[test]
    fn however_few_may_begin_one_may_be_ahead_and_one_may_wait() {
        let mut rate = Rate::new(1);
        let now = Instant::now() + Duration::from_secs(9);
        let mut wait = || rate.take(Actor { uid: 1, gid: 0 }, now).ok().map(|begins| begins - now);
        let (none, second) = (Some(Duration::ZERO), Some(Duration::from_secs(1)));
        assert_eq!([wait(), wait(), wait(), wait()], [none, none, second, None]);
        assert!(Rate::new(usize::MAX).take(Actor { uid: 1, gid: 0 }, now).is_ok());
        assert!(Rate::new(0).take(Actor { uid: 1, gid: 0 }, now).is_ok());
    }
}
