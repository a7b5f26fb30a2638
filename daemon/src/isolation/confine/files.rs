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
