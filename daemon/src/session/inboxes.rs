//! The bytes of messages that each user's guests have not received.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::actor::Actor;
use super::limits::Limits;
use crate::guest::InboxBudget;

/// One budget for each user with a connection; those of the connections lie in it.
#[derive(Debug)]
pub(crate) struct Inboxes {
    n_bytes_per_session_max: usize,
    n_bytes_per_actor_max: usize,
    users: Mutex<HashMap<u32, Weak<InboxBudget>>>,
}

impl Inboxes {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self {
            n_bytes_per_session_max: limits.inbox_bytes_per_session_max,
            n_bytes_per_actor_max: limits.inbox_bytes_per_actor_max,
            users: Mutex::default(),
        }
    }

    /// The budget of a new connection.
    pub(crate) fn open(&self, actor: Actor) -> Arc<InboxBudget> {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        users.retain(|_, user| user.strong_count() > 0);
        let known = users.get(&actor.uid).and_then(Weak::upgrade);
        let user = known.unwrap_or_else(|| InboxBudget::new("user", self.n_bytes_per_actor_max, None));
        users.insert(actor.uid, Arc::downgrade(&user));
        InboxBudget::new("session", self.n_bytes_per_session_max, Some(user))
    }
}
