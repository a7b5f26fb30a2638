//! What flows between a guest and its session.

use std::sync::Arc;

use futures_util::FutureExt;
use serde::{Deserialize, Serialize};
use tokio::sync::{Semaphore, TryAcquireError, mpsc};
use tokio::task::unconstrained;
use trellis_engine::account::{Account, BudgetExceeded, HostCharge};
use trellis_wire::{OUTPUT_BYTES_MAX, OUTPUT_OVERHEAD_BYTES};

use super::inbox::InboxReceiver;
use super::tape::Tape;

/// Something a guest sends to its client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GuestOutput {
    /// Text.
    Text(String),
    /// Tokens of the guest's model.
    Tokens(Vec<u32>),
    /// One JSON text.
    Json(String),
    /// A line for the log.
    Log {
        /// How much it matters.
        level: LogLevel,
        /// The line.
        line: String,
    },
    /// The next bytes of the guest's recording: what the host says of it, not the guest.
    Recorded(#[serde(with = "serde_bytes")] Vec<u8>),
    /// The next bytes of the guest's profile, of which the same holds.
    Profiled(#[serde(with = "serde_bytes")] Vec<u8>),
}

/// How much a log line matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum LogLevel {
    /// For the guest's author.
    Debug,
    /// For the user that runs it.
    Info,
    /// Something unexpected that the guest went around.
    Warn,
    /// Something that failed.
    Error,
}

impl GuestOutput {
    /// Bytes of what is sent.
    #[must_use]
    pub fn n_bytes(&self) -> usize {
        match self {
            Self::Text(text) | Self::Json(text) => text.len(),
            Self::Tokens(tokens) => size_of_val(tokens.as_slice()),
            Self::Log { line, .. } => line.len(),
            Self::Recorded(bytes) | Self::Profiled(bytes) => bytes.len(),
        }
    }

    /// Bytes that it takes of the client's credit: its own, and for each event in which it travels what an entry of a
    /// queue costs. That bounds the memory of many small outputs, too.
    #[must_use]
    pub fn credit_bytes(&self) -> usize {
        let n_bytes = self.n_bytes();
        let n_events = match self {
            Self::Text(text) => n_pieces(text),
            Self::Tokens(_) | Self::Recorded(_) | Self::Profiled(_) => {
                n_bytes.div_ceil(OUTPUT_BYTES_MAX).max(1)
            }
            Self::Json(_) | Self::Log { .. } => 1,
        };
        n_bytes + n_events * OUTPUT_OVERHEAD_BYTES
    }
}

/// Events in which a text travels, none cut inside a character.
fn n_pieces(text: &str) -> usize {
    let (mut n_pieces, mut begin) = (1, 0);
    while text.len() - begin > OUTPUT_BYTES_MAX {
        begin = text.floor_char_boundary(begin + OUTPUT_BYTES_MAX);
        n_pieces += 1;
    }
    n_pieces
}

/// Why something was not sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OutputRefused {
    /// The client is gone and nothing more can be sent.
    #[error("the client is gone")]
    Closed,
    /// What clients have not read is too much for a budget.
    #[error(transparent)]
    OverBudget(#[from] BudgetExceeded),
}

/// A guest's end of its output: waits while the client's credit is used up.
#[derive(Clone, Debug)]
pub struct OutputSender {
    credit: Arc<Semaphore>,
    way: Way,
    /// Where what is sent is noted, if it is recorded.
    tape: Option<Arc<Tape>>,
    /// Who pays for what is sent until it is read, if anybody does.
    payer: Option<Arc<Account>>,
}

/// How outputs come to the session.
#[derive(Clone, Debug)]
enum Way {
    /// By a queue.
    Queue(mpsc::UnboundedSender<Queued>),
    /// By what takes them at once.
    Sink(Arc<dyn Sink>),
}

/// Takes a guest's outputs to another process, on the guest's thread.
pub(crate) trait Sink: std::fmt::Debug + Send + Sync {
    /// Takes one, after all that it was given before.
    fn take(&self, output: GuestOutput);
}

/// An output that the session has not read.
#[derive(Debug)]
struct Queued {
    output: GuestOutput,
    _charge: Option<HostCharge>,
}

/// The session's end of a guest's output.
#[derive(Debug)]
pub struct OutputReceiver {
    credit: Arc<Semaphore>,
    queue: mpsc::UnboundedReceiver<Queued>,
    /// One that was looked at and did not go with those before it.
    next: Option<Queued>,
}

/// So many outputs have to wait before texts among them go together: what is read as it is written comes as it was written.
const N_WAITING_TOGETHER: usize = 64;

/// So many texts go together at most, and so many bytes: as one text of a guest may have by default.
const N_TOGETHER_MAX: usize = 256;
const BYTES_TOGETHER_MAX: usize = 16 << 10;

/// What so many bytes of the host's take of the client's credit.
fn credit_of_host(n_bytes: usize) -> Result<u32, OutputRefused> {
    let n_events = n_bytes.div_ceil(OUTPUT_BYTES_MAX).max(1);
    u32::try_from(n_bytes + n_events * OUTPUT_OVERHEAD_BYTES).map_err(|_| OutputRefused::Closed)
}

/// Credit without end.
const CREDIT_MAX: usize = Semaphore::MAX_PERMITS / 2;

/// A channel whose bytes in flight never pass the credit that the receiver has granted. The queue itself has
/// no bound of its own: credit is what bounds it, with what an entry costs counted for each entry.
#[must_use]
pub fn output_channel(credit_bytes: usize) -> (OutputSender, OutputReceiver) {
    let credit = Arc::new(Semaphore::new(credit_bytes.min(CREDIT_MAX)));
    let (tx, rx) = mpsc::unbounded_channel();
    let sender = OutputSender { credit: credit.clone(), way: Way::Queue(tx), tape: None, payer: None };
    (sender, OutputReceiver { credit, queue: rx, next: None })
}

/// The sender of a guest whose session is in another process, without credit at first; and what gives it credit, until it is
/// dropped.
pub(crate) fn output_to(sink: Arc<dyn Sink>) -> (OutputSender, Creditor) {
    let credit = Arc::new(Semaphore::new(0));
    let sender = OutputSender { credit: credit.clone(), way: Way::Sink(sink), tape: None, payer: None };
    (sender, Creditor(Granter(credit)))
}

/// Stands for the client of a guest whose outputs go to a [`Sink`]. Once this is dropped the client is gone.
#[derive(Debug)]
pub(crate) struct Creditor(Granter);

impl Creditor {
    /// Lets the guest send so many bytes more.
    pub(crate) fn grant(&self, n_bytes: usize) {
        self.0.grant(n_bytes);
    }
}

impl Drop for Creditor {
    fn drop(&mut self) {
        self.0.0.close();
    }
}

impl OutputSender {
    /// Sends one output once the client has credit for it.
    ///
    /// # Errors
    /// The client is gone, or a budget has no room for it.
    pub async fn send(&self, output: GuestOutput) -> Result<(), OutputRefused> {
        let n_bytes = u32::try_from(output.credit_bytes()).map_err(|_| OutputRefused::Closed)?;
        let permit = self.credit.acquire_many(n_bytes).await.map_err(|_| OutputRefused::Closed)?;
        let charge = self.charge(n_bytes)?;
        permit.forget();
        self.note(&output);
        self.push(output, charge)
    }

    /// Sends one output if the client has credit for it now; says whether it was sent.
    ///
    /// # Errors
    /// As for [`Self::send`].
    pub fn try_send(&self, output: GuestOutput) -> Result<bool, OutputRefused> {
        let n_bytes = u32::try_from(output.credit_bytes()).map_err(|_| OutputRefused::Closed)?;
        let permit = match self.credit.try_acquire_many(n_bytes) {
            Ok(permit) => permit,
            Err(TryAcquireError::NoPermits) => return Ok(false),
            Err(TryAcquireError::Closed) => return Err(OutputRefused::Closed),
        };
        let charge = self.charge(n_bytes)?;
        permit.forget();
        self.note(&output);
        self.push(output, charge).map(|()| true)
    }

    /// Sends so many bytes of what the host says of the guest once the client has credit for them, and makes them only then.
    ///
    /// # Errors
    /// As for [`Self::send`].
    pub(crate) async fn send_of_host(
        &self,
        n_bytes: usize,
        output: impl FnOnce() -> GuestOutput,
    ) -> Result<(), OutputRefused> {
        let n_bytes = credit_of_host(n_bytes)?;
        let permit = self.credit.acquire_many(n_bytes).await.map_err(|_| OutputRefused::Closed)?;
        let charge = self.charge(n_bytes)?;
        permit.forget();
        self.push(output(), charge)
    }

    /// Sends so many bytes of that if the client has credit for them now, and makes them only then; says whether it had.
    ///
    /// # Errors
    /// As for [`Self::send`].
    pub(crate) fn try_send_of_host(
        &self,
        n_bytes: usize,
        output: impl FnOnce() -> GuestOutput,
    ) -> Result<bool, OutputRefused> {
        let n_bytes = credit_of_host(n_bytes)?;
        let Ok(permit) = self.credit.try_acquire_many(n_bytes) else { return Ok(false) };
        let charge = self.charge(n_bytes)?;
        permit.forget();
        self.push(output(), charge).map(|()| true)
    }

    /// Waits until the client has given credit, and takes all of it, for a guest that counts by itself what it sends. `None`
    /// once the client is gone.
    pub(crate) async fn lend(&self) -> Option<usize> {
        self.credit.acquire().await.ok()?.forget();
        // In one go, however much that is: whoever lends has the guests of all users to see to.
        Some(1 + self.credit.forget_permits(usize::MAX))
    }

    /// Sends what such a guest has counted.
    ///
    /// # Errors
    /// As for [`Self::send`].
    pub(crate) fn send_lent(&self, output: GuestOutput) -> Result<(), OutputRefused> {
        let charge = self.charge(u32::try_from(output.credit_bytes()).unwrap_or(u32::MAX))?;
        self.push(output, charge)
    }

    /// The same, with what is sent noted on a tape.
    pub(crate) fn with_tape(self, tape: Option<Arc<Tape>>) -> Self {
        Self { tape, ..self }
    }

    /// The same, with what is sent paid for until it is read.
    pub(crate) fn paid_by(self, account: Arc<Account>) -> Self {
        Self { payer: Some(account), ..self }
    }

    fn charge(&self, n_bytes: u32) -> Result<Option<HostCharge>, BudgetExceeded> {
        // What a sink takes is not kept here.
        let payer = self.payer.as_ref().filter(|_| matches!(self.way, Way::Queue(_)));
        payer.map(|account| HostCharge::new(account, u64::from(n_bytes))).transpose()
    }

    fn push(&self, output: GuestOutput, charge: Option<HostCharge>) -> Result<(), OutputRefused> {
        match &self.way {
            Way::Queue(queue) => {
                queue.send(Queued { output, _charge: charge }).map_err(|_| OutputRefused::Closed)
            }
            Way::Sink(_) if self.is_closed() => Err(OutputRefused::Closed),
            Way::Sink(sink) => {
                sink.take(output);
                Ok(())
            }
        }
    }

    fn note(&self, output: &GuestOutput) {
        if let Some(tape) = &self.tape {
            tape.note_sent(output);
        }
    }
}

impl OutputSender {
    /// Whether the client is gone.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.credit.is_closed()
    }
}

impl OutputReceiver {
    /// The next output; `None` once the guest has ended and all is read. Dropping the future loses nothing.
    pub async fn recv(&mut self) -> Option<GuestOutput> {
        match self.next.take() {
            Some(next) => Some(next.output),
            None => self.queue.recv().await.map(|queued| queued.output),
        }
    }

    /// The next output, if it is there.
    pub(crate) fn try_recv(&mut self) -> Option<GuestOutput> {
        let next = self.next.take().or_else(|| self.queue.try_recv().ok());
        next.map(|queued| queued.output)
    }

    /// As [`Self::recv`], with texts of a guest that is far ahead going together: what an event costs on its way is not for each
    /// of their bytes. What they take less of the client's credit that way is the guest's again.
    pub(crate) async fn recv_together(&mut self) -> Option<GuestOutput> {
        match self.recv().await? {
            GuestOutput::Text(text) if self.queue.len() >= N_WAITING_TOGETHER => {
                Some(GuestOutput::Text(self.with_texts_behind(text)))
            }
            output => Some(output),
        }
    }

    /// A text, with those behind it that wait already.
    fn with_texts_behind(&mut self, mut text: String) -> String {
        let mut n_together = 1;
        while n_together < N_TOGETHER_MAX {
            // The queue's own `try_recv` would have the thread wait where a sender is in the middle of sending.
            let Some(Some(queued)) = unconstrained(self.queue.recv()).now_or_never() else { break };
            match &queued.output {
                GuestOutput::Text(more) if text.len() + more.len() <= BYTES_TOGETHER_MAX => {
                    text.push_str(more);
                }
                _ => {
                    self.next = Some(queued);
                    break;
                }
            }
            n_together += 1;
        }
        self.grant((n_together - 1) * OUTPUT_OVERHEAD_BYTES);
        text
    }

    /// Lets the guest send so many bytes more.
    pub fn grant(&self, n_bytes: usize) {
        Granter(self.credit.clone()).grant(n_bytes);
    }
}

/// Lets a guest send more.
#[derive(Debug)]
struct Granter(Arc<Semaphore>);

impl Granter {
    fn grant(&self, n_bytes: usize) {
        // What a guest that waits for more has got already is not among those that are available, and may come back.
        let room = CREDIT_MAX.saturating_sub(self.0.available_permits());
        self.0.add_permits(n_bytes.min(room));
    }
}

impl Drop for OutputReceiver {
    fn drop(&mut self) {
        self.credit.close();
    }
}

/// Both directions of a guest's talk with its client.
#[derive(Debug)]
pub struct GuestIo {
    /// What the guest sends.
    pub output: OutputSender,
    /// What the client sends; closed when it will send no more.
    pub input: InboxReceiver,
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::task::{Context, Waker};

    use super::*;

    #[test]
    fn credit_without_end_leaves_room_for_what_a_guest_that_waits_has_got() {
        let (sender, receiver) = output_channel(10_000);
        let mut cx = Context::from_waker(Waker::noop());
        let mut waiting = Box::pin(sender.send_of_host(50_000, || GuestOutput::Recorded(vec![0; 50_000])));
        assert!(waiting.as_mut().poll(&mut cx).is_pending(), "it holds what credit there is");
        for _ in 0..2 {
            receiver.grant(usize::MAX);
        }
        drop(waiting);
        assert!(matches!(sender.try_send(GuestOutput::Text("it goes on".to_owned())), Ok(true)));
    }

    #[tokio::test]
    async fn all_credit_is_lent_at_once_also_credit_without_end() {
        let (sender, receiver) = output_channel(10);
        assert_eq!(sender.lend().await, Some(10));
        let begun = std::time::Instant::now();
        receiver.grant(usize::MAX);
        assert_eq!(sender.lend().await, Some(CREDIT_MAX));
        assert!(begun.elapsed() < std::time::Duration::from_secs(1), "{:?}", begun.elapsed());
        receiver.grant(5);
        assert_eq!(sender.lend().await, Some(5));
        drop(receiver);
        assert_eq!(sender.lend().await, None);
    }

    #[tokio::test]
    async fn texts_of_a_guest_that_is_far_ahead_go_together_and_the_credit_between_them_is_its_again() {
        let credit = 200_000;
        let (sender, mut receiver) = output_channel(credit);
        let send = |n: usize, output: GuestOutput| {
            (0..n).for_each(|_| assert_eq!(sender.try_send(output.clone()), Ok(true)));
        };
        let text = |text: &str| GuestOutput::Text(text.to_owned());
        let tokens = || GuestOutput::Tokens(vec![7]);
        // Of few each goes alone, and so does each where they are not to go together.
        send(N_WAITING_TOGETHER, text("a"));
        for _ in 0..N_WAITING_TOGETHER {
            assert_eq!(receiver.recv_together().await, Some(text("a")));
        }
        send(100, text("a"));
        for _ in 0..100 {
            assert_eq!(receiver.recv().await, Some(text("a")));
        }
        let long = "c".repeat(BYTES_TOGETHER_MAX);
        send(100, text("é"));
        send(1, tokens());
        send(100, text("b"));
        send(1, text(&long));
        let mut seen = Vec::new();
        for _ in 0..4 {
            seen.push(receiver.recv_together().await.expect("it is there"));
        }
        assert_eq!(seen, [text(&"é".repeat(100)), tokens(), text(&"b".repeat(100)), text(&long)]);
        assert_eq!(receiver.try_recv(), None);
        // What has gone took its part of the credit as one output does, as the client sees it.
        let gone = (N_WAITING_TOGETHER + 100) * text("a").credit_bytes();
        let gone = gone + seen.iter().map(GuestOutput::credit_bytes).sum::<usize>();
        assert_eq!(sender.credit.available_permits(), credit - gone);
        send(2 * N_TOGETHER_MAX + N_WAITING_TOGETHER, text(""));
        for _ in 0..2 {
            assert_eq!(receiver.recv_together().await, Some(text("")));
        }
        let n_left = std::iter::from_fn(|| receiver.try_recv()).count();
        assert_eq!(n_left, N_WAITING_TOGETHER, "texts of nothing end, too");
    }
}
