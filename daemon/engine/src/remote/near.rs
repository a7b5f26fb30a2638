//! An engine as a process of guests reaches it: the daemon's side.

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::Numbers;
use super::message::{Answered, Asked, Question};
use crate::account::{GuestId, Owner};
use crate::completion::CallerId;
use crate::handle::{EngineWatch, Link, Message};
use crate::mailbox::Postbox;

/// Takes what engines give back to a process of guests. Called on the engines' threads, which it must not hold up.
pub trait Outward: std::fmt::Debug + Send + Sync {
    /// Puts an answer into the queue; returns the waker of whoever empties it.
    fn put(&self, answered: Answered) -> Waker;
}

/// What no guest of ours would have sent: the process that did is not to be trusted any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Violation(pub(crate) String);

/// How long the thread that reads from a process sleeps while its engine has as many operations unread as a guest may have.
const FULL: Duration = Duration::from_micros(100);

/// An engine, for the guests of one process.
#[derive(Debug)]
pub struct NearEngine {
    link: Arc<Link>,
    outward: Arc<dyn Outward>,
    callers: FxHashMap<CallerId, Owner>,
    numbers: Numbers,
}

impl NearEngine {
    /// The engine that is watched, for the process with these ids.
    #[must_use]
    pub fn new(engine: &EngineWatch, numbers: Numbers, outward: Arc<dyn Outward>) -> Self {
        Self { link: engine.link().clone(), outward, callers: FxHashMap::default(), numbers }
    }

    /// Passes on what the process asks. Waits while a guest has as many operations unread as it may.
    ///
    /// # Errors
    /// What none of our guests would ask.
    pub fn take(
        &mut self,
        asked: Asked,
        owner_of: impl FnOnce(GuestId) -> Option<Owner>,
    ) -> Result<(), Violation> {
        match asked.0 {
            Question::Enter { caller, guest } => {
                let owner = owner_of(guest).ok_or_else(|| Violation(format!("no guest {}", guest.0)))?;
                if !self.numbers.range().contains(&caller.0) || self.callers.contains_key(&caller) {
                    return Err(Violation(format!("{caller:?} is not its to name")));
                }
                self.callers.insert(caller, owner.clone());
                let postbox = Postbox::Far(self.outward.clone());
                self.post(Message::Enter { caller, owner, postbox });
            }
            Question::Leave { caller } => {
                self.callers
                    .remove(&caller)
                    .ok_or_else(|| Violation(format!("{caller:?} has not entered")))?;
                self.post(Message::Leave { caller });
            }
            Question::Operation { caller, operation } => {
                let owner = self.callers.get(&caller);
                let owner = owner.ok_or_else(|| Violation(format!("{caller:?} has not entered")))?;
                loop {
                    match self.link.try_room(caller, owner) {
                        // An engine that has ended says so by itself.
                        Some(room) => break drop(self.link.post_into(room, operation)),
                        None => std::thread::sleep(FULL),
                    }
                }
            }
        }
        Ok(())
    }

    /// The process is gone: frees what its guests held.
    pub fn abandon(&mut self) {
        for (caller, _) in std::mem::take(&mut self.callers) {
            self.post(Message::Leave { caller });
        }
    }

    /// An engine that has ended forgets everything.
    fn post(&self, message: Message) {
        let _ = self.link.post_message(message);
    }
}

impl Drop for NearEngine {
    fn drop(&mut self) {
        self.abandon();
    }
}
