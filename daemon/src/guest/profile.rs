//! Notes where the time of one guest goes.

use std::fmt::{self, Write as _};
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
const WAITING_BYTES_MAX: usize = 1 << 20;

/// How long the end of a profile waits for a client that reads nothing.
const END_TIME_MAX: Duration = Duration::from_secs(5);

/// Bytes of the name of a function, as its module has it and as people read it. A name that is cut stays as it is.
const RAW_NAME_BYTES_MAX: usize = 512;
const NAME_BYTES_MAX: usize = 200;

/// Functions of a guest whose names are kept; the others go by one name.
const N_FUNCTIONS_MAX: usize = 1 << 12;

/// The name of the others.
const OTHERS: &str = "(others)";

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
    /// Names of host functions.
    texts: FxHashMap<&'static str, u32>,
    /// Functions of the guest, by their names as its modules have them.
    functions: FxHashMap<String, u32>,
    n_texts: u32,
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
        Moment { at_ns: as_ns(self.started.elapsed()), cpu_ns: as_ns(self.cpu.used_now()) }
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
        let functions = stack.frames().iter().map(|frame| match frame.func_name() {
            Some(name) => inner.function(name),
            // The names were stripped.
            None => inner.function(&format!("function {}", frame.func_index())),
        });
        let stack = functions.collect();
        inner.note(&Entry::Sample { at_ns, guest_ns, stack });
    }

    fn note_call(&self, name: &'static str, begin: Moment) {
        let end = self.moment();
        let mut inner = self.lock();
        inner.in_calls_ns += end.cpu_ns.saturating_sub(begin.cpu_ns);
        let name = inner.text(name);
        inner.note(&Entry::Call { name, begin, end });
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

    /// Sends what was noted, if there is enough of it and the client has room: no guest waits for who looks on.
    pub(crate) fn flush(&self, output: &OutputSender, piece_bytes: usize) {
        self.note_steps();
        loop {
            let n_bytes = self.n_bytes_waiting();
            if n_bytes < SENT_BYTES_MIN {
                return;
            }
            let n_bytes = n_bytes.min(piece_bytes);
            if output.try_send_of_host(n_bytes, || self.take(n_bytes)) != Ok(true) {
                return;
            }
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
            if output.send_of_host(n_bytes, || self.take(n_bytes)).await.is_err() {
                return;
            }
        }
    }

    fn take(&self, n_bytes: usize) -> GuestOutput {
        GuestOutput::Profiled(self.lock().bytes.drain(..n_bytes).collect())
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

    /// The number of a host function's name.
    fn text(&mut self, text: &'static str) -> u32 {
        if let Some(&number) = self.texts.get(text) {
            return number;
        }
        let number = self.say(text);
        self.texts.insert(text, number);
        number
    }

    /// The number of a guest's function.
    fn function(&mut self, name: &str) -> u32 {
        let name = &name[..name.floor_char_boundary(RAW_NAME_BYTES_MAX)];
        if let Some(&number) = self.functions.get(name) {
            return number;
        }
        if self.functions.len() >= N_FUNCTIONS_MAX {
            return self.text(OTHERS);
        }
        let number = self.say(&demangled(name));
        self.functions.insert(name.to_owned(), number);
        number
    }

    /// Says a text, which goes by its number from here on. There is room for all that there may be.
    fn say(&mut self, text: &str) -> u32 {
        Entry::Text(text.to_owned()).write(&mut self.bytes);
        self.n_texts += 1;
        self.n_texts - 1
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

/// The beginning of a text. What is longer is not even made: a short name may stand for a very long one.
struct Beginning(String);

impl fmt::Write for Beginning {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = NAME_BYTES_MAX - self.0.len();
        self.0.push_str(&text[..text.floor_char_boundary(room)]);
        if text.len() > room { Err(fmt::Error) } else { Ok(()) }
    }
}

fn demangled(name: &str) -> String {
    let mut beginning = Beginning(String::new());
    // An error is the end of the room.
    let _ = write!(beginning, "{:#}", rustc_demangle::demangle(name));
    beginning.0
}

fn as_ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_readable_said_once_and_bounded() {
        let mut inner = Inner::default();
        let first = inner.function("_ZN5panic3run17h0123456789abcdefE");
        assert_eq!(inner.function("_ZN5panic3run17h0123456789abcdefE"), first);
        let long = "é".repeat(5000);
        inner.function(&long);
        for number in 0..2 * N_FUNCTIONS_MAX {
            inner.function(&format!("function {number}"));
        }
        assert_eq!(inner.function("one more"), inner.function("and another"));
        let texts: Vec<String> = crate::profile::entries(&inner.bytes)
            .into_iter()
            .map(|entry| match entry {
                Entry::Text(text) => text,
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(texts.len(), N_FUNCTIONS_MAX + 1);
        assert_eq!(texts[0], "panic::run");
        assert!(texts[1].len() <= NAME_BYTES_MAX && long.starts_with(&texts[1]), "{:?}", texts[1]);
        assert_eq!(texts.last().map(String::as_str), Some(OTHERS));
    }
}
