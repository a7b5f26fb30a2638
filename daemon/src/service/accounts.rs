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

    pub(super) fn session(&self, actor: ActorId, session: SessionId) -> Arc<Account> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let Open { users, sessions } = &mut *open;
        let user = users.entry(actor).or_insert_with(|| Account::new("user", self.user, None));
        let new = || Account::new("session", self.session, Some(user.clone()));
        sessions.entry(session).or_insert_with(new).clone()
    }

    pub(super) fn end_session(&self, session: SessionId) {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).sessions.remove(&session);
    }
}
