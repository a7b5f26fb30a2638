//! What the daemon lends to the guests of one process together.

use trellis_engine::account::{Account, Resource};

use crate::isolation::budgets::at_once;

/// What is lent to all guests together.
#[derive(Debug, Default)]
pub(super) struct Borrowed {
    pub(super) host_bytes: u64,
    pub(super) n_contexts: u64,
}

impl Borrowed {
    /// Lends what a guest asks for first, as far as nothing of it is lent and the user has it.
    pub(super) fn ahead(&mut self, user: &Account) -> Vec<(Resource, u64)> {
        let mut lent = Vec::new();
        for (resource, n) in at_once(|resource| user.limit(resource)) {
            if let Some(borrowed) = self.of(resource)
                && *borrowed == 0
                && user.charge(resource, n).is_ok()
            {
                *borrowed = n;
                lent.push((resource, n));
            }
        }
        lent
    }

    pub(super) fn of(&mut self, resource: Resource) -> Option<&mut u64> {
        match resource {
            Resource::HostBytes => Some(&mut self.host_bytes),
            Resource::Contexts => Some(&mut self.n_contexts),
            Resource::Tokens | Resource::Pages | Resource::HostPages => None,
        }
    }
}
