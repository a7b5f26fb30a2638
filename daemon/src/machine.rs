//! What the machine has.

use std::sync::OnceLock;

use sysinfo::{ProcessRefreshKind, ProcessesToUpdate, System, get_current_pid};

/// Taken where the system does not tell.
const UNKNOWN_BYTES: u64 = 4 << 30;

/// Bytes of memory that this process may come to: the machine's, or what its control group is held to.
pub(crate) fn memory_bytes() -> u64 {
    static BYTES: OnceLock<u64> = OnceLock::new();
    *BYTES.get_or_init(|| known_bytes().unwrap_or(UNKNOWN_BYTES))
}

fn known_bytes() -> Option<u64> {
    let mut system = System::new().ok()?;
    system.refresh_memory();
    let of_machine = Some(system.total_memory()).filter(|&n_bytes| n_bytes > 0)?;
    let Ok(pid) = get_current_pid() else { return Some(of_machine) };
    let this = ProcessesToUpdate::Some(&[pid]);
    system.refresh_processes_specifics(this, false, ProcessRefreshKind::nothing());
    let of_group = system.process(pid).and_then(|process| process.cgroup_limits());
    Some(of_group.map_or(of_machine, |limits| limits.total_memory.clamp(1, of_machine)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_memory() {
        let n_bytes = memory_bytes();
        assert!((1 << 28..1 << 50).contains(&n_bytes), "{n_bytes}");
    }
}
