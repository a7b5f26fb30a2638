//! What a daemon holds, as it says itself and as the system counts.

use std::{fs, io};

use serde::Serialize;
use trellis_wire::{Call, Value};

use super::raw::Raw;

/// How much more there may be of something afterwards, of 1.
const TOLERANCE: f64 = 0.05;

/// What a daemon holds at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct State {
    /// Guests that run.
    pub n_guests: u64,
    /// Connections.
    pub n_sessions: u64,
    /// Contexts, open or saved.
    pub n_contexts: u64,
    /// KV pages that something holds.
    pub n_pages: u64,
    /// Threads of its process.
    pub n_threads: u64,
    /// Open files of its process.
    pub n_descriptors: u64,
    /// Processes that it has started and that live.
    pub n_children: u64,
    /// Kilobytes of it in memory.
    pub resident_kb: u64,
}

/// The number after a word in a file of `/proc`.
fn number_after(text: &str, word: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(word))?;
    line.split_whitespace().next()?.parse().ok()
}

fn n_entries(folder: &str) -> io::Result<u64> {
    Ok(fs::read_dir(folder)?.count() as u64)
}

/// The parent of a process and its name, and clock ticks of itself and of the children that it has waited for.
pub(crate) struct Process {
    pub(crate) parent: u32,
    pub(crate) is_gone: bool,
    pub(crate) n_ticks: u64,
    pub(crate) n_child_ticks: u64,
}

/// What `/proc` says of a process; `None` where there is none.
pub(crate) fn process(pid: u32) -> Option<Process> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything.
    let (_, rest) = text.rsplit_once(") ")?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let number = |idx: usize| fields.get(idx)?.parse::<u64>().ok();
    Some(Process {
        parent: number(1)? as u32,
        is_gone: fields.first() == Some(&"Z"),
        n_ticks: number(11)? + number(12)?,
        n_child_ticks: number(13)? + number(14)?,
    })
}

fn n_children(pid: u32) -> io::Result<u64> {
    let pids = fs::read_dir("/proc")?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    Ok(pids.filter_map(process).filter(|process| process.parent == pid && !process.is_gone).count() as u64)
}

impl State {
    /// Asks a daemon and looks at its process.
    ///
    /// # Errors
    /// It does not answer, or it is gone.
    pub async fn of(raw: &mut Raw, pid: u32) -> io::Result<Self> {
        let Value::Info { info } = raw.value(Call::Info).await? else {
            return Err(io::Error::other("the answer to info is none"));
        };
        let Value::Models { models } = raw.value(Call::Models).await? else {
            return Err(io::Error::other("the answer to models is none"));
        };
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        Ok(Self {
            n_guests: info.n_guests,
            n_sessions: info.n_sessions,
            n_contexts: models.iter().map(|model| model.n_contexts).sum(),
            n_pages: models.iter().map(|model| model.n_pages - model.n_pages_free).sum(),
            n_threads: n_entries(&format!("/proc/{pid}/task"))?,
            n_descriptors: n_entries(&format!("/proc/{pid}/fd"))?,
            n_children: n_children(pid)?,
            resident_kb: number_after(&status, "VmRSS:").unwrap_or(0),
        })
    }

    /// What is still more than it was, in words; nothing where all is back. Counts of the daemon's own are to be what they
    /// were, those of the system within 5 %.
    #[must_use]
    pub fn beyond(&self, before: &Self) -> Vec<String> {
        let exact = [
            ("guests", self.n_guests, before.n_guests),
            ("connections", self.n_sessions, before.n_sessions),
            ("contexts", self.n_contexts, before.n_contexts),
            ("pages", self.n_pages, before.n_pages),
            ("children", self.n_children, before.n_children),
        ];
        let near = [
            ("threads", self.n_threads, before.n_threads),
            ("descriptors", self.n_descriptors, before.n_descriptors),
            ("kB in memory", self.resident_kb, before.resident_kb),
        ];
        let more = exact.into_iter().filter(|(_, now, before)| now > before);
        let far =
            near.into_iter().filter(|(_, now, before)| *now as f64 > *before as f64 * (1.0 + TOLERANCE));
        more.chain(far).map(|(what, now, before)| format!("{now} {what}, before {before}")).collect()
    }
}

/// Processor time of the whole machine, and of the processes that belong to a measurement.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Load {
    n_busy_ticks: u64,
    n_own_ticks: u64,
}

impl Load {
    /// Now; `pids` are those of the processes that live, children that have ended count with their parents.
    pub(crate) fn of(pids: &[u32]) -> Self {
        let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
        let first = stat.lines().next().unwrap_or_default();
        let fields: Vec<u64> =
            first.split_whitespace().skip(1).filter_map(|field| field.parse().ok()).collect();
        // user nice system idle iowait irq softirq steal; what guests of a hypervisor have is in user already.
        let n_busy_ticks = [0, 1, 2, 5, 6].iter().filter_map(|&idx| fields.get(idx)).sum();
        let own = pids.iter().filter_map(|&pid| process(pid));
        Self { n_busy_ticks, n_own_ticks: own.map(|process| process.n_ticks + process.n_child_ticks).sum() }
    }

    /// Processors that others have kept busy since then.
    pub(crate) fn foreign_since(&self, before: &Self, seconds: f64) -> f64 {
        const TICKS_PER_SECOND: f64 = 100.0;
        let busy = self.n_busy_ticks.saturating_sub(before.n_busy_ticks);
        let own = self.n_own_ticks.saturating_sub(before.n_own_ticks);
        busy.saturating_sub(own) as f64 / TICKS_PER_SECOND / seconds.max(0.01)
    }
}
