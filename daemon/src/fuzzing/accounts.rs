//! The accounts of users and sessions, for a simulation.

use std::sync::Arc;

use trellis_engine::account::{Account, ActorId, Resource, SessionId};

use crate::classes::Classes;
use crate::config::Budgets;
use crate::session::Actor;

/// As the daemon has them, without classes.
#[derive(Clone, Debug)]
pub struct Accounts(Arc<crate::accounts::Accounts>);

impl Accounts {
    /// Without users, in a process that may come to so many bytes.
    #[must_use]
    pub fn new(budgets: &Budgets, memory_bytes: u64) -> Self {
        let host_bytes = budgets.host_bytes(memory_bytes, u64::MAX);
        Self(crate::accounts::Accounts::with_classes(budgets, host_bytes, Classes::default()))
    }

    /// Opens the account of a session, and that of its user if this is the first.
    pub async fn begin_session(&self, actor: Actor, session_id: u64) -> Arc<Account> {
        let class = self.0.class_of(actor).await;
        self.0.begin_session(ActorId(actor.uid), SessionId(session_id), class)
    }

    /// The account of a session that has not ended.
    #[must_use]
    pub fn session(&self, session_id: u64) -> Option<Arc<Account>> {
        self.0.session(SessionId(session_id))
    }

    /// Closes the account of a session.
    pub fn end_session(&self, session_id: u64) {
        self.0.end_session(SessionId(session_id));
    }

    /// What a user has in use.
    #[must_use]
    pub fn used_by(&self, uid: u32, resource: Resource) -> u64 {
        self.0.used_by(ActorId(uid), resource)
    }

    /// What all users have in use.
    #[must_use]
    pub fn used(&self, resource: Resource) -> u64 {
        self.0.used(resource)
    }
}
