//! A place where a thread sleeps that receives in turns with another.

use std::sync::Arc;

use super::bell::Bell;
use super::closer::State;
use super::error::ChannelError;

/// One of the two places where a thread may sleep until something comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Where a lone receiver sleeps.
    First,
    /// Of the thread that receives in turns with it.
    Second,
}

/// Sleeps in one of the places, without the receiver.
#[derive(Clone, Debug)]
pub struct Sleeper {
    pub(super) bell: Bell,
    pub(super) state: Arc<State>,
}

impl Sleeper {
    /// Sleeps until something comes that this place is woken for, it is roused, or the channel ends; maybe shorter.
    ///
    /// # Errors
    /// The system refuses.
    pub fn sleep(&self) -> Result<(), ChannelError> {
        self.bell.wait(self.state.alarm())
    }

    /// Wakes who sleeps here, or who does so next.
    ///
    /// # Errors
    /// The system refuses.
    pub fn rouse(&self) -> Result<(), ChannelError> {
        self.bell.ring()
    }
}
