//! A guest at the other end of a scheduler's completions.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::account::Owner;
use crate::command::Operation;
use crate::completion::{CallerId, Completion, Done};
use crate::mailbox::{Mailbox, Ticket};
use crate::port::Port;
use crate::run::RunQueue;
use crate::scheduler::Scheduler;

/// Guests of one scheduler, and what came back for them.
#[derive(Default)]
pub(super) struct Guests {
    mailboxes: HashMap<CallerId, Arc<Mailbox>>,
    /// Those that are no guests of ours, and how often they were found out.
    hostile: HashSet<CallerId>,
    n_expelled: Cell<usize>,
}

impl Guests {
    /// A guest that the scheduler knows from now on.
    pub(super) fn enter(&mut self, scheduler: &mut Scheduler, owner: Owner) -> CallerId {
        let caller = CallerId(self.mailboxes.len() as u64 + 1);
        self.mailboxes.insert(caller, Arc::default());
        scheduler.commons.enter(caller, owner);
        caller
    }

    /// A caller asks what no guest of ours does.
    pub(super) fn note_hostile(&mut self, caller: CallerId) {
        self.hostile.insert(caller);
    }

    /// How often those were found out.
    pub(super) fn n_expelled(&self) -> usize {
        self.n_expelled.get()
    }

    pub(super) fn ticket(&self, caller: CallerId) -> Ticket {
        self.mailboxes[&caller].ticket()
    }

    pub(super) fn queue(&self, caller: CallerId) -> RunQueue {
        RunQueue::new(self.ticket(caller))
    }

    /// Hands over what the scheduler has given back.
    pub(super) fn deliver(&self, scheduler: &Scheduler, port: Port) {
        let mut completions = Vec::new();
        scheduler.outbox.take(&mut completions);
        for completion in completions {
            let Completion { caller, tag, done } = port.carry(completion);
            if let Done::Expelled(violation) = &done {
                assert!(self.hostile.contains(&caller), "of an honest guest: {violation}");
                self.n_expelled.set(self.n_expelled.get() + 1);
                continue;
            }
            assert!(self.mailboxes[&caller].deliver(tag, done).is_none(), "nobody waits in these tests");
        }
    }

    /// Asks for something that is answered at once.
    pub(super) fn ask_at_once(
        &self,
        scheduler: &mut Scheduler,
        caller: CallerId,
        operation: impl FnOnce(&Ticket) -> Operation,
    ) -> Done {
        let place = self.ticket(caller);
        scheduler.apply(operation(&place));
        self.deliver(scheduler, Port::Encoded);
        place.try_take().expect("answered at once")
    }
}
