//! Models that the daemon has told of and that the process does not know yet.
//!
//! To read the tokenizer of one takes up to some tenths of a second. A thread of its own does it, so that what guests wait for
//! goes on coming in. What may be about the model is held back until then, in its order; guests that run already are not held up.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::sync::mpsc;
use std::thread;

use trellis_engine::account::GuestId;
use trellis_engine::model::{Model, ModelCard, ModelError};
use trellis_engine::remote::ModelFacts;

use super::channel::Sleeper;
use super::message::{EngineNumber, ModelNumber, ToGuests};

/// A model that has come.
pub(super) struct Arrived {
    pub(super) model: ModelNumber,
    pub(super) engine: EngineNumber,
    pub(super) facts: Box<ModelFacts>,
    pub(super) loaded: Result<Model, ModelError>,
}

/// What is on its way.
pub(super) struct Coming {
    arrive: mpsc::Sender<Arrived>,
    arrived: mpsc::Receiver<Arrived>,
    /// Whether one is being read.
    is_reading: bool,
    held: VecDeque<ToGuests>,
    /// Guests whose start is held back.
    guests: HashSet<GuestId>,
    /// Of the thread that takes what arrives.
    taker: Sleeper,
}

impl Coming {
    /// What arrives is taken by who sleeps there.
    pub(super) fn new(taker: Sleeper) -> Self {
        let (arrive, arrived) = mpsc::channel();
        let (held, guests) = (VecDeque::new(), HashSet::new());
        Self { arrive, arrived, is_reading: false, held, guests, taker }
    }

    /// Begins to read a model.
    ///
    /// # Errors
    /// The system has no thread.
    pub(super) fn read(
        &mut self,
        model: ModelNumber,
        engine: EngineNumber,
        facts: Box<ModelFacts>,
        card: ModelCard,
    ) -> io::Result<()> {
        let (arrive, taker) = (self.arrive.clone(), self.taker.clone());
        thread::Builder::new().name("guests-model".to_owned()).spawn(move || {
            let loaded = Model::without_weights(card);
            // Where nobody takes it, or is to be roused, the process ends.
            let _ = arrive.send(Arrived { model, engine, facts, loaded });
            let _ = taker.rouse();
        })?;
        self.is_reading = true;
        Ok(())
    }

    /// Takes a message on its way, unless it has to wait for a model.
    pub(super) fn pass(&mut self, message: ToGuests) -> Option<ToGuests> {
        if !self.is_reading || self.may_go_before(&message) {
            return Some(message);
        }
        if let ToGuests::Start(start) = &message {
            self.guests.insert(start.guest);
        }
        self.held.push_back(message);
        None
    }

    fn may_go_before(&self, message: &ToGuests) -> bool {
        match message {
            ToGuests::Answer { .. }
            | ToGuests::Counted { .. }
            | ToGuests::Steps { .. }
            | ToGuests::Lent { .. }
            | ToGuests::Drain { .. }
            | ToGuests::EngineEnded { .. } => true,
            ToGuests::Credit { guest, .. }
            | ToGuests::ClientGone { guest }
            | ToGuests::Message { guest, .. }
            | ToGuests::InputClosed { guest }
            | ToGuests::Stop { guest } => !self.guests.contains(guest),
            _ => false,
        }
    }

    /// The model that has been read, and what was held back because of it.
    pub(super) fn arrived(&mut self) -> Option<(Arrived, VecDeque<ToGuests>)> {
        let arrived = self.arrived.try_recv().ok()?;
        self.is_reading = false;
        self.guests.clear();
        Some((arrived, std::mem::take(&mut self.held)))
    }
}

#[cfg(test)]
mod tests {
    use trellis_engine::account::SessionId;

    use super::super::channel::{Channel, Place, RING_BYTES};
    use super::super::message::Start;
    use super::*;

    fn start(guest: u64) -> ToGuests {
        ToGuests::Start(Box::new(Start {
            guest: GuestId(guest),
            hash: [0; 32],
            name: String::new(),
            session: SessionId(1),
            arguments: Vec::new(),
            model: None,
            seed: 0,
            deadline_ms: None,
            is_recorded: false,
            is_profiled: false,
            lent: Vec::new(),
        }))
    }

    fn stop(guest: u64) -> ToGuests {
        ToGuests::Stop { guest: GuestId(guest) }
    }

    #[test]
    fn guests_that_run_are_not_held_up_and_what_waits_for_a_model_keeps_its_order() {
        let (channel, _fds) = Channel::pair(RING_BYTES, 1 << 16).expect("made");
        let (_sender, receiver) = channel.split();
        let mut coming = Coming::new(receiver.sleeper(Place::First));
        assert!(coming.pass(start(1)).is_some(), "nothing is being read");
        coming.is_reading = true;
        let listing = ToGuests::Listing { loaded: Vec::new(), leaving: Vec::new(), engines: Vec::new() };
        for message in [listing, start(2), stop(2)] {
            assert!(coming.pass(message).is_none());
        }
        assert!(coming.pass(stop(1)).is_some(), "guest 1 runs");
        assert!(coming.pass(ToGuests::ForgetProgram { hash: [0; 32] }).is_none(), "guest 2 may need it");
        let held: Vec<ToGuests> = coming.held.drain(..).collect();
        assert!(matches!(
            &held[..],
            [
                ToGuests::Listing { .. },
                ToGuests::Start(_),
                ToGuests::Stop { .. },
                ToGuests::ForgetProgram { .. }
            ]
        ));
    }
}
