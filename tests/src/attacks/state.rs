//! What a daemon holds, as it says itself and as the system counts.

use std::time::{Duration, Instant};
use std::{fs, io};

use serde::Serialize;
use trellis_wire::{Call, Value};

use super::raw::Raw;

/// How much more there may be of something afterwards, of 1.
const TOLERANCE: f64 = 0.05;

/// The limits of the programs that are kept: their number, the modules of each, and the memory that they take.
const N_PROGRAMS: &str = "limits.n_programs";
const N_MODULES: &str = "limits.n_instances";
const PROGRAM_BYTES: &str = "limits.program_bytes";

/// What files are called from which memories of programs begin.
const IMAGE: &str = "wasm-memory-image";

/// Time between two looks at a daemon that is to come to rest.
const LOOK_PERIOD: Duration = Duration::from_millis(200);

/// The longest time between two looks at what is left of attacks. A look is work of the daemon's, and among threads that take it by turns
/// none would ever be without work for the ten seconds after which it ends.
pub(super) const LOOK_PERIOD_MAX: Duration = Duration::from_secs(12);

/// How long nothing changes in a daemon at rest: longer than threads that have nothing to do are kept.
const QUIET_TIME: Duration = Duration::from_secs(12);

/// How long a daemon may take to come to rest, and to give back what was taken: processes without guests are kept for a minute.
const REST_TIME_MAX: Duration = Duration::from_secs(120);

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
    /// Open files of its process, images not counted.
    pub n_descriptors: u64,
    /// Open files from which memories of programs begin: at most one for each module of those that are kept.
    pub n_images: u64,
    /// Modules that the programs have at most which are kept for the next start.
    pub n_modules_most: u64,
    /// Processes that it has started and that live.
    pub n_children: u64,
    /// Those of them whose open files and memory the system does not show to this user: processes of guests, to whoever is not root.
    /// What they hold is not among `n_children_descriptors` and `held_kb`.
    pub n_hidden: u64,
    /// Kilobytes of it in memory.
    pub resident_kb: u64,
    /// Kilobytes of programs among those, kept for the next start: no more than `limits.program_bytes`.
    pub programs_kb: u64,
    /// Kilobytes of those processes in memory.
    pub children_resident_kb: u64,
    /// Threads of those processes.
    pub n_children_threads: u64,
    /// Open files of those processes, images not counted.
    pub n_children_descriptors: u64,
    /// Kilobytes that it and those processes hold together: what they have written to, and of what several processes share to each
    /// its part, so that memory between the daemon and a process of guests counts once. Pages of files are not among it: they are the
    /// system's, which takes them back by itself, and as many as other processes of the same program leave to these.
    pub held_kb: u64,
}

/// The number after a word in a file of `/proc`.
fn number_after(text: &str, word: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(word))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Open files of a process, and those among them that are images.
fn descriptors(pid: u32) -> io::Result<(u64, u64)> {
    let (mut n_others, mut n_images) = (0, 0);
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        // One may be closed by now.
        let file = fs::read_link(entry?.path()).unwrap_or_default();
        let n = if file.to_string_lossy().contains(IMAGE) { &mut n_images } else { &mut n_others };
        *n += 1;
    }
    Ok((n_others, n_images))
}

fn n_threads(pid: u32) -> io::Result<u64> {
    Ok(fs::read_dir(format!("/proc/{pid}/task"))?.count() as u64)
}

/// Kilobytes that a process holds, as [`State::held_kb`] counts them.
fn held_kb(pid: u32) -> io::Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let parts = ["Pss_Anon:", "Pss_Shmem:"].map(|word| number_after(&text, word));
    let missing = || io::Error::other("the system does not say what of a process is in memory");
    parts.into_iter().sum::<Option<u64>>().ok_or_else(missing)
}

/// What is looked up of a child: nothing of one that has ended by now, and `None` where the system does not show it.
///
/// # Errors
/// The system has failed otherwise.
pub fn of_child<T: Default>(
    looked_up: io::Result<T>,
    has_ended: impl FnOnce() -> bool,
) -> io::Result<Option<T>> {
    let is_gone = |error: &io::Error| {
        error.kind() == io::ErrorKind::NotFound
            || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
    };
    match looked_up {
        Err(error) if is_gone(&error) => Ok(Some(T::default())),
        // What is left of a process that nobody has waited for yet is root's.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Ok(has_ended().then(|| T::default()))
        }
        looked_up => looked_up.map(Some),
    }
}

/// What the processes of a daemon hold, as far as the system shows it.
#[derive(Debug, Default)]
struct OfChildren {
    n_threads: u64,
    n_descriptors: u64,
    held_kb: u64,
    n_hidden: u64,
}

impl OfChildren {
    fn of(children: &[u32]) -> io::Result<Self> {
        let mut sum = Self::default();
        for &pid in children {
            let has_ended = || process(pid).is_none_or(|process| process.is_gone);
            sum.n_threads += of_child(n_threads(pid), has_ended)?.unwrap_or(0);
            let looked_up = descriptors(pid).and_then(|(n_files, _)| Ok((n_files, held_kb(pid)?)));
            match of_child(looked_up, has_ended)? {
                Some((n_descriptors, held_kb)) => {
                    sum.n_descriptors += n_descriptors;
                    sum.held_kb += held_kb;
                }
                None => sum.n_hidden += 1,
            }
        }
        Ok(sum)
    }
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

/// The processes that this one has started and that live.
pub(crate) fn children(pid: u32) -> io::Result<Vec<u32>> {
    let pids = fs::read_dir("/proc")?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_child = |&other: &u32| process(other).is_some_and(|other| other.parent == pid && !other.is_gone);
    Ok(pids.filter(is_child).collect())
}

/// Kilobytes of a process in memory; none of one that has ended.
pub(crate) fn resident_kb(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    number_after(&status, "VmRSS:").unwrap_or(0)
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
        let Value::Limits { limits } = raw.value(Call::Limits).await? else {
            return Err(io::Error::other("the answer to limits is none"));
        };
        let named = |name: &str| limits.iter().find(|limit| limit.name == name);
        let used = |name: &str| named(name).and_then(|limit| limit.used_by_all).unwrap_or(0);
        let limit = |name: &str| named(name).and_then(|limit| limit.value).unwrap_or(0);
        let children = children(pid)?;
        let (n_descriptors, n_images) = descriptors(pid)?;
        let of_children = OfChildren::of(&children)?;
        let not_shown = |error: io::Error| match error.kind() {
            io::ErrorKind::PermissionDenied => {
                io::Error::other(format!("what the daemon, process {pid}, holds is not shown: {error}"))
            }
            _ => error,
        };
        Ok(Self {
            n_guests: info.n_guests,
            n_sessions: info.n_sessions,
            n_contexts: models.iter().map(|model| model.n_contexts).sum(),
            n_pages: models.iter().map(|model| model.n_pages - model.n_pages_free).sum(),
            n_threads: n_threads(pid)?,
            n_descriptors,
            n_images,
            n_modules_most: used(N_PROGRAMS) * limit(N_MODULES),
            n_children: children.len() as u64,
            resident_kb: resident_kb(pid),
            programs_kb: used(PROGRAM_BYTES) >> 10,
            children_resident_kb: children.iter().copied().map(resident_kb).sum(),
            n_hidden: of_children.n_hidden,
            n_children_threads: of_children.n_threads,
            n_children_descriptors: of_children.n_descriptors,
            held_kb: held_kb(pid).map_err(not_shown)? + of_children.held_kb,
        })
    }

    /// Waits until no guest runs, no process of guests is kept, and threads and files are what they stay.
    ///
    /// # Errors
    /// The daemon is gone, or does not come to rest.
    pub async fn at_rest(raw: &mut Raw, pid: u32) -> io::Result<Self> {
        let begun = Instant::now();
        let (mut last, mut since) = (Self::of(raw, pid).await?, Instant::now());
        loop {
            tokio::time::sleep(LOOK_PERIOD).await;
            let state = Self::of(raw, pid).await?;
            let is_idle = state.n_guests == 0 && state.n_children == 0;
            let counts = |state: &Self| (state.n_threads, state.n_descriptors, state.n_contexts);
            if !is_idle || counts(&state) != counts(&last) {
                since = Instant::now();
            }
            last = state;
            if since.elapsed() > QUIET_TIME {
                return Ok(state);
            }
            if begun.elapsed() > REST_TIME_MAX {
                return Err(io::Error::other(format!("not at rest after {REST_TIME_MAX:?}: {state:?}")));
            }
        }
    }

    /// Waits until a daemon holds no more than it held before; what it holds then, and what of it is too much.
    ///
    /// # Errors
    /// The daemon is gone.
    pub async fn back(raw: &mut Raw, pid: u32, before: &Self) -> io::Result<(Self, Vec<String>)> {
        let (begun, mut period) = (Instant::now(), LOOK_PERIOD);
        loop {
            let state = Self::of(raw, pid).await?;
            let beyond = state.beyond(before);
            if beyond.is_empty() || begun.elapsed() > REST_TIME_MAX {
                return Ok((state, beyond));
            }
            tokio::time::sleep(period).await;
            period = (2 * period).min(LOOK_PERIOD_MAX);
        }
    }

    /// Kilobytes of it in memory beside programs that are kept.
    fn beside_programs_kb(&self) -> u64 {
        self.resident_kb.saturating_sub(self.programs_kb)
    }

    /// Kilobytes that it and its processes hold beside programs that are kept.
    fn held_beside_programs_kb(&self) -> u64 {
        self.held_kb.saturating_sub(self.programs_kb)
    }

    /// Has what is compared with this state later be compared with no less than another one has.
    pub fn raise_to(&mut self, other: &Self) {
        if other.beside_programs_kb() > self.beside_programs_kb()
            || other.held_beside_programs_kb() > self.held_beside_programs_kb()
        {
            self.resident_kb = other.resident_kb.max(self.beside_programs_kb() + other.programs_kb);
            self.held_kb = other.held_kb.max(self.held_beside_programs_kb() + other.programs_kb);
            self.programs_kb = other.programs_kb;
        }
        (self.n_images, self.n_modules_most) = (other.n_images, other.n_modules_most);
        let Self {
            n_threads,
            n_descriptors,
            n_contexts,
            n_pages,
            n_children,
            n_hidden,
            n_children_threads,
            n_children_descriptors,
            ..
        } = self;
        for (number, seen) in [
            (n_threads, other.n_threads),
            (n_descriptors, other.n_descriptors),
            (n_contexts, other.n_contexts),
            (n_pages, other.n_pages),
            (n_children, other.n_children),
            (n_hidden, other.n_hidden),
            (n_children_threads, other.n_children_threads),
            (n_children_descriptors, other.n_children_descriptors),
        ] {
            *number = seen.max(*number);
        }
    }

    /// Images beyond one for each module of programs that are kept.
    fn n_images_more(&self) -> u64 {
        self.n_images.saturating_sub(self.n_modules_most)
    }

    /// In one line.
    #[must_use]
    pub fn line(&self) -> String {
        let Self { n_guests, n_sessions, n_pages, n_threads, n_descriptors, n_children, .. } = self;
        let mib = |kb: u64| kb / 1024;
        let (own, theirs) = (mib(self.resident_kb), mib(self.children_resident_kb));
        let (programs, held) = (mib(self.programs_kb), mib(self.held_kb));
        format!(
            "{n_guests} guests, {n_sessions} connections, {own} MiB with {programs} of programs, {n_threads} threads, {n_descriptors} files, {n_pages} pages, \
             {n_children} processes with {theirs} MiB, {held} MiB held by all"
        )
    }

    /// What is still more than it was, in words; nothing where all is back. Counts of the daemon's own are to be what they
    /// were, those of the system within 5 %, of the daemon's process and of that and those that it has started together; programs
    /// that came to be kept meanwhile are not counted. Files and memory of several processes are compared where both times all of
    /// them were shown.
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
            ("images beyond one a module", self.n_images_more(), before.n_images_more()),
            ("kB in memory beside programs", self.beside_programs_kb(), before.beside_programs_kb()),
            (
                "threads with its processes",
                self.n_threads + self.n_children_threads,
                before.n_threads + before.n_children_threads,
            ),
        ];
        let near_of_all = [
            (
                "descriptors with its processes",
                self.n_descriptors + self.n_children_descriptors,
                before.n_descriptors + before.n_children_descriptors,
            ),
            (
                "kB held with its processes beside programs",
                self.held_beside_programs_kb(),
                before.held_beside_programs_kb(),
            ),
        ];
        let more = exact.into_iter().filter(|(_, now, before)| now > before);
        let is_shown = self.n_hidden == 0 && before.n_hidden == 0;
        let near = near.into_iter().chain(near_of_all.into_iter().filter(|_| is_shown));
        let far = near.filter(|(_, now, before)| *now as f64 > *before as f64 * (1.0 + TOLERANCE));
        more.chain(far).map(|(what, now, before)| format!("{now} {what}, before {before}")).collect()
    }
}

/// Processors that the machine has.
pub(crate) fn n_online() -> usize {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let is_one = |line: &&str| {
        line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    stat.lines().filter(is_one).count()
}

/// What the system counts processor time in.
const TICKS_PER_SECOND: f64 = 100.0;

/// Processor time of the whole machine, and of the processes that belong to a measurement.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Load {
    n_busy_ticks: u64,
    n_own_ticks: u64,
}

impl Load {
    /// Now; `pids` are those of the processes that live, whose children belong to it as well. Those that have ended count with their
    /// parents.
    pub(crate) fn of(pids: &[u32]) -> Self {
        let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
        let first = stat.lines().next().unwrap_or_default();
        let fields: Vec<u64> =
            first.split_whitespace().skip(1).filter_map(|field| field.parse().ok()).collect();
        // user nice system idle iowait irq softirq steal; what guests of a hypervisor have is in user already.
        let n_busy_ticks = [0, 1, 2, 5, 6].iter().filter_map(|&idx| fields.get(idx)).sum();
        let mut all: Vec<u32> = pids
            .iter()
            .flat_map(|&pid| children(pid).unwrap_or_default())
            .chain(pids.iter().copied())
            .collect();
        all.sort_unstable();
        all.dedup();
        let own = all.into_iter().filter_map(process);
        Self { n_busy_ticks, n_own_ticks: own.map(|process| process.n_ticks + process.n_child_ticks).sum() }
    }

    /// Processors that others have kept busy since then.
    pub(crate) fn foreign_since(&self, before: &Self, seconds: f64) -> f64 {
        let busy = self.n_busy_ticks.saturating_sub(before.n_busy_ticks);
        let own = self.n_own_ticks.saturating_sub(before.n_own_ticks);
        busy.saturating_sub(own) as f64 / TICKS_PER_SECOND / seconds.max(0.01)
    }

    /// Processors that those have kept busy since then that belong to it.
    pub(crate) fn own_since(&self, before: &Self, seconds: f64) -> f64 {
        self.n_own_ticks.saturating_sub(before.n_own_ticks) as f64 / TICKS_PER_SECOND / seconds.max(0.01)
    }
}
