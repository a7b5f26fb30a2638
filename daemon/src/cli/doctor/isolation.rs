//! Whether guests can run in processes of their own. Where they cannot, they run in the daemon's, and nothing is wrong.

use std::path::Path;

use super::finding::{Check, Code, Finding};

/// Tries it, with the daemon's socket among what a guest would be after.
pub(super) async fn check(socket: &Path) -> Check {
    match look(socket).await {
        Ok(said) => Check::new("isolation", said),
        Err(reason) => {
            let said = "guests cannot run in processes of their own here";
            let remedy = "nothing, while `isolation = \"thread\"` will do: WebAssembly keeps guests in";
            Check::found("isolation", Finding::note(Code::NoIsolation, said, remedy).with(reason))
        }
    }
}

/// Has a guests' process try what it can get at, the daemon's socket among it.
#[cfg(target_os = "linux")]
async fn look(socket: &Path) -> Result<String, String> {
    use crate::isolation::confine::FileRules;
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
    let landlock = match files {
        FileRules::Enforced => {
            "system calls are filtered, and Landlock takes all rights to files and sockets"
        }
        FileRules::PartlyEnforced => {
            "system calls are filtered; this kernel's Landlock knows some of the rules about files and sockets"
        }
        FileRules::Missing => "system calls are filtered; this kernel has no Landlock",
    };
    let n_refused = found.attacks.len();
    Ok(format!(
        "guests can run in processes of their own: {landlock}; {n_refused} of {n_refused} ways out refused"
    ))
}

#[cfg(not(target_os = "linux"))]
async fn look(_: &Path) -> Result<String, String> {
    Err("guests run in processes of their own on Linux".to_owned())
}
