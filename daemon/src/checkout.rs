//! Where components lie that come with the program: those of packages, and those of the checkout that it was built from.

use std::fs;
use std::path::{Path, PathBuf};

/// Where the examples lie in a checkout.
pub(crate) const EXAMPLES: &str = "guest-examples";

/// Where packages have those that commands and the HTTP front need, built.
pub(crate) const INSTALLED: &str = "/usr/lib/trellis/guests";

/// Where cargo puts components, below the folder of the examples.
const BUILT: &str = "target/wasm32-wasip2/release";

/// The examples of the checkout that this program was built from, if it is still there and nobody but this user and root decides what
/// is built there: the program may have been built on another machine, or by somebody else.
pub(crate) fn examples() -> Option<PathBuf> {
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(|root| root.join(EXAMPLES));
    checkout.filter(|folder| is_trusted(folder))
}

/// Where the component of an example may lie, built: as a package has it, else as cargo has built it in the checkout, where nobody
/// else can have put it.
pub(crate) fn built(name: &str) -> Vec<PathBuf> {
    let file = format!("{}.wasm", name.replace('-', "_"));
    let in_checkout = examples().map(|folder| folder.join(BUILT).join(file)).filter(|file| is_trusted(file));
    [Path::new(INSTALLED).join(format!("{name}.wasm"))].into_iter().chain(in_checkout).collect()
}

/// Whether nobody but this user and root may change what lies there, or what the folders on the way to it hold.
#[cfg(unix)]
fn is_trusted(path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let own = rustix::process::geteuid().as_raw();
    // Links lead where they lead.
    let Ok(path) = fs::canonicalize(path) else { return false };
    path.ancestors().all(|place| {
        fs::symlink_metadata(place).is_ok_and(|metadata| {
            // In a sticky folder only its owner can replace a file; what is to be run is not taken from one that others fill.
            let is_passed = metadata.mode() & 0o1000 != 0 && place != path;
            [0, own].contains(&metadata.uid()) && (metadata.mode() & 0o022 == 0 || is_passed)
        })
    })
}

#[cfg(not(unix))]
fn is_trusted(_: &Path) -> bool {
    true
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn each_folder_down_to_the_file_is_looked_at() {
        let root = tempfile::tempdir().expect("a folder");
        let folder = root.path().join("target/release");
        fs::create_dir_all(&folder).expect("made");
        let file = folder.join("http_chat.wasm");
        fs::write(&file, "").expect("written");
        let set = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode));
        let places = [(root.path().to_owned(), 0o755), (folder, 0o755), (file.clone(), 0o644)];
        for (place, mode) in &places {
            set(place, *mode).expect("it is ours");
        }
        assert!(is_trusted(&file));
        for (place, mode) in &places {
            set(place, mode | 0o020).expect("it is ours");
            assert!(!is_trusted(&file), "others may change {}", place.display());
            set(place, *mode).expect("it is ours");
        }
        assert!(!is_trusted(&root.path().join("nothing")));
    }
}
