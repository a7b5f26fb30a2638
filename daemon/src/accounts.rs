//! The accounts of users and sessions, in which those of guests lie, and around all of them the daemon's.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use trellis_engine::account::{Account, ActorId, Budget, Resource, SessionId, USER};

use crate::config::Budgets;

/// One account for each user, kept while the daemon runs since saved contexts are charged to it, and one for each
/// session, kept until the session ends.
#[derive(Debug)]
pub(crate) struct Accounts {
    daemon: Arc<Account>,
    user: Budget,
    session: Budget,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    users: HashMap<ActorId, Arc<Account>>,
    sessions: HashMap<SessionId, Arc<Account>>,
}

impl Accounts {
    /// Without users. `memory_bytes` is what the daemon's process may come to, of which budgets that say nothing are parts.
    pub(crate) fn new(budgets: &Budgets, memory_bytes: u64) -> Arc<Self> {
        let host_bytes = budgets.host_bytes(memory_bytes);
        let daemon = Budget { host_bytes: host_bytes.daemon, ..Budget::UNLIMITED };
        Arc::new(Self {
            daemon: Account::new("daemon", daemon, None),
            user: budgets.user.budget(host_bytes.user),
            session: budgets.session.budget(host_bytes.session),
            open: Mutex::default(),
        })
    }

    /// Opens the account of a session.
    pub(crate) fn begin_session(&self, actor: ActorId, session: SessionId) -> Arc<Account> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let Open { users, sessions } = &mut *open;
        let user = users.entry(actor);
        let user = user.or_insert_with(|| Account::new(USER, self.user, Some(self.daemon.clone())));
        let account = Account::new("session", self.session, Some(user.clone()));
        sessions.insert(session, account.clone());
        account
    }

    /// The account of a session, unless the session has ended.
    pub(crate) fn session(&self, session: SessionId) -> Option<Arc<Account>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).sessions.get(&session).cloned()
    }

    /// What a user has in use; a user that was never here has nothing.
    pub(crate) fn used_by(&self, actor: ActorId, resource: Resource) -> u64 {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.users.get(&actor).map_or(0, |user| user.used(resource))
    }

    /// What all users have in use.
    pub(crate) fn used(&self, resource: Resource) -> u64 {
        self.daemon.used(resource)
    }

    pub(crate) fn end_session(&self, session: SessionId) {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).sessions.remove(&session);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_after_the_end_opens_nothing() {
        let accounts = Accounts::new(&Budgets::default(), 1 << 30);
        let (actor, session) = (ActorId(7), SessionId(1));
        assert!(accounts.session(session).is_none());
        let account = accounts.begin_session(actor, session);
        assert!(Arc::ptr_eq(&account, &accounts.session(session).expect("it has begun")));
        accounts.end_session(session);
        assert!(accounts.session(session).is_none());
        assert!(accounts.open.lock().expect("nothing panicked").sessions.is_empty());
    }

    #[test]
    fn users_are_counted_apart_and_together() {
        let accounts = Accounts::new(&Budgets::default(), 1 << 30);
        for (uid, session, n_pages) in [(7, 1, 3), (7, 2, 4), (8, 3, 5)] {
            let account = accounts.begin_session(ActorId(uid), SessionId(session));
            account.charge(Resource::Pages, n_pages).expect("within all budgets");
        }
        let by = |uid| accounts.used_by(ActorId(uid), Resource::Pages);
        assert_eq!((by(7), by(8), by(9), accounts.used(Resource::Pages)), (7, 5, 0, 12));
    }

    #[test]
    fn no_user_comes_to_more_than_half_of_what_all_have() {
        let accounts = Accounts::new(&Budgets::default(), 3 << 30);
        let (one, other) = (ActorId(1), ActorId(2));
        let take = |actor, session| {
            let account = accounts.begin_session(actor, SessionId(session));
            let mut n_bytes = 0;
            let exceeded = loop {
                match account.charge(Resource::HostBytes, 1 << 20) {
                    Ok(()) => n_bytes += 1 << 20,
                    Err(exceeded) => break exceeded,
                }
            };
            (n_bytes, exceeded.level)
        };
        let (n_bytes, level) = take(one, 1);
        assert_eq!((n_bytes, level), (512 << 20, "session"));
        assert_eq!(take(one, 2), (0, USER));
        assert_eq!(take(other, 3).0, 512 << 20);
        assert_eq!(take(ActorId(3), 4), (0, "daemon"));
    }
}
