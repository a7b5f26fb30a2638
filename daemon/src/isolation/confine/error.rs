//! Why a process could not be confined.

use std::io;

use rustix::io::Errno;

/// Why a process could not be confined.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    /// It has threads that would not be confined.
    #[error("the process has {n_threads} threads; it can be confined while it has 1")]
    Threads {
        /// How many.
        n_threads: usize,
    },
    /// The process that started it has ended.
    #[error("process {parent}, which started this one, is gone")]
    ParentIsGone {
        /// Its number.
        parent: i32,
    },
    /// What the system tells of this process cannot be read.
    #[error("/proc/self cannot be read: {0}")]
    Proc(#[source] io::Error),
    /// The system refuses a step.
    #[error("{what} is refused: {errno}")]
    Refused {
        /// Which.
        what: &'static str,
        /// Why.
        errno: Errno,
    },
    /// The rules about files cannot be made or put on.
    #[error("Landlock: {reason}")]
    Files {
        /// What the library says.
        reason: String,
    },
    /// There is no list of system calls for this processor.
    #[error("there is no list of system calls for {arch}")]
    Processor {
        /// Its name.
        arch: &'static str,
    },
    /// The kernel cannot filter system calls.
    #[error("the kernel does not filter system calls (seccomp): {reason}")]
    Filter {
        /// What the library says.
        reason: String,
    },
}
