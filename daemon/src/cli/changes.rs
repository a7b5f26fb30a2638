//! Changes of a guest's source.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::sync::mpsc;

use super::error::CliError;
use super::resolve::Named;

/// An editor writes a file in several goes, and often several files.
const SETTLED: Duration = Duration::from_millis(100);

/// The folder of cargo's outputs.
const TARGET: &str = "target";

/// Tells when a guest's files have changed.
pub(super) struct Changes {
    /// Something has changed that has not been told.
    is_pending: bool,
    changed: mpsc::UnboundedReceiver<()>,
    _watcher: RecommendedWatcher,
}

impl Changes {
    /// Watches the folder of a crate but for what cargo builds in it, or the file of a component. These files, which are
    /// written meanwhile, are no source.
    ///
    /// # Errors
    /// It cannot be watched, or is neither.
    pub(super) fn of(named: &Named, written: &[&Path]) -> Result<Self, CliError> {
        let (folder, file) = match named {
            Named::Crate(folder) => (folder.clone(), None),
            Named::Component(path) => (folder_of(path), path.file_name().map(ToOwned::to_owned)),
            Named::Artifact(reference) => {
                return Err(CliError::NothingToWatch { name: reference.to_string() });
            }
            Named::Registered(name) => return Err(CliError::NothingToWatch { name: name.clone() }),
        };
        let shown = folder.display().to_string();
        let doing = |error: notify::Error| CliError::Io {
            doing: format!("watch {shown}"),
            source: std::io::Error::other(error),
        };
        let folder = folder.canonicalize().map_err(|error| doing(error.into()))?;
        let written: Vec<PathBuf> = written.iter().filter_map(|path| place_of(path)).collect();
        let (sender, changed) = mpsc::unbounded_channel();
        let is_of_it = move |path: &PathBuf| match &file {
            _ if written.contains(path) => false,
            Some(file) => path.file_name() == Some(file),
            None => path.file_name().is_some_and(|name| !is_beside(Path::new(name))),
        };
        let note = move |event: notify::Result<Event>| {
            let Ok(Event { kind, paths, .. }) = event else { return };
            let is_change = !matches!(kind, EventKind::Access(_));
            if is_change && paths.iter().any(&is_of_it) {
                // Nobody waits for changes any more once this fails.
                let _ = sender.send(());
            }
        };
        let mut watcher = notify::recommended_watcher(note).map_err(doing)?;
        watcher.watch(&folder, RecursiveMode::NonRecursive).map_err(doing)?;
        if let Named::Crate(_) = named {
            // One by one: the folder of what is built has thousands of its own.
            let entries = fs::read_dir(&folder).map_err(|error| doing(error.into()))?;
            for path in entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()) {
                if !path.file_name().is_some_and(|name| is_beside(Path::new(name))) {
                    watcher.watch(&path, RecursiveMode::Recursive).map_err(doing)?;
                }
            }
        }
        Ok(Self { is_pending: false, changed, _watcher: watcher })
    }

    /// Waits until something has changed, and no more does.
    pub(super) async fn next(&mut self) {
        if !self.is_pending && self.changed.recv().await.is_none() {
            return std::future::pending().await;
        }
        // Whoever gives up here is told the next time.
        self.is_pending = true;
        while let Ok(Some(())) = tokio::time::timeout(SETTLED, self.changed.recv()).await {}
        self.is_pending = false;
    }
}

/// What lies in a crate's folder and is not its source.
fn is_beside(name: &Path) -> bool {
    name == Path::new(TARGET) || name == Path::new("Cargo.lock") || name.to_string_lossy().starts_with('.')
}

/// A file as the system names it, though it may not be there yet.
fn place_of(path: &Path) -> Option<PathBuf> {
    Some(folder_of(path).canonicalize().ok()?.join(path.file_name()?))
}

fn folder_of(path: &Path) -> PathBuf {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn is_seen(changes: &mut Changes) -> bool {
        tokio::time::timeout(Duration::from_secs(5), changes.next()).await.is_ok()
    }

    #[tokio::test]
    async fn sources_are_seen_and_what_is_built_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        for name in ["src", "target", ".git"] {
            fs::create_dir(path(name)).expect("made");
        }
        let mut changes =
            Changes::of(&Named::Crate(folder.path().to_owned()), &[&path("out.json")]).expect("watched");
        fs::write(path("src/lib.rs"), "fn main() {}").expect("written");
        assert!(is_seen(&mut changes).await);
        fs::write(path("Cargo.toml"), "[package]").expect("written");
        assert!(is_seen(&mut changes).await);
        for name in ["target/a.wasm", ".git/index", "Cargo.lock", ".lib.rs.swp", "out.json"] {
            fs::write(path(name), "x").expect("written");
        }
        let quiet = tokio::time::timeout(Duration::from_millis(400), changes.next()).await;
        assert!(quiet.is_err(), "nothing of it is source");

        fs::write(path("guest.wasm"), "x").expect("written");
        let mut changes = Changes::of(&Named::Component(path("guest.wasm")), &[]).expect("watched");
        fs::write(path("Cargo.toml"), "[package] ").expect("written");
        let quiet = tokio::time::timeout(Duration::from_millis(400), changes.next()).await;
        assert!(quiet.is_err(), "another file");
        fs::write(path("guest.wasm"), "y").expect("written");
        assert!(is_seen(&mut changes).await);
        assert!(Changes::of(&Named::Registered("chat".to_owned()), &[]).is_err());
    }
}
