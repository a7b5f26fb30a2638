//! No core dumps: what is in the daemon's memory are the prompts of all its users.
//!
//! A process that is not dumpable (`PR_SET_DUMPABLE`) would leave none either, but its files in `/proc` are root's then: its own user
//! could not profile it any more, nor see what it has open. The processes of guests, of which nobody has to see anything, are closed
//! that way.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The limit for core files, which is smaller than any. Linux pipes a dump to the program of `core_pattern` whatever the limit is, 0
/// included; 1 alone keeps it from that as well (`do_coredump`).
#[cfg(target_os = "linux")]
const LIMIT: u64 = 1;
#[cfg(not(target_os = "linux"))]
const LIMIT: u64 = 0;

/// Has this process, and those that it starts, leave no core dump. The limit cannot be raised again, but by root.
///
/// # Errors
/// The system refuses.
pub(crate) fn forbid() -> io::Result<()> {
    let limit = getrlimit(Resource::Core).maximum.map_or(LIMIT, |maximum| maximum.min(LIMIT));
    setrlimit(Resource::Core, Rlimit { current: Some(limit), maximum: Some(limit) })?;
    // Where the limit was 0 before and cannot become 1: what is piped has no memory in it.
    #[cfg(target_os = "linux")]
    std::fs::write("/proc/self/coredump_filter", "0")?;
    Ok(())
}
