//! What token lists take of host memory.

use std::sync::Arc;

use crate::account::{Account, BudgetExceeded, Resource};

/// A token takes four bytes where it was appended and four in the engine, and two of the key of its page. Forks that share
/// them pay as much each: any of them may be the one that is left.
const TOKEN_BYTES: u64 = 10;

/// Tokens that are charged together, so that decoding touches the accounts once in a while; as many lie together in the
/// engine.
pub(super) const N_TOKENS_TOGETHER: usize = 256;

/// Host memory that is charged to an account for the tokens of one context, until this is dropped.
#[derive(Debug)]
pub(crate) struct Footprint {
    account: Arc<Account>,
    n_bytes: u64,
}

impl Footprint {
    /// That of a context of so many tokens.
    ///
    /// # Errors
    /// A budget would be passed.
    pub(crate) fn new(account: &Arc<Account>, n_tokens: usize) -> Result<Self, BudgetExceeded> {
        let mut footprint = Self { account: account.clone(), n_bytes: 0 };
        footprint.set(n_tokens)?;
        Ok(footprint)
    }

    /// Makes it that of so many tokens.
    ///
    /// # Errors
    /// A budget would be passed; nothing has changed then.
    pub(crate) fn set(&mut self, n_tokens: usize) -> Result<(), BudgetExceeded> {
        self.set_with(n_tokens, 0)
    }

    /// Makes it that of so many tokens and of other lists that grow with them.
    ///
    /// # Errors
    /// As for [`Self::set`].
    pub(crate) fn set_with(&mut self, n_tokens: usize, n_bytes_beside: u64) -> Result<(), BudgetExceeded> {
        let n_bytes = n_tokens.next_multiple_of(N_TOKENS_TOGETHER) as u64 * TOKEN_BYTES + n_bytes_beside;
        if n_bytes > self.n_bytes {
            self.account.charge(Resource::HostBytes, n_bytes - self.n_bytes)?;
        } else if n_bytes < self.n_bytes {
            self.account.release(Resource::HostBytes, self.n_bytes - n_bytes);
        }
        self.n_bytes = n_bytes;
        Ok(())
    }
}

impl Drop for Footprint {
    fn drop(&mut self) {
        self.account.release(Resource::HostBytes, self.n_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::account::Budget;

    #[test]
    fn it_follows_the_tokens_and_goes_with_them() {
        let account = Account::new("guest", Budget { host_bytes: 6_000, ..Budget::UNLIMITED }, None);
        let used = || account.used(Resource::HostBytes);
        let mut footprint = Footprint::new(&account, 1).expect("within the budget");
        assert_eq!(used(), 2_560);
        footprint.set(256).expect("charged already");
        footprint.set(257).expect("within the budget");
        assert_eq!(used(), 5_120);
        assert_eq!(footprint.set(513).expect_err("past the budget").requested, 2_560);
        assert_eq!(used(), 5_120);
        footprint.set(0).expect("less");
        assert_eq!(used(), 0);
        footprint.set(100).expect("within the budget");
        drop(footprint);
        assert_eq!(used(), 0);
    }
}
