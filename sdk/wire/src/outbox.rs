use std::future::poll_fn;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use serde::Serialize;
use tokio::io::AsyncWrite;
use tokio::sync::Notify;

use crate::{FrameBuffer, WireError};

/// Above this many bytes, who can wait does: several of the largest outputs, so that the socket never starves,
/// and little enough to hold for each connection.
const FULL_BYTES: usize = 512 * 1024;

/// The frames that one connection has to write: many push, one writes.
#[derive(Debug)]
pub struct Outbox {
    state: Mutex<State>,
    room: Notify,
}

#[derive(Debug)]
struct State {
    frames: FrameBuffer,
    writer: Option<Waker>,
}

impl Outbox {
    /// An outbox of frames of at most `frame_bytes_max`.
    #[must_use]
    pub fn new(frame_bytes_max: u32) -> Self {
        let state = State { frames: FrameBuffer::new(frame_bytes_max), writer: None };
        Self { state: Mutex::new(state), room: Notify::new() }
    }

    /// Adds a message, whether or not there is room: bulk waits for [`Self::room`] first, and what is left is
    /// bounded by the requests in flight.
    ///
    /// # Errors
    /// The message is larger than a frame.
    pub fn push<T: Serialize>(&self, message: &T) -> Result<(), WireError> {
        let mut state = self.lock();
        state.frames.push(message)?;
        if let Some(writer) = state.writer.take() {
            drop(state);
            writer.wake();
        }
        Ok(())
    }

    /// Whether bulk may be pushed now.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.lock().frames.n_bytes() < FULL_BYTES
    }

    /// Waits until bulk may be pushed.
    pub async fn room(&self) {
        while !self.has_room() {
            let notified = self.room.notified();
            // The writer may have made room since; once `notified` exists it cannot be missed.
            if self.has_room() {
                return;
            }
            notified.await;
        }
    }

    /// Whether everything has been written.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lock().frames.n_bytes() == 0
    }

    /// Writes what there is and returns; waits while there is nothing. Dropping the future loses nothing.
    ///
    /// # Errors
    /// The connection failed.
    pub async fn write<W: AsyncWrite + Unpin>(&self, writer: &mut W) -> Result<(), WireError> {
        Ok(poll_fn(|cx| self.poll_write(cx, writer)).await?)
    }

    fn poll_write<W: AsyncWrite + Unpin>(
        &self,
        cx: &mut Context<'_>,
        writer: &mut W,
    ) -> Poll<io::Result<()>> {
        let mut state = self.lock();
        let n_bytes = state.frames.n_bytes();
        if n_bytes == 0 {
            state.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let result = state.frames.poll_write(cx, writer);
        if n_bytes >= FULL_BYTES && state.frames.n_bytes() < FULL_BYTES {
            self.room.notify_waiters();
        }
        result
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while encoding leaves at worst a frame that the peer refuses.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
