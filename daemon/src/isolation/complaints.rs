//! What a guests' process writes to its standard error, in the daemon's log.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncRead, AsyncReadExt};

/// Bytes of a line that are kept.
const LINE_BYTES_MAX: usize = 1 << 10;

/// Lines of one process that are logged. What comes after is read, so that the process does not wait, and dropped.
const N_LINES_MAX: usize = 100;

/// The last line, as long as it was among those that are logged.
#[derive(Clone, Debug, Default)]
pub(super) struct Complaints(Arc<Mutex<Option<String>>>);

impl Complaints {
    pub(super) fn last(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
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
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(said);
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
    }
}
