//! The accounts of users and sessions, in which those of guests lie.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use trellis_engine::account::{Account, ActorId, Budget, SessionId};

use crate::config::Budgets;

/// One account for each user, kept while the daemon runs since saved contexts are charged to it, and one for each
/// session, kept until the session ends.
pub(super) struct Accounts {
    user: Budget,
    session: Budget,
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    users: HashMap<ActorId, Arc<Account>>,
    sessions: HashMap<SessionId, Arc<Account>>,
}

impl Accounts {
    pub(super) fn new(budgets: &Budgets) -> Self {
        Self { user: budgets.user.into(), session: budgets.session.into(), open: Mutex::default() }
    }

    pub(super) fn begin_session(&self, actor: ActorId, session: SessionId) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let Open { users, sessions } = &mut *open;
        let user = users.entry(actor).or_insert_with(|| Account::new("user", self.user, None));
        sessions.insert(session, Account::new("session", self.session, Some(user.clone())));
    }

    /// The account of a session, unless the session has ended.
    pub(super) fn session(&self, session: SessionId) -> Option<Arc<Account>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).sessions.get(&session).cloned()
    }

    pub(super) fn end_session(&self, session: SessionId) {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).sessions.remove(&session);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_after_the_end_opens_nothing() {
        let accounts = Accounts::new(&Budgets::default());
        let (actor, session) = (ActorId(7), SessionId(1));
        assert!(accounts.session(session).is_none());
        accounts.begin_session(actor, session);
        let account = accounts.session(session).expect("it has begun");
        assert!(Arc::ptr_eq(&account, &accounts.session(session).expect("it has begun")));
        accounts.end_session(session);
        assert!(accounts.session(session).is_none());
        assert!(accounts.open.lock().expect("nothing panicked").sessions.is_empty());
    }
}
