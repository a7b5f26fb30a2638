//! One reader of a detached guest, from its attach to its end.

use std::sync::Arc;

use trellis_wire::{ErrorBody, ErrorCode, Event, Outbox, Room, ServerMessage};

use super::guest::{Next, Reading};
use crate::session::call::{Ending, stopped};
use crate::session::control::Control;
use crate::session::service::{Progress, StopReason};

/// What a reader needs of its connection.
pub(crate) struct Line {
    pub(crate) id: u64,
    pub(crate) outbox: Arc<Outbox>,
    pub(crate) control: Arc<Control>,
    /// The number of this daemon.
    pub(crate) daemon: u64,
}

/// Why a reader ends before its guest.
enum Parted {
    Stopped(StopReason),
    TakenOver,
}

impl From<Parted> for Ending {
    fn from(parted: Parted) -> Self {
        let error = match parted {
            Parted::Stopped(reason) => stopped(reason),
            Parted::TakenOver => {
                ErrorBody::new(ErrorCode::TakenOver, "another client of yours reads the guest now")
            }
        };
        Err(error).into()
    }
}

/// Sends what a guest has sent, from the event of this number on, until the guest has ended, the client has enough, or another
/// reads it.
pub(crate) async fn read(line: Line, reading: Reading, from: u64) -> Ending {
    line.send(Event::Attached { guest_id: reading.guest.id, from, daemon: line.daemon });
    let mut progress = reading.guest.progress.clone();
    // What it waited for before is no news.
    let now = progress.borrow_and_update().clone().filter(|progress| progress.done < progress.total);
    line.tell(now);
    let mut number = from;
    loop {
        let next = tokio::select! {
            biased;
            reason = line.control.stopped() => return Parted::Stopped(reason).into(),
            Ok(()) = progress.changed() => {
                let now = progress.borrow_and_update().clone();
                line.tell(now);
                continue;
            }
            next = reading.wait_for(|| match reading.next(number) {
                Next::Nothing => None,
                next => Some(next),
            }) => next,
        };
        match next {
            Next::Nothing => {}
            Next::TakenOver => return Parted::TakenOver.into(),
            Next::End(ending) => return *ending,
            Next::Event { credit_bytes } => match line.pass_on(&reading, number, credit_bytes).await {
                Ok(()) => number += 1,
                Err(parted) => return parted.into(),
            },
        }
    }
}

impl Line {
    /// Sends an event once the client has credit and room for it.
    async fn pass_on(&self, reading: &Reading, number: u64, credit_bytes: usize) -> Result<(), Parted> {
        let ready = async {
            self.control.credit(credit_bytes as u64).await.map_err(Parted::Stopped)?;
            tokio::select! {
                biased;
                reason = self.control.stopped() => Err(Parted::Stopped(reason)),
                () = self.outbox.room(Room::Bulk) => Ok(()),
            }
        };
        tokio::select! {
            biased;
            ready = ready => ready?,
            () = reading.taken_over() => return Err(Parted::TakenOver),
        }
        let event = reading.take(number).ok_or(Parted::TakenOver)?;
        self.control.spend(credit_bytes as u64);
        self.send(event);
        Ok(())
    }

    /// Tells how far that is which the guest waits for; a slow reader skips states.
    fn tell(&self, progress: Option<Progress>) {
        if let Some(Progress { stage, name, done, total }) = progress
            && self.outbox.has_room(Room::Bulk)
        {
            self.send(Event::Progress { stage, name, done, total });
        }
    }

    fn send(&self, event: Event) {
        let pushed = self.outbox.push(&ServerMessage::Event { id: self.id, event });
        debug_assert!(pushed.is_ok(), "no event is kept that does not fit in every frame");
    }
}
