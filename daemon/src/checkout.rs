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

/// Where the component of an example may lie, built: as a package has it, else as cargo has built it in the checkout.
pub(crate) fn built(name: &str) -> Vec<PathBuf> {
    let file = format!("{}.wasm", name.replace('-', "_"));
    let in_checkout = examples().map(|folder| folder.join(BUILT).join(file));
    [Path::new(INSTALLED).join(format!("{name}.wasm"))].into_iter().chain(in_checkout).collect()
}

#[cfg(unix)]
fn is_trusted(folder: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let own = rustix::process::geteuid().as_raw();
    fs::metadata(folder).is_ok_and(|folder| {
        [0, own].contains(&folder.uid()) && (folder.mode() & 0o022 == 0 || own == folder.uid())
    })
}

#[cfg(not(unix))]
fn is_trusted(_: &Path) -> bool {
    true
}
