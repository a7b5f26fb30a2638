//! How far the start of a daemon is, said beside its socket: for `trellis status`, and for those who wait.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use trellis_client::LoadingInfo;

use super::status::loading;
use crate::daemon::LoadProgress;
use crate::ipc::StartNote;

/// A rate over less time says nothing.
const RATED_TIME: Duration = Duration::from_millis(500);

/// While bytes come it is said again after so long, also where the percent is the same: that it is written tells those who wait that
/// the load comes on.
const SAID_TIME: Duration = Duration::from_secs(1);

/// Where it is said, and what was last.
pub(super) struct StartNotes {
    note: StartNote,
    last: Mutex<Last>,
}

/// What was said last.
#[derive(Default)]
struct Last {
    line: String,
    /// When that was, and how much was there then.
    said: Option<(Instant, u64)>,
    /// The model that is loaded, from when on, and how much of it was there then.
    load: Option<(String, Instant, u64)>,
}

impl Last {
    /// What is to be said, unless that is what was said last but for the rate, and nothing has come since or too soon after it.
    fn next(&mut self, info: &LoadingInfo, now: Instant) -> Option<String> {
        let LoadingInfo { model, done_bytes, .. } = info;
        if self.load.as_ref().is_none_or(|(name, ..)| name != model) {
            self.load = Some((model.clone(), now, *done_bytes));
        }
        let line = loading(info);
        let comes_on = self.said.is_some_and(|(at, n_bytes)| {
            *done_bytes > n_bytes && now.saturating_duration_since(at) >= SAID_TIME
        });
        if line == self.line && !comes_on {
            return None;
        }
        self.line.clone_from(&line);
        self.said = Some((now, *done_bytes));
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
    fn a_load_is_said_with_its_rate_for_each_percent_and_each_second_in_which_bytes_come() {
        let (mut last, begun) = (Last::default(), Instant::now());
        let mut said = |done_bytes, after_ms| {
            let info = LoadingInfo { model: "big".to_owned(), done_bytes, total_bytes: 10_000_000_000 };
            last.next(&info, begun + Duration::from_millis(after_ms))
        };
        assert_eq!(said(0, 0).as_deref(), Some("loading big: 0% of 10.0 GB"));
        assert_eq!(said(50_000_000, 100), None);
        assert_eq!(said(200_000_000, 200).as_deref(), Some("loading big: 2% of 10.0 GB"));
        assert_eq!(said(3_000_000_000, 2_000).as_deref(), Some("loading big: 30% of 10.0 GB, 1.50 GB/s"));
        assert_eq!(said(3_000_000_001, 2_500), None, "so soon");
        assert_eq!(said(3_000_000_000, 3_500), None, "nothing has come");
        assert_eq!(
            said(3_000_000_001, 4_000).as_deref(),
            Some("loading big: 30% of 10.0 GB, 0.75 GB/s"),
            "a percent may take minutes"
        );
        assert_eq!(said(3_000_000_002, 4_500), None);
    }
}
