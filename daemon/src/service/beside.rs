//! What a user holds beside its sessions.

use std::sync::Arc;

use trellis_engine::account::{Account, ActorId};

use super::HostService;
use crate::session::Actor;

impl HostService {
    /// An account of this user for what is held of it before there is a session, or after.
    pub(crate) async fn account_beside_sessions(&self, actor: Actor) -> Arc<Account> {
        let class = self.accounts.class_of(actor).await;
        self.accounts.beside_sessions(ActorId(actor.uid), class)
    }
}
