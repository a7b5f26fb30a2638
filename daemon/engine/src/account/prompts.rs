//! Prompts of a guest that are being computed.

use std::sync::atomic::{AtomicU64, Ordering};

/// Tokens of those, and how many of them are left; counted by engines while others read them.
#[derive(Debug, Default)]
pub struct Prompts {
    n_tokens: AtomicU64,
    n_left: AtomicU64,
}

impl Prompts {
    /// One more, of so many tokens.
    pub(crate) fn begin(&self, n_tokens: u64) {
        self.n_tokens.fetch_add(n_tokens, Ordering::Relaxed);
        self.n_left.fetch_add(n_tokens, Ordering::Relaxed);
    }

    /// Of one of them there is more or less left than before.
    pub(crate) fn go_on(&self, n_before: u64, n_left: u64) {
        match n_left > n_before {
            true => self.n_left.fetch_add(n_left - n_before, Ordering::Relaxed),
            false => self.n_left.fetch_sub(n_before - n_left, Ordering::Relaxed),
        };
    }

    /// One is computed, or given up with so many tokens left.
    pub(crate) fn end(&self, n_tokens: u64, n_left: u64) {
        self.n_left.fetch_sub(n_left, Ordering::Relaxed);
        self.n_tokens.fetch_sub(n_tokens, Ordering::Relaxed);
    }

    /// Tokens of all of them, and those that are left.
    #[must_use]
    pub fn now(&self) -> (u64, u64) {
        let n_left = self.n_left.load(Ordering::Relaxed);
        (self.n_tokens.load(Ordering::Relaxed).max(n_left), n_left)
    }
}
