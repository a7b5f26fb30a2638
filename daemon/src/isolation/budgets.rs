//! The budgets of a user's guests as their process counts them.
//!
//! The accounts of guests and sessions are the process's own; what they come to together is lent to it by the user's account
//! in the daemon, in pieces. So nothing is asked of the daemon for each charge, and no user comes to more than it may.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use serde::{Deserialize, Serialize};
use trellis_engine::account::{Account, Budget, GuestId, Lender, Lending, Resource, SessionId, USER};

/// What guests borrow at once.
const HOST_BYTES_AT_ONCE: u64 = 2 << 20;
const N_CONTEXTS_AT_ONCE: u64 = 16;

/// What is lent with the start of a guest in a process that has borrowed nothing: it would ask for that first.
pub(crate) const AHEAD: [(Resource, u64); 2] =
    [(Resource::HostBytes, HOST_BYTES_AT_ONCE), (Resource::Contexts, N_CONTEXTS_AT_ONCE)];

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
        let lendings = [
            Lending { resource: Resource::HostBytes, chunk: Some(HOST_BYTES_AT_ONCE) },
            Lending { resource: Resource::Contexts, chunk: Some(N_CONTEXTS_AT_ONCE) },
        ];
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
