//! The way out of a process of guests: what it says to the daemon, and what it borrows there.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use trellis_engine::account::{BudgetExceeded, GuestId, Lender, Resource};

use super::budgets::Bank;
use super::channel::Sender;
use super::message::{FromGuests, encode};

/// Says things to the daemon.
#[derive(Debug)]
pub(crate) struct Up(Mutex<Sender>);

impl Up {
    pub(crate) fn new(sender: Sender) -> Arc<Self> {
        Arc::new(Self(Mutex::new(sender)))
    }

    /// Says one thing. Waits while the daemon has not read what was said before.
    pub(crate) fn say(&self, message: &FromGuests) {
        let frame = encode(message);
        let mut sender = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Without the daemon the process ends: the thread that reads sees that as well.
        let _ = sender.send(&frame);
    }
}

/// Borrows from the daemon.
#[derive(Debug)]
pub(crate) struct Teller {
    up: Arc<Up>,
    n_tickets: AtomicU64,
    waiting: Mutex<HashMap<u64, mpsc::SyncSender<Result<(), BudgetExceeded>>>>,
    /// What the daemon has lent before it was asked for.
    spare: Mutex<Vec<(Resource, u64)>>,
}

/// Borrows in one name.
#[derive(Debug)]
struct Borrower {
    teller: Arc<Teller>,
    guest: Option<GuestId>,
}

impl Teller {
    pub(crate) fn new(up: Arc<Up>) -> Arc<Self> {
        Arc::new(Self {
            up,
            n_tickets: AtomicU64::new(0),
            waiting: Mutex::default(),
            spare: Mutex::default(),
        })
    }

    /// The daemon lends this before it is asked for.
    pub(crate) fn note_spare(&self, lent: Vec<(Resource, u64)>) {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).extend(lent);
    }

    /// Takes so much of what was lent before, if there is so much in one piece; the rest of the piece goes back.
    fn take_spare(&self, resource: Resource, n: u64) -> bool {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(idx) = spare.iter().position(|(of, lent)| *of == resource && *lent >= n) else {
            return false;
        };
        let (_, lent) = spare.swap_remove(idx);
        drop(spare);
        if lent > n {
            self.up.say(&FromGuests::GiveBack { resource, n: lent - n });
        }
        true
    }

    /// No guest runs: what was lent before and not asked for goes back.
    pub(crate) fn give_back_spare(&self) {
        let spare = std::mem::take(&mut *self.spare.lock().unwrap_or_else(PoisonError::into_inner));
        for (resource, n) in spare {
            self.up.say(&FromGuests::GiveBack { resource, n });
        }
    }

    /// The daemon has answered.
    pub(crate) fn note_lent(&self, ticket: u64, lent: Result<(), BudgetExceeded>) {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&ticket);
        if let Some(waiting) = waiting {
            // There is room for the one answer.
            let _ = waiting.try_send(lent);
        }
    }
}

impl Bank for Teller {
    fn lender(self: Arc<Self>, guest: Option<GuestId>) -> Arc<dyn Lender> {
        Arc::new(Borrower { teller: self, guest })
    }
}

impl Lender for Borrower {
    fn borrow(&self, resource: Resource, n: u64) -> Result<(), BudgetExceeded> {
        let Self { teller, guest } = self;
        if guest.is_none() && teller.take_spare(resource, n) {
            return Ok(());
        }
        let ticket = teller.n_tickets.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = mpsc::sync_channel(1);
        teller.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(ticket, answer);
        teller.up.say(&FromGuests::Borrow { ticket, guest: *guest, resource, n });
        // The thread that reads ends the process when the daemon is gone, and no answer comes.
        answered.recv().unwrap_or(Err(BudgetExceeded {
            what: resource.name(),
            level: "daemon",
            used: 0,
            requested: n,
            limit: 0,
        }))
    }

    fn give_back(&self, resource: Resource, n: u64) {
        self.teller.up.say(&FromGuests::GiveBack { resource, n });
    }
}
