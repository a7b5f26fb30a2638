//! Models of the catalog that fail again and again, as they are loaded or as they are used: they are loaded anew after a while only,
//! which doubles each time, and who asks for one meanwhile hears at once what went wrong last.

use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::Loader;
use crate::daemon::DaemonError;
use crate::hub;
use crate::tasks::blocking;

/// How long nobody tries anew after the first failure, and after any.
const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);

/// What has worked for so long since it was loaded begins anew.
const WORKS_FOR: Duration = Duration::from_secs(60);

/// Whoever asks for a model that has failed waits for so long at most until its files were looked at.
const LOOK_TIME: Duration = Duration::from_secs(1);

/// Files of a folder that are looked at; more has no model.
const N_FILES_MAX: usize = 1 << 12;

/// What is known of models of the catalog that were to be loaded for guests, by their names.
#[derive(Debug, Default)]
pub(super) struct Setbacks(Mutex<HashMap<String, Setback>>);

#[derive(Debug)]
struct Setback {
    /// Failures in a row. The first one of a model that is used counts for nothing: it may be loaded again at once.
    n_failures: u32,
    last: Option<Arc<DaemonError>>,
    /// No load begins before.
    until: Instant,
    /// When it was loaded, unless its load failed since.
    loaded: Option<Instant>,
    /// Its files, before they were read last.
    files: Files,
    /// Held by who looks at its files, which may lie where nothing answers.
    look: Arc<tokio::sync::Mutex<()>>,
}

/// Names, lengths and times of the files of a model, in short; `None` where there is no folder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Files(Option<u64>);

impl Files {
    /// Those at a path of the catalog. Blocks.
    fn at(path: &Path) -> Self {
        let folder = hub::snapshot(path).ok().flatten().map_or_else(|| path.to_owned(), |found| found.folder);
        let seen = |path: &Path, hasher: &mut DefaultHasher| {
            let metadata = fs::metadata(path).ok();
            let seen = metadata.map(|metadata| (metadata.len(), metadata.modified().ok()));
            (path, seen).hash(hasher);
        };
        let Ok(entries) = fs::read_dir(&folder) else { return Self(None) };
        let mut hasher = DefaultHasher::new();
        seen(&folder, &mut hasher);
        let mut files: Vec<PathBuf> = entries.flatten().take(N_FILES_MAX).map(|entry| entry.path()).collect();
        files.sort_unstable();
        files.iter().for_each(|file| seen(file, &mut hasher));
        Self(Some(hasher.finish()))
    }
}

/// How long nobody tries anew after so many failures.
fn delay(n_failures: u32) -> Duration {
    match n_failures {
        0 => Duration::ZERO,
        n => FIRST.saturating_mul(2_u32.saturating_pow(n - 1)).min(LONGEST),
    }
}

impl Setbacks {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Setback>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It was loaded from these files.
    fn note_loaded(&self, name: &str, files: Files, now: Instant) {
        let mut all = self.lock();
        let known = all.entry(name.to_owned()).or_insert_with(|| Setback::none(files, now));
        (known.loaded, known.files) = (Some(now), files);
    }

    /// It was not loaded from these files; says after which time that may be tried again.
    fn note_not_loaded(&self, name: &str, error: Arc<DaemonError>, files: Files, now: Instant) -> Duration {
        let mut all = self.lock();
        let known = all.entry(name.to_owned()).or_insert_with(|| Setback::none(files, now));
        let n_before = if known.has_worked(now) { 0 } else { known.n_failures };
        known.n_failures = n_before.saturating_add(1);
        (known.loaded, known.files) = (None, files);
        known.fail(error, now)
    }

    /// It has failed as it was used; says after which time it may be loaded again.
    pub(super) fn note_failed(&self, name: &str, error: Arc<DaemonError>, now: Instant) -> Duration {
        let mut all = self.lock();
        let Some(known) = all.get_mut(name) else {
            let mut first = Setback::none(Files(None), now);
            // Who loaded it did not look: whatever is there is as new as it may be.
            first.last = Some(error);
            all.insert(name.to_owned(), first);
            return Duration::ZERO;
        };
        let is_first = known.last.is_none() || known.has_worked(now);
        known.n_failures = if is_first { 0 } else { known.n_failures.saturating_add(1) };
        known.fail(error, now)
    }

    /// What went wrong last, where it is too early to try anew.
    fn standing(&self, name: &str, now: Instant) -> Option<Standing> {
        let all = self.lock();
        let known = all.get(name).filter(|known| now < known.until)?;
        Some(Standing { error: known.last.clone()?, files: known.files, look: known.look.clone() })
    }

    /// It may be loaded at once.
    pub(super) fn clear(&self, name: &str) {
        self.lock().remove(name);
    }

    /// All may.
    fn clear_all(&self) {
        self.lock().clear();
    }
}

/// A failure that stands for now.
struct Standing {
    error: Arc<DaemonError>,
    files: Files,
    look: Arc<tokio::sync::Mutex<()>>,
}

impl Setback {
    fn none(files: Files, now: Instant) -> Self {
        Self { n_failures: 0, last: None, until: now, loaded: None, files, look: Arc::default() }
    }

    /// Whether it was loaded long enough ago for what went wrong before to count for nothing.
    fn has_worked(&self, now: Instant) -> bool {
        self.loaded.is_some_and(|loaded| now.saturating_duration_since(loaded) >= WORKS_FOR)
    }

    fn fail(&mut self, error: Arc<DaemonError>, now: Instant) -> Duration {
        let delay = delay(self.n_failures);
        (self.last, self.until) = (Some(error), now + delay);
        delay
    }
}

/// Whether an error says that the same would happen again: not that there was no room, nor that nobody wanted it any more.
fn is_of_the_model(error: &DaemonError) -> bool {
    !error.is_passing()
        && !matches!(
            error,
            DaemonError::GivenUp
                | DaemonError::Ending
                | DaemonError::Loading { .. }
                | DaemonError::NoRoom { .. }
                | DaemonError::KvTooSmall { .. }
        )
}

impl Loader {
    /// Models that have failed may be loaded for guests at once.
    pub(crate) fn forget_setbacks(&self) {
        self.setbacks.clear_all();
    }

    fn path_of(&self, name: &str) -> Option<PathBuf> {
        self.config.catalog.get(name).map(|model| PathBuf::from(&model.path))
    }

    /// The files of a model of the catalog, as they are now.
    pub(super) async fn files_of(&self, name: &str) -> Files {
        match self.path_of(name) {
            Some(path) => blocking(move || Files::at(&path)).await,
            None => Files(None),
        }
    }

    /// What came of a load for guests, from these files.
    pub(super) fn note_outcome(&self, name: &str, files: Files, error: Option<&Arc<DaemonError>>) {
        match error {
            None => self.setbacks.note_loaded(name, files, Instant::now()),
            Some(error) if is_of_the_model(error) => {
                let delay = self.setbacks.note_not_loaded(name, error.clone(), files, Instant::now());
                tracing::warn!(model = name, "it is not loaded on demand for {} s", delay.as_secs());
            }
            Some(_) => {}
        }
    }

    /// Why a model is not loaded for a guest yet: it has failed shortly before, and its files are the same.
    pub(super) async fn setback(&self, name: &str) -> Option<Arc<DaemonError>> {
        let Standing { error, files, look } = self.setbacks.standing(name, Instant::now())?;
        // Where somebody looks already, and has no answer yet, they are taken for the same.
        if let (Some(path), Ok(look)) = (self.path_of(name), look.try_lock_owned()) {
            let now = blocking(move || {
                let _look = look;
                Files::at(&path)
            });
            // Where nothing answers, they are taken for the same as well: the look goes on, and is the only one.
            if timeout(LOOK_TIME, now).await.is_ok_and(|now| now != files) {
                self.setbacks.clear(name);
                return None;
            }
        }
        Some(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error() -> Arc<DaemonError> {
        Arc::new(DaemonError::UnknownModel { name: "a".to_owned() })
    }

    #[test]
    fn what_fails_again_and_again_is_tried_less_and_less() {
        let (setbacks, begun) = (Setbacks::default(), Instant::now());
        let delays = (0..9).map(|_| setbacks.note_not_loaded("a", error(), Files(None), begun).as_secs());
        assert_eq!(delays.collect::<Vec<_>>(), [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert!(setbacks.standing("a", begun + LONGEST / 2).is_some());
        assert!(setbacks.standing("a", begun + LONGEST).is_none(), "it may be tried");
        assert!(setbacks.standing("b", begun).is_none());
        setbacks.clear("a");
        assert!(setbacks.standing("a", begun).is_none());
        assert_eq!(setbacks.note_not_loaded("a", error(), Files(None), begun), FIRST);
    }

    #[test]
    fn what_fails_in_use_is_loaded_again_at_once_and_the_next_time_later() {
        let (setbacks, mut now) = (Setbacks::default(), Instant::now());
        let mut fail_after = |worked: Duration| {
            setbacks.note_loaded("a", Files(Some(1)), now);
            now += worked;
            setbacks.note_failed("a", error(), now).as_secs()
        };
        let short = Duration::from_secs(2);
        assert_eq!([(); 4].map(|()| fail_after(short)), [0, 1, 2, 4]);
        assert_eq!(fail_after(WORKS_FOR), 0, "it has worked for long");
        assert_eq!(fail_after(short), 1);
        assert_eq!(setbacks.note_failed("b", error(), now), Duration::ZERO, "the operator has loaded it");
    }

    #[test]
    fn what_worked_for_long_before_its_load_fails_begins_anew() {
        let (setbacks, mut now) = (Setbacks::default(), Instant::now());
        let mut fail_after = |worked: Duration| {
            setbacks.note_loaded("a", Files(Some(1)), now);
            now += worked;
            setbacks.note_not_loaded("a", error(), Files(Some(1)), now).as_secs()
        };
        assert_eq!([(); 4].map(|()| fail_after(WORKS_FOR)), [1; 4], "none of them is known to the next");
        assert_eq!([(); 3].map(|()| fail_after(WORKS_FOR / 2)), [2, 4, 8]);
        assert_eq!(fail_after(WORKS_FOR), 1);
    }

    #[test]
    fn files_that_change_are_others() {
        let folder = tempfile::tempdir().expect("a folder");
        let before = Files::at(folder.path());
        assert_eq!(Files::at(folder.path()), before);
        fs::write(folder.path().join("config.json"), "{}").expect("written");
        let with_one = Files::at(folder.path());
        assert_ne!(with_one, before);
        // In its place, without a change of the folder itself.
        fs::write(folder.path().join("config.json"), "{ }").expect("written");
        assert_ne!(Files::at(folder.path()), with_one);
        assert_eq!(Files::at(&folder.path().join("none")), Files(None));
    }
}
