//! The holders of something: through which accounts they hold it, and which of these pays.

use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use crate::account::{Account, Resource};

/// An account and how often it holds.
#[derive(Debug)]
struct Holder {
    account: Arc<Account>,
    n: u32,
}

/// The holders of one thing, the longest first. Of the accounts of one user the first pays.
#[derive(Debug, Default)]
pub(super) struct Holders(SmallVec<[Holder; 1]>);

impl Holders {
    /// One holder.
    pub(super) fn one(account: &Arc<Account>) -> Self {
        Self(smallvec![Holder { account: account.clone(), n: 1 }])
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How often it is held.
    pub(super) fn n(&self) -> u32 {
        self.0.iter().map(|holder| holder.n).sum()
    }

    /// How often this account holds it.
    pub(super) fn n_of(&self, account: &Arc<Account>) -> u32 {
        self.0.iter().find(|holder| Arc::ptr_eq(&holder.account, account)).map_or(0, |holder| holder.n)
    }

    /// Whether an account of the same user holds it.
    pub(super) fn has_user_of(&self, account: &Arc<Account>) -> bool {
        self.0.iter().any(|holder| is_same_user(&holder.account, account))
    }

    /// One holder more. The caller charges the account that pays.
    pub(super) fn add(&mut self, account: &Arc<Account>) {
        match self.0.iter_mut().find(|holder| Arc::ptr_eq(&holder.account, account)) {
            Some(holder) => holder.n += 1,
            None => self.0.push(Holder { account: account.clone(), n: 1 }),
        }
    }

    /// One holder less. The caller charges the account that pays then.
    ///
    /// # Panics
    /// The account does not hold it.
    pub(super) fn remove(&mut self, account: &Arc<Account>) {
        let idx = self.idx_of(account);
        self.0[idx].n -= 1;
        if self.0[idx].n == 0 {
            self.0.remove(idx);
        }
    }

    /// One holder less of what counts as one page, in host memory or not. If it paid, it gets that back, and of the same
    /// user's other holders the longest pays from now on.
    ///
    /// # Panics
    /// The account does not hold it.
    pub(super) fn remove_payer(&mut self, account: &Arc<Account>, is_on_host: bool) {
        let idx = self.idx_of(account);
        self.0[idx].n -= 1;
        if self.0[idx].n > 0 {
            return;
        }
        let left = self.0.remove(idx).account;
        let (before, after) = self.0.split_at(idx);
        if !before.iter().any(|holder| is_same_user(&holder.account, &left)) {
            let next = after.iter().find(|holder| is_same_user(&holder.account, &left));
            for &what in resources(is_on_host) {
                left.release(what, 1);
                if let Some(next) = next {
                    next.account.charge_beyond(what, 1);
                }
            }
        }
    }

    /// The accounts that pay.
    pub(super) fn payers(&self) -> impl Iterator<Item = &Arc<Account>> {
        let is_payer = |&(idx, holder): &(usize, &Holder)| {
            !self.0[..idx].iter().any(|before| is_same_user(&before.account, &holder.account))
        };
        self.0.iter().enumerate().filter(is_payer).map(|(_, holder)| &holder.account)
    }

    fn idx_of(&self, account: &Arc<Account>) -> usize {
        let idx = self.0.iter().position(|holder| Arc::ptr_eq(&holder.account, account));
        idx.expect("it is released by who holds it")
    }
}

/// What a page counts as.
pub(super) fn resources(is_on_host: bool) -> &'static [Resource] {
    if is_on_host { &[Resource::Pages, Resource::HostPages] } else { &[Resource::Pages] }
}

fn is_same_user(a: &Arc<Account>, b: &Arc<Account>) -> bool {
    Arc::ptr_eq(a.user(), b.user())
}
