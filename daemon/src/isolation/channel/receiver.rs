//! The end that frames are read from.

use super::closer::Closer;
use super::end::End;
use super::error::ChannelError;
use super::ring::WORD_BYTES;
use super::sleeper::{Place, Sleeper};

/// Receives the frames of the other process. Dropping it closes the channel.
#[derive(Debug)]
pub struct Receiver {
    end: End,
    frame_bytes_max: usize,
    /// The beginning of a frame whose rest has not come.
    partial: Vec<u8>,
    /// Bytes of it that are missing; nothing between frames.
    n_missing: Option<usize>,
}

impl Receiver {
    pub(super) fn new(end: End, frame_bytes_max: usize) -> Self {
        Self { end, frame_bytes_max, partial: Vec::new(), n_missing: None }
    }

    /// The same, whose frames have at most so many bytes.
    #[must_use]
    pub fn of_frames(self, frame_bytes_max: usize) -> Self {
        Self { frame_bytes_max, ..self }
    }

    /// Waits for a frame, which replaces what is in `into`.
    ///
    /// # Errors
    /// The other end breaks the rules, or the channel has ended.
    pub fn recv(&mut self, into: &mut Vec<u8>) -> Result<(), ChannelError> {
        while !self.try_recv(into)? {
            self.end.wait_for(1)?;
        }
        Ok(())
    }

    /// Takes a frame if all of it is there. Never waits. Whether there was one.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn try_recv(&mut self, into: &mut Vec<u8>) -> Result<bool, ChannelError> {
        self.end.check_open()?;
        let is_whole = self.take()?;
        if is_whole {
            self.end.note_come();
            self.n_missing = None;
            std::mem::swap(into, &mut self.partial);
        }
        Ok(is_whole)
    }

    /// As [`try_recv`](Self::try_recv), looking for a while, unless something else is to be done: some times what waking a thread
    /// takes.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn poll(&mut self, into: &mut Vec<u8>, is_called: impl Fn() -> bool) -> Result<bool, ChannelError> {
        loop {
            if self.try_recv(into)? {
                return Ok(true);
            }
            if self.end.poll_for(1, &is_called)?.is_none() {
                return Ok(false);
            }
        }
    }

    /// Has whoever sleeps in this place woken, and nobody else, once something comes. Whether nothing has come already.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn call(&mut self, place: Place) -> Result<bool, ChannelError> {
        Ok(self.end.call(1, place)?.is_none())
    }

    /// Has nobody woken: this thread receives.
    pub fn recall(&mut self) {
        self.end.recall();
    }

    /// What sleeps in a place, while others may have the receiver.
    #[must_use]
    pub fn sleeper(&self, place: Place) -> Sleeper {
        self.end.sleeper(place)
    }

    /// What ends the channel from any thread.
    #[must_use]
    pub fn closer(&self) -> Closer {
        self.end.closer()
    }

    /// Takes what there is of a frame. Whether it is whole.
    fn take(&mut self) -> Result<bool, ChannelError> {
        let start = self.end.position();
        let is_whole = self.take_words();
        if self.end.position() != start {
            self.end.wake_peer()?;
        }
        is_whole
    }

    fn take_words(&mut self) -> Result<bool, ChannelError> {
        let mut n_missing = match self.n_missing {
            Some(n_missing) => n_missing,
            None => {
                if self.end.look_for(1)? == 0 {
                    return Ok(false);
                }
                let n_bytes = self.take_header()?;
                self.partial.clear();
                n_bytes
            }
        };
        while n_missing > 0 {
            let n_ready = self.end.look_for(n_missing.div_ceil(WORD_BYTES) as u64)?;
            if n_ready == 0 {
                break;
            }
            // Memory is taken for what has come, not for what was announced.
            let n_bytes = n_missing.min(n_ready as usize * WORD_BYTES);
            let n_before = self.partial.len();
            self.partial.resize(n_before + n_bytes, 0);
            self.end.ring.read(self.end.position(), &mut self.partial[n_before..]);
            self.end.advance(n_bytes.div_ceil(WORD_BYTES) as u64);
            n_missing -= n_bytes;
        }
        self.n_missing = Some(n_missing);
        Ok(n_missing == 0)
    }

    /// The length of the frame that begins.
    fn take_header(&mut self) -> Result<usize, ChannelError> {
        let mut header = [0; WORD_BYTES];
        // Once: the other end may change it between two looks.
        self.end.ring.read(self.end.position(), &mut header);
        let word = u64::from_ne_bytes(header);
        let Ok(n_bytes) = u32::try_from(word) else {
            return Err(self.end.fail(ChannelError::Header { word }));
        };
        if n_bytes as usize > self.frame_bytes_max {
            let limit = self.frame_bytes_max as u64;
            return Err(self.end.fail(ChannelError::FrameTooLong { bytes: n_bytes.into(), limit }));
        }
        self.end.advance(1);
        Ok(n_bytes as usize)
    }
}
