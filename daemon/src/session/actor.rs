use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The peer of a connection as the kernel names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Actor {
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
}

impl Actor {
    /// The user and group of this process, for a client inside it.
    #[must_use]
    pub fn this_process() -> Self {
        Self { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() }
    }
}

/// How many of something each user has.
#[derive(Debug)]
pub(crate) struct Quota {
    n_max: AtomicUsize,
    n_by_uid: Mutex<HashMap<u32, usize>>,
}

/// Permission to have one of them; given back when dropped.
#[derive(Debug)]
pub(crate) struct QuotaPermit {
    quota: Arc<Quota>,
    uid: u32,
    /// How many the user had, with this one.
    n: usize,
}

impl QuotaPermit {
    /// How many the user had when it took this one, with this one.
    pub(crate) fn n(&self) -> usize {
        self.n
    }
}

impl Quota {
    pub(crate) fn new(n_max: usize) -> Arc<Self> {
        Arc::new(Self { n_max: AtomicUsize::new(n_max), n_by_uid: Mutex::default() })
    }

    /// One more for the actor, unless it has all that it may have.
    pub(crate) fn take(self: &Arc<Self>, actor: Actor) -> Option<QuotaPermit> {
        self.take_of(actor, self.n_max.load(Ordering::Relaxed))
    }

    /// As [`Self::take`], for an actor that may have so many, whatever others may.
    pub(crate) fn take_of(self: &Arc<Self>, actor: Actor, n_max: usize) -> Option<QuotaPermit> {
        let mut n_by_uid = self.n_by_uid.lock().unwrap_or_else(PoisonError::into_inner);
        let n = n_by_uid.get(&actor.uid).copied().unwrap_or(0) + 1;
        if n > n_max {
            return None;
        }
        n_by_uid.insert(actor.uid, n);
        Some(QuotaPermit { quota: self.clone(), uid: actor.uid, n })
    }

    /// How many the actor has, and all together.
    pub(crate) fn taken(&self, actor: Actor) -> (usize, usize) {
        let n_by_uid = self.n_by_uid.lock().unwrap_or_else(PoisonError::into_inner);
        (n_by_uid.get(&actor.uid).copied().unwrap_or(0), n_by_uid.values().sum())
    }

    pub(crate) fn n_max(&self) -> u64 {
        self.n_max.load(Ordering::Relaxed) as u64
    }

    /// Lets each have so many from now on; who has more keeps them.
    pub(crate) fn set_n_max(&self, n_max: usize) {
        self.n_max.store(n_max, Ordering::Relaxed);
    }
}

impl Drop for QuotaPermit {
    fn drop(&mut self) {
        let mut n_by_uid = self.quota.n_by_uid.lock().unwrap_or_else(PoisonError::into_inner);
        let n = n_by_uid.get_mut(&self.uid).expect("counted when the permit was taken");
        *n -= 1;
        if *n == 0 {
            n_by_uid.remove(&self.uid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_user_has_its_own_share() {
        let quota = Quota::new(2);
        let [a, b] = [1, 2].map(|uid| Actor { uid, gid: 0 });
        let permits = [quota.take(a).unwrap(), quota.take(a).unwrap()];
        assert!(quota.take(Actor { uid: 1, gid: 9 }).is_none());
        let of_b = quota.take(b);
        assert!(of_b.is_some());
        assert_eq!((quota.taken(a), quota.taken(b)), ((2, 3), (1, 3)));
        quota.set_n_max(1);
        drop(permits);
        let one = quota.take(a);
        assert!(one.is_some() && quota.take(a).is_none() && quota.n_max() == 1);
        let another = quota.take_of(a, 2).expect("it may have more than others");
        assert_eq!((another.n(), quota.take_of(b, 1).is_none()), (2, true));
        drop((one, another, of_b));
        assert!(quota.take(a).is_some() && quota.take_of(a, 0).is_none());
        assert!(quota.n_by_uid.lock().unwrap().is_empty());
    }
}
