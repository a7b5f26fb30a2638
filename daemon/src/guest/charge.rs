//! Host memory that a guest pays for.

use std::sync::Arc;

use trellis_engine::account::{Account, BudgetExceeded, Resource};

/// Bytes of host memory on the account of a guest, until this is dropped.
#[derive(Debug)]
pub(crate) struct HostCharge {
    account: Arc<Account>,
    n_bytes: u64,
}

impl HostCharge {
    /// # Errors
    /// The guest, or what it is of, has not so much left.
    pub(crate) fn new(account: &Arc<Account>, n_bytes: u64) -> Result<Self, BudgetExceeded> {
        account.charge(Resource::HostBytes, n_bytes)?;
        Ok(Self { account: account.clone(), n_bytes })
    }
}

impl Drop for HostCharge {
    fn drop(&mut self) {
        self.account.release(Resource::HostBytes, self.n_bytes);
    }
}
