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
