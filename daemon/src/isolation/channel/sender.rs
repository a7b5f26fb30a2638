//! The end that frames are written to.

use super::closer::Closer;
use super::end::End;
use super::error::ChannelError;
use super::ring::WORD_BYTES;

/// Sends frames to the other process. Dropping it closes the channel; what was sent can still be received.
#[derive(Debug)]
pub struct Sender {
    end: End,
    frame_bytes_max: usize,
}

/// Words of a header or of bytes.
fn n_words(n_bytes: usize) -> u64 {
    n_bytes.div_ceil(WORD_BYTES) as u64
}

impl Sender {
    pub(super) fn new(end: End, frame_bytes_max: usize) -> Self {
        Self { end, frame_bytes_max }
    }

    /// Sends a frame; waits for room where there is none, also in the middle of it.
    ///
    /// # Errors
    /// The frame is too long, or the channel has ended.
    pub fn send(&mut self, frame: &[u8]) -> Result<(), ChannelError> {
        self.write(frame)?;
        self.end.wake_peer()
    }

    /// Sends frames and rings once for all of them, unless there is no room in between.
    ///
    /// # Errors
    /// As [`send`](Self::send); the frames before may have been sent.
    pub fn send_all<'a>(&mut self, frames: impl IntoIterator<Item = &'a [u8]>) -> Result<(), ChannelError> {
        for frame in frames {
            if let Err(error) = self.write(frame) {
                self.end.wake_peer()?;
                return Err(error);
            }
        }
        self.end.wake_peer()
    }

    /// Sends a frame if there is room for all of it. Never waits. Whether it was sent.
    ///
    /// # Errors
    /// The frame is too long, longer than the ring too, or the channel has ended.
    pub fn try_send(&mut self, frame: &[u8]) -> Result<bool, ChannelError> {
        self.check(frame)?;
        let n_needed = 1 + n_words(frame.len());
        let n_most = self.end.ring.n_words();
        if n_needed > n_most {
            let limit = (n_most - 1) * WORD_BYTES as u64;
            return Err(ChannelError::FrameTooLong { bytes: frame.len() as u64, limit });
        }
        if self.end.look_for(n_needed)? < n_needed {
            return Ok(false);
        }
        self.write(frame)?;
        self.end.wake_peer()?;
        Ok(true)
    }

    /// What ends the channel from any thread.
    #[must_use]
    pub fn closer(&self) -> Closer {
        self.end.closer()
    }

    fn check(&self, frame: &[u8]) -> Result<(), ChannelError> {
        self.end.check_open()?;
        if frame.len() > self.frame_bytes_max {
            let limit = self.frame_bytes_max as u64;
            return Err(ChannelError::FrameTooLong { bytes: frame.len() as u64, limit });
        }
        Ok(())
    }

    /// Writes a frame, a piece at a time where it does not fit, without waking a reader that could read all of it.
    fn write(&mut self, frame: &[u8]) -> Result<(), ChannelError> {
        self.check(frame)?;
        let header = (frame.len() as u64).to_ne_bytes();
        let n_needed = 1 + n_words(frame.len());
        if self.end.look_for(n_needed)? >= n_needed {
            let start = self.end.position();
            self.end.ring.write(start, &header);
            self.end.ring.write(start + 1, frame);
            self.end.advance(n_needed);
            return Ok(());
        }
        self.write_pieces(&header)?;
        self.write_pieces(frame)
    }

    fn write_pieces(&mut self, mut bytes: &[u8]) -> Result<(), ChannelError> {
        let half = self.end.ring.n_words() / 2;
        while !bytes.is_empty() {
            // All that is left or, of much, half a ring at a time: the two processes then seldom wait for each other.
            let n_wanted = n_words(bytes.len()).min(half);
            if self.end.look_for(n_wanted)? < n_wanted {
                self.end.wake_peer()?;
            }
            let n_free = self.end.wait_for(n_wanted)?;
            let (piece, rest) = bytes.split_at(bytes.len().min(n_free as usize * WORD_BYTES));
            self.end.ring.write(self.end.position(), piece);
            self.end.advance(n_words(piece.len()));
            bytes = rest;
        }
        Ok(())
    }
}
