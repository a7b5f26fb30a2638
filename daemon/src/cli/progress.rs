//! Progress bars for what takes more than a second, and for people only.

use std::io::IsTerminal;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use trellis_client::Stage;

use super::output::{Format, escaped_line};

/// Work that is over sooner is not worth a flicker.
const DELAY: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(100);

/// The title of a wait.
const WAITS: &str = "waiting";

/// At most one bar at a time, drawn on standard error once its work has taken a second.
#[derive(Debug)]
pub(crate) struct ProgressDisplay {
    is_drawn: bool,
    delay: Duration,
    bar: Mutex<Option<Bar>>,
}

#[derive(Debug)]
struct Bar {
    title: String,
    due: Instant,
    bar: ProgressBar,
}

/// How a bar counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Bytes,
    Items,
}

impl ProgressDisplay {
    pub(crate) fn new(format: Format) -> Self {
        let is_drawn = format == Format::Text && std::io::stderr().is_terminal();
        Self { is_drawn, delay: DELAY, bar: Mutex::new(None) }
    }

    /// Bars for work that is known to take long, drawn at once.
    pub(crate) fn of_long_work(format: Format) -> Self {
        let mut progress = Self::new(format);
        progress.delay = Duration::ZERO;
        progress
    }

    /// Whether anybody sees them.
    pub(crate) fn is_drawn(&self) -> bool {
        self.is_drawn
    }

    fn lock(&self) -> MutexGuard<'_, Option<Bar>> {
        self.bar.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How far that is which a guest waits for. A model that is loaded is there with the last of its bytes.
    pub(crate) fn stage(&self, stage: &Stage, name: Option<&str>, done: u64, total: u64) {
        if *stage == Stage::Load && total > 0 && done == total {
            return self.finish();
        }
        let (title, unit, total) = match stage {
            Stage::Upload => ("uploading", Unit::Bytes, total),
            Stage::Compile => ("compiling", Unit::Items, 0),
            Stage::Load => ("loading", Unit::Bytes, total),
            Stage::Other(name) => (name.as_str(), Unit::Items, total),
        };
        match name {
            Some(name) => self.update(&format!("{title} {name}"), unit, done, total),
            None => self.update(title, unit, done, total),
        }
    }

    /// How far some work is; a new title is new work. A `total` of 0 means that it is not known.
    pub(crate) fn update(&self, title: &str, unit: Unit, done: u64, total: u64) {
        if !self.is_drawn {
            return;
        }
        let mut slot = self.lock();
        if slot.as_ref().is_none_or(|bar| bar.title != title) {
            clear(&mut slot);
            *slot = Some(Bar::new(title, unit, Instant::now() + self.delay));
        }
        let bar = slot.as_ref().expect("a bar was just made");
        // A total of one says no more than no total.
        if total > 1 {
            bar.bar.set_length(total);
            bar.bar.set_style(counted(unit));
        }
        bar.bar.set_position(done);
        bar.draw_if_due();
    }

    /// What is waited for, and how long already; another line goes on with the same wait.
    pub(crate) fn say(&self, line: &str) {
        self.update(WAITS, Unit::Items, 0, 0);
        if let Some(bar) = &*self.lock() {
            bar.bar.set_message(escaped_line(line).into_owned());
        }
    }

    /// Waits until the second of the bar has passed, and draws it. Pending for ever without a bar to draw.
    pub(crate) async fn due(&self) {
        // The lock is given back before the wait.
        let due = self.lock().as_ref().filter(|bar| bar.bar.is_hidden()).map(|bar| bar.due);
        let Some(due) = due else { return std::future::pending().await };
        tokio::time::sleep_until(due.into()).await;
        if let Some(bar) = &*self.lock() {
            bar.draw_if_due();
        }
    }

    /// The work is over; the bar goes away.
    pub(crate) fn finish(&self) {
        clear(&mut self.lock());
    }
}

impl Drop for ProgressDisplay {
    fn drop(&mut self) {
        self.finish();
    }
}

impl Bar {
    fn new(title: &str, unit: Unit, due: Instant) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        bar.set_style(uncounted(unit));
        bar.set_message(escaped_line(title).into_owned());
        Self { title: title.to_owned(), due, bar }
    }

    fn draw_if_due(&self) {
        if self.bar.is_hidden() && Instant::now() >= self.due {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
            self.bar.enable_steady_tick(TICK);
        }
    }
}

fn clear(slot: &mut Option<Bar>) {
    if let Some(bar) = slot.take() {
        bar.bar.finish_and_clear();
    }
}

fn counted(unit: Unit) -> ProgressStyle {
    let template = match unit {
        Unit::Bytes => "{msg} [{bar:30}] {decimal_bytes}/{decimal_total_bytes} {eta}",
        Unit::Items => "{msg} [{bar:30}] {pos}/{len} {eta}",
    };
    ProgressStyle::with_template(template).expect("the template is valid").progress_chars("=> ")
}

fn uncounted(unit: Unit) -> ProgressStyle {
    let template = match unit {
        Unit::Bytes => "{spinner} {msg} {decimal_bytes} {elapsed}",
        Unit::Items => "{spinner} {msg} {elapsed}",
    };
    ProgressStyle::with_template(template).expect("the template is valid")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn() -> ProgressDisplay {
        ProgressDisplay { is_drawn: true, delay: 3_600 * DELAY, bar: Mutex::new(None) }
    }

    #[test]
    fn templates_are_valid() {
        for unit in [Unit::Bytes, Unit::Items] {
            let _ = (counted(unit), uncounted(unit));
        }
    }

    #[test]
    fn short_work_is_never_drawn() {
        let progress = drawn();
        progress.stage(&Stage::Upload, None, 10, 100);
        assert!(progress.lock().as_ref().expect("a bar").bar.is_hidden());
        progress.stage(&Stage::Compile, None, 0, 0);
        assert_eq!(progress.lock().as_ref().expect("a bar").title, "compiling");
        progress.stage(&Stage::Load, Some("small"), 1, 2);
        assert_eq!(progress.lock().as_ref().expect("a bar").title, "loading small");
        progress.stage(&Stage::Load, Some("small"), 2, 2);
        assert!(progress.lock().is_none(), "it is loaded");
        progress.finish();
        assert!(progress.lock().is_none());
    }

    #[test]
    fn a_wait_goes_on_under_another_line() {
        let progress = drawn();
        progress.say("loading a");
        let begun = progress.lock().as_ref().expect("a bar").due;
        progress.say("loading b\u{1b}");
        let slot = progress.lock();
        let bar = slot.as_ref().expect("a bar");
        assert_eq!((bar.due, bar.bar.message().as_str()), (begun, "loading b\\u{1b}"));
    }

    #[test]
    fn nothing_is_kept_when_nobody_looks() {
        let progress = ProgressDisplay::new(Format::Json);
        progress.stage(&Stage::Upload, None, 10, 100);
        assert!(progress.lock().is_none());
    }
}
