//! When to look whether a socket's file is still there: after something has changed in its folder.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// Between a change and the look, so that a folder in which something changes all the time is not looked at as often.
const SETTLED: Duration = Duration::from_millis(100);

/// Between two looks where nothing has changed: where folders above it are moved away, the folder itself says nothing.
const WATCHED: Duration = Duration::from_secs(60);

/// Between two looks where the system has no more watches to give.
const UNWATCHED: Duration = Duration::from_secs(2);

/// When to look.
#[derive(Debug)]
pub(super) struct Looks {
    folder: PathBuf,
    changed: Arc<Notify>,
    watcher: Option<RecommendedWatcher>,
    due: Instant,
}

impl Looks {
    /// After changes in the folder of the socket. Needs a tokio runtime with a clock.
    pub(super) fn of(socket: &Path) -> Self {
        let folder = socket.parent().unwrap_or(socket).to_owned();
        let mut looks = Self { folder, changed: Arc::default(), watcher: None, due: Instant::now() };
        looks.watch();
        // Something may have changed before.
        looks.due = Instant::now();
        looks
    }

    /// Watches the folder that has this name now.
    pub(super) fn watch(&mut self) {
        let changed = self.changed.clone();
        let note = move |event: notify::Result<notify::Event>| {
            // Whoever only reads changes nothing; whatever the system could not tell may have been a change.
            if !event.is_ok_and(|event| matches!(event.kind, EventKind::Access(_))) {
                changed.notify_one();
            }
        };
        let watcher = notify::recommended_watcher(note).and_then(|mut watcher| {
            watcher.watch(&self.folder, RecursiveMode::NonRecursive)?;
            Ok(watcher)
        });
        self.watcher = watcher.ok();
        // What changed before it was watched is not told.
        self.due = Instant::now() + UNWATCHED;
    }

    fn put_off(&mut self) {
        self.due = Instant::now() + if self.watcher.is_some() { WATCHED } else { UNWATCHED };
    }

    /// Waits until it is time. Whoever gives up the future misses nothing.
    pub(super) async fn next(&mut self) {
        loop {
            tokio::select! {
                () = sleep_until(self.due) => break,
                () = self.changed.notified() => self.due = self.due.min(Instant::now() + SETTLED),
            }
        }
        self.put_off();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tokio::time::timeout;

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn it_is_time_after_a_change_and_not_before() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("socket");
        let mut looks = Looks::of(&socket);
        timeout(SOON, looks.next()).await.expect("it may have changed before");
        assert!(timeout(3 * SETTLED, looks.next()).await.is_err(), "nothing has changed");
        for change in [|path: &Path| fs::write(path, ""), |path: &Path| fs::remove_file(path)] {
            change(&socket).expect("it is ours");
            timeout(SOON, looks.next()).await.expect("something has changed");
        }
    }

    #[tokio::test]
    async fn a_folder_that_was_made_anew_is_watched_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let inner = folder.path().join("inner");
        let make = || fs::create_dir(&inner).expect("it is not there");
        make();
        let mut looks = Looks::of(&inner.join("socket"));
        looks.next().await;
        fs::remove_dir(&inner).expect("it is empty");
        timeout(SOON, looks.next()).await.expect("it is gone");
        make();
        looks.watch();
        fs::write(inner.join("socket"), "").expect("it is ours");
        timeout(SOON, looks.next()).await.expect("something has changed");
    }

    #[tokio::test]
    async fn a_folder_that_cannot_be_watched_is_looked_at_by_the_clock() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut looks = Looks::of(&folder.path().join("nowhere/socket"));
        assert!(looks.watcher.is_none());
        for _ in 0..2 {
            timeout(SOON, looks.next()).await.expect("it is time");
        }
    }
}
