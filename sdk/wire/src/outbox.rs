use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use serde::Serialize;
use tokio::io::AsyncWrite;
use tokio::sync::Notify;

use crate::{FrameBuffer, Payer, WireError};

/// For what an outbox may have room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// Output and chunks, which wait at this mark: several of the largest, so that the socket never starves, and little
    /// enough to hold for each connection.
    Bulk,
    /// Answers. They have bytes of their own above those of bulk, so that a peer that lets bulk pile up is still
    /// answered.
    Answers,
}

impl Room {
    /// Bytes in the outbox below which there is room. Bulk is pushed below its mark and may be as large as a frame of
    /// [`crate::FRAME_BYTES_MIN`].
    #[must_use]
    pub const fn n_bytes(self) -> usize {
        match self {
            Self::Bulk => 512 * 1024,
            Self::Answers => 1536 * 1024,
        }
    }
}

/// The frames that one connection has to write: many push, one writes.
#[derive(Debug)]
pub struct Outbox {
    state: Mutex<State>,
    /// Told whenever the bytes fall below a mark, or to nothing, or bytes are written that somebody waits for.
    room: Notify,
}

#[derive(Debug)]
struct State {
    frames: FrameBuffer,
    writer: Option<Waker>,
    /// Why a message was lost: the connection is of no use any more.
    lost: Option<String>,
    /// Whether nobody writes any more.
    is_closed: bool,
    /// Bytes that were ever written.
    n_written: u64,
    /// Whether somebody waits for bytes to be written.
    is_awaited: bool,
}

impl Outbox {
    /// An outbox of frames of at most `frame_bytes_max`.
    #[must_use]
    pub fn new(frame_bytes_max: u32) -> Self {
        Self::of(FrameBuffer::new(frame_bytes_max))
    }

    /// The same, with the memory for frames that wait paid for.
    #[must_use]
    pub fn paid_by(frame_bytes_max: u32, payer: Box<dyn Payer>) -> Self {
        Self::of(FrameBuffer::new(frame_bytes_max).paid_by(payer))
    }

    fn of(frames: FrameBuffer) -> Self {
        let state =
            State { frames, writer: None, lost: None, is_closed: false, n_written: 0, is_awaited: false };
        Self { state: Mutex::new(state), room: Notify::new() }
    }

    /// Adds a message, whether or not there is room: bulk waits for [`Self::room`] first, and so does the task that takes
    /// requests in. What is left is bounded by the requests in flight. A message for whose memory nobody pays is lost, and
    /// [`Self::write`] says so. Once the outbox is closed, messages are dropped.
    ///
    /// # Errors
    /// The message is larger than a frame.
    pub fn push<T: Serialize>(&self, message: &T) -> Result<(), WireError> {
        let mut state = self.lock();
        if state.is_closed {
            return Ok(());
        }
        match state.frames.push(message) {
            Err(WireError::Unpaid { reason }) => state.lost = Some(reason),
            pushed => pushed?,
        }
        if let Some(writer) = state.writer.take() {
            drop(state);
            writer.wake();
        }
        Ok(())
    }

    /// Whether there is room now.
    #[must_use]
    pub fn has_room(&self, room: Room) -> bool {
        self.n_bytes() < room.n_bytes()
    }

    /// Drops what is not written, and everything that is pushed from here on: there is always room then. For a connection
    /// that has ended, so that nothing waits for a writer that is gone.
    pub fn close(&self) {
        let mut state = self.lock();
        state.frames = FrameBuffer::new(0);
        state.is_closed = true;
        drop(state);
        self.room.notify_waiters();
    }

    /// Waits until there is room.
    pub async fn room(&self, room: Room) {
        while !self.has_room(room) {
            let notified = self.room.notified();
            // The writer may have made room since; once `notified` exists it cannot be missed.
            if self.has_room(room) {
                return;
            }
            notified.await;
        }
    }

    /// Waits until all that was pushed before this call has been written, or nobody writes any more. What is pushed meanwhile is not
    /// waited for.
    pub async fn written(&self) {
        let end = {
            let state = self.lock();
            state.n_written + state.frames.n_bytes() as u64
        };
        loop {
            let notified = self.room.notified();
            // It may have been written since; once `notified` exists it cannot be missed.
            {
                let mut state = self.lock();
                if state.n_written >= end || state.is_closed {
                    return;
                }
                state.is_awaited = true;
            }
            notified.await;
        }
    }

    /// Bytes not yet written.
    #[must_use]
    pub fn n_bytes(&self) -> usize {
        self.lock().frames.n_bytes()
    }

    /// Whether everything has been written.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.n_bytes() == 0
    }

    /// Writes what there is and returns; waits while there is nothing. Dropping the future loses nothing.
    ///
    /// # Errors
    /// The connection failed, or a message was lost.
    pub async fn write<W: AsyncWrite + Unpin>(&self, writer: &mut W) -> Result<(), WireError> {
        poll_fn(|cx| self.poll_write(cx, writer)).await
    }

    fn poll_write<W: AsyncWrite + Unpin>(
        &self,
        cx: &mut Context<'_>,
        writer: &mut W,
    ) -> Poll<Result<(), WireError>> {
        let mut state = self.lock();
        if let Some(reason) = &state.lost {
            return Poll::Ready(Err(WireError::Unpaid { reason: reason.clone() }));
        }
        let before = state.frames.n_bytes();
        if before == 0 {
            state.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let result = state.frames.poll_write(cx, writer);
        let after = state.frames.n_bytes();
        state.n_written += (before - after) as u64;
        let is_awaited = after < before && std::mem::take(&mut state.is_awaited);
        let crossed = |room: Room| before >= room.n_bytes() && after < room.n_bytes();
        if is_awaited || crossed(Room::Bulk) || crossed(Room::Answers) || after == 0 {
            self.room.notify_waiters();
        }
        result.map_err(WireError::from)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while encoding leaves at worst a frame that the peer refuses.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::pin::{Pin, pin};

    use super::*;

    /// A peer that takes some bytes each time.
    struct Slow;

    impl AsyncWrite for Slow {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            Poll::Ready(Ok(bytes.len().min(64)))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[test]
    fn what_comes_after_is_not_waited_for() {
        let outbox = Outbox::new(crate::FRAME_BYTES_MAX);
        let context = &mut Context::from_waker(Waker::noop());
        outbox.push(&"x".repeat(1_000)).expect("it fits");
        let mut written = pin!(outbox.written());
        for n_turns in 0.. {
            // There is always more than before.
            outbox.push(&"y".repeat(1_000)).expect("it fits");
            let mut slow = Slow;
            let n_before = outbox.n_bytes();
            assert!(outbox.poll_write(context, &mut slow).is_ready());
            assert!(outbox.n_bytes() < n_before && !outbox.is_empty());
            if written.as_mut().poll(context).is_ready() {
                assert!(n_turns > 0, "some of it is not written");
                break;
            }
            assert!(n_turns < 1_000, "it is written by now");
        }
        outbox.push(&"z").expect("it fits");
        let mut written = pin!(outbox.written());
        assert!(written.as_mut().poll(context).is_pending());
        outbox.close();
        assert!(written.as_mut().poll(context).is_ready(), "nobody writes any more");
    }
}
