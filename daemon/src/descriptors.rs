//! File descriptors: how many this process may have open, and how they are shared out.
//!
//! Each connection and each compiled component with memory takes one for as long as it is there; compiling takes some for a
//! while. Connections are what others open as they like, so that they get a share and leave the rest to the work.

use std::error::Error;
use std::fs;
use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// What is taken to be open where the system does not tell.
const N_OPEN_UNKNOWN: u64 = 64;

/// Descriptors for what stays open for long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shares {
    /// One for each connection.
    pub(crate) n_connections: usize,
    /// One for each compiled component that is kept in memory.
    pub(crate) n_programs: usize,
}

impl Shares {
    /// Of what is free at this moment.
    pub(crate) fn now() -> Self {
        Self::of(n_free())
    }

    fn of(n_free: u64) -> Self {
        let part = |n: u64| usize::try_from(n).unwrap_or(usize::MAX).max(1);
        Self { n_connections: part(n_free / 2), n_programs: part(n_free / 4) }
    }
}

/// Lets this process open as many files as the system grants to it; the lower limit that it starts with is for programs
/// whose `select` knows no more than 1,024.
///
/// # Errors
/// The system refuses.
pub(crate) fn raise_limit() -> io::Result<()> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    Ok(setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?)
}

fn n_free() -> u64 {
    let n_open = fs::read_dir("/dev/fd").map_or(N_OPEN_UNKNOWN, |open| open.count() as u64);
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX).saturating_sub(n_open)
}

/// Whether an error, or what caused it, is that this process or the system has no descriptor left.
pub(crate) fn are_used_up(error: &(dyn Error + 'static)) -> bool {
    std::iter::successors(Some(error), |&error| error.source()).any(|error| {
        let errno = match error.downcast_ref::<io::Error>() {
            Some(error) => Errno::from_io_error(error),
            None => error.downcast_ref::<Errno>().copied(),
        };
        errno.is_some_and(|errno| errno == Errno::MFILE || errno == Errno::NFILE)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::GuestError;

    #[test]
    fn connections_leave_half_to_the_rest() {
        assert_eq!(Shares::of(50), Shares { n_connections: 25, n_programs: 12 });
        assert_eq!(Shares::of(0), Shares { n_connections: 1, n_programs: 1 });
        assert!(Shares::of(u64::MAX).n_connections > 1 << 40);
        let n_free_before = n_free();
        let files: Vec<_> = (0..100).map(|_| fs::File::open("/dev/null").expect("opened")).collect();
        // Other tests open and close files meanwhile.
        assert!(n_free() < n_free_before - 50, "{} of {n_free_before}", n_free());
        drop(files);
    }

    #[test]
    fn the_cause_of_an_error_is_found() {
        let error = |errno: Errno| GuestError::Compiler { exe: "exe".into(), source: errno.into() };
        assert!(are_used_up(&error(Errno::MFILE)) && are_used_up(&error(Errno::NFILE)));
        assert!(!are_used_up(&error(Errno::NOENT)) && !are_used_up(&GuestError::NoModel));
        assert!(are_used_up(&Errno::MFILE));
    }
}
