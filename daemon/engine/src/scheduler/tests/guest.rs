//! A guest at the other end of a scheduler's completions.

use std::collections::HashMap;
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
}

impl Guests {
    /// A guest that the scheduler knows from now on.
    pub(super) fn enter(&mut self, scheduler: &mut Scheduler, owner: Owner) -> CallerId {
        let caller = CallerId(self.mailboxes.len() as u64 + 1);
        self.mailboxes.insert(caller, Arc::default());
        scheduler.commons.enter(caller, owner);
        caller
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
