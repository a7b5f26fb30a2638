//! Notes where the time of one guest goes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use trellis_engine::account::{StepLog, StepNote};
use wasmtime::WasmBacktrace;

use super::cpu::CpuClock;
use super::io::{GuestOutput, OutputSender};
use super::run::Vitals;
use crate::profile::{Entry, Moment};

/// Bytes that go to the client together.
const SENT_BYTES_MIN: usize = 64 << 10;

/// Bytes that may wait for a client that does not read; what comes after them is lost, and counted.
const WAITING_BYTES_MAX: usize = 4 << 20;

/// How long the end of a profile waits for a client that reads nothing.
const END_TIME_MAX: Duration = Duration::from_secs(5);

/// Functions of a sample, from the innermost out.
const N_FRAMES_MAX: usize = 64;

/// Bytes of the name of a function.
const NAME_BYTES_MAX: usize = 200;

/// Different names that are kept.
const N_TEXTS_MAX: usize = 1 << 14;

/// The profile of one guest.
#[derive(Debug)]
pub(crate) struct Profile {
    started: Instant,
    cpu: Arc<CpuClock>,
    steps: Arc<StepLog>,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    texts: FxHashMap<String, u32>,
    /// What the client does not have yet.
    bytes: Vec<u8>,
    n_lost: u64,
    /// Processor time of the host, in calls.
    in_calls_ns: u64,
    /// Processor time of the guest itself at its last sample.
    sampled_ns: u64,
}

/// A host call that is under way; noted when dropped, however it ends.
pub(crate) struct Calling(Option<(Arc<Profile>, &'static str, Moment)>);

impl Profile {
    pub(crate) fn new(vitals: &Vitals) -> Arc<Self> {
        let steps = vitals.account.watch_steps();
        let (started, cpu) = (vitals.started, vitals.cpu.clone());
        Arc::new(Self { started, cpu, steps, inner: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn moment(&self) -> Moment {
        Moment { at_ns: as_ns(self.started.elapsed()), cpu_ns: as_ns(self.cpu.used()) }
    }

    /// The guest's first instruction is next.
    pub(crate) fn note_begin(&self) {
        let moment = self.moment();
        let mut inner = self.lock();
        inner.in_calls_ns = moment.cpu_ns;
        inner.note(&Entry::Begin(moment));
    }

    /// Where the guest is, if it has computed since this was noted last.
    pub(crate) fn note_sample(&self, stack: &WasmBacktrace) {
        let Moment { at_ns, cpu_ns } = self.moment();
        let mut inner = self.lock();
        let now_ns = cpu_ns.saturating_sub(inner.in_calls_ns);
        let guest_ns = now_ns.saturating_sub(inner.sampled_ns);
        inner.sampled_ns = now_ns;
        let names = stack.frames().iter().take(N_FRAMES_MAX).map(|frame| match frame.func_name() {
            Some(name) => demangled(name),
            // The names were stripped.
            None => format!("function {}", frame.func_index()),
        });
        let stack = names.filter_map(|name| inner.text(&name)).collect();
        inner.note(&Entry::Sample { at_ns, guest_ns, stack });
    }

    fn note_call(&self, name: &'static str, begin: Moment) {
        let end = self.moment();
        let mut inner = self.lock();
        inner.in_calls_ns += end.cpu_ns.saturating_sub(begin.cpu_ns);
        match inner.text(name) {
            Some(name) => inner.note(&Entry::Call { name, begin, end }),
            None => inner.n_lost += 1,
        }
    }

    fn note_steps(&self) {
        let (steps, n_lost) = self.steps.take();
        let mut inner = self.lock();
        inner.n_lost += n_lost;
        for StepNote { ended, elapsed, n_rows, n_tokens } in steps {
            let end_ns = as_ns(ended.saturating_duration_since(self.started));
            inner.note(&Entry::Step { end_ns, elapsed_ns: as_ns(elapsed), n_rows, n_tokens });
        }
    }

    /// Sends what was noted, if there is enough of it.
    pub(crate) async fn flush(&self, output: &OutputSender, piece_bytes: usize) {
        if self.n_bytes_waiting() >= SENT_BYTES_MIN {
            self.note_steps();
            self.send(output, piece_bytes).await;
        }
    }

    /// The guest has ended.
    pub(crate) async fn finish(&self, output: &OutputSender, piece_bytes: usize) {
        self.note_end();
        // A client that is gone, or reads no more, finds its profile cut short.
        let _ = tokio::time::timeout(END_TIME_MAX, self.send(output, piece_bytes)).await;
    }

    fn note_end(&self) {
        self.note_steps();
        let end = self.moment();
        let mut inner = self.lock();
        let n_lost = inner.n_lost;
        Entry::End { end, n_lost }.write(&mut inner.bytes);
    }

    async fn send(&self, output: &OutputSender, piece_bytes: usize) {
        loop {
            let n_bytes = self.n_bytes_waiting().min(piece_bytes);
            if n_bytes == 0 {
                return;
            }
            // Bytes are taken once there is credit for them: the wait may be given up.
            let taken = || GuestOutput::Profiled(self.lock().bytes.drain(..n_bytes).collect());
            if output.send_of_host(n_bytes, taken).await.is_err() {
                return;
            }
        }
    }

    fn n_bytes_waiting(&self) -> usize {
        self.lock().bytes.len()
    }
}

impl Inner {
    fn note(&mut self, entry: &Entry) {
        match self.bytes.len() < WAITING_BYTES_MAX {
            true => entry.write(&mut self.bytes),
            false => self.n_lost += 1,
        }
    }

    /// The number of a text, which is said when it is met first.
    fn text(&mut self, text: &str) -> Option<u32> {
        if let Some(&number) = self.texts.get(text) {
            return Some(number);
        }
        if self.texts.len() >= N_TEXTS_MAX {
            return None;
        }
        let number = u32::try_from(self.texts.len()).ok()?;
        Entry::Text(text.to_owned()).write(&mut self.bytes);
        self.texts.insert(text.to_owned(), number);
        Some(number)
    }
}

impl Calling {
    /// A call begins, in a guest that may have a profile.
    pub(crate) fn begin(profile: Option<&Arc<Profile>>, name: &'static str) -> Self {
        Self(profile.map(|profile| (profile.clone(), name, profile.moment())))
    }
}

impl Drop for Calling {
    fn drop(&mut self) {
        if let Some((profile, name, begin)) = self.0.take() {
            profile.note_call(name, begin);
        }
    }
}

fn demangled(name: &str) -> String {
    let name = format!("{:#}", rustc_demangle::demangle(name));
    name[..name.floor_char_boundary(NAME_BYTES_MAX)].to_owned()
}

fn as_ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
