//! What is given back after a turn: into the mailbox of each guest, which is woken once.

use std::task::Waker;
use std::time::Instant;

use rustc_hash::FxHashMap;

use super::core::{Core, Next};
use super::inbox::Inbox;
use crate::completion::{CallerId, Completion, Done};
use crate::error::EngineFailure;
use crate::mailbox::Postbox;
use crate::port::Port;

/// What is given back after a turn. Its memory is reused.
#[derive(Default)]
pub(super) struct Post {
    completions: Vec<Completion>,
    /// Of guests whose questions were answered: the next step may wait for them.
    first: Vec<Waker>,
    wakers: Vec<Waker>,
}

impl Post {
    /// Carries out a turn; what it brought is put into its place, and each guest is woken once.
    pub(super) fn turn(
        &mut self,
        core: &mut Core,
        inbox: &mut Inbox,
        now: Instant,
        port: Port,
    ) -> Result<Next, EngineFailure> {
        let inputs = inbox.inputs(core.favoured(now));
        let next = core.turn(now, inputs, &mut self.completions);
        inbox.end_turn(matches!(next, Ok(Next::Turn)));
        // Before any guest is told an error of it.
        for (model, failure) in core.take_failed() {
            inbox.note_failed(model, failure);
        }
        self.deliver(&inbox.postboxes, port);
        next
    }

    fn deliver(&mut self, postboxes: &FxHashMap<CallerId, Postbox>, port: Port) {
        for completion in self.completions.drain(..) {
            let Completion { caller, tag, done } = port.carry(completion);
            let wakers = if matches!(done, Done::Answer(_)) { &mut self.first } else { &mut self.wakers };
            // A guest that has gone is given nothing.
            let waker = postboxes.get(&caller).and_then(|postbox| postbox.deliver(caller, tag, done));
            if let Some(waker) = waker
                && !wakers.last().is_some_and(|last| last.will_wake(&waker))
            {
                wakers.push(waker);
            }
        }
        self.first.drain(..).chain(self.wakers.drain(..)).for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context as TaskContext, Poll, Wake};

    use super::*;
    use crate::mailbox::{Mailbox, Ticket};

    #[derive(Default)]
    struct Alarm(AtomicUsize);

    impl Wake for Alarm {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_guest_is_woken_once_for_all_that_a_turn_brought() {
        let callers = [CallerId(1), CallerId(2)];
        let mailboxes: FxHashMap<_, _> =
            callers.map(|caller| (caller, Arc::<Mailbox>::default())).into_iter().collect();
        let alarms = [Arc::<Alarm>::default(), Arc::<Alarm>::default()];
        let mut places: Vec<(CallerId, Ticket)> = Vec::new();
        for (caller, alarm) in callers.iter().zip(&alarms) {
            let waker = Waker::from(alarm.clone());
            for _ in 0..50 {
                let place = mailboxes[caller].ticket();
                {
                    let mut waiting = pin!(place.take());
                    assert!(waiting.as_mut().poll(&mut TaskContext::from_waker(&waker)).is_pending());
                }
                places.push((*caller, place));
            }
        }
        let mut post = Post::default();
        let done = Done::Kept(Ok(()));
        let brought = |(caller, place): &(CallerId, Ticket)| Completion {
            caller: *caller,
            tag: place.tag(),
            done: done.clone(),
        };
        post.completions.extend(places.iter().map(brought));
        let postboxes = mailboxes.iter().map(|(caller, mailbox)| (*caller, Postbox::Here(mailbox.clone())));
        post.deliver(&postboxes.collect(), Port::Encoded);
        for alarm in &alarms {
            assert_eq!(alarm.0.load(Ordering::Relaxed), 1);
        }
        let waker = Waker::from(alarms[0].clone());
        for (_, place) in &places {
            let taken = pin!(place.take()).poll(&mut TaskContext::from_waker(&waker));
            assert!(matches!(taken, Poll::Ready(Some(Done::Kept(Ok(()))))));
        }
    }
}
