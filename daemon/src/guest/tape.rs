//! A guest's tape: what it asks of its host and is answered, written down or read back.
//!
//! Everything that a guest can see of the world comes through calls that stand in one order. A tape that records notes
//! each with its answer; one that replays gives the answers and calls nothing, and halts the guest at the first call
//! that is not the recorded one.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::BytesMut;
use trellis_engine::account::{Account, HostCharge};

use super::error::{GuestEnd, GuestFault};
use super::io::{GuestOutput, OutputSender};
use super::limits::GuestLimits;
use crate::recording::{Answer, Begin, Broken, Call, End, Entry, FrameWriter, Reader, Sent, Value};

/// Recorded bytes that go to the client together.
const SENT_BYTES_MIN: usize = 64 << 10;

/// How long the end of a recording waits for a client that reads nothing.
const END_TIME_MAX: Duration = Duration::from_secs(5);

/// Records or replays one guest.
#[derive(Debug)]
pub(crate) struct Tape(Mutex<Mode>);

enum Mode {
    Recording(Recorder),
    Replaying(Box<Replayer>),
}

impl fmt::Debug for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Recording(_) => "Recording",
            Self::Replaying(_) => "Replaying",
        })
    }
}

struct Recorder {
    frames: FrameWriter,
    /// Bytes that may wait here, frames and what was sent since the last of them.
    waiting_bytes_max: usize,
    /// Frames that the client does not have.
    bytes: BytesMut,
    /// The call that the guest is in.
    call: Option<Call>,
    /// What was sent to the client since the last entry.
    sent: Vec<Sent>,
    /// Bytes of that, and of what there was no room to note: credit counts what an entry of a list costs.
    sent_bytes: usize,
    /// For what waits here, in whole pieces.
    charge: HostCharge,
    charged_bytes: usize,
}

impl Recorder {
    fn waiting_bytes(&self) -> usize {
        self.bytes.len() + self.sent_bytes
    }

    /// Pays for what waits.
    ///
    /// # Errors
    /// More waits than may, or than there is memory for.
    fn check(&mut self) -> Result<(), GuestFault> {
        let waiting_bytes = self.waiting_bytes();
        if waiting_bytes > self.waiting_bytes_max {
            return Err(GuestFault::Recording { waiting_bytes });
        }
        self.pay()
    }

    /// # Errors
    /// There is no memory for what waits.
    fn pay(&mut self) -> Result<(), GuestFault> {
        let charged_bytes = self.waiting_bytes().next_multiple_of(SENT_BYTES_MIN);
        if charged_bytes != self.charged_bytes {
            self.charge.resize(charged_bytes as u64).map_err(GuestFault::HostBytes)?;
            self.charged_bytes = charged_bytes;
        }
        Ok(())
    }

    fn take_sent(&mut self) -> Vec<Sent> {
        self.sent_bytes = 0;
        std::mem::take(&mut self.sent)
    }

    fn write(&mut self, entry: &Entry) {
        self.frames.write(entry, &mut self.bytes);
    }
}

struct Replayer {
    reader: Reader,
    output: OutputSender,
    verdict: Option<Verdict>,
}

/// What came of a replay.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// All was the same, and the guest ended so.
    Same(GuestEnd),
    /// The guest did something else than it had done.
    Different(Box<Difference>),
    /// The recording cannot be followed any further.
    Broken(Broken),
}

/// Where a replay left its recording.
#[derive(Debug)]
pub(crate) struct Difference {
    /// The entry of the recording, counted from 1.
    pub(crate) number: u64,
    pub(crate) recorded: Deed,
    pub(crate) replayed: Deed,
}

/// What a guest did next.
#[derive(Debug)]
pub(crate) enum Deed {
    Call(Call),
    End(GuestEnd),
}

/// The guest has left its recording and is not to go on.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the guest has left its recording")]
pub(crate) struct Halted;

impl Tape {
    /// A tape that records; what waits on it is charged to `account`.
    pub(crate) fn record(hash: blake3::Hash, limits: &GuestLimits, account: &Arc<Account>) -> Arc<Self> {
        let mut recorder = Recorder {
            frames: FrameWriter::default(),
            waiting_bytes_max: limits.recording_bytes,
            bytes: BytesMut::new(),
            call: None,
            sent: Vec::new(),
            sent_bytes: 0,
            charge: HostCharge::none(account),
            charged_bytes: 0,
        };
        recorder.write(&Entry::Begin(Box::new(Begin { hash: *hash.as_bytes(), limits: limits.clone() })));
        Arc::new(Self(Mutex::new(Mode::Recording(recorder))))
    }

    /// A tape that replays what comes after [`Entry::Begin`], and sends to `output` what was sent then. That channel
    /// has to take everything at once.
    pub(crate) fn replay(reader: Reader, output: OutputSender) -> Arc<Self> {
        let replayer = Box::new(Replayer { reader, output, verdict: None });
        Arc::new(Self(Mutex::new(Mode::Replaying(replayer))))
    }

    fn lock(&self) -> MutexGuard<'_, Mode> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The guest calls a function. Replaying, this is its answer; recording, the answer has to be noted.
    ///
    /// # Errors
    /// The guest has to end.
    pub(crate) fn begin(
        &self,
        name: &'static str,
        arguments: Vec<Value>,
    ) -> Result<Option<Answer>, wasmtime::Error> {
        let call = Call { name: name.into(), arguments, sent: Vec::new(), answer: None };
        match &mut *self.lock() {
            Mode::Recording(recorder) => {
                recorder.check()?;
                recorder.call = Some(call);
                Ok(None)
            }
            Mode::Replaying(replayer) => Ok(Some(replayer.answer(call)?)),
        }
    }

    /// Notes what came of the call that was begun last.
    ///
    /// # Errors
    /// The guest has to end: in this call more was sent than can be noted.
    pub(crate) fn note_answer(&self, answer: Answer) -> Result<(), GuestFault> {
        if let Mode::Recording(recorder) = &mut *self.lock() {
            recorder.check()?;
            if let Some(call) = recorder.call.take() {
                let sent = recorder.take_sent();
                recorder.write(&Entry::Call(Call { sent, answer: Some(answer), ..call }));
            }
        }
        Ok(())
    }

    /// Pays for what is noted, where it may wait for the client for long: an answer of any length that was noted goes first.
    ///
    /// # Errors
    /// The guest has to end: there is no memory for it.
    pub(crate) fn pay(&self) -> Result<(), GuestFault> {
        match &mut *self.lock() {
            Mode::Recording(recorder) => recorder.pay(),
            Mode::Replaying(_) => Ok(()),
        }
    }

    /// Notes what was sent to the client, unless too much waits: then its guest ends with this call.
    pub(crate) fn note_sent(&self, output: &GuestOutput) {
        if let Mode::Recording(recorder) = &mut *self.lock() {
            recorder.sent_bytes = recorder.sent_bytes.saturating_add(output.credit_bytes());
            if recorder.check().is_ok() {
                recorder.sent.push(Sent(output.clone()));
            }
        }
    }

    /// Calls a function that cannot fail; `None` once the guest has to end.
    pub(crate) fn call(
        &self,
        name: &'static str,
        arguments: Vec<Value>,
        function: impl FnOnce() -> Value,
    ) -> Option<Value> {
        match self.begin(name, arguments) {
            Ok(Some(Answer::Value(value))) => Some(value),
            Ok(Some(_)) | Err(_) => None,
            Ok(None) => {
                let value = function();
                self.note_answer(Answer::Value(value.clone())).ok()?;
                Some(value)
            }
        }
    }

    /// An answer in the recording is not one that the function can give.
    pub(crate) fn refuse_answer(&self) -> wasmtime::Error {
        if let Mode::Replaying(replayer) = &mut *self.lock() {
            let number = replayer.reader.n_entries();
            let offset = replayer.reader.entry_offset();
            replayer.verdict.get_or_insert(Verdict::Broken(Broken::Changed { number, offset }));
        }
        Halted.into()
    }

    /// Sends what was recorded, if there is enough of it.
    pub(crate) async fn flush(&self, output: &OutputSender, piece_bytes: usize) {
        if self.n_bytes_waiting() >= SENT_BYTES_MIN {
            self.send(output, piece_bytes).await;
        }
    }

    async fn send(&self, output: &OutputSender, piece_bytes: usize) {
        loop {
            let n_bytes = self.n_bytes_waiting().min(piece_bytes);
            if n_bytes == 0 {
                return;
            }
            // Bytes are taken off the tape once there is credit for them: the wait may be given up.
            let taken = || GuestOutput::Recorded(self.take(n_bytes));
            if output.send_of_host(n_bytes, taken).await.is_err() {
                return;
            }
        }
    }

    fn n_bytes_waiting(&self) -> usize {
        match &*self.lock() {
            Mode::Recording(recorder) => recorder.bytes.len(),
            Mode::Replaying(_) => 0,
        }
    }

    fn take(&self, n_bytes: usize) -> Vec<u8> {
        match &mut *self.lock() {
            Mode::Recording(recorder) => recorder.bytes.split_to(n_bytes).to_vec(),
            Mode::Replaying(_) => Vec::new(),
        }
    }

    /// The guest has ended, and all that it held is gone.
    pub(crate) async fn finish(&self, end: &GuestEnd, output: &OutputSender, piece_bytes: usize) {
        self.note_end(end);
        // A client that is gone, or reads no more, finds its recording cut short.
        let _ = tokio::time::timeout(END_TIME_MAX, self.send(output, piece_bytes)).await;
    }

    fn note_end(&self, end: &GuestEnd) {
        match &mut *self.lock() {
            Mode::Recording(recorder) => {
                let sent = recorder.take_sent();
                let (call, sent) = match recorder.call.take() {
                    Some(call) => (Some(Call { sent, ..call }), Vec::new()),
                    None => (None, sent),
                };
                recorder.write(&Entry::End(Box::new(End { call, sent, end: end.clone() })));
            }
            Mode::Replaying(replayer) => replayer.finish(end),
        }
    }

    /// What came of a replay, once the guest has ended.
    pub(crate) fn take_verdict(&self) -> Option<Verdict> {
        match &mut *self.lock() {
            Mode::Recording(_) => None,
            Mode::Replaying(replayer) => replayer.verdict.take(),
        }
    }
}

impl Replayer {
    fn answer(&mut self, call: Call) -> Result<Answer, Halted> {
        if self.verdict.is_some() {
            return Err(Halted);
        }
        let number = self.reader.n_entries() + 1;
        let is_same = |other: &Call| other.name == call.name && other.arguments == call.arguments;
        let verdict = match self.reader.entry() {
            Ok(Entry::Call(Call { name, arguments, sent, answer: Some(answer) })) => {
                let recorded = Call { name, arguments, sent: Vec::new(), answer: None };
                if is_same(&recorded) {
                    self.send(sent);
                    return Ok(answer);
                }
                different(number, Deed::Call(recorded), Deed::Call(call))
            }
            // It was ended in this call, or before it, by others.
            Ok(Entry::End(last)) => match *last {
                End { call: Some(recorded), sent, end } if is_same(&recorded) => {
                    self.send(recorded.sent);
                    self.send(sent);
                    Verdict::Same(end)
                }
                End { call: None, sent, end } if is_from_outside(&end) => {
                    self.send(sent);
                    Verdict::Same(end)
                }
                End { call: Some(recorded), .. } => different(number, Deed::Call(recorded), Deed::Call(call)),
                End { call: None, end, .. } => different(number, Deed::End(end), Deed::Call(call)),
            },
            Ok(Entry::Begin(_) | Entry::Call(_)) => Verdict::Broken(self.unexpected()),
            Err(broken) => Verdict::Broken(broken),
        };
        self.verdict = Some(verdict);
        Err(Halted)
    }

    fn finish(&mut self, replayed: &GuestEnd) {
        if self.verdict.is_some() {
            return;
        }
        let number = self.reader.n_entries() + 1;
        let verdict = match self.reader.entry() {
            Ok(Entry::End(last)) => match *last {
                End { call: None, sent, end } if is_same_end(&end, replayed) => {
                    self.send(sent);
                    Verdict::Same(end)
                }
                End { call: None, end, .. } => different(number, Deed::End(end), Deed::End(replayed.clone())),
                End { call: Some(call), .. } => {
                    different(number, Deed::Call(call), Deed::End(replayed.clone()))
                }
            },
            Ok(Entry::Call(call)) => different(number, Deed::Call(call), Deed::End(replayed.clone())),
            Ok(Entry::Begin(_)) => Verdict::Broken(self.unexpected()),
            Err(broken) => Verdict::Broken(broken),
        };
        self.verdict = Some(verdict);
    }

    fn unexpected(&self) -> Broken {
        Broken::Changed { number: self.reader.n_entries(), offset: self.reader.entry_offset() }
    }

    fn send(&self, sent: Vec<Sent>) {
        for Sent(output) in sent {
            // The client may be gone.
            let _ = self.output.try_send(output);
        }
    }
}

fn different(number: u64, recorded: Deed, replayed: Deed) -> Verdict {
    Verdict::Different(Box::new(Difference { number, recorded, replayed }))
}

/// Whether a guest would not have ended so by itself, or not there.
fn is_from_outside(end: &GuestEnd) -> bool {
    matches!(
        end,
        GuestEnd::Stopped
            | GuestEnd::DeadlineExceeded { .. }
            | GuestEnd::IdleExceeded { .. }
            | GuestEnd::HostBytesExceeded { .. }
            | GuestEnd::CpuExceeded { .. }
            | GuestEnd::RecordingExceeded { .. }
            | GuestEnd::DeviceFailed { .. }
            | GuestEnd::ModelFailed { .. }
            | GuestEnd::ModelUnloaded { .. }
            | GuestEnd::ClientGone
            | GuestEnd::Panicked { .. }
    )
}

fn is_same_end(recorded: &GuestEnd, replayed: &GuestEnd) -> bool {
    match (recorded, replayed) {
        // What it would have done after that does not matter.
        (recorded, _) if is_from_outside(recorded) => true,
        // It trapped behind the same calls; the words for that are the host's, or of a panic that was told in a call.
        (GuestEnd::Trapped { .. }, GuestEnd::Trapped { .. }) => true,
        (recorded, replayed) => recorded == replayed,
    }
}

#[cfg(test)]
mod tests {
    use trellis_engine::account::{Budget, Resource};

    use super::*;
    use crate::guest::io::output_channel;

    #[test]
    fn what_waits_for_the_client_is_paid_for_until_it_is_gone() {
        let limits = GuestLimits { recording_bytes: 1 << 20, ..GuestLimits::default() };
        let budget = Budget { host_bytes: 256 << 10, ..Budget::UNLIMITED };
        let account = Account::new("session", budget, None);
        let tape = Tape::record(blake3::hash(b"a component"), &limits, &account);
        let answer = |n_bytes| Answer::Value(Value::Text("x".repeat(n_bytes)));
        let call = |n_bytes| -> Result<(), wasmtime::Error> {
            tape.begin("context.text", Vec::new())?;
            Ok(tape.note_answer(answer(n_bytes))?)
        };
        call(200 << 10).expect("there is room");
        call(1).expect("there is room");
        assert_eq!(account.used(Resource::HostBytes), 256 << 10);
        call(100 << 10).expect("what comes of a call is paid for with the next one");
        let error = tape.pay().expect_err("or where it waits for the client");
        assert!(matches!(error, GuestFault::HostBytes(_)), "{error}");
        let error = call(1).expect_err("the budget is used up");
        assert!(matches!(error.downcast_ref(), Some(GuestFault::HostBytes(_))), "{error}");
        tape.take(300 << 10);
        call(1).expect("the client has it");
        drop(tape);
        assert_eq!(account.used(Resource::HostBytes), 0);
    }

    #[test]
    fn what_is_sent_within_one_call_is_bounded_as_well() {
        const N_OUTPUTS: usize = 10_000;
        let limits = GuestLimits { recording_bytes: 64 << 10, ..GuestLimits::default() };
        let account = Account::new("session", Budget::UNLIMITED, None);
        let tape = Tape::record(blake3::hash(b"a component"), &limits, &account);
        let (output, mut client) = output_channel(usize::MAX);
        let output = output.with_tape(Some(tape.clone()));
        assert!(tape.begin("streams.generate", Vec::new()).expect("there is room").is_none());
        let one = GuestOutput::Text("x".to_owned());
        for _ in 0..N_OUTPUTS {
            assert_eq!(output.try_send(one.clone()), Ok(true));
        }
        let fault = tape.note_answer(Answer::Value(Value::Unit)).expect_err("it is too much");
        let GuestFault::Recording { waiting_bytes } = fault else { panic!("{fault}") };
        assert!(waiting_bytes >= N_OUTPUTS * one.credit_bytes(), "{waiting_bytes} bytes");
        assert!(tape.begin("session.seed", Vec::new()).is_err(), "it has to end");
        let Mode::Recording(recorder) = &*tape.lock() else { panic!("it records") };
        let n_noted = recorder.sent.len();
        assert!((500..=1_008).contains(&n_noted), "{n_noted} are noted");
        // What goes to the client is its own business.
        assert!(client.try_recv().is_some());
    }
}
