//! Whether the user of the service can read what the configuration names: it is root that installs, and root reads everything.

use std::fs;
use std::path::{Path, PathBuf};

use crate::bundled;
use crate::cli::access::{Identity, Wanted};
use crate::cli::error::CliError;
use crate::config::Config;
use crate::daemon::SHAPE_PREFIX;

/// Folders that the unit has of its own.
const PRIVATE: [&str; 2] = ["/tmp", "/var/tmp"];

/// Endings of the files of a model.
const OF_MODELS: [&str; 3] = ["json", "safetensors", "jinja"];

/// # Errors
/// A file is closed to that user, or is not where the service would look for it.
pub(super) fn check(file: &Path, config: &Config, who: &Identity) -> Result<(), CliError> {
    let is_folder = |choice: &&String| bundled::source(choice).is_none() && !choice.starts_with(SHAPE_PREFIX);
    let models: Vec<&Path> = config.models.iter().filter(is_folder).map(Path::new).collect();
    let cannot =
        |reason: String, remedy: String| CliError::ServiceCannot { file: file.to_owned(), reason, remedy };
    let (component, guests_dir) = (config.policy.component.as_deref(), config.guests_dir.as_deref());
    for path in models.iter().copied().chain(component).chain(guests_dir) {
        let shown = path.display();
        if !path.is_absolute() {
            let remedy = "write the whole path, from / on".to_owned();
            return Err(cannot(format!("{shown} is found from the current folder alone"), remedy));
        }
        if PRIVATE.iter().any(|private| path.starts_with(private)) {
            let remedy = "move it to a folder such as /srv".to_owned();
            return Err(cannot(format!("{shown} is not in the /tmp that the unit has of its own"), remedy));
        }
    }
    let of_path = |path: &Path| (path.to_owned(), if path.is_file() { Wanted::Read } else { Wanted::List });
    let folders = models.iter().copied().chain(guests_dir).map(of_path);
    let files = models.iter().flat_map(|folder| of_model(folder)).chain(component.map(Path::to_owned));
    let files = files.chain([file.to_owned()]).map(|path| (path, Wanted::Read));
    let closed = folders.chain(files).find_map(|(path, wanted)| Some((who.kept_from(&path, wanted)?, path)));
    let Some((closed, path)) = closed else { return Ok(()) };
    let reason = format!("{} may not read {} ({})", who.name(), path.display(), closed.details());
    Err(cannot(reason, closed.remedy(who)))
}

fn of_model(folder: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_read =
        |file: &PathBuf| file.extension().is_some_and(|end| OF_MODELS.iter().any(|known| end == *known));
    files.filter(is_read).collect()
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// A folder that is not below those that the unit has of its own.
    fn folder() -> tempfile::TempDir {
        let exe = std::env::current_exe().expect("this program");
        tempfile::tempdir_in(exe.parent().expect("it is in a folder")).expect("a folder")
    }

    fn reason(config: &Config, who: &Identity) -> Option<(String, String)> {
        match check(Path::new("/"), config, who) {
            Ok(()) => None,
            Err(CliError::ServiceCannot { reason, remedy, .. }) => Some((reason, remedy)),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn what_the_services_user_cannot_see_is_named() {
        let of = |model: &Path| Config { models: vec![model.display().to_string()], ..Config::default() };
        let who = Identity::stranger("trellis");
        assert_eq!(reason(&Config::default(), &who), None, "bundled models are in the program");
        assert_eq!(reason(&of(Path::new("shape:llama-3.2-1b")), &who), None);
        assert!(reason(&of(Path::new("models/x")), &who).expect("relative").1.contains("whole path"));
        assert!(
            reason(&of(Path::new("/tmp/x")), &who).expect("private").0.contains("/tmp that the unit has")
        );
    }

    #[test]
    fn a_closed_file_is_named_unless_the_folders_above_it_are_closed_already() {
        let folder = folder();
        // Where the tests are built in a folder that is private, that one is found first.
        let who = Identity::stranger("trellis");
        if PRIVATE.iter().any(|private| folder.path().starts_with(private)) {
            let config = Config { models: vec![folder.path().display().to_string()], ..Config::default() };
            assert!(reason(&config, &who).expect("private").1.contains("/srv"));
            return;
        }
        let model = folder.path().join("model");
        fs::create_dir(&model).expect("made");
        fs::write(model.join("config.json"), "{}").expect("written");
        fs::set_permissions(&model, Permissions::from_mode(0o700)).expect("it is ours");
        let config = Config { models: vec![model.display().to_string()], ..Config::default() };
        let (reason_, remedy) = reason(&config, &who).expect("it is closed");
        assert!(reason_.starts_with("trellis may not read"), "{reason_}");
        assert!(remedy.contains("chmod o+"), "{remedy}");
    }
}
