//! Where the tests find what they need: in the checkout that they were built from, or, on a machine without Rust
//! and at another path, in a checkout around the current folder and in what `cuda/gpu/pack.sh` has packed.

use std::env;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Names the folder that `cuda/gpu/run.sh` has unpacked: the `trellis` binary and `guests/NAME.wasm`.
const PACK: &str = "TRELLIS_TEST_PACK";

/// The unpacked folder, when the tests were packed.
#[must_use]
pub fn folder() -> Option<PathBuf> {
    env::var_os(PACK).map(PathBuf::from)
}

/// The root of the checkout.
///
/// # Panics
/// The checkout of the build is gone, and the current folder lies in none.
#[must_use]
pub fn root() -> &'static Path {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    ROOT.get_or_init(|| {
        let built = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests lie in the checkout");
        let here = env::current_dir().expect("there is a current folder");
        let is_root = |folder: &&Path| folder.join("tests/golden").is_dir() && folder.join("wit").is_dir();
        let found = std::iter::once(built).chain(here.ancestors()).find(is_root);
        found
            .unwrap_or_else(|| panic!("no checkout at {} or around {}", built.display(), here.display()))
            .to_owned()
    })
}

/// The `trellis` binary: the packed one, or the one that was built with the tests.
#[must_use]
pub fn exe(built: &'static str) -> &'static str {
    static EXE: OnceLock<String> = OnceLock::new();
    EXE.get_or_init(|| match folder() {
        // Absolute, because the tests start it elsewhere.
        Some(folder) => {
            let path = folder.join("trellis").canonicalize().expect("the pack holds the binary");
            path.into_os_string().into_string().expect("the path is UTF-8")
        }
        None => built.to_owned(),
    })
}
