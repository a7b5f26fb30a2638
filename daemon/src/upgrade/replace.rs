//! The end of one program and the beginning of the next in its process.

use std::convert::Infallible;
use std::ffi::{CString, OsStr};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::process::{WaitOptions, wait};

use super::Successor;
use super::handover::{NAME, leave};
use super::signals::let_signals_through;
use crate::http::LeftHttp;
use crate::ipc::Listener;

/// How long children that were ended have to be gone.
const CHILDREN_TIME: Duration = Duration::from_secs(5);
const CHILDREN_PAUSE: Duration = Duration::from_millis(5);

/// What names the sockets that a process is handed.
const LISTEN: &str = "LISTEN_";

/// Puts a program in the place of this one, with the same arguments and environment. Only the standard streams and what is left to it
/// stay open. Signals are held until then ([`Signals::hold`](super::Signals::hold)). Returns where it cannot be put there.
pub(crate) fn replace(
    successor: &Successor,
    listener: &Listener,
    metrics: Option<(BorrowedFd<'_>, bool)>,
    http: Option<LeftHttp<'_>>,
) -> io::Error {
    let Err(error) = put(successor, listener, metrics, http);
    // Nothing comes after this one.
    let_signals_through();
    error
}

fn put(
    successor: &Successor,
    listener: &Listener,
    metrics: Option<(BorrowedFd<'_>, bool)>,
    http: Option<LeftHttp<'_>>,
) -> io::Result<Infallible> {
    let left = leave(listener, metrics, http)?;
    fcntl_setfd(&left, FdFlags::empty())?;
    let program = text(successor.program().as_os_str())?;
    let arguments = successor.arguments().iter().map(|argument| text(argument));
    let arguments: Vec<_> =
        std::iter::once(Ok(program.clone())).chain(arguments).collect::<io::Result<_>>()?;
    let environment = environment(left.as_raw_fd())?;
    // A process has its children from program to program: the next one would never ask how they ended.
    wait_for_children();
    close_others(left.as_raw_fd());
    Ok(nix::unistd::execve(&program, &arguments, &environment)?)
}

fn text(text: &OsStr) -> io::Result<CString> {
    Ok(CString::new(text.as_bytes())?)
}

/// This program's, in which the next one finds what is left to it.
fn environment(left: RawFd) -> io::Result<Vec<CString>> {
    let kept = std::env::vars_os().filter(|(name, _)| !name.as_bytes().starts_with(LISTEN.as_bytes()));
    let kept = kept.map(|(name, value)| [name.as_bytes(), b"=", value.as_bytes()].concat());
    let told = [
        ("PID", std::process::id().to_string()),
        ("FDS", "1".to_owned()),
        ("FDS_FIRST_FD", left.to_string()),
        ("FDNAMES", NAME.to_owned()),
    ];
    let told = told.into_iter().map(|(name, value)| format!("{LISTEN}{name}={value}").into_bytes());
    Ok(kept.chain(told).map(CString::new).collect::<Result<_, _>>()?)
}

/// All of them have been told to end.
fn wait_for_children() {
    let begun = Instant::now();
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some(_)) | Err(Errno::INTR) => {}
            Ok(None) if begun.elapsed() < CHILDREN_TIME => thread::sleep(CHILDREN_PAUSE),
            Ok(None) => {
                tracing::warn!("a child of the daemon has not ended");
                return;
            }
            // There is none.
            Err(_) => return,
        }
    }
}

/// Closes what would stay open in the next program: what this one was started with, and what libraries of the system have opened. All
/// else is closed by the kernel.
fn close_others(left: RawFd) {
    let Ok(open) = fs::read_dir("/proc/self/fdinfo") else { return };
    let numbers: Vec<RawFd> =
        open.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    for number in numbers {
        if number > 2 && number != left && stays_open(number) {
            // Whatever works with it ends in this moment.
            let _ = nix::unistd::close(number);
        }
    }
}

/// Whether the kernel leaves a descriptor open for the next program.
fn stays_open(number: RawFd) -> bool {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{number}")).unwrap_or_default();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & OFlags::CLOEXEC.bits() == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_library_has_left_open_is_seen() {
        let file = fs::File::open("/dev/null").expect("it is there");
        assert!(!stays_open(file.as_raw_fd()));
        fcntl_setfd(&file, FdFlags::empty()).expect("it is open");
        assert!(stays_open(file.as_raw_fd()));
        assert!(!stays_open(RawFd::MAX));
    }

    #[test]
    fn the_next_program_finds_what_is_left_to_it_and_nothing_older() {
        let environment = environment(77).expect("there is no zero in it");
        let of = |name: &str| {
            let begins = format!("{name}=");
            let of = environment.iter().filter_map(|set| set.to_str().ok()?.strip_prefix(&begins));
            of.map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(of("LISTEN_FDS"), ["1"]);
        assert_eq!(of("LISTEN_FDS_FIRST_FD"), ["77"]);
        assert_eq!(of("LISTEN_FDNAMES"), [NAME]);
        assert_eq!(of("LISTEN_PID"), [std::process::id().to_string()]);
        assert_eq!(of("PATH"), std::env::var("PATH").into_iter().collect::<Vec<_>>());
    }
}
