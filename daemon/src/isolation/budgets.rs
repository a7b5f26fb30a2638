//! The budgets of a user's guests as their process counts them.
//!
//! The accounts of guests and sessions are the process's own; what they come to together is lent to it by the user's account
//! in the daemon, in pieces. So nothing is asked of the daemon for each charge, and no user comes to more than it may.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use serde::{Deserialize, Serialize};
use trellis_engine::account::{Account, Budget, GuestId, Lender, Lending, Resource, SessionId, USER};

/// What guests borrow at once at most.
const AT_ONCE: [(Resource, u64); 2] = [(Resource::HostBytes, 2 << 20), (Resource::Contexts, 16)];

/// Of a budget so large a part at most: what is lent and not used is missing elsewhere.
const PART_AT_ONCE: u64 = 64;

/// What guests of a user borrow at once, and what is lent with the start of one in a process that has borrowed nothing: it would
/// ask for that first.
pub(crate) fn at_once(limit: impl Fn(Resource) -> u64) -> [(Resource, u64); 2] {
    AT_ONCE.map(|(resource, most)| (resource, most.min(limit(resource) / PART_AT_ONCE).max(1)))
}

/// How much the accounts of a user and of its sessions may come to.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct UserBudgets {
    pub(crate) user: Budget,
    pub(crate) session: Budget,
}

impl UserBudgets {
    /// Those that hold for the guests of this session.
    pub(crate) fn of(session: &Arc<Account>) -> Self {
        let budget = |account: &Account| Budget {
            // Engines count those, on the daemon's side.
            n_tokens: u64::MAX,
            n_pages: u64::MAX,
            n_contexts: account.limit(Resource::Contexts),
            host_bytes: account.limit(Resource::HostBytes),
        };
        Self { user: budget(session.user()), session: budget(session) }
    }
}

/// The accounts in a process of guests.
#[derive(Debug)]
pub(crate) struct FarAccounts {
    user: Arc<Account>,
    session: Budget,
    sessions: Mutex<HashMap<SessionId, Weak<Account>>>,
}

/// Asks the daemon in the name of one guest.
pub(crate) trait Bank: std::fmt::Debug + Send + Sync {
    /// Where a guest borrows what is counted for it alone; all guests together when `None`.
    fn lender(self: Arc<Self>, guest: Option<GuestId>) -> Arc<dyn Lender>;
}

impl FarAccounts {
    pub(crate) fn new(budgets: UserBudgets, bank: Arc<dyn Bank>) -> Self {
        let Budget { n_contexts, host_bytes, .. } = budgets.user;
        let limit = |resource| if resource == Resource::Contexts { n_contexts } else { host_bytes };
        let lendings = at_once(limit).map(|(resource, n)| Lending { resource, chunk: Some(n) });
        let user = Account::lent(USER, budgets.user, None, bank.lender(None), &lendings);
        Self { user, session: budgets.session, sessions: Mutex::default() }
    }

    /// The account of a session, as long as one of its guests has it.
    pub(crate) fn session(&self, session: SessionId) -> Arc<Account> {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|_, account| account.strong_count() > 0);
        let known = sessions.get(&session).and_then(Weak::upgrade);
        known.unwrap_or_else(|| {
            let account = Account::new("session", self.session, Some(self.user.clone()));
            sessions.insert(session, Arc::downgrade(&account));
            account
        })
    }
}

/// What a guest's account borrows by itself: the tokens that it is charged for on its own side.
pub(crate) const OF_A_GUEST: [Lending; 1] = [Lending { resource: Resource::Tokens, chunk: None }];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_small_budgets_little_is_borrowed_at_once() {
        let at_once = |n_contexts, host_bytes| {
            at_once(|resource| if resource == Resource::Contexts { n_contexts } else { host_bytes })
                .map(|(_, n)| n)
        };
        assert_eq!(at_once(8192, 1 << 30), [2 << 20, 16]);
        assert_eq!(at_once(u64::MAX, u64::MAX), [2 << 20, 16]);
        assert_eq!(at_once(128, 64 << 20), [1 << 20, 2]);
        assert_eq!(at_once(5, 0), [1, 1], "what is asked for is borrowed all the same");
    }
}
