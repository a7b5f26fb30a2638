//! Loads that are held up for as long as a test likes.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use trellis::daemon::BackendWrap;

/// Names a file: while it is there, no load comes to its end.
pub const ENVIRONMENT: &str = "TRELLIS_TEST_HELD_LOADS";

const LOOK: Duration = Duration::from_millis(20);

/// What holds loads up that the environment names a file for, in front of what is between engines and backends otherwise.
#[must_use]
pub fn wrap_from_environment(inner: Option<BackendWrap>) -> Option<BackendWrap> {
    let Some(path) = std::env::var_os(ENVIRONMENT).map(PathBuf::from) else { return inner };
    let wrap: BackendWrap = Arc::new(move |name, backend| {
        while path.exists() {
            thread::sleep(LOOK);
        }
        match &inner {
            Some(inner) => inner(name, backend),
            None => backend,
        }
    });
    Some(wrap)
}
