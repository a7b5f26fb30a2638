//! The guest's end of what comes back from an engine: one mailbox for each guest.
//!
//! A guest takes a ticket for each question, and the tag of the ticket travels with the question. What comes back is put
//! into the ticket's place in the mailbox; the guest is woken once all that a step brought is there.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use crate::batch::Token;
use crate::completion::{CallerId, Completion, Done, Tag};
use crate::remote::Outward;

/// What may have come for a ticket in so many pieces before the room for it is given back once it is taken: a guest that has let a run
/// of a hundred thousand tokens come to its end is no reason to keep ten megabytes while the guest lives.
const N_DONE_KEPT: usize = 64;

/// What wants to hear of each token of a run as soon as it is there, whether or not its guest takes it. Told on the engine's
/// thread, which it must not hold up.
pub(crate) trait Watch: std::fmt::Debug + Send + Sync {
    /// The next token was drawn.
    fn note_drawn(self: Arc<Self>, token: Token);
}

/// Where what comes back for a guest goes.
#[derive(Clone, Debug)]
pub(crate) enum Postbox {
    /// To its mailbox.
    Here(Arc<Mailbox>),
    /// To the process that it lives in.
    Far(Arc<dyn Outward>),
}

impl Postbox {
    /// Brings what came for a ticket on its way; returns the waker of whoever waits for it.
    pub(crate) fn deliver(&self, caller: CallerId, tag: Tag, done: Done) -> Option<Waker> {
        match self {
            Self::Here(mailbox) => mailbox.deliver(tag, done),
            Self::Far(outward) => Some(outward.put(Completion { caller, tag, done }.into())),
        }
    }

    /// Nothing more will come. A process is told of the engine's end by itself.
    pub(crate) fn close(&self) {
        if let Self::Here(mailbox) = self {
            mailbox.close();
        }
    }
}

/// What has come back for one guest and is not taken.
#[derive(Debug, Default)]
pub(crate) struct Mailbox(Mutex<Compartments>);

#[derive(Debug, Default)]
struct Compartments {
    all: Vec<Compartment>,
    /// Those without a ticket.
    free: Vec<u32>,
    is_closed: bool,
}

/// Where the answers to one ticket are put.
#[derive(Debug, Default)]
struct Compartment {
    /// How many tickets it has had: completions for an earlier one are dropped.
    generation: u32,
    done: VecDeque<Done>,
    waker: Option<Waker>,
    watch: Option<Arc<dyn Watch>>,
}

impl Compartment {
    /// What came first of what is not taken.
    fn pop(&mut self) -> Option<Done> {
        let done = self.done.pop_front();
        self.let_go_of_room();
        done
    }

    /// Gives back what many took that are gone.
    fn let_go_of_room(&mut self) {
        if self.done.is_empty() && self.done.capacity() > N_DONE_KEPT {
            self.done = VecDeque::new();
        }
    }
}

impl Compartments {
    fn get(&mut self, tag: Tag) -> Option<&mut Compartment> {
        self.all.get_mut(tag.place()).filter(|compartment| compartment.generation == tag.generation())
    }
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, Compartments> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A ticket for one more question.
    pub(crate) fn ticket(self: &Arc<Self>) -> Ticket {
        let mut compartments = self.lock();
        let idx = compartments.free.pop().unwrap_or_else(|| {
            compartments.all.push(Compartment::default());
            u32::try_from(compartments.all.len() - 1).expect("a guest asks less than 2³² things at once")
        });
        let tag = Tag::new(idx, compartments.all[idx as usize].generation);
        Ticket { mailbox: self.clone(), tag }
    }

    /// Puts what came for a ticket into its place; returns the waker of the guest's task that waits for it.
    pub(crate) fn deliver(&self, tag: Tag, done: Done) -> Option<Waker> {
        if let Done::Expelled(violation) = done {
            tracing::error!(%violation, "a guest asks what none of ours does; it is answered no more");
            self.close();
            return None;
        }
        let mut compartments = self.lock();
        let compartment = compartments.get(tag)?;
        let told = done.token().zip(compartment.watch.clone());
        compartment.done.push_back(done);
        let waker = compartment.waker.take();
        drop(compartments);
        if let Some((token, watch)) = told {
            watch.note_drawn(token);
        }
        waker
    }

    /// Nothing more will come.
    pub(crate) fn close(&self) {
        let mut compartments = self.lock();
        compartments.is_closed = true;
        let wakers: Vec<Waker> =
            compartments.all.iter_mut().filter_map(|compartment| compartment.waker.take()).collect();
        drop(compartments);
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// A place in a mailbox, kept until this is dropped.
#[derive(Debug)]
pub(crate) struct Ticket {
    mailbox: Arc<Mailbox>,
    tag: Tag,
}

impl Ticket {
    pub(crate) fn tag(&self) -> Tag {
        self.tag
    }

    /// Has the tokens of a run told to this from now on.
    pub(crate) fn watch(&self, watch: Arc<dyn Watch>) {
        self.mailbox.lock().get(self.tag).expect("the place is taken").watch = Some(watch);
    }

    /// What has come, if anything has.
    pub(crate) fn try_take(&self) -> Option<Done> {
        self.mailbox.lock().get(self.tag)?.pop()
    }

    /// The tokens of a run that have come and were not taken.
    pub(crate) fn tokens(&self) -> Vec<Token> {
        let mut compartments = self.mailbox.lock();
        let done = compartments.get(self.tag).map(|compartment| compartment.done.iter());
        done.into_iter().flatten().filter_map(Done::token).collect()
    }

    /// What comes next; `None` when the engine has ended and nothing will.
    pub(crate) async fn take(&self) -> Option<Done> {
        poll_fn(|cx| {
            let mut compartments = self.mailbox.lock();
            let is_closed = compartments.is_closed;
            let compartment = compartments.get(self.tag).expect("the place is taken");
            match compartment.pop() {
                Some(done) => Poll::Ready(Some(done)),
                None if is_closed => Poll::Ready(None),
                None => {
                    match &mut compartment.waker {
                        Some(waker) => waker.clone_from(cx.waker()),
                        waker => *waker = Some(cx.waker().clone()),
                    }
                    Poll::Pending
                }
            }
        })
        .await
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut compartments = self.mailbox.lock();
        if let Some(compartment) = compartments.get(self.tag) {
            compartment.generation = compartment.generation.wrapping_add(1);
            compartment.done.clear();
            compartment.let_go_of_room();
            compartment.waker = None;
            compartment.watch = None;
            compartments.free.push(self.tag.place() as u32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::violation::Violation;

    #[tokio::test]
    async fn who_is_expelled_waits_for_nothing() {
        let mailbox = Arc::<Mailbox>::default();
        let (first, second) = (mailbox.ticket(), mailbox.ticket());
        assert!(mailbox.deliver(first.tag(), Done::Kept(Ok(()))).is_none());
        assert!(mailbox.deliver(Tag::new(0, 0), Done::Expelled(Violation::NotForGuests)).is_none());
        assert!(matches!(first.take().await, Some(Done::Kept(Ok(())))), "what came before it is there");
        assert!(second.take().await.is_none());
    }

    #[test]
    fn what_once_came_for_a_ticket_takes_no_memory_afterwards() {
        let mailbox = Arc::<Mailbox>::default();
        let capacity = |ticket: &Ticket| mailbox.lock().all[ticket.tag().place()].done.capacity();
        let deliver = |ticket: &Ticket, n: usize| {
            for _ in 0..n {
                assert!(mailbox.deliver(ticket.tag(), Done::Kept(Ok(()))).is_none(), "nobody waits");
            }
        };
        let (taken, dropped) = (mailbox.ticket(), mailbox.ticket());
        for ticket in [&taken, &dropped] {
            deliver(ticket, 1_000);
            assert!(capacity(ticket) >= 1_000);
        }
        let n_taken = std::iter::from_fn(|| taken.try_take()).count();
        assert_eq!((n_taken, capacity(&taken)), (1_000, 0));
        let place = dropped.tag().place();
        drop(dropped);
        assert_eq!(mailbox.lock().all[place].done.capacity(), 0);
        // What is usual comes into room that is there.
        deliver(&taken, N_DONE_KEPT / 2);
        let usual = capacity(&taken);
        while taken.try_take().is_some() {}
        assert_eq!(capacity(&taken), usual);
    }
}
