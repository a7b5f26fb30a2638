//! An engine without a thread, for simulations: its caller turns it, and says what time it is.

use std::future::poll_fn;
use std::time::Instant;

use super::turns::{Turns, Until};
use super::{Engine, EngineSettings};
use crate::error::EngineFailure;
use crate::handle::{EngineState, Link};

/// What an engine's next turn waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// Nothing.
    Nothing,
    /// The oldest step is done: then [`EngineLoop::collect`] is to be called.
    Device,
    /// The same, or [`EngineLoop::input`].
    DeviceOrInput,
    /// The layers of the last step are done, or [`EngineLoop::input`].
    LayersOrInput,
    /// [`EngineLoop::input`].
    Input,
    /// [`EngineLoop::input`], or this moment, or that the oldest step is done.
    InputBefore(Instant),
    /// There is no next turn.
    Stopped,
}

/// What an engine keeps for its guests beside the contexts of its models.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineHolds {
    /// Guests that may ask.
    pub n_callers: usize,
    /// Mailboxes of guests.
    pub n_mailboxes: usize,
    /// Rows of logits that are kept for draws.
    pub n_kept_rows: usize,
    /// Contexts of models that have gone.
    pub n_contexts_gone: usize,
    /// Steps under way.
    pub n_steps_under_way: usize,
}

/// The loop of an engine that has no thread.
pub struct EngineLoop(Option<Turns>);

impl std::fmt::Debug for EngineLoop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("EngineLoop").field(&self.holds()).finish()
    }
}

impl EngineLoop {
    /// An engine, and the loop without which it does nothing.
    #[must_use]
    pub fn begin(settings: EngineSettings) -> (Engine, Self) {
        let (link, served) = Link::new(settings.port);
        let turns = Turns::new(served, settings.port);
        let engine = Engine { link, settings, places: Default::default(), thread: None };
        (engine, Self(Some(turns)))
    }

    /// Carries out what has come in by now, and says what the next turn waits for.
    ///
    /// # Errors
    /// The engine has failed; this was its last turn.
    pub fn turn(&mut self, now: Instant) -> Result<Awaited, EngineFailure> {
        let Some(turns) = &mut self.0 else { return Ok(Awaited::Stopped) };
        let until = turns.turn(now);
        match &until {
            Err(failure) => self.end(EngineState::Failed(failure.clone())),
            Ok(Until::Stopped) => self.end(EngineState::Stopped),
            Ok(_) => {}
        }
        Ok(match until? {
            Until::Nothing => Awaited::Nothing,
            Until::Device => Awaited::Device,
            Until::DeviceOrInput => Awaited::DeviceOrInput,
            Until::LayersOrInput => Awaited::LayersOrInput,
            Until::Input => Awaited::Input,
            Until::InputBefore(moment) => Awaited::InputBefore(moment),
            Until::Stopped => Awaited::Stopped,
        })
    }

    /// Waits until something has come in. An engine that is wanted no more stops.
    pub async fn input(&mut self) {
        let Some(turns) = &mut self.0 else { return };
        if poll_fn(|cx| turns.inbox.poll_wait(cx)).await.is_err() {
            self.end(EngineState::Stopped);
        }
    }

    /// Takes in the oldest step, which waits for the device if that is not done.
    pub fn collect(&mut self) {
        if let Some(turns) = &mut self.0 {
            turns.core.wait();
        }
    }

    /// Whether the oldest step is done.
    pub fn is_done(&mut self) -> bool {
        self.0.as_mut().is_some_and(|turns| turns.core.is_done())
    }

    /// Whether the last step waits for its masks alone.
    pub fn is_held_up(&mut self) -> bool {
        self.0.as_mut().is_some_and(|turns| turns.core.is_held_up())
    }

    /// What it keeps; nothing once it has ended.
    #[must_use]
    pub fn holds(&self) -> EngineHolds {
        self.0.as_ref().map_or_else(EngineHolds::default, |turns| EngineHolds {
            n_mailboxes: turns.inbox.postboxes.len() - 1, // the engine's own
            ..turns.core.holds()
        })
    }

    /// Holds the page tables of all models against what their contexts hold; returns the pages that are held, each counted
    /// for each user who holds it.
    ///
    /// # Panics
    /// They do not agree.
    #[must_use]
    pub fn check(&self) -> usize {
        self.0.as_ref().map_or(0, |turns| turns.core.check())
    }

    fn end(&mut self, ended: EngineState) {
        if let Some(turns) = self.0.take() {
            turns.end(ended);
        }
    }
}
