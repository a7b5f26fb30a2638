//! One end of a ring: where it is, where the other one says it is, and how the two wait for each other.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::bell::Bell;
use super::closer::{Closer, Ending, State};
use super::error::ChannelError;
use super::patience::{N_LOOKS, Patience};
use super::ring::{Ring, Role};
use super::sleeper::{Place, Sleeper};

/// Beside a position at which an end wants to be woken: it sleeps in the second place. Positions do not come so far.
const IN_SECOND_PLACE: u64 = 1 << 63;

/// What is rung for an end, by the place in which it sleeps, and what it rings for the other.
#[derive(Debug)]
pub(super) struct Bells {
    pub(super) own: [Bell; 2],
    pub(super) peer: [Bell; 2],
}

#[derive(Debug)]
pub(super) struct End {
    pub(super) ring: Ring,
    role: Role,
    /// Where this end is. What stands in the shared memory is a copy for the other end, never read back.
    position: u64,
    /// Where the other end was when it was last looked for.
    peer: u64,
    state: Arc<State>,
    bells: Bells,
    patience: Patience,
}

impl End {
    pub(super) fn new(ring: Ring, role: Role, state: Arc<State>, bells: Bells) -> Self {
        Self { ring, role, position: 0, peer: 0, state, bells, patience: Patience::default() }
    }

    pub(super) fn position(&self) -> u64 {
        self.position
    }

    pub(super) fn closer(&self) -> Closer {
        Closer(Arc::clone(&self.state))
    }

    /// Ends the channel because of what the other end did.
    pub(super) fn fail(&self, error: ChannelError) -> ChannelError {
        self.closer().close();
        error
    }

    /// Fails at once where this side has closed the channel, and where there is nobody to write for.
    pub(super) fn check_open(&self) -> Result<(), ChannelError> {
        match (self.state.ending(), self.role) {
            (Ending::Open, _) | (Ending::NoPeer, Role::Reader) => Ok(()),
            (Ending::NoPeer, Role::Writer) | (Ending::Closed, _) => Err(ChannelError::Closed),
        }
    }

    /// Words that can be read or written from the position on, as of what was last seen.
    fn seen(&self) -> u64 {
        match self.role {
            Role::Reader => self.peer - self.position,
            Role::Writer => self.ring.n_words() - (self.position - self.peer),
        }
    }

    /// Looks where the other end is. Words that can be read or written from the position on.
    pub(super) fn look(&mut self) -> Result<u64, ChannelError> {
        // Acquire, with the release in `advance`: a reader that sees the writer's position sees the words before it, and a
        // writer that sees the reader's position writes over words only after they were read.
        let said = self.ring.position(self.role.other()).load(Ordering::Acquire);
        let highest = match self.role {
            Role::Reader => self.position + self.ring.n_words(),
            Role::Writer => self.position,
        };
        if said < self.peer || said > highest {
            return Err(self.fail(ChannelError::Position { said, lowest: self.peer, highest }));
        }
        self.peer = said;
        Ok(self.seen())
    }

    /// As [`look`](Self::look), but only where less is known of than wanted.
    pub(super) fn look_for(&mut self, n_words: u64) -> Result<u64, ChannelError> {
        let n_seen = self.seen();
        if n_seen >= n_words { Ok(n_seen) } else { self.look() }
    }

    /// Goes on by words that have been read or written.
    pub(super) fn advance(&mut self, n_words: u64) {
        self.position += n_words;
        // Release: what was done to the words before comes first for whoever sees the position. For a reader these are
        // loads, which stay before a release as stores do.
        self.ring.position(self.role).store(self.position, Ordering::Release);
    }

    /// Wakes the other end if it sleeps and waits for no more than the position that this end has come to.
    pub(super) fn wake_peer(&self) -> Result<(), ChannelError> {
        // One end stores its position and then looks whether the other sleeps; the other stores that it sleeps and then looks
        // at the position. With a sequentially consistent fence between the two in both, at least one sees what the other
        // stored. Release and acquire do not give that: x86 too lets a load go ahead of an earlier store.
        fence(Ordering::SeqCst);
        let wakes_at = self.ring.wakes_at(self.role.other());
        let at = wakes_at.load(Ordering::Relaxed);
        if at == 0 || self.position < at & !IN_SECOND_PLACE {
            return Ok(());
        }
        // Where the other end has called anew meanwhile, in another place maybe, it has looked at the position after that, and
        // has seen this one: its call is for what comes later, and stays.
        if wakes_at.compare_exchange(at, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            self.bells.peer[usize::from(at & IN_SECOND_PLACE != 0)].ring()?;
        }
        Ok(())
    }

    /// Waits until so many words, at most half a ring, can be read or written. How many they are.
    pub(super) fn wait_for(&mut self, n_words: u64) -> Result<u64, ChannelError> {
        let n_ready = self.look_for(n_words)?;
        if n_ready >= n_words {
            return Ok(n_ready);
        }
        if let Some(n_ready) = self.poll_for(n_words, || false)? {
            return Ok(n_ready);
        }
        let result = loop {
            match self.call(n_words, Place::First) {
                Ok(None) => {}
                Ok(Some(n_ready)) => break Ok(n_ready),
                Err(error) => break Err(error),
            }
            if let Err(error) = self.bells.own[0].wait(self.state.alarm()) {
                break Err(error);
            }
        };
        self.recall();
        result
    }

    /// Has the other end wake whoever sleeps in this place once so many words can be read or written; returns how many they
    /// are where they can be already.
    pub(super) fn call(&mut self, n_words: u64, place: Place) -> Result<Option<u64>, ChannelError> {
        let wakes_at = match self.role {
            Role::Reader => self.position + n_words,
            // Less than `n_words` are free, so that this is beyond the reader's position, and not 0.
            Role::Writer => self.position + n_words - self.ring.n_words(),
        };
        let place = if place == Place::Second { IN_SECOND_PLACE } else { 0 };
        self.ring.wakes_at(self.role).store(wakes_at | place, Ordering::Relaxed);
        // See `wake_peer`.
        fence(Ordering::SeqCst);
        self.ready(n_words)
    }

    /// Nobody is to be woken.
    pub(super) fn recall(&self) {
        self.ring.wakes_at(self.role).store(0, Ordering::Relaxed);
    }

    /// What sleeps in a place.
    pub(super) fn sleeper(&self, place: Place) -> Sleeper {
        let bell = self.bells.own[usize::from(place == Place::Second)].clone();
        Sleeper { bell, state: Arc::clone(&self.state) }
    }

    /// Looks for a while whether so many words can be read or written, unless something else is to be done.
    pub(super) fn poll_for(
        &mut self,
        n_words: u64,
        is_called: impl Fn() -> bool,
    ) -> Result<Option<u64>, ChannelError> {
        let mut wait = self.patience.begin();
        loop {
            for _ in 0..N_LOOKS {
                if let Some(n_ready) = self.ready(n_words)? {
                    return Ok(Some(n_ready));
                }
                std::hint::spin_loop();
            }
            if is_called() || !self.patience.goes_on(&mut wait) {
                return Ok(None);
            }
        }
    }

    /// Something has come, after a wait or at once.
    pub(super) fn note_come(&mut self) {
        self.patience.note_come();
    }

    /// The words, if there are so many; an error if there will never be.
    fn ready(&mut self, n_words: u64) -> Result<Option<u64>, ChannelError> {
        // The ending first: who sees that the other side has closed the channel looks at its position after that, and so
        // misses nothing of what it had sent.
        let ending = self.state.ending();
        if ending == Ending::Closed {
            return Err(ChannelError::Closed);
        }
        let n_ready = self.look()?;
        match (ending, self.role) {
            (Ending::NoPeer, Role::Writer) => Err(ChannelError::Closed),
            _ if n_ready >= n_words => Ok(Some(n_ready)),
            (Ending::NoPeer, _) => Err(ChannelError::Closed),
            _ => Ok(None),
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.closer().close();
    }
}
