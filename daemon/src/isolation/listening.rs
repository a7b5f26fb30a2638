//! How a process of guests listens to the daemon.
//!
//! The thread that has begun the process sleeps until something comes. Most of what comes is an answer that a guest waits for,
//! so that a thread of guests which has none to run listens in its place: it finds the guest woken without another thread in
//! between. When it goes to run one, the first thread is the one that is woken again, without a word to it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use super::channel::{ChannelError, Place, Receiver, Sleeper};
use super::inside::{Inside, InsideError, fail};
use super::message::{ToGuests, decode};
use crate::guest::Lookout;

/// The way in of a process of guests.
pub(super) struct Listening {
    state: Mutex<State>,
    /// Whether a thread of guests listens, or sleeps until something comes.
    is_looked_after: AtomicBool,
    /// Where the first thread sleeps.
    first: Sleeper,
    /// Where a thread of guests does.
    second: Sleeper,
}

struct State {
    receiver: Receiver,
    inside: Inside,
    frame: Vec<u8>,
    /// What takes longer than guests may wait, and is left to the first thread.
    left: Option<ToGuests>,
}

impl Listening {
    pub(super) fn new(receiver: Receiver, inside: Inside) -> Arc<Self> {
        let (first, second) = (receiver.sleeper(Place::First), receiver.sleeper(Place::Second));
        let state = State { receiver, inside, frame: Vec::new(), left: None };
        Arc::new(Self { state: Mutex::new(state), is_looked_after: AtomicBool::new(false), first, second })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Listens until the daemon is gone.
    ///
    /// # Errors
    /// The channel is broken, or the daemon says what has no meaning.
    pub(super) fn listen(&self) -> Result<(), InsideError> {
        loop {
            match self.lock().take_all(&self.is_looked_after) {
                Ok(()) => {}
                // The daemon is gone, or wants nothing more of this process.
                Err(InsideError::Channel(ChannelError::Closed)) => return Ok(()),
                Err(error) => return Err(error),
            }
            self.first.sleep()?;
        }
    }
}

impl State {
    /// Takes all that has come, and has the thread woken for what comes that listens.
    fn take_all(&mut self, is_looked_after: &AtomicBool) -> Result<(), InsideError> {
        loop {
            self.inside.take_models()?;
            if let Some(left) = self.left.take() {
                self.inside.take(left)?;
            }
            while self.receiver.try_recv(&mut self.frame)? {
                self.inside.take(decode(&self.frame)?)?;
            }
            // One that stops listening afterwards rouses the first thread, or has it woken itself.
            let place = if is_looked_after.load(Ordering::SeqCst) { Place::Second } else { Place::First };
            if self.receiver.call(place)? {
                return Ok(());
            }
        }
    }

    /// Takes what comes within a while, short things alone. Whether the thread of guests may sleep: it is woken for what comes,
    /// or the first thread is at work.
    fn take_short(
        &mut self,
        is_called: &dyn Fn() -> bool,
        rouse_first: impl Fn(),
    ) -> Result<bool, InsideError> {
        if self.left.is_some() {
            return Ok(true);
        }
        self.receiver.recall();
        loop {
            while self.receiver.poll(&mut self.frame, is_called)? {
                let message = decode(&self.frame)?;
                if is_long(&message) {
                    self.left = Some(message);
                    rouse_first();
                    return Ok(true);
                }
                self.inside.take(message)?;
                if is_called() {
                    return Ok(false);
                }
            }
            if is_called() {
                return Ok(false);
            }
            if self.receiver.call(Place::Second)? {
                return Ok(true);
            }
        }
    }
}

/// Whether what it takes to do it is more than a guest should wait for that has been answered.
fn is_long(message: &ToGuests) -> bool {
    matches!(
        message,
        ToGuests::Begin(_)
            | ToGuests::Program { .. }
            | ToGuests::ForgetProgram { .. }
            | ToGuests::Engine { .. }
            | ToGuests::EngineEnded { .. }
            | ToGuests::Model { .. }
            | ToGuests::ModelFailed { .. }
            | ToGuests::ModelUnloaded { .. }
            | ToGuests::Listing { .. }
    )
}

/// The system's refusal to wake or to sleep leaves no way to go on.
fn done(result: Result<(), ChannelError>) {
    if let Err(error) = result {
        fail(&error.into());
    }
}

impl Lookout for Listening {
    fn look(&self, is_called: &dyn Fn() -> bool) -> bool {
        self.is_looked_after.store(true, Ordering::SeqCst);
        // The first thread is at it, and rouses this one if a guest is woken.
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::WouldBlock) => return true,
            // What it was in the middle of is lost.
            Err(TryLockError::Poisoned(_)) => fail(&InsideError::Panicked),
        };
        let taken =
            catch_unwind(AssertUnwindSafe(|| state.take_short(is_called, || done(self.first.rouse()))));
        match taken.unwrap_or(Err(InsideError::Panicked)) {
            Ok(may_sleep) => may_sleep,
            Err(InsideError::Channel(ChannelError::Closed)) => {
                // The first thread ends the process.
                done(self.first.rouse());
                true
            }
            Err(error) => fail(&error),
        }
    }

    fn sleep(&self) {
        done(self.second.sleep());
    }

    fn rouse(&self) {
        done(self.second.rouse());
    }

    fn leave(&self) {
        self.is_looked_after.store(false, Ordering::SeqCst);
        // The first thread, which is at it, may have seen before that this one listens.
        let Ok(mut state) = self.state.try_lock() else { return done(self.first.rouse()) };
        match state.receiver.call(Place::First) {
            Ok(true) => {}
            Ok(false) | Err(ChannelError::Closed) => done(self.first.rouse()),
            Err(error) => fail(&error.into()),
        }
    }
}
