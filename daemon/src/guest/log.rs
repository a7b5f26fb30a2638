//! A guest's log: lines to the client, under a budget, never waited for.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::io::{GuestOutput, LogLevel, OutputSender};

/// The longest line; what is longer is cut into several.
pub(crate) const LINE_BYTES_MAX: usize = 4 << 10;

/// What the shortest line costs of the budget. A line takes time, however short.
const LINE_BYTES_MIN: usize = 16;

/// How far what is said of a panic is looked for. A text as long as a call may be would take tens of milliseconds.
const PANIC_BYTES_MAX: usize = 4 * LINE_BYTES_MAX;

/// How the entry begins that a guest's panic leaves, by `trellis_guest::main!`.
pub(crate) const PANICKED: &str = "panicked at ";

/// Sends log lines while the budget lasts and the client has room. A line that does not fit is dropped with the rest of its
/// text, and counted, so that logging never holds up a guest.
#[derive(Debug)]
pub(crate) struct LogSink {
    output: OutputSender,
    n_bytes_left: AtomicU64,
    n_dropped: AtomicU64,
    /// What the guest said of its panic, in one line.
    panic: Mutex<Option<String>>,
}

impl LogSink {
    pub(crate) fn new(output: OutputSender, n_bytes_max: u64) -> Self {
        Self {
            output,
            n_bytes_left: AtomicU64::new(n_bytes_max),
            n_dropped: AtomicU64::new(0),
            panic: Mutex::default(),
        }
    }

    /// What the guest said of its panic, if it had one.
    pub(crate) fn panic(&self) -> Option<String> {
        self.panic.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note_panic(&self, text: &str) {
        let text = pieces(text, PANIC_BYTES_MAX).next().unwrap_or_default();
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let line = lines.join(", ");
        *self.panic.lock().unwrap_or_else(PoisonError::into_inner) =
            pieces(&line, LINE_BYTES_MAX).next().map(str::to_owned);
    }

    /// Sends a text as lines.
    pub(crate) fn write(&self, level: LogLevel, text: &str) {
        if level == LogLevel::Error && text.starts_with(PANICKED) {
            self.note_panic(text);
        }
        if self.is_spent() {
            return self.drop_lines(text.as_bytes());
        }
        let mut rest = text;
        loop {
            let (line, next) = match rest.split_once('\n') {
                Some((line, next)) => (line, Some(next)),
                None => (rest, None),
            };
            for piece in pieces(line, LINE_BYTES_MAX) {
                // No room comes while the guest is in this call, and no budget at all.
                if !self.send(level, piece) {
                    return self.drop_lines(rest.as_bytes());
                }
            }
            match next {
                Some(next) if !next.is_empty() => rest = next,
                _ => return,
            }
        }
    }

    /// Sends a line; whether there was budget and room for it.
    fn send(&self, level: LogLevel, line: &str) -> bool {
        let n_bytes = line.len().max(LINE_BYTES_MIN) as u64;
        let paid = self
            .n_bytes_left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(n_bytes))
            .is_ok();
        paid && self.output.try_send(GuestOutput::Log { level, line: line.to_owned() }) == Ok(true)
    }

    /// Whether no line fits the budget any more.
    pub(crate) fn is_spent(&self) -> bool {
        self.n_bytes_left.load(Ordering::Relaxed) < LINE_BYTES_MIN as u64
    }

    /// Counts lines without looking at each: a text without a budget costs nobody time.
    pub(crate) fn drop_lines(&self, text: &[u8]) {
        let n_feeds = text.iter().filter(|&&byte| byte == b'\n').count();
        let n_lines = n_feeds + usize::from(!text.ends_with(b"\n"));
        self.n_dropped.fetch_add(n_lines as u64, Ordering::Relaxed);
    }

    /// Says how many lines were dropped, outside the budget and if the client has room.
    pub(crate) fn close(&self) {
        let n_dropped = self.n_dropped.load(Ordering::Relaxed);
        if n_dropped > 0 {
            let line = format!("{n_dropped} log lines were dropped");
            // A client without room learns nothing, as with any other line.
            let _ = self.output.try_send(GuestOutput::Log { level: LogLevel::Warn, line });
        }
    }
}

/// A text in pieces of at most `n_bytes_max` bytes, cut between characters; one empty piece for an empty text.
pub(crate) fn pieces(text: &str, n_bytes_max: usize) -> impl Iterator<Item = &str> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest?;
        if text.len() <= n_bytes_max {
            rest = None;
            return Some(text);
        }
        let cut = text.floor_char_boundary(n_bytes_max).max(text.ceil_char_boundary(1));
        let (piece, next) = text.split_at(cut);
        rest = Some(next).filter(|next| !next.is_empty());
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::super::io::output_channel;
    use super::*;

    #[test]
    fn pieces_end_between_characters() {
        assert_eq!(pieces("", 4).collect::<Vec<_>>(), [""]);
        assert_eq!(pieces("abcdef", 4).collect::<Vec<_>>(), ["abcd", "ef"]);
        assert_eq!(pieces("aéé", 4).collect::<Vec<_>>(), ["aé", "é"]);
        assert_eq!(pieces("🌱🌱", 2).collect::<Vec<_>>(), ["🌱", "🌱"]);
    }

    #[tokio::test]
    async fn lines_past_the_budget_are_counted() {
        let (output, mut client) = output_channel(1 << 20);
        let log = LogSink::new(output, 50);
        log.write(LogLevel::Info, "one\ntwo\n");
        log.write(LogLevel::Info, "far too long a line");
        log.write(LogLevel::Info, "last");
        log.write(LogLevel::Info, "x");
        log.close();
        drop(log);
        let mut lines = Vec::new();
        while let Some(GuestOutput::Log { line, .. }) = client.recv().await {
            lines.push(line);
        }
        assert_eq!(lines, ["one", "two", "last", "2 log lines were dropped"]);
    }
}
