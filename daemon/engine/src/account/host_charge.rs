//! Host memory that an account pays for as long as it is held.

use std::sync::Arc;

use super::{Account, BudgetExceeded, Resource};

/// Bytes of host memory on an account, until this is dropped.
#[derive(Debug)]
pub struct HostCharge {
    account: Arc<Account>,
    n_bytes: u64,
}

impl HostCharge {
    /// Charges so many bytes.
    ///
    /// # Errors
    /// The account, or what it is of, has not so much left.
    pub fn new(account: &Arc<Account>, n_bytes: u64) -> Result<Self, BudgetExceeded> {
        account.charge(Resource::HostBytes, n_bytes)?;
        Ok(Self { account: account.clone(), n_bytes })
    }

    /// Nothing yet, on this account.
    #[must_use]
    pub fn none(account: &Arc<Account>) -> Self {
        Self { account: account.clone(), n_bytes: 0 }
    }

    /// Nothing yet, on the same account.
    #[must_use]
    pub fn beside(&self) -> Self {
        Self::none(&self.account)
    }

    /// Charges so many bytes in the place of those before.
    ///
    /// # Errors
    /// As for [`Self::new`]; it is as before then.
    pub fn resize(&mut self, n_bytes: u64) -> Result<(), BudgetExceeded> {
        match n_bytes.checked_sub(self.n_bytes) {
            Some(n_more) => self.account.charge(Resource::HostBytes, n_more)?,
            None => self.account.release(Resource::HostBytes, self.n_bytes - n_bytes),
        }
        self.n_bytes = n_bytes;
        Ok(())
    }

    /// As many bytes again.
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub fn again(&self) -> Result<Self, BudgetExceeded> {
        Self::new(&self.account, self.n_bytes)
    }
}

impl Drop for HostCharge {
    fn drop(&mut self) {
        self.account.release(Resource::HostBytes, self.n_bytes);
    }
}
