//! A control group of one's own, that holds what runs in it to so much memory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long what was killed may take to leave the group.
const LEAVE_TIME_MAX: Duration = Duration::from_secs(10);

/// The names of a version's files.
#[derive(Debug)]
struct Files {
    limit: &'static str,
    /// What bounds memory and swap, and what is written to it for no swap; `None`: as much as memory alone.
    swap: (&'static str, Option<&'static str>),
    peak: &'static str,
    events: &'static str,
}

const V2: Files = Files {
    limit: "memory.max",
    swap: ("memory.swap.max", Some("0")),
    peak: "memory.peak",
    events: "memory.events",
};

const V1: Files = Files {
    limit: "memory.limit_in_bytes",
    swap: ("memory.memsw.limit_in_bytes", None),
    peak: "memory.max_usage_in_bytes",
    events: "memory.oom_control",
};

/// A control group; removed when dropped.
#[derive(Debug)]
pub struct Group {
    folder: PathBuf,
    files: &'static Files,
}

impl Group {
    /// Makes one at the root of the system's groups, of version 2, or of 1 where that has the memory.
    ///
    /// # Errors
    /// This user may not, or the system has none.
    pub fn make(limit_bytes: u64) -> io::Result<Self> {
        let root = Path::new("/sys/fs/cgroup");
        let name = format!("trellis-attacks-{}", std::process::id());
        let group = if root.join("memory/memory.limit_in_bytes").is_file() {
            Self { folder: root.join("memory").join(name), files: &V1 }
        } else {
            let control = root.join("cgroup.subtree_control");
            if !fs::read_to_string(&control)?.split_whitespace().any(|controller| controller == "memory") {
                fs::write(&control, "+memory")?;
            }
            Self { folder: root.join(name), files: &V2 }
        };
        fs::create_dir(&group.folder)?;
        fs::write(group.folder.join(group.files.limit), limit_bytes.to_string())?;
        let (swap, none) = group.files.swap;
        // It is not there where the system does not count swap.
        if group.folder.join(swap).is_file() {
            fs::write(group.folder.join(swap), none.map_or(limit_bytes.to_string(), str::to_owned))?;
        }
        Ok(group)
    }

    /// Who writes their number here is in it.
    #[must_use]
    pub fn members(&self) -> PathBuf {
        self.folder.join("cgroup.procs")
    }

    /// The most memory that it had, what the system keeps of files included.
    ///
    /// # Errors
    /// The system does not say.
    pub fn peak_bytes(&self) -> io::Result<u64> {
        let text = fs::read_to_string(self.folder.join(self.files.peak))?;
        text.trim().parse().map_err(io::Error::other)
    }

    /// Processes that were killed because it had no memory left.
    ///
    /// # Errors
    /// The system does not say.
    pub fn n_killed(&self) -> io::Result<u64> {
        let text = fs::read_to_string(self.folder.join(self.files.events))?;
        let killed = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        let killed = killed.ok_or_else(|| io::Error::other(format!("no oom_kill in {text:?}")))?;
        killed.trim().parse().map_err(io::Error::other)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let begun = Instant::now();
        // What ran in it may be about to end.
        while fs::remove_dir(&self.folder).is_err() && begun.elapsed() < LEAVE_TIME_MAX {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
