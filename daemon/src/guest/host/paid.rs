//! What a generation pays for.

use std::sync::Arc;

use trellis_engine::account::{Account, BudgetExceeded, HostCharge};

/// The host memory of a generation on its guest's account, until this is dropped: what it has been given, and what it has drawn.
#[derive(Debug)]
pub(super) struct Paid {
    charge: HostCharge,
    given_bytes: usize,
    drawn_bytes: usize,
}

impl Paid {
    /// For what there is before anything is drawn.
    ///
    /// # Errors
    /// There is not so much left.
    pub(super) fn new(account: &Arc<Account>, given_bytes: usize) -> Result<Self, BudgetExceeded> {
        let charge = HostCharge::new(account, given_bytes as u64)?;
        Ok(Self { charge, given_bytes, drawn_bytes: 0 })
    }

    /// Pays for so many bytes of what was drawn in the place of those before. Whoever counts what lists have room for changes that
    /// seldom, as they grow to twice their length each time: a token on its way costs accounts nothing.
    ///
    /// # Errors
    /// There is not so much left; what was paid for before still is.
    pub(super) fn cover(&mut self, drawn_bytes: usize) -> Result<(), BudgetExceeded> {
        if drawn_bytes != self.drawn_bytes {
            self.charge.resize((self.given_bytes + drawn_bytes) as u64)?;
            self.drawn_bytes = drawn_bytes;
        }
        Ok(())
    }

    /// For all of it, as it passes to the guest.
    pub(super) fn into_charge(self) -> HostCharge {
        self.charge
    }
}

#[cfg(test)]
mod tests {
    use trellis_engine::account::{Budget, Resource};

    use super::*;

    #[test]
    fn what_is_drawn_is_paid_for_beside_what_was_given_until_it_is_gone() {
        let budget = Budget { host_bytes: 1_000, ..Budget::UNLIMITED };
        let account = Account::new("guest", budget, None);
        let used = || account.used(Resource::HostBytes);
        let mut paid = Paid::new(&account, 300).expect("there is room");
        paid.cover(200).expect("there is room");
        assert_eq!(used(), 500);
        paid.cover(700).expect("there is just room");
        let exceeded = paid.cover(701).expect_err("one byte too many");
        assert_eq!((exceeded.level, exceeded.used, exceeded.requested), ("guest", 1_000, 1));
        paid.cover(100).expect("it is less");
        assert_eq!(used(), 400);
        drop(paid);
        assert_eq!(used(), 0);
    }
}
