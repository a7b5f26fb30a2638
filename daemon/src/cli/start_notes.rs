//! How far the start of a daemon is, said beside its socket: for `trellis status`, and for those who wait.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use trellis_client::LoadingInfo;

use super::status::loading;
use crate::daemon::LoadProgress;
use crate::ipc::StartNote;

/// A rate over less time says nothing.
const RATED_TIME: Duration = Duration::from_millis(500);

/// Where it is said, and what was last.
pub(super) struct StartNotes {
    note: StartNote,
    last: Mutex<Last>,
}

/// What was said last.
#[derive(Default)]
struct Last {
    line: String,
    /// The model that is loaded, from when on, and how much of it was there then.
    load: Option<(String, Instant, u64)>,
}

impl Last {
    /// What is to be said, unless that is what was said last but for the rate.
    fn next(&mut self, info: &LoadingInfo, now: Instant) -> Option<String> {
        let LoadingInfo { model, done_bytes, .. } = info;
        if self.load.as_ref().is_none_or(|(name, ..)| name != model) {
            self.load = Some((model.clone(), now, *done_bytes));
        }
        let line = loading(info);
        if line == self.line {
            return None;
        }
        self.line.clone_from(&line);
        let rate = self.load.as_ref().and_then(|(_, since, n_before)| {
            let (time, n_bytes) = (now.duration_since(*since), done_bytes.saturating_sub(*n_before));
            (time >= RATED_TIME && n_bytes > 0)
                .then(|| format!(", {:.2} GB/s", n_bytes as f64 / 1e9 / time.as_secs_f64()))
        });
        Some(line + &rate.unwrap_or_default())
    }
}

impl StartNotes {
    pub(super) fn in_(note: StartNote) -> Self {
        Self { note, last: Mutex::default() }
    }

    /// Says it where it has changed.
    pub(super) fn tell(&self, progress: &LoadProgress) {
        let LoadProgress::Loading { model, done_bytes, total_bytes } = progress else {
            // That it is not said keeps nobody from serving.
            let _ = self.note.say_ready();
            return;
        };
        let info = LoadingInfo { model: model.clone(), done_bytes: *done_bytes, total_bytes: *total_bytes };
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(line) = last.next(&info, Instant::now())
            && self.note.say(&line).is_err()
        {
            last.line.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_is_said_with_its_rate_once_for_each_percent() {
        let (mut last, begun) = (Last::default(), Instant::now());
        let mut said = |done_bytes, after_ms| {
            let info = LoadingInfo { model: "big".to_owned(), done_bytes, total_bytes: 10_000_000_000 };
            last.next(&info, begun + Duration::from_millis(after_ms))
        };
        assert_eq!(said(0, 0).as_deref(), Some("loading big: 0% of 10.0 GB"));
        assert_eq!(said(50_000_000, 100), None);
        assert_eq!(said(200_000_000, 200).as_deref(), Some("loading big: 2% of 10.0 GB"));
        assert_eq!(said(3_000_000_000, 2_000).as_deref(), Some("loading big: 30% of 10.0 GB, 1.50 GB/s"));
        assert_eq!(said(3_000_000_001, 3_000), None);
    }
}
