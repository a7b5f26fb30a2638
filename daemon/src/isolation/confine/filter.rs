//! The list of system calls, put on as a filter in the kernel (seccomp).

use std::env::consts::ARCH;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

use super::calls::{self, Rules};
use super::error::ConfineError;

const NOT_PERMITTED: u32 = libc::EPERM.cast_unsigned();
const NOT_THERE: u32 = libc::ENOSYS.cast_unsigned();

fn program(
    rules: Rules,
    otherwise: SeccompAction,
    where_they_hold: SeccompAction,
) -> Result<BpfProgram, ConfineError> {
    let failed = |error: seccompiler::BackendError| ConfineError::Filter { reason: error.to_string() };
    let arch = TargetArch::try_from(ARCH).map_err(|_| ConfineError::Processor { arch: ARCH })?;
    let filter = SeccompFilter::new(rules, otherwise, where_they_hold, arch).map_err(failed)?;
    BpfProgram::try_from(filter).map_err(failed)
}

/// The filters of a process of this number. Of what they answer to a call the strictest holds.
fn programs(pid: u32) -> Result<[BpfProgram; 2], ConfineError> {
    let rules = calls::allowed(pid).map_err(|error| ConfineError::Filter { reason: error.to_string() })?;
    Ok([
        program(calls::absent(), SeccompAction::Allow, SeccompAction::Errno(NOT_THERE))?,
        program(rules, SeccompAction::Errno(NOT_PERMITTED), SeccompAction::Allow)?,
    ])
}

/// Puts them on the calling thread and those that it starts.
pub(super) fn apply() -> Result<(), ConfineError> {
    // All are made before the first is put on, which may forbid what making takes.
    let [absent, allowed] = programs(std::process::id())?;
    for program in [absent, allowed] {
        // The second is put on while the first allows it to.
        seccompiler::apply_filter(&program)
            .map_err(|error| ConfineError::Filter { reason: error.to_string() })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PID: u32 = 4321;

    /// What the kernel would answer: the program run over a call, as far as such programs go.
    fn run(program: &BpfProgram, call: i64, arguments: [u64; 6]) -> u32 {
        let arch = match ARCH {
            "x86_64" => 0xc000_003e_u32,
            "aarch64" => 0xc000_00b7,
            other => panic!("{other}"),
        };
        let mut data = [0_u8; 64];
        data[..4].copy_from_slice(&(call as u32).to_le_bytes());
        data[4..8].copy_from_slice(&arch.to_le_bytes());
        for (idx, argument) in arguments.iter().enumerate() {
            data[16 + 8 * idx..][..8].copy_from_slice(&argument.to_le_bytes());
        }
        let (mut at, mut value) = (0, 0_u32);
        loop {
            let one = &program[at];
            at += 1;
            let mut jump = |is_true: bool| at += usize::from(if is_true { one.jt } else { one.jf });
            match one.code {
                // Loads of a word of the call, a conjunction, jumps, and the answer.
                0x20 => value = u32::from_le_bytes(data[one.k as usize..][..4].try_into().expect("a word")),
                0x54 => value &= one.k,
                0x05 => at += one.k as usize,
                0x15 => jump(value == one.k),
                0x25 => jump(value > one.k),
                0x35 => jump(value >= one.k),
                0x06 => return one.k,
                code => panic!("instruction {code:#x}"),
            }
        }
    }

    /// The error that a call is answered with, if it is not made.
    fn answer(call: i64, arguments: [u64; 6]) -> Option<u32> {
        let answers = programs(PID).expect("made").map(|program| run(&program, call, arguments));
        // Errors have lower numbers than permission, and the first of two alike is not what is asked here.
        let strictest = answers.into_iter().min_by_key(|answer| answer & 0x7fff_0000).expect("two");
        match strictest & 0x7fff_0000 {
            0x7fff_0000 => None,
            0x0005_0000 => Some(strictest & 0xffff),
            action => panic!("{action:#x}"),
        }
    }

    fn of(arguments: &[u64]) -> [u64; 6] {
        let mut all = [0; 6];
        all[..arguments.len()].copy_from_slice(arguments);
        all
    }

    const EPERM: Option<u32> = Some(NOT_PERMITTED);

    #[test]
    fn what_reaches_beyond_the_process_is_refused() {
        let calls = [
            libc::SYS_openat,
            libc::SYS_openat2,
            libc::SYS_open_by_handle_at,
            libc::SYS_newfstatat,
            libc::SYS_statx,
            libc::SYS_readlinkat,
            libc::SYS_getdents64,
            libc::SYS_socket,
            libc::SYS_socketpair,
            libc::SYS_connect,
            libc::SYS_bind,
            libc::SYS_sendmsg,
            libc::SYS_recvmsg,
            libc::SYS_sendto,
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_ptrace,
            libc::SYS_process_vm_readv,
            libc::SYS_process_vm_writev,
            libc::SYS_process_madvise,
            libc::SYS_io_uring_setup,
            libc::SYS_io_uring_enter,
            libc::SYS_io_uring_register,
            libc::SYS_bpf,
            libc::SYS_perf_event_open,
            libc::SYS_userfaultfd,
            libc::SYS_keyctl,
            libc::SYS_add_key,
            libc::SYS_request_key,
            libc::SYS_mount,
            libc::SYS_umount2,
            libc::SYS_move_mount,
            libc::SYS_fsopen,
            libc::SYS_unshare,
            libc::SYS_setns,
            libc::SYS_setuid,
            libc::SYS_setresuid,
            libc::SYS_setgid,
            libc::SYS_capset,
            libc::SYS_kill,
            libc::SYS_tkill,
            libc::SYS_rt_sigqueueinfo,
            libc::SYS_rt_tgsigqueueinfo,
            libc::SYS_pidfd_open,
            libc::SYS_pidfd_getfd,
            libc::SYS_pidfd_send_signal,
            libc::SYS_shmget,
            libc::SYS_shmat,
            libc::SYS_msgget,
            libc::SYS_mq_open,
            libc::SYS_memfd_secret,
            libc::SYS_remap_file_pages,
            libc::SYS_ioctl,
            libc::SYS_dup3,
            libc::SYS_seccomp,
            libc::SYS_landlock_create_ruleset,
            libc::SYS_personality,
            libc::SYS_sched_setaffinity,
            libc::SYS_sched_setscheduler,
            libc::SYS_setrlimit,
            libc::SYS_timerfd_create,
            libc::SYS_inotify_init1,
            libc::SYS_chroot,
            libc::SYS_reboot,
        ];
        for call in calls {
            for arguments in [[0; 6], [u64::MAX; 6], [u64::from(PID); 6]] {
                assert_eq!(answer(call, arguments), EPERM, "call {call} with {arguments:?}");
            }
        }
        #[cfg(target_arch = "x86_64")]
        for call in
            [libc::SYS_open, libc::SYS_fork, libc::SYS_vfork, libc::SYS_arch_prctl, libc::SYS_modify_ldt]
        {
            assert_eq!(answer(call, [0; 6]), EPERM, "call {call}");
        }
        // Numbers that are none, and those of another way to call the same kernel.
        for call in (1000..1100).chain([0x4000_0000, 0x4000_0001, 0x7fff_ffff]) {
            assert_eq!(answer(call, [0; 6]), EPERM, "call {call}");
        }
        for call in [libc::SYS_clone3, libc::SYS_memfd_create] {
            assert_eq!(answer(call, [0; 6]), Some(NOT_THERE));
        }
    }

    #[test]
    fn what_a_call_is_given_is_looked_at() {
        let flags = |flags: i32| u64::from(flags.cast_unsigned());
        let thread = 0x003d_0f00;
        let high = 1 << 40;
        for (call, allowed, refused) in [
            (
                libc::SYS_clone,
                vec![of(&[thread]), of(&[thread | high])],
                vec![
                    of(&[17]), // fork: a signal at its end
                    of(&[flags(libc::CLONE_VM | libc::CLONE_VFORK) | 17]),
                    of(&[thread & !flags(libc::CLONE_THREAD)]),
                    of(&[thread | flags(libc::CLONE_NEWUSER)]),
                    of(&[thread | flags(libc::CLONE_NEWNS)]),
                    of(&[thread | flags(libc::CLONE_PARENT)]),
                ],
            ),
            (
                libc::SYS_mmap,
                vec![
                    of(&[0, 4096, 7, flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)]),
                    of(&[0, 4096, 0, flags(libc::MAP_PRIVATE | libc::MAP_NORESERVE | libc::MAP_FIXED)]),
                ],
                vec![
                    of(&[0, 4096, 3, flags(libc::MAP_SHARED | libc::MAP_ANONYMOUS)]),
                    of(&[0, 4096, 3, flags(libc::MAP_SHARED_VALIDATE)]),
                    of(&[0, 4096, 3, flags(libc::MAP_PRIVATE | libc::MAP_GROWSDOWN)]),
                    of(&[0, 4096, 3, flags(libc::MAP_PRIVATE | libc::MAP_HUGETLB)]),
                ],
            ),
            (
                libc::SYS_futex,
                vec![of(&[0, 128]), of(&[0, 129]), of(&[0, 9 | 128 | 256])],
                vec![of(&[0, 6]), of(&[0, 7 | 128]), of(&[0, 11 | 128])],
            ),
            (libc::SYS_tgkill, vec![of(&[PID.into(), 9])], vec![of(&[1]), of(&[0]), of(&[u64::MAX])]),
            (
                libc::SYS_fcntl,
                vec![of(&[3, flags(libc::F_DUPFD_CLOEXEC)])],
                vec![of(&[3, flags(libc::F_SETFL)]), of(&[3, flags(libc::F_SETOWN)]), of(&[3, 1033])],
            ),
            (
                libc::SYS_prctl,
                vec![of(&[flags(libc::PR_SET_NAME)])],
                [libc::PR_SET_PDEATHSIG, libc::PR_SET_DUMPABLE, libc::PR_SET_MM, libc::PR_SET_SECCOMP]
                    .map(|option| of(&[flags(option)]))
                    .to_vec(),
            ),
            (
                libc::SYS_prlimit64,
                vec![of(&[0, 7, 0, 1 << 40])],
                vec![of(&[0, 7, 1 << 40, 0]), of(&[PID.into(), 7, 0, 1 << 40])],
            ),
            (libc::SYS_setpriority, vec![of(&[0, 0, 19])], vec![of(&[0, 7, 19]), of(&[2, 0, 19])]),
        ] {
            for arguments in allowed {
                assert_eq!(answer(call, arguments), None, "call {call} with {arguments:x?}");
            }
            for arguments in refused {
                assert_eq!(answer(call, arguments), EPERM, "call {call} with {arguments:x?}");
            }
        }
        for call in [libc::SYS_read, libc::SYS_mprotect, libc::SYS_exit_group, libc::SYS_clock_gettime] {
            assert_eq!(answer(call, [u64::MAX; 6]), None);
        }
    }
}
