//! The system calls that a guests' process may make, and with what.
//!
//! They are those that Rust's threads and locks, the allocator, the loading and running of compiled code, clocks and the
//! channel take. All act on the process itself and on descriptors that it has.

use std::collections::BTreeMap;

use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::SeccompCmpOp::{Eq, MaskedEq};
use seccompiler::{BackendError, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};

/// Rules by the numbers of system calls; a call without one is allowed whatever its arguments are.
pub(super) type Rules = BTreeMap<i64, Vec<SeccompRule>>;

const ALWAYS: &[i64] = &[
    // Descriptors that it has.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_ppoll,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    // Memory. `mmap` is below.
    libc::SYS_brk,
    libc::SYS_madvise,
    libc::SYS_mincore,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_membarrier,
    // Signals to itself: traps of compiled code.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    // Threads. `clone` and `futex` are below.
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_getcpu,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    // Clocks and randomness.
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_getrandom,
    libc::SYS_gettimeofday,
    libc::SYS_nanosleep,
    // Other filters say that they are not there.
    libc::SYS_clone3,
    libc::SYS_memfd_create,
];

/// Calls that a processor has besides.
#[cfg(target_arch = "x86_64")]
const ALWAYS_HERE: &[i64] = &[libc::SYS_epoll_wait, libc::SYS_poll];
#[cfg(not(target_arch = "x86_64"))]
const ALWAYS_HERE: &[i64] = &[];

/// What a thread of this process shares with the others.
const SHARED_BY_THREADS: i32 =
    libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SIGHAND | libc::CLONE_THREAD;

/// What the C library asks for besides when it starts a thread. The last is one of musl's, without effect.
const ALSO_OF_THREADS: i32 = libc::CLONE_SYSVSEM
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_SETTID
    | libc::CLONE_CHILD_CLEARTID
    | libc::CLONE_DETACHED;

/// Kinds of mappings that are not counted against the limit on data, and so are refused: shared ones (the kind of a mapping is
/// in its lowest four bits), stacks that grow, huge pages.
const MAP_KIND: i32 = 0xf | libc::MAP_GROWSDOWN | libc::MAP_HUGETLB;

/// Waiting and waking. Locks with priorities are not among them.
const FUTEX_OPERATIONS: [i32; 7] = [
    libc::FUTEX_WAIT,
    libc::FUTEX_WAKE,
    libc::FUTEX_REQUEUE,
    libc::FUTEX_CMP_REQUEUE,
    libc::FUTEX_WAKE_OP,
    libc::FUTEX_WAIT_BITSET,
    libc::FUTEX_WAKE_BITSET,
];

/// No flags of descriptors: whether the channel's doorbells block is the daemon's affair as well.
const FCNTL_COMMANDS: [i32; 4] = [libc::F_GETFD, libc::F_SETFD, libc::F_GETFL, libc::F_DUPFD_CLOEXEC];

/// Names of threads and of mappings.
const PRCTL_OPTIONS: [i32; 3] = [libc::PR_SET_NAME, libc::PR_GET_NAME, libc::PR_SET_VMA];

/// What has to hold of an argument: which one, how much of it counts, how and with what it is compared.
type Argument = (u8, SeccompCmpArgLen, SeccompCmpOp, u64);

fn number(n: i32) -> u64 {
    u64::from(n.cast_unsigned())
}

/// The whole list, for a process of this number.
pub(super) fn allowed(pid: u32) -> Result<Rules, BackendError> {
    let mut rules: Rules = ALWAYS.iter().chain(ALWAYS_HERE).map(|call| (*call, Vec::new())).collect();
    let mut allow = |call: i64, arguments: &[Argument]| {
        let conditions = arguments.iter().map(|(idx, length, operator, value)| {
            SeccompCondition::new(*idx, length.clone(), operator.clone(), *value)
        });
        let rule = SeccompRule::new(conditions.collect::<Result<_, _>>()?)?;
        rules.entry(call).or_default().push(rule);
        Ok::<(), BackendError>(())
    };
    let beyond = !number(ALSO_OF_THREADS) & u64::from(u32::MAX);
    allow(libc::SYS_clone, &[(0, Dword, MaskedEq(beyond), number(SHARED_BY_THREADS))])?;
    allow(libc::SYS_mmap, &[(3, Dword, MaskedEq(number(MAP_KIND)), number(libc::MAP_PRIVATE))])?;
    // Aborting is a signal to oneself.
    allow(libc::SYS_tgkill, &[(0, Dword, Eq, u64::from(pid))])?;
    // The calling thread's priority alone.
    allow(libc::SYS_setpriority, &[(0, Dword, Eq, 0), (1, Dword, Eq, 0)])?;
    allow(libc::SYS_getpriority, &[(0, Dword, Eq, 0), (1, Dword, Eq, 0)])?;
    // Limits of this process can be read: no new ones are given.
    allow(libc::SYS_prlimit64, &[(0, Dword, Eq, 0), (2, Qword, Eq, 0)])?;
    for operation in FUTEX_OPERATIONS {
        let flags = number(libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME);
        let operations = MaskedEq(!flags & u64::from(u32::MAX));
        allow(libc::SYS_futex, &[(1, Dword, operations, number(operation))])?;
    }
    for command in FCNTL_COMMANDS {
        allow(libc::SYS_fcntl, &[(1, Dword, Eq, number(command))])?;
    }
    for option in PRCTL_OPTIONS {
        allow(libc::SYS_prctl, &[(0, Dword, Eq, number(option))])?;
    }
    Ok(rules)
}

/// Calls that are answered as by a kernel that does not have them: their callers then do without. `clone` shows its flags to the
/// filter, which `clone3` has in memory. Memory behind a descriptor is not counted.
pub(super) fn absent() -> Rules {
    [libc::SYS_clone3, libc::SYS_memfd_create].map(|call| (call, Vec::new())).into()
}
