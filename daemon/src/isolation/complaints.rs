//! What a guests' process writes to its standard error, in the daemon's log.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::io::{AsyncRead, AsyncReadExt};

/// Bytes of a line that are kept.
const LINE_BYTES_MAX: usize = 1 << 10;

/// Lines of one process that are logged. What comes after is read, so that the process does not wait, and dropped.
const N_LINES_MAX: usize = 100;

/// What a process writes that the system has refused memory to: Rust's allocator, and errors of the system.
const REFUSALS: [&str; 2] = ["memory allocation of ", "Cannot allocate memory"];

/// What it has said among the lines that are logged.
#[derive(Clone, Debug, Default)]
pub(super) struct Complaints(Arc<Mutex<Said>>);

#[derive(Debug, Default)]
struct Said {
    last: Option<String>,
    is_refused_memory: bool,
}

impl Complaints {
    /// The last line.
    pub(super) fn last(&self) -> Option<String> {
        self.lock().last.clone()
    }

    /// Whether a line says that the system has refused it memory.
    pub(super) fn tell_of_refused_memory(&self) -> bool {
        self.lock().is_refused_memory
    }

    fn lock(&self) -> MutexGuard<'_, Said> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads to the end.
    pub(super) async fn read(self, mut from: impl AsyncRead + Unpin, user: String) {
        let (mut line, mut n_lines) = (Vec::new(), 0);
        let mut piece = [0; 1024];
        loop {
            let n = match from.read(&mut piece).await {
                Ok(0) => break,
                Ok(n) => n,
                Err(error) => {
                    tracing::warn!(user, %error, "the complaints of a guests' process cannot be read");
                    break;
                }
            };
            // It may write without end.
            if n_lines > N_LINES_MAX {
                tokio::task::yield_now().await;
                continue;
            }
            for byte in &piece[..n] {
                if *byte == b'\n' {
                    self.say(&user, &mut line, &mut n_lines);
                } else if line.len() < LINE_BYTES_MAX {
                    line.push(*byte);
                }
            }
        }
        self.say(&user, &mut line, &mut n_lines);
    }

    fn say(&self, user: &str, line: &mut Vec<u8>, n_lines: &mut usize) {
        // It may be the text of a guest: nothing in it is to act on a terminal.
        let said = String::from_utf8_lossy(line).trim().escape_debug().to_string();
        line.clear();
        if said.is_empty() || *n_lines > N_LINES_MAX {
            return;
        }
        *n_lines += 1;
        if *n_lines > N_LINES_MAX {
            tracing::warn!(user, "a guests' process complains more than {N_LINES_MAX} times");
            return;
        }
        tracing::warn!(user, said, "a guests' process complains");
        let mut all = self.lock();
        all.is_refused_memory |= REFUSALS.iter().any(|refusal| said.contains(refusal));
        all.last = Some(said);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_are_cut_counted_and_harmless() {
        let complaints = Complaints::default();
        complaints.clone().read(&b"first\n\x1b[2J second"[..], "user".to_owned()).await;
        assert_eq!(complaints.last().as_deref(), Some("\\u{1b}[2J second"));
        let long = vec![b'x'; 1 << 20];
        complaints.clone().read(&long[..], "user".to_owned()).await;
        assert_eq!(complaints.last().map(|said| said.len()), Some(LINE_BYTES_MAX));
        let many: String = (1..=1000).map(|idx| format!("line {idx}\n")).collect();
        complaints.clone().read(many.as_bytes(), "user".to_owned()).await;
        assert_eq!(complaints.last().as_deref(), Some("line 100"));
        assert!(!complaints.tell_of_refused_memory());
    }

    #[tokio::test]
    async fn that_memory_was_refused_is_known_whatever_comes_after() {
        for said in [
            "memory allocation of 41 bytes failed\nskipping backtrace printing\n",
            "no thread: Cannot allocate memory (os error 12)",
        ] {
            let complaints = Complaints::default();
            complaints.clone().read(said.as_bytes(), "user".to_owned()).await;
            assert!(complaints.tell_of_refused_memory(), "{said}");
        }
    }
}
