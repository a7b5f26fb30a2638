//! What comes in on one connection: which frames are decoded, and when.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncRead;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::PollSemaphore;
use trellis_wire::{ClientMessage, FrameReader, Outbox, Room, WireError};

use super::turns::Turns;
use crate::thread_time::thread_time;

/// Messages of one client after which other tasks have their turn.
const N_MESSAGES_PER_TURN: usize = 8;

/// Bytes after which they have. A value takes a byte at least, and some 25 ns to decode: that makes 25 µs for each connection,
/// of which a user may have hundreds.
const N_BYTES_PER_TURN: usize = 1 << 10;

/// Larger frames are decoded by turns of their user: one of the largest number of values takes milliseconds. Requests,
/// cancels and credit of honest clients are smaller; chunks are larger, and a turn costs nothing beside what they bring.
const N_BYTES_WITHOUT_TURN: usize = 256;

/// A frame that takes longer to decode is followed by a pause of so many times as long, up to the longest, in which its user keeps the
/// turn: nobody pays for that time, and so it is a small part of one processor.
const NOTICED: Duration = Duration::from_micros(500);
const N_TIMES_AS_LONG: u32 = 4;
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// Takes in the messages of one connection.
pub(super) struct Intake<R> {
    reader: FrameReader<R>,
    /// Where it waits for its user's turn.
    waiting: PollSemaphore,
    /// Its user's turn, from before a large frame is decoded until other tasks have had theirs.
    turn: Option<OwnedSemaphorePermit>,
    /// How long the last frame took to decode.
    spent: Duration,
    /// What came since other tasks had their turn.
    n_messages: usize,
    n_bytes: usize,
    /// Whether the frame in front is a request that came when there was no room for its answer.
    is_held: bool,
}

impl<R: AsyncRead + Unpin> Intake<R> {
    pub(super) fn new(reader: FrameReader<R>, turns: &Turns) -> Self {
        let waiting = PollSemaphore::new(turns.frames.clone());
        Self { reader, waiting, turn: None, spent: Duration::ZERO, n_messages: 0, n_bytes: 0, is_held: false }
    }

    /// The next message; `None` when the client has left. A request waits until there is room for its answer, as the bytes that
    /// came, whose buffer is paid for: what is made of them may take many times as much. Nothing is read behind it. Dropping
    /// the future loses nothing.
    ///
    /// # Errors
    /// As for [`FrameReader::next`].
    pub(super) async fn next(&mut self, outbox: &Outbox) -> Result<Option<ClientMessage>, WireError> {
        loop {
            self.turn = None;
            if self.is_held && !outbox.has_room(Room::Answers) {
                self.leave_queue();
                outbox.room(Room::Answers).await;
            }
            let Some(n_bytes) = self.reader.arrive().await? else { return Ok(None) };
            if n_bytes > N_BYTES_WITHOUT_TURN {
                self.turn = poll_fn(|cx| self.waiting.poll_acquire(cx)).await;
                if self.is_held && !outbox.has_room(Room::Answers) {
                    continue;
                }
            }
            self.n_messages += 1;
            self.n_bytes += n_bytes;
            let begun = thread_time();
            let peeked = self.reader.peek::<ClientMessage>()?;
            self.spent = thread_time().saturating_sub(begun);
            let Some(message) = peeked else { continue };
            self.is_held =
                matches!(message, ClientMessage::Request { .. }) && !outbox.has_room(Room::Answers);
            if !self.is_held {
                self.reader.consume()?;
                return Ok(Some(message));
            }
            // Decoded again when there is room, which is cheaper than to hold it.
            drop(message);
            self.rest().await;
        }
    }

    /// Lets other tasks have their turn, where enough was taken in since they had it last. To be called when a message has been
    /// dealt with.
    pub(super) async fn rest(&mut self) {
        let is_enough = self.n_messages >= N_MESSAGES_PER_TURN || self.n_bytes >= N_BYTES_PER_TURN;
        if self.turn.is_some() || is_enough {
            // With the user's turn: the next connection of that user decodes after the other tasks, and not before them.
            match self.turn.is_some() && self.spent > NOTICED {
                true => tokio::time::sleep((N_TIMES_AS_LONG * self.spent).min(PAUSE_MAX)).await,
                false => tokio::task::yield_now().await,
            }
            self.turn = None;
            (self.n_messages, self.n_bytes) = (0, 0);
        }
    }

    /// A turn that came while this waits for something else would be held from the user's other connections.
    fn leave_queue(&mut self) {
        let frames: Arc<Semaphore> = self.waiting.clone_inner();
        self.waiting = PollSemaphore::new(frames);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use futures_util::FutureExt as _;
    use tokio::io::DuplexStream;
    use trellis_wire::{Call, FRAME_BYTES_MAX, FrameBuffer, ServerMessage};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    async fn frames(messages: &[ClientMessage]) -> Vec<u8> {
        let mut frames = FrameBuffer::new(FRAME_BYTES_MAX);
        for message in messages {
            frames.push(message).expect("it fits");
        }
        let mut bytes = Vec::new();
        frames.write(&mut bytes).await.expect("memory takes all");
        bytes
    }

    fn chunk(n_bytes: usize) -> ClientMessage {
        ClientMessage::Chunk { id: 1, bytes: vec![7; n_bytes] }
    }

    fn intake<'a>(bytes: &'a [u8], turns: &Turns) -> Intake<&'a [u8]> {
        Intake::new(FrameReader::new(bytes, FRAME_BYTES_MAX), turns)
    }

    fn outbox() -> Outbox {
        Outbox::new(FRAME_BYTES_MAX)
    }

    /// One without room for answers.
    fn full() -> Outbox {
        let outbox = outbox();
        while outbox.has_room(Room::Answers) {
            let event = trellis_wire::Event::Text { text: "x".repeat(500_000) };
            outbox.push(&ServerMessage::Event { id: 1, event }).expect("it fits");
        }
        outbox
    }

    #[tokio::test]
    async fn large_frames_wait_for_the_users_turn_and_small_ones_do_not() {
        let (turns, outbox) = (Turns::default(), outbox());
        let bytes = frames(&[chunk(10), chunk(5_000), chunk(10)]).await;
        let (mut one, mut two) = (intake(&bytes, &turns), intake(&bytes, &turns));
        for intake in [&mut one, &mut two] {
            assert_eq!(intake.next(&outbox).await.expect("whole"), Some(chunk(10)));
            intake.rest().await;
        }
        assert_eq!(one.next(&outbox).await.expect("whole"), Some(chunk(5_000)));
        assert!(two.next(&outbox).now_or_never().is_none(), "it is the other's turn");
        one.rest().await;
        assert!(one.turn.is_none());
        // Its place is kept, though the future was dropped.
        assert_eq!(one.next(&outbox).await.expect("whole"), Some(chunk(10)));
        let next = tokio::time::timeout(PATIENCE, two.next(&outbox)).await.expect("in time");
        assert_eq!(next.expect("whole"), Some(chunk(5_000)));
        drop(two);
        assert_eq!(turns.frames.available_permits(), 1, "who leaves gives the turn back");
    }

    #[tokio::test]
    async fn a_frame_that_takes_long_is_followed_by_a_pause_with_the_users_turn() {
        let (turns, outbox) = (Turns::default(), outbox());
        let bytes = frames(&[chunk(5_000)]).await;
        let mut intake = intake(&bytes, &turns);
        assert!(intake.next(&outbox).await.expect("whole").is_some());
        let spent = 10 * NOTICED;
        intake.spent = spent;
        let begun = Instant::now();
        assert!(intake.rest().now_or_never().is_none());
        assert_eq!(turns.frames.available_permits(), 0);
        intake.rest().await;
        assert!(begun.elapsed() >= N_TIMES_AS_LONG * spent);
        assert_eq!(turns.frames.available_permits(), 1);
    }

    #[tokio::test]
    async fn other_tasks_have_their_turn_after_so_many_messages_or_bytes() {
        let turns = Turns::default();
        for (n_bytes, n_messages) in [(0, N_MESSAGES_PER_TURN), (200, 5)] {
            let bytes = frames(&vec![chunk(n_bytes); 2 * N_MESSAGES_PER_TURN]).await;
            let (mut intake, outbox) = (intake(&bytes, &turns), outbox());
            for _ in 0..2 {
                for n in 1..=n_messages {
                    assert!(intake.next(&outbox).await.expect("whole").is_some());
                    let has_rested = intake.rest().now_or_never().is_none();
                    assert_eq!(has_rested, n == n_messages, "{n} of {n_bytes} bytes");
                }
                intake.rest().await;
            }
        }
    }

    #[tokio::test]
    async fn a_request_without_room_stays_bytes_and_keeps_no_turn() {
        let (turns, full) = (Turns::default(), full());
        let text = "x".repeat(5_000);
        let request = ClientMessage::Request { id: 1, call: Call::Message { to: 7, text } };
        let cancel = ClientMessage::Cancel { id: 1 };
        let bytes = frames(&[cancel.clone(), request.clone(), cancel.clone()]).await;
        let mut intake = intake(&bytes, &turns);
        assert_eq!(intake.next(&full).await.expect("whole"), Some(cancel.clone()), "it needs no answer");
        let waited = tokio::time::timeout(Duration::from_millis(50), intake.next(&full)).await;
        assert!(waited.is_err() && intake.is_held);
        assert_eq!(turns.frames.available_permits(), 1);
        assert_eq!(intake.next(&outbox()).await.expect("whole"), Some(request));
        intake.rest().await;
        assert_eq!(intake.next(&full).await.expect("whole"), Some(cancel));
    }

    #[tokio::test]
    async fn who_waits_for_room_leaves_the_queue_for_the_turn() {
        let (turns, outbox) = (Turns::default(), outbox());
        let request =
            ClientMessage::Request { id: 1, call: Call::Message { to: 7, text: "x".repeat(5_000) } };
        let bytes = frames(std::slice::from_ref(&request)).await;
        let mut held: Intake<DuplexStream> = {
            let (ours, mut theirs) = tokio::io::duplex(64 << 10);
            tokio::io::AsyncWriteExt::write_all(&mut theirs, &bytes).await.expect("it has room");
            Intake::new(FrameReader::new(ours, FRAME_BYTES_MAX), &turns)
        };
        let full = full();
        let waited = tokio::time::timeout(Duration::from_millis(50), held.next(&full)).await;
        assert!(waited.is_err() && held.is_held);
        let other = turns.frames.clone().acquire_owned().await.expect("never closed");
        assert!(held.next(&outbox).now_or_never().is_none(), "there is room, and no turn");
        assert!(held.next(&full).now_or_never().is_none(), "there is no room any more");
        drop(other);
        assert_eq!(turns.frames.available_permits(), 1);
        assert_eq!(held.next(&outbox).await.expect("whole"), Some(request));
    }
}
