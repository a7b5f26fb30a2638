//! The newest lines of the log, in bounded memory.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};
use tokio::sync::watch;
use tracing_subscriber::fmt::MakeWriter;

/// What a line takes beside its text.
const LINE_BYTES: usize = 64;

/// Of a longer line the beginning is kept.
const TEXT_BYTES_MAX: usize = 16 << 10;

/// Text that is read at once. The rest is there for the next question.
const BATCH_BYTES: usize = 128 << 10;

/// The newest lines of the log. Lines have numbers, from 0 on.
#[derive(Debug)]
pub(crate) struct LogRing {
    n_bytes_max: usize,
    kept: Mutex<Kept>,
    /// The number of the next line.
    next: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Kept {
    lines: VecDeque<String>,
    n_bytes: usize,
    /// The number of the oldest line that is kept, or of the next where none is.
    first: u64,
}

/// Which lines are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Since {
    /// So many of the newest.
    Last(u64),
    /// From this number on.
    Number(u64),
}

/// Lines that follow each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) lines: Vec<String>,
    /// The number of the line after them.
    pub(crate) next: u64,
    /// The number of the next line that is said.
    pub(crate) end: u64,
    /// Lines that were wanted, and are not kept any more.
    pub(crate) n_missed: u64,
}

impl LogRing {
    /// Keeps lines of so many bytes.
    pub(crate) fn new(n_bytes_max: usize) -> Self {
        Self { n_bytes_max, kept: Mutex::default(), next: watch::Sender::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more line; waits for nobody.
    pub(crate) fn push(&self, line: &str) {
        let line = &line[..line.floor_char_boundary(TEXT_BYTES_MAX)];
        let mut kept = self.lock();
        kept.n_bytes += line.len() + LINE_BYTES;
        kept.lines.push_back(line.to_owned());
        while kept.n_bytes > self.n_bytes_max
            && let Some(oldest) = kept.lines.pop_front()
        {
            kept.n_bytes -= oldest.len() + LINE_BYTES;
            kept.first += 1;
        }
        let next = kept.first + kept.lines.len() as u64;
        drop(kept);
        // Another thread may have been faster.
        self.next.send_if_modified(|number| {
            let is_news = next > *number;
            *number = next.max(*number);
            is_news
        });
    }

    /// The lines that are wanted and kept, the oldest first, as far as they are read at once.
    pub(crate) fn read(&self, since: Since) -> Batch {
        let kept = self.lock();
        let end = kept.first + kept.lines.len() as u64;
        let (begin, n_missed) = match since {
            Since::Last(n) => (end.saturating_sub(n).max(kept.first), 0),
            // A number beyond is one of a daemon before this one.
            Since::Number(number) => (number.clamp(kept.first, end), kept.first.saturating_sub(number)),
        };
        let n_before = usize::try_from(begin - kept.first).unwrap_or(usize::MAX);
        let mut n_bytes = 0;
        let fits = |line: &&String| {
            n_bytes += line.len();
            n_bytes <= BATCH_BYTES.max(line.len())
        };
        let lines: Vec<String> = kept.lines.iter().skip(n_before).take_while(fits).cloned().collect();
        Batch { next: begin + lines.len() as u64, lines, end, n_missed }
    }

    /// Waits until there is a line of this number.
    pub(crate) async fn has(&self, number: u64) {
        // The sender is held here.
        let _ = self.next.subscribe().wait_for(|next| *next > number).await;
    }
}

/// Takes what is said, a line at a time.
#[derive(Clone, Debug)]
pub(super) struct RingWriter {
    pub(super) ring: Arc<LogRing>,
    pub(super) is_json: bool,
}

/// A line of JSON that is kept: one too long would be none any more without its end.
fn whole_json(line: &str) -> Cow<'_, str> {
    match line.len() {
        0..=TEXT_BYTES_MAX => line.into(),
        n_bytes => {
            let said: Value = serde_json::from_str(line).unwrap_or_default();
            let message = format!("a line of {n_bytes} bytes is not kept");
            let kept = json!({
                "timestamp": said["timestamp"], "level": said["level"], "target": said["target"], "message": message,
            });
            kept.to_string().into()
        }
    }
}

impl io::Write for RingWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        let line = text.trim_end_matches('\n');
        let line = if self.is_json { whole_json(line) } else { line.into() };
        self.ring.push(&line);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for RingWriter {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn numbered(ring: &LogRing, numbers: std::ops::Range<u64>) {
        numbers.for_each(|number| ring.push(&number.to_string()));
    }

    #[test]
    fn the_newest_lines_are_kept_and_who_comes_late_hears_how_many_there_were() {
        let ring = LogRing::new(10 * (LINE_BYTES + 1));
        assert_eq!(ring.read(Since::Last(5)), Batch { lines: vec![], next: 0, end: 0, n_missed: 0 });
        numbered(&ring, 0..9);
        assert_eq!(ring.read(Since::Last(2)).lines, ["7", "8"]);
        assert_eq!(ring.read(Since::Number(0)).lines.len(), 9);
        ring.push("a longer line");
        let batch = ring.read(Since::Number(0));
        assert_eq!((batch.lines.len(), batch.next, batch.n_missed), (9, 10, 1), "{batch:?}");
        assert_eq!(ring.read(Since::Number(10)), Batch { lines: vec![], next: 10, end: 10, n_missed: 0 });
        assert_eq!(ring.read(Since::Number(99)).next, 10, "of another daemon");
        ring.push(&"é".repeat(TEXT_BYTES_MAX));
        assert!(ring.read(Since::Last(9)).lines.is_empty(), "it takes more than all");
        assert_eq!(ring.lock().n_bytes, 0);
    }

    #[test]
    fn what_is_long_is_read_in_pieces() {
        let ring = LogRing::new(4 << 20);
        (0..40).for_each(|_| ring.push(&"é".repeat(TEXT_BYTES_MAX)));
        let (mut next, mut n_lines, mut n_batches) = (0, 0, 0);
        loop {
            let batch = ring.read(Since::Number(next));
            assert!(batch.lines.iter().map(String::len).sum::<usize>() <= BATCH_BYTES);
            if batch.lines.is_empty() {
                break;
            }
            (next, n_lines, n_batches) = (batch.next, n_lines + batch.lines.len(), n_batches + 1);
        }
        assert_eq!((n_lines, n_batches), (40, 5));
    }

    #[test]
    fn a_long_line_of_json_stays_json() {
        let line = json!({ "level": "INFO", "message": "é".repeat(TEXT_BYTES_MAX) }).to_string();
        let kept: Value = serde_json::from_str(&whole_json(&line)).expect("JSON");
        assert_eq!(kept["level"], "INFO");
        assert_eq!(kept["message"], format!("a line of {} bytes is not kept", line.len()));
    }

    #[tokio::test]
    async fn who_waits_hears_of_the_next_line() {
        let ring = Arc::new(LogRing::new(1 << 10));
        ring.push("before");
        ring.has(0).await;
        let waiting = tokio::spawn({
            let ring = ring.clone();
            async move { ring.has(1).await }
        });
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(!waiting.is_finished());
        ring.push("after");
        tokio::time::timeout(Duration::from_secs(60), waiting).await.expect("in time").expect("no panic");
        assert_eq!(ring.read(Since::Number(1)).lines, ["after"]);
    }
}
