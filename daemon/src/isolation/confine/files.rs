//! No right to any file, port, abstract socket or process outside: Landlock without a rule.
//!
//! System calls for these are refused already; this holds where a descriptor or a call was overlooked.

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetStatus, Scope,
};
use serde::{Deserialize, Serialize};

use super::error::ConfineError;

/// The newest rules that are asked for. A kernel that is older enforces those that it knows.
const NEWEST: ABI = ABI::V6;

/// How much of the rules a kernel enforces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileRules {
    /// All.
    Enforced,
    /// Those that it knows.
    PartlyEnforced,
    /// It has no Landlock, or it is switched off.
    Missing,
}

impl FileRules {
    /// For clients, in a word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Enforced => "enforced",
            Self::PartlyEnforced => "partly-enforced",
            Self::Missing => "missing",
        }
    }

    /// What a kernel that does not enforce all means for the operator, and what would help.
    #[must_use]
    pub fn lacking(self) -> Option<Lacking> {
        match self {
            Self::Enforced => None,
            Self::PartlyEnforced => Some(Lacking {
                said: "this kernel's Landlock knows some of the rules about files, ports, sockets and signals: the filter of system \
                       calls, which refuses them all, stands alone against the rest",
                remedy: "a kernel with Landlock ABI 6 (Linux 6.12 and newer) has them all",
            }),
            Self::Missing => Some(Lacking {
                said: "this kernel has no Landlock, or it is switched off: the filter of system calls alone keeps files, ports, \
                       sockets and signals from guests",
                remedy: "a kernel with Landlock (Linux 5.13 and newer, all rules from 6.12 on), and `landlock` in its list of \
                         security modules (`lsm=`)",
            }),
        }
    }
}

/// A layer that a kernel does not have, or not in whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lacking {
    /// What that means.
    pub said: &'static str,
    /// What has it.
    pub remedy: &'static str,
}

/// Takes every right from the calling thread and those that it starts.
pub(super) fn forbid() -> Result<FileRules, ConfineError> {
    let status = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))
        .and_then(|rules| rules.handle_access(AccessNet::from_all(NEWEST)))
        .and_then(|rules| rules.scope(Scope::from_all(NEWEST)))
        .and_then(Ruleset::create)
        .and_then(landlock::RulesetCreated::restrict_self)
        .map_err(|error| ConfineError::Files { reason: error.to_string() })?;
    Ok(match status.ruleset {
        RulesetStatus::FullyEnforced => FileRules::Enforced,
        RulesetStatus::PartiallyEnforced => FileRules::PartlyEnforced,
        RulesetStatus::NotEnforced => FileRules::Missing,
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::ErrorKind;
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    #[test]
    fn a_kernel_without_landlock_is_told_of() {
        use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

        let status = thread::spawn(|| {
            let calls = [(libc::SYS_landlock_create_ruleset, Vec::new())].into();
            let absent = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
            let arch = std::env::consts::ARCH.try_into().expect("known");
            let filter = SeccompFilter::new(calls, SeccompAction::Allow, absent, arch).expect("made");
            seccompiler::apply_filter(&BpfProgram::try_from(filter).expect("made")).expect("put on");
            forbid().expect("it goes on without")
        });
        assert_eq!(status.join().expect("no panic"), FileRules::Missing);
        let lacking = |rules: FileRules| rules.lacking().map(|lacking| lacking.said);
        assert_eq!(lacking(FileRules::Enforced), None);
        assert!(lacking(FileRules::PartlyEnforced).is_some_and(|said| said.contains("some of the rules")));
        assert!(lacking(FileRules::Missing).is_some_and(|said| said.contains("has no Landlock")));
    }

    #[test]
    fn a_thread_without_rights_opens_nothing() {
        let status = thread::spawn(|| {
            let status = forbid().expect("it is put on, or the kernel has none");
            if status == FileRules::Missing {
                return status;
            }
            let refused = |result: std::io::Result<()>| {
                assert_eq!(result.expect_err("refused").kind(), ErrorKind::PermissionDenied);
            };
            refused(fs::read("/etc/passwd").map(drop));
            refused(fs::read_dir("/").map(drop));
            refused(fs::write("/tmp/landlock-test", "x"));
            if status == FileRules::Enforced {
                refused(TcpListener::bind("127.0.0.1:0").map(drop));
            }
            status
        });
        match status.join().expect("no panic") {
            FileRules::Missing => println!("skipped: this kernel has no Landlock"),
            status => println!("Landlock: {status:?}"),
        }
        fs::read("/etc/passwd").expect("other threads are as before");
    }
}
