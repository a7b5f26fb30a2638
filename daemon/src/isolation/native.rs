//! What native code in a process of guests gets by system calls of its own, made one by one: the kernel answers, and not the library
//! of C, which would ask for something else first.
//!
//! Run in a child of the tests that is confined as a child for guests is.

use std::io;

use super::channel::{Receiver, Sender};

/// A system call that has to be refused, with what would make it do its work.
struct Call {
    what: &'static str,
    number: i64,
    arguments: [u64; 6],
    /// The error that it has to be answered with.
    errno: i32,
    /// Whether a process that went through returns from it twice.
    forks: bool,
}

fn text(text: &'static std::ffi::CStr) -> u64 {
    text.as_ptr() as u64
}

fn flags(flags: i32) -> u64 {
    u64::from(flags.cast_unsigned())
}

/// Structures that the calls below point to.
static EMPTY: [u64; 11] = [0; 11];
/// `clone_args`: a signal at the end, as `fork` has it.
static FORKED: [u64; 11] = [0, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0];
/// `io_uring_params` and all that is written over are as long as this at most; a call that went through writes here.
fn written(room: &mut [u64; 64]) -> u64 {
    room.as_mut_ptr() as u64
}

/// All of them; `parent` is a process that is not to be reached.
fn calls(parent: i32, room: &mut [u64; 64]) -> Vec<Call> {
    let at = flags(libc::AT_FDCWD);
    let parent = flags(parent);
    let (read, room) = (flags(libc::O_RDONLY), written(room));
    let empty = EMPTY.as_ptr() as u64;
    let mut calls = Vec::new();
    let mut refused = |what, number, arguments: &[u64]| {
        let mut all = [0; 6];
        all[..arguments.len()].copy_from_slice(arguments);
        calls.push(Call { what, number, arguments: all, errno: libc::EPERM, forks: false });
    };

    for path in [c"/etc/passwd", c"/dev/nvidia0", c"/dev/null", c"/proc/self/mem", c"/"] {
        refused("openat", libc::SYS_openat, &[at, text(path), read]);
        refused("openat2", libc::SYS_openat2, &[at, text(path), empty, 24]);
        #[cfg(target_arch = "x86_64")]
        refused("open", libc::SYS_open, &[text(path), read]);
    }
    refused("linkat", libc::SYS_linkat, &[at, text(c"/etc/passwd"), at, text(c"/tmp/trellis-native"), 0]);
    refused("mknodat", libc::SYS_mknodat, &[at, text(c"/tmp/trellis-native"), flags(0o20600), 0x103]);
    refused("readlinkat", libc::SYS_readlinkat, &[at, text(c"/proc/self/exe"), room, 8]);
    for (family, kind) in [
        (libc::AF_UNIX, libc::SOCK_STREAM),
        (libc::AF_INET, libc::SOCK_STREAM),
        (libc::AF_INET6, libc::SOCK_DGRAM),
        (libc::AF_NETLINK, libc::SOCK_RAW),
        (libc::AF_PACKET, libc::SOCK_RAW),
        (libc::AF_VSOCK, libc::SOCK_STREAM),
        (libc::AF_ALG, libc::SOCK_SEQPACKET),
    ] {
        refused("socket", libc::SYS_socket, &[flags(family), flags(kind), 0]);
    }
    refused("socketpair", libc::SYS_socketpair, &[flags(libc::AF_UNIX), flags(libc::SOCK_STREAM), 0, room]);

    refused("execve", libc::SYS_execve, &[text(c"/bin/true"), empty, empty]);
    refused("execveat", libc::SYS_execveat, &[at, text(c"/bin/true"), empty, empty, 0]);
    // Of a descriptor that it has.
    let by_descriptor = flags(libc::AT_EMPTY_PATH);
    refused("execveat of a descriptor", libc::SYS_execveat, &[0, text(c""), empty, empty, by_descriptor]);
    refused("ptrace to attach", libc::SYS_ptrace, &[u64::from(libc::PTRACE_ATTACH), parent]);
    refused("ptrace to be traced", libc::SYS_ptrace, &[u64::from(libc::PTRACE_TRACEME)]);
    refused("process_vm_readv", libc::SYS_process_vm_readv, &[parent, empty, 1, empty, 1, 0]);
    refused("process_vm_writev", libc::SYS_process_vm_writev, &[parent, empty, 1, empty, 1, 0]);
    refused("kill", libc::SYS_kill, &[parent, 0]);
    refused("kill of all", libc::SYS_kill, &[u64::MAX, 0]);
    refused("tkill", libc::SYS_tkill, &[parent, 0]);
    refused("tgkill", libc::SYS_tgkill, &[parent, parent, 0]);
    refused("pidfd_open", libc::SYS_pidfd_open, &[parent, 0]);
    refused("pidfd_getfd", libc::SYS_pidfd_getfd, &[0, 0, 0]);

    refused("io_uring_setup", libc::SYS_io_uring_setup, &[8, room]);
    refused("bpf", libc::SYS_bpf, &[0, room, 72]);
    refused("userfaultfd", libc::SYS_userfaultfd, &[flags(libc::O_CLOEXEC)]);
    refused("perf_event_open", libc::SYS_perf_event_open, &[room, 0, u64::MAX, u64::MAX, 0]);
    refused("unshare", libc::SYS_unshare, &[flags(libc::CLONE_NEWUSER)]);
    refused("setns", libc::SYS_setns, &[0, 0]);
    refused("mount", libc::SYS_mount, &[text(c"none"), text(c"/mnt"), text(c"tmpfs"), 0, 0]);
    refused("pivot_root", libc::SYS_pivot_root, &[text(c"/tmp"), text(c"/tmp")]);
    refused("keyctl", libc::SYS_keyctl, &[0, 0, 0]);
    refused("memfd_secret", libc::SYS_memfd_secret, &[0]);
    refused("shmget", libc::SYS_shmget, &[0, 4096, 0o1600]);
    refused("semget", libc::SYS_semget, &[0, 1, 0o1600]);
    refused("msgget", libc::SYS_msgget, &[0, 0o1600]);
    refused("seccomp", libc::SYS_seccomp, &[0, 0, 0]);
    refused("personality", libc::SYS_personality, &[u64::from(u32::MAX)]);
    refused("setresuid", libc::SYS_setresuid, &[0, 0, 0]);
    refused("ioctl", libc::SYS_ioctl, &[0, libc::TIOCSTI, text(c"x")]);
    refused("dup3", libc::SYS_dup3, &[0, 63, 0]);

    let shared = flags(libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    let all_rights = flags(libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC);
    refused("mmap of shared code", libc::SYS_mmap, &[0, 4096, all_rights, shared, u64::MAX, 0]);
    let huge = flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB);
    refused("mmap of huge pages", libc::SYS_mmap, &[0, 2 << 20, all_rights, huge, u64::MAX, 0]);

    #[cfg(target_arch = "x86_64")]
    {
        // The same kernel by another way to number its calls.
        let x32 = 0x4000_0000;
        refused("openat by x32", x32 | libc::SYS_openat, &[at, text(c"/etc/passwd"), read]);
        refused("iopl", libc::SYS_iopl, &[3]);
    }

    let mut fork = |what, number, arguments: [u64; 6], errno| {
        calls.push(Call { what, number, arguments, errno, forks: true });
    };
    let at_end = 17;
    #[cfg(target_arch = "x86_64")]
    fork("fork", libc::SYS_fork, [0; 6], libc::EPERM);
    fork("clone", libc::SYS_clone, [at_end, 0, 0, 0, 0, 0], libc::EPERM);
    let new_user = flags(libc::CLONE_NEWUSER) | at_end;
    fork("clone into other namespaces", libc::SYS_clone, [new_user, 0, 0, 0, 0, 0], libc::EPERM);
    let forked = FORKED.as_ptr() as u64;
    fork("clone3", libc::SYS_clone3, [forked, 88, 0, 0, 0, 0], libc::ENOSYS);
    calls.push(Call {
        what: "memfd_create",
        number: libc::SYS_memfd_create,
        arguments: [text(c"native"), 0, 0, 0, 0, 0],
        errno: libc::ENOSYS,
        forks: false,
    });
    // Last: a process that went through would go on with the stack of this one.
    #[cfg(target_arch = "x86_64")]
    calls.push(Call {
        what: "vfork",
        number: libc::SYS_vfork,
        arguments: [0; 6],
        errno: libc::EPERM,
        forks: true,
    });
    calls
}

/// Makes a call. The error that it was answered with; 0 where it went through.
#[expect(unsafe_code, reason = "there is no safe way to make a call by its number")]
fn make(call: &Call) -> i32 {
    let [a, b, c, d, e, f] = call.arguments;
    // SAFETY: what the arguments point to lives as long as the process or as `room`, and is as long as the call takes it to be. Calls
    // that would change this process for the worse are for a process that makes nothing else.
    let answer = unsafe { libc::syscall(call.number, a, b, c, d, e, f) };
    let error = io::Error::last_os_error();
    if call.forks && answer == 0 {
        // Two of the same would answer.
        std::process::abort();
    }
    if answer == -1 { error.raw_os_error().unwrap_or(0) } else { 0 }
}

/// The child's part: makes all calls against the process that each frame names, and answers with what they were answered with.
pub(super) fn serve(mut sender: Sender, mut receiver: Receiver) {
    let (mut frame, mut room) = (Vec::new(), [0; 64]);
    while receiver.recv(&mut frame).is_ok() {
        let parent = i32::from_le_bytes(frame[..].try_into().expect("a number"));
        let answers: Vec<i32> = calls(parent, &mut room).iter().map(make).collect();
        let bytes: Vec<u8> = answers.iter().flat_map(|errno| errno.to_le_bytes()).collect();
        sender.send(&bytes).expect("the test is there");
    }
}

/// What is wrong with a child's answers, in words. The second is how many calls it made.
pub(super) fn wrong(answers: &[u8]) -> (Vec<String>, usize) {
    let mut room = [0; 64];
    let calls = calls(1, &mut room);
    let answers: Vec<i32> =
        answers.as_chunks::<4>().0.iter().map(|errno| i32::from_le_bytes(*errno)).collect();
    assert_eq!(answers.len(), calls.len(), "each call is answered");
    let wrong = |(call, errno): (&Call, &i32)| {
        let Call { what, number, arguments, errno: expected, .. } = call;
        (errno != expected).then(|| {
            format!("{what} ({number}, {arguments:x?}) was answered with {errno}, and not with {expected}")
        })
    };
    (calls.iter().zip(&answers).filter_map(wrong).collect(), calls.len())
}

/// Calls of those that go through for a process that is not confined, and change nothing.
pub(super) fn outside() -> Vec<(&'static str, i32)> {
    let own = std::process::id().cast_signed();
    let mut room = [0; 64];
    let harmless = ["openat", "readlinkat", "socket", "memfd_create", "kill", "pidfd_open"];
    let mut seen = Vec::new();
    for call in calls(own, &mut room) {
        let is_new = seen.iter().all(|(what, _)| *what != call.what);
        if harmless.contains(&call.what) && is_new {
            seen.push((call.what, make(&call)));
        }
    }
    seen
}

/// Calls as a program of 32 bits does, whose numbers are others: 20 asks for the process's number.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "there is no safe way to call so")]
pub(super) fn call_as_32_bits() {
    // SAFETY: it reads and writes no memory; the registers that the kernel may change are named.
    unsafe {
        std::arch::asm!("int 0x80", inout("eax") 20 => _, out("r8") _, out("r9") _, out("r10") _, out("r11") _);
    }
}
