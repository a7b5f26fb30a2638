//! What is being loaded at this moment and what went wrong last, for whoever asks how the daemon is.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use trellis_wire::{FailureInfo, LoadingInfo};

use crate::daemon::DaemonError;
use crate::metrics::Loads;

/// Bytes of what is said of a failure.
const MESSAGE_BYTES_MAX: usize = 1 << 10;

/// Loads under way, and the last failure.
#[derive(Debug, Default)]
pub(crate) struct News {
    loading: Mutex<Vec<Arc<UnderWay>>>,
    last_failure: Mutex<Option<(Instant, String)>>,
    loads: Loads,
}

/// A model that is being loaded.
#[derive(Debug)]
pub(crate) struct UnderWay {
    name: String,
    begun: Instant,
    /// Whether it is loaded for the operator.
    is_operators: bool,
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
}

impl UnderWay {
    /// How far it is.
    pub(crate) fn note(&self, done_bytes: u64, total_bytes: u64) {
        self.done_bytes.store(done_bytes, Ordering::Relaxed);
        self.total_bytes.store(total_bytes, Ordering::Relaxed);
    }
}

/// A load among the news, until this is dropped.
#[derive(Debug)]
pub(crate) struct Load<'a> {
    news: &'a News,
    under_way: Arc<UnderWay>,
}

impl Load<'_> {
    /// Where it is noted how far it is.
    pub(crate) fn heard(&self) -> Arc<UnderWay> {
        self.under_way.clone()
    }

    /// It is loaded, or is not, for this reason.
    pub(crate) fn end(self, error: Option<&DaemonError>) {
        let outcome = match error {
            None => "loaded",
            Some(DaemonError::GivenUp) => "given_up",
            Some(_) => "failed",
        };
        self.news.loads.note(outcome, self.under_way.begun.elapsed());
        match error {
            // That is no failure.
            None | Some(DaemonError::GivenUp) => {}
            Some(error) => self.news.note_failure(format!("{} was not loaded: {error}", self.under_way.name)),
        }
    }
}

impl Drop for Load<'_> {
    fn drop(&mut self) {
        lock(&self.news.loading).retain(|under_way| !Arc::ptr_eq(under_way, &self.under_way));
    }
}

impl News {
    /// A model is being loaded that was asked for as this: a name, or a folder, of which the last part is said.
    pub(crate) fn begin(&self, choice: &str, is_operators: bool) -> Load<'_> {
        let name = Path::new(choice).file_name().map_or(choice.into(), |name| name.to_string_lossy());
        let (done_bytes, total_bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        let name = name.into_owned();
        let under_way =
            Arc::new(UnderWay { name, begun: Instant::now(), is_operators, done_bytes, total_bytes });
        lock(&self.loading).push(under_way.clone());
        Load { news: self, under_way }
    }

    /// Something went wrong.
    pub(crate) fn note_failure(&self, mut message: String) {
        message.truncate(message.floor_char_boundary(MESSAGE_BYTES_MAX));
        *lock(&self.last_failure) = Some((Instant::now(), message));
    }

    /// Models that are being loaded.
    pub(crate) fn loading(&self) -> Vec<LoadingInfo> {
        let info = |under_way: &Arc<UnderWay>| LoadingInfo {
            model: under_way.name.clone(),
            done_bytes: under_way.done_bytes.load(Ordering::Relaxed),
            total_bytes: under_way.total_bytes.load(Ordering::Relaxed),
        };
        lock(&self.loading).iter().map(info).collect()
    }

    /// How long loads took that have come to their ends.
    pub(crate) fn loads(&self) -> &Loads {
        &self.loads
    }

    /// How many bytes of a model are loaded for the operator, and how many there are, if it is being loaded.
    pub(crate) fn progress_of(&self, name: &str) -> Option<(u64, u64)> {
        let loading = lock(&self.loading);
        let under_way = loading.iter().find(|load| load.is_operators && load.name == name)?;
        let UnderWay { done_bytes, total_bytes, .. } = &**under_way;
        Some((done_bytes.load(Ordering::Relaxed), total_bytes.load(Ordering::Relaxed)))
    }

    /// What went wrong last.
    pub(crate) fn last_failure(&self) -> Option<FailureInfo> {
        let (at, message) = lock(&self.last_failure).clone()?;
        let ago_ms = u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX);
        Some(FailureInfo { message, ago_ms })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_is_told_until_it_ends_and_why_it_failed_after_that() {
        let news = News::default();
        let (one, other) = (news.begin("/srv/models/llama", true), news.begin("draft", false));
        one.heard().note(3, 12);
        let told = LoadingInfo { model: "llama".to_owned(), done_bytes: 3, total_bytes: 12 };
        assert_eq!(news.loading()[0], told);
        assert_eq!((news.progress_of("llama"), news.progress_of("draft")), (Some((3, 12)), None));
        other.end(Some(&DaemonError::GivenUp));
        assert_eq!((news.loading().len(), news.last_failure()), (1, None));
        one.end(Some(&DaemonError::Leaving { name: "llama".to_owned() }));
        assert!(news.loading().is_empty());
        let failure = news.last_failure().expect("it was noted");
        assert!(failure.message.starts_with("llama was not loaded: model \"llama\" is being"), "{failure:?}");
        news.note_failure("é".repeat(MESSAGE_BYTES_MAX));
        assert_eq!(news.last_failure().expect("the last").message.len(), MESSAGE_BYTES_MAX);
    }
}
