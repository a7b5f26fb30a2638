//! How far prompts are that are being computed, as their guests' accounts tell it.

use std::sync::Arc;

use super::ContextState;
use crate::account::Account;
use crate::fair::Class;

/// A prompt on its way, in the account of its guest until this is dropped.
#[derive(Debug)]
pub(super) struct Prefill {
    account: Arc<Account>,
    n_tokens: u64,
    n_left: u64,
}

impl Prefill {
    /// One of so many tokens, none of which is computed.
    fn begin(account: &Arc<Account>, n_tokens: u64) -> Self {
        account.prompts().begin(n_tokens);
        Self { account: account.clone(), n_tokens, n_left: n_tokens }
    }

    /// So many tokens are left of it. They may have become more: what was computed is given up where pages are short.
    fn go_on(&mut self, n_left: u64) {
        if n_left > self.n_tokens {
            *self = Self::begin(&self.account, n_left);
            return;
        }
        self.account.prompts().go_on(self.n_left, n_left);
        self.n_left = n_left;
    }
}

impl Drop for Prefill {
    fn drop(&mut self) {
        self.account.prompts().end(self.n_tokens, self.n_left);
    }
}

impl ContextState {
    /// Says how far its prompt is, if its work has one.
    pub(super) fn note_prefill(&mut self) {
        if self.class() == Class::Decode {
            self.prefill = None;
            return;
        }
        let n_left = self.n_pending() as u64;
        match &mut self.prefill {
            Some(prefill) => prefill.go_on(n_left),
            None => self.prefill = Some(Prefill::begin(&self.owner.account, n_left)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::account::Budget;

    #[test]
    fn an_account_tells_of_prompts_as_long_as_they_are_computed() {
        let account = Account::new("guest", Budget::UNLIMITED, None);
        let mut long = Prefill::begin(&account, 100);
        let short = Prefill::begin(&account, 10);
        assert_eq!(account.prompts().now(), (110, 110));
        long.go_on(40);
        assert_eq!(account.prompts().now(), (110, 50));
        drop(short);
        assert_eq!(account.prompts().now(), (100, 40));
        // Its KV was given up, and more was appended.
        long.go_on(120);
        assert_eq!(account.prompts().now(), (120, 120));
        drop(long);
        assert_eq!(account.prompts().now(), (0, 0));
    }
}
