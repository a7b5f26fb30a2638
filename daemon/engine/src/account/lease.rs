//! What an account of another process may use of the daemon's: a share that was lent, and is asked for again when it is used
//! up.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{BudgetExceeded, Resource};

/// Where the daemon's side of an account is asked for more.
pub trait Lender: std::fmt::Debug + Send + Sync {
    /// Asks for so much more, and waits for the answer.
    ///
    /// # Errors
    /// A budget around the account has not so much left, or the daemon is gone.
    fn borrow(&self, resource: Resource, n: u64) -> Result<(), BudgetExceeded>;

    /// Gives so much back.
    fn give_back(&self, resource: Resource, n: u64);
}

/// How one resource is lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lending {
    /// What.
    pub resource: Resource,
    /// What is asked for at once, so that not each charge asks; what is free beyond twice that goes back, and all
    /// once nothing is used. Without one each
    /// charge is asked for by itself, and counts as the daemon counts.
    pub chunk: Option<u64>,
}

/// What an account was lent.
#[derive(Debug)]
pub(super) struct Lease {
    lender: Arc<dyn Lender>,
    lent: Vec<Lent>,
}

#[derive(Debug)]
struct Lent {
    resource: Resource,
    chunk: Option<u64>,
    /// What was lent and is not used.
    free: AtomicU64,
}

impl Lent {
    /// Takes so much of what is free, or all; how much that is.
    fn take(&self, n: u64) -> u64 {
        let left = |free: u64| Some(free.saturating_sub(n));
        self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left).map_or(0, |free| free.min(n))
    }
}

impl Lease {
    pub(super) fn new(lender: Arc<dyn Lender>, lendings: &[Lending]) -> Self {
        let lent = |&Lending { resource, chunk }: &Lending| Lent { resource, chunk, free: AtomicU64::new(0) };
        Self { lender, lent: lendings.iter().map(lent).collect() }
    }

    fn lent(&self, resource: Resource) -> Option<&Lent> {
        self.lent.iter().find(|lent| lent.resource == resource)
    }

    /// Sees to it that `n` more was lent. Each charge asks for what it lacks itself, and waits for no other. Nothing is locked
    /// meanwhile: what the daemon answers may have to release something first.
    pub(super) fn cover(&self, resource: Resource, n: u64) -> Result<(), BudgetExceeded> {
        let Some(lent) = self.lent(resource) else { return Ok(()) };
        let Some(chunk) = lent.chunk else { return self.lender.borrow(resource, n) };
        let mut n_taken = lent.take(n);
        while n_taken < n {
            let missing = n - n_taken;
            let chunk = missing.max(chunk);
            let borrowed = match self.lender.borrow(resource, chunk) {
                // Near the end of a budget what is missing may still be there.
                Err(_) if chunk > missing => self.lender.borrow(resource, missing).map(|()| missing),
                borrowed => borrowed.map(|()| chunk),
            };
            match borrowed {
                Ok(borrowed) => {
                    lent.free.fetch_add(borrowed - missing, Ordering::Relaxed);
                    return Ok(());
                }
                // Another one may have brought more than it needed meanwhile.
                Err(exceeded) => match lent.take(missing) {
                    0 => {
                        lent.free.fetch_add(n_taken, Ordering::Relaxed);
                        return Err(exceeded);
                    }
                    n_more => n_taken += n_more,
                },
            }
        }
        Ok(())
    }

    /// Takes back what was covered. What is not used goes to the lender, but for what will soon be asked for again while anything
    /// is used.
    pub(super) fn uncover(&self, resource: Resource, n: u64, used: &AtomicU64) {
        let Some((lent, chunk)) = self.lent(resource).and_then(|lent| Some((lent, lent.chunk?))) else {
            return;
        };
        lent.free.fetch_add(n, Ordering::Relaxed);
        let mut kept = 0;
        let before = lent.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| {
            kept = match used.load(Ordering::Relaxed) {
                0 => 0,
                _ if free > 2 * chunk => chunk,
                _ => free,
            };
            Some(kept)
        });
        let surplus = before.map_or(0, |free| free - kept);
        if surplus > 0 {
            self.lender.give_back(resource, surplus);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Account, Budget};
    use super::*;

    /// Lends out of an account as the daemon would.
    #[derive(Debug)]
    struct Bank(Arc<Account>);

    impl Lender for Bank {
        fn borrow(&self, resource: Resource, n: u64) -> Result<(), BudgetExceeded> {
            self.0.charge(resource, n)
        }

        fn give_back(&self, resource: Resource, n: u64) {
            self.0.release(resource, n);
        }
    }

    #[test]
    fn what_is_used_was_lent_and_what_is_not_goes_back() {
        let user = Account::new("user", Budget { host_bytes: 100, ..Budget::UNLIMITED }, None);
        let lendings = [Lending { resource: Resource::HostBytes, chunk: Some(30) }];
        let bank = Arc::new(Bank(user.clone()));
        let far = Account::lent("user", Budget::UNLIMITED, None, bank, &lendings);
        let charge = |n| far.charge(Resource::HostBytes, n);
        charge(1).expect("there is room");
        assert_eq!(user.used(Resource::HostBytes), 30, "a chunk at once");
        charge(29).expect("lent before");
        assert_eq!(user.used(Resource::HostBytes), 30);
        charge(50).expect("more than a chunk");
        assert_eq!(user.used(Resource::HostBytes), 80);
        charge(15).expect("what is left, though no chunk is");
        let exceeded = charge(6).expect_err("past the user's budget");
        assert_eq!((exceeded.level, exceeded.used, exceeded.limit), ("user", 95, 100));
        assert_eq!(far.used(Resource::HostBytes), 95, "what was refused is not charged");
        far.release(Resource::HostBytes, 90);
        assert_eq!(user.used(Resource::HostBytes), 35, "a chunk stays lent beside what is used");
        far.release(Resource::HostBytes, 5);
        assert_eq!(user.used(Resource::HostBytes), 0, "nothing is used");
        far.charge(Resource::Pages, 7).expect("nothing that is lent");
        charge(61).expect("more than a chunk");
        charge(5).expect("a chunk, of which 25 are free");
        charge(34).expect("what is free and what is left are enough together");
        charge(1).expect_err("all is used");
    }
}
