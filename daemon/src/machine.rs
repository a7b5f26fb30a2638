//! What the machine has.

use std::sync::OnceLock;

use sysinfo::{CGroupLimits, ProcessRefreshKind, ProcessesToUpdate, System, get_current_pid};

/// Taken where the system does not tell.
const UNKNOWN_BYTES: u64 = 4 << 30;

/// Bytes of memory that this process may come to: the machine's, or what its control group is held to.
pub(crate) fn memory_bytes() -> u64 {
    static BYTES: OnceLock<u64> = OnceLock::new();
    *BYTES.get_or_init(|| known_bytes().unwrap_or(UNKNOWN_BYTES))
}

/// What bounds the memory of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bound {
    /// The machine has no more.
    Machine,
    /// Its control group is held to less than the machine has.
    ControlGroup,
}

/// What [`memory_bytes`] is bounded by.
pub(crate) fn bound() -> Bound {
    let bytes = System::new().ok().and_then(|mut system| {
        system.refresh_memory();
        Some((group_limits(&mut system)?.total_memory, system.total_memory()))
    });
    match bytes {
        Some((of_group, of_machine)) if of_group < of_machine => Bound::ControlGroup,
        _ => Bound::Machine,
    }
}

/// Bytes of memory that the system would give to this process: what is available on the machine, or what its control group
/// has left. Files that the system keeps in memory make room.
pub(crate) fn available_bytes() -> Option<u64> {
    let mut system = System::new().ok()?;
    system.refresh_memory();
    let of_machine = Some(system.available_memory()).filter(|&n_bytes| n_bytes > 0)?;
    let of_group = group_limits(&mut system).map(|limits| limits.total_memory.saturating_sub(limits.rss));
    Some(of_group.map_or(of_machine, |n_bytes| n_bytes.min(of_machine)))
}

fn known_bytes() -> Option<u64> {
    let mut system = System::new().ok()?;
    system.refresh_memory();
    let of_machine = Some(system.total_memory()).filter(|&n_bytes| n_bytes > 0)?;
    let of_group = group_limits(&mut system);
    Some(of_group.map_or(of_machine, |limits| limits.total_memory.clamp(1, of_machine)))
}

/// The most memory that this process has had at once; 0 where the system does not tell.
pub(crate) fn own_peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix("kB"));
    peak.and_then(|n_kib| n_kib.trim().parse().ok()).map_or(0, |n_kib: u64| n_kib << 10)
}

/// Nothing where no group holds this process to less than the machine has.
fn group_limits(system: &mut System) -> Option<CGroupLimits> {
    let pid = get_current_pid().ok()?;
    let this = ProcessesToUpdate::Some(&[pid]);
    system.refresh_processes_specifics(this, false, ProcessRefreshKind::nothing());
    system.process(pid).and_then(|process| process.cgroup_limits())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_memory() {
        let n_bytes = memory_bytes();
        assert!((1 << 28..1 << 50).contains(&n_bytes), "{n_bytes}");
        let n_available = available_bytes().expect("the system tells");
        assert!((1..=n_bytes).contains(&n_available), "{n_available} of {n_bytes}");
        #[cfg(target_os = "linux")]
        assert!((1 << 20..n_bytes).contains(&own_peak_bytes()));
    }
}
