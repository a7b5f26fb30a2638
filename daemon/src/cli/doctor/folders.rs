//! The folders that settings name, as the user finds them that the daemon runs as: where the settings are those of a service, its user.

use std::path::Path;

use super::finding::{Check, Code, Finding};
use super::socket;
use crate::cli::access::{Closed, Identity, Wanted};
use crate::config::{Config, SavedContexts};
use crate::daemon::usual_state_dir;
use crate::guest::check_private;
use crate::start_check::check_guests_dir;

/// Who a daemon with the settings runs as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Runner {
    /// This process's user. Its cache and its socket are tried by checks of their own.
    Own(Identity),
    /// The user of the service, which has folders for its cache, its state and its socket where the settings name none.
    Service {
        /// The user.
        who: Identity,
        /// Whether systemd makes the socket.
        has_socket: bool,
    },
}

impl Runner {
    pub(super) fn who(&self) -> &Identity {
        match self {
            Self::Own(who) | Self::Service { who, .. } => who,
        }
    }
}

/// Looks at each of them, and makes none.
pub(super) fn check(config: &Config, runner: &Runner) -> Check {
    let who = runner.who();
    let mut check = Check::new("folders", format!("{} can use those that are set", who.name()));
    if let Some(dir) = &config.guests_dir {
        check.details.push(format!("guests_dir: {}", dir.display()));
        check.findings.extend(of_guests(config, dir, runner));
    }
    let is_kept = config.saved_contexts == SavedContexts::Disk;
    let usual = || matches!(runner, Runner::Own(_)).then(usual_state_dir).flatten();
    if let Some(dir) = config.state_dir.clone().or_else(usual).filter(|_| is_kept) {
        check.details.push(format!("state_dir: {}", dir.display()));
        check.findings.extend(not_private(&dir.join("contexts"), who).map(|(why, remedy)| {
            let said = format!("what guests save cannot be kept on disk: {why}");
            let finding = Finding::problem(Code::StateDirUnusable, said, remedy("state_dir"));
            // Guests run without.
            if config.state_dir.is_some() {
                finding
            } else {
                Finding::note(finding.code, finding.said, finding.remedy)
            }
        }));
    }
    if let Runner::Service { who, has_socket } = runner {
        if let Some(dir) = &config.cache_dir {
            check.details.push(format!("cache_dir: {}", dir.display()));
            check.findings.extend(not_private(dir, who).map(|(why, remedy)| {
                let said = format!("the cache cannot be used: {why}");
                Finding::problem(Code::CacheUnusable, said, remedy("cache_dir"))
            }));
        }
        if let Some(path) = config.socket.as_ref().filter(|_| !has_socket) {
            check.details.push(format!("socket: {}", path.display()));
            check.findings.extend(socket::closed_place_for(path, who));
        }
    }
    check
}

fn of_guests(config: &Config, dir: &Path, runner: &Runner) -> Option<Finding> {
    let problem = |said: String, remedy: String| Finding::problem(Code::GuestsDirUnusable, said, remedy);
    if let Some(closed) = runner.who().kept_from(dir, Wanted::List) {
        let said = format!("{} may not list the guests of guests_dir", runner.who().name());
        return Some(problem(said, closed.remedy(runner.who())).with(closed.details()));
    }
    let error = check_guests_dir(config).err()?;
    let remedy = "make that folder, with each guest in it as NAME.wasm, or take `guests_dir` out";
    Some(problem(error.to_string(), remedy.to_owned()))
}

/// Why a folder cannot be this user's alone, and what to do about the setting that names it.
fn not_private(dir: &Path, who: &Identity) -> Option<(String, impl Fn(&str) -> String)> {
    let found = check_private(dir, who.uid()).err().map(|error| (error.to_string(), None));
    let found = found.or_else(|| {
        let above = dir.ancestors().find(|path| path.exists())?;
        let closed = closed_to_make(above, who)?;
        Some((format!("{} may make no folder there ({})", who.name(), closed.details()), Some(closed)))
    });
    let (why, closed) = found?;
    let name = who.name().to_owned();
    let path = dir.display().to_string();
    Some((why, move |setting: &str| match &closed {
        Some(_) => {
            format!("`sudo install -d -m 700 -o {name} {path}`, or set `{setting}` to a folder of {name}'s")
        }
        None => format!("set `{setting}` to a folder that is {name}'s alone (mode 700)"),
    }))
}

/// What keeps a user from making something in a folder.
fn closed_to_make(folder: &Path, who: &Identity) -> Option<Closed> {
    who.kept_from(folder, Wanted::Write).or_else(|| who.kept_from(folder, Wanted::Search))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
    use std::path::PathBuf;

    use super::*;

    /// A folder that others may look into, and a user who is not its owner.
    fn place() -> (tempfile::TempDir, Identity) {
        let folder = tempfile::tempdir().expect("a folder");
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("it is ours");
        let uid = fs::metadata(folder.path()).expect("it is there").uid();
        (folder, Identity::new(uid + 4321, Vec::new()))
    }

    fn codes(config: &Config, runner: &Runner) -> Vec<Code> {
        check(config, runner).findings.iter().map(|finding| finding.code).collect()
    }

    fn config(state_dir: Option<PathBuf>) -> Config {
        Config { state_dir, ..Config::default() }
    }

    #[test]
    fn folders_that_the_services_user_cannot_use_are_found() {
        let (folder, who) = place();
        let at = |name: &str| Some(folder.path().join(name));
        let service = Runner::Service { who: who.clone(), has_socket: false };
        assert_eq!(codes(&Config::default(), &service), [], "the unit has folders of its own");
        fs::create_dir(at("guests").expect("a path")).expect("made");
        fs::set_permissions(at("guests").expect("a path"), Permissions::from_mode(0o700))
            .expect("it is ours");
        let all = Config {
            guests_dir: at("guests"),
            cache_dir: at("cache"),
            socket: at("trellis.sock"),
            ..config(at("state"))
        };
        let found = check(&all, &service).findings;
        let codes_of: Vec<Code> = found.iter().map(|finding| finding.code).collect();
        assert_eq!(
            codes_of,
            [Code::GuestsDirUnusable, Code::StateDirUnusable, Code::CacheUnusable, Code::SocketPlaceClosed]
        );
        assert!(found.iter().all(Finding::is_problem), "{found:?}");
        assert!(found[0].remedy.contains("setfacl"), "{found:?}");
        assert!(
            found[1].remedy.contains("install -d -m 700") && found[1].remedy.contains("state_dir"),
            "{found:?}"
        );
        let handed = Runner::Service { who, has_socket: true };
        assert!(!codes(&all, &handed).contains(&Code::SocketPlaceClosed), "systemd makes it");
        assert!(!folder.path().join("cache").exists() && !folder.path().join("state").exists());
    }

    #[test]
    fn folders_of_ones_own_are_used_and_what_is_no_folder_is_not() {
        let (folder, _) = place();
        let at = |name: &str| Some(folder.path().join(name));
        let own = Runner::Own(Identity::this_process());
        assert_eq!(codes(&Config { guests_dir: at("."), ..config(at("state")) }, &own), []);
        fs::write(folder.path().join("file"), "").expect("written");
        let wrong = Config { guests_dir: at("nowhere"), ..config(at("file")) };
        assert_eq!(codes(&wrong, &own), [Code::GuestsDirUnusable, Code::StateDirUnusable]);
        let unkept = Config { saved_contexts: SavedContexts::Memory, ..config(at("file")) };
        assert_eq!(codes(&unkept, &own), []);
    }
}
