//! Where guests run, and whether they can run in processes of their own: where they are to, and cannot, no guest would start.

use std::path::Path;

use super::finding::{Check, Code, Finding};
use crate::config::Isolation;

/// What a process of guests is like here.
struct Tried {
    said: String,
    /// A layer that the kernel does not have in whole.
    lacking: Option<Finding>,
}

/// Tries it, with the daemon's socket among what a guest would be after.
pub(super) async fn check(isolation: Isolation, socket: &Path) -> Check {
    found(isolation, look(socket).await)
}

fn found(isolation: Isolation, tried: Result<Tried, String>) -> Check {
    let is_wanted = isolation == Isolation::Process;
    let run = match is_wanted {
        true => "guests run in processes of their own",
        false => "guests run in threads of the daemon, and can run in processes of their own",
    };
    match tried {
        Ok(Tried { said, lacking }) => {
            let check = Check::new("isolation", format!("{run}: {said}"));
            // It says nothing of guests that do not run so.
            Check { findings: lacking.filter(|_| is_wanted).into_iter().collect(), ..check }
        }
        Err(reason) if is_wanted => {
            let said = "guests are to run in processes of their own, and cannot here: none would start";
            let remedy = "`isolation = \"thread\"` in the configuration, where all users are trusted: WebAssembly alone keeps guests \
                          in then";
            Check::found("isolation", Finding::problem(Code::NoIsolation, said, remedy).with(reason))
        }
        Err(reason) => {
            let said = "guests cannot run in processes of their own here";
            let remedy = "nothing, while `isolation = \"thread\"` will do: WebAssembly keeps guests in";
            Check::found("isolation", Finding::note(Code::NoIsolation, said, remedy).with(reason))
        }
    }
}

/// Has a guests' process try what it can get at, the daemon's socket among it.
#[cfg(target_os = "linux")]
async fn look(socket: &Path) -> Result<Tried, String> {
    use crate::isolation::{GuestProcess, ProcessSettings, probe};

    let exe = std::env::current_exe().map_err(|error| format!("this executable is not found: {error}"))?;
    let settings = ProcessSettings { user: "doctor".to_owned(), ..ProcessSettings::default() };
    let (process, sender, receiver) =
        GuestProcess::spawn_to_probe(&exe, &settings).await.map_err(|error| error.to_string())?;
    let files = process.confinement().files;
    let targets = probe::targets(socket, settings.data_bytes);
    let found = probe::run(process, sender, receiver, &targets).await.map_err(|error| error.to_string())?;
    let problems = found.problems();
    if !problems.is_empty() {
        return Err(problems.join("; "));
    }
    let n_refused = found.attacks.len();
    Ok(of_kernel(files, n_refused))
}

/// What a kernel with this much of Landlock comes to.
#[cfg(target_os = "linux")]
fn of_kernel(files: crate::isolation::confine::FileRules, n_refused: usize) -> Tried {
    use crate::isolation::confine::{FileRules, Lacking};

    let landlock = match files {
        FileRules::Enforced => "and Landlock takes all rights to files and sockets",
        FileRules::PartlyEnforced => "and Landlock takes some rights to files and sockets",
        FileRules::Missing => "and there is no Landlock",
    };
    let finding = |Lacking { said, remedy }| {
        let code = if files == FileRules::Missing { Code::NoLandlock } else { Code::OldLandlock };
        Finding::note(code, said, remedy)
    };
    Tried {
        said: format!("system calls are filtered, {landlock}; {n_refused} of {n_refused} ways out refused"),
        lacking: files.lacking().map(finding),
    }
}

#[cfg(not(target_os = "linux"))]
async fn look(_: &Path) -> Result<Tried, String> {
    Err("guests run in processes of their own on Linux".to_owned())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::isolation::confine::FileRules;

    #[test]
    fn it_is_a_problem_where_guests_are_to_have_processes_and_cannot() {
        let of = |isolation| found(isolation, Err("no seccomp".to_owned())).findings.remove(0);
        let (wanted, not_wanted) = (of(Isolation::Process), of(Isolation::Thread));
        assert!(wanted.is_problem() && wanted.remedy.contains("isolation = \"thread\""), "{wanted:?}");
        assert!(!not_wanted.is_problem() && not_wanted.code == Code::NoIsolation, "{not_wanted:?}");
    }

    #[test]
    fn a_kernel_without_landlock_is_noted_where_guests_have_processes() {
        let of = |files, isolation| {
            let findings = found(isolation, Ok(of_kernel(files, 3))).findings;
            assert!(findings.iter().all(|finding| !finding.is_problem()), "{findings:?}");
            findings.first().map(|finding| finding.code)
        };
        assert_eq!(of(FileRules::Missing, Isolation::Process), Some(Code::NoLandlock));
        assert_eq!(of(FileRules::PartlyEnforced, Isolation::Process), Some(Code::OldLandlock));
        assert_eq!(of(FileRules::Enforced, Isolation::Process), None);
        assert_eq!(of(FileRules::Missing, Isolation::Thread), None);
    }
}
