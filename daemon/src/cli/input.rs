//! Standard input as messages to a guest, a line each.

use std::io::{self, BufRead, Read};

use tokio::sync::mpsc;
use trellis_client::{Error, GuestSender};

use super::output::remark;

/// Lines read and not yet taken by the guest.
const N_LINES_MAX: usize = 16;

/// The largest message that a daemon takes by default.
const LINE_BYTES_MAX: usize = 256 << 10;

/// How far standard input was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// To its end, or that of the guest.
    All,
    /// Not all: what cannot be read or sent has been said.
    NotAll,
}

/// Sends the lines of standard input to a guest until either ends.
pub(crate) async fn send_lines(sender: GuestSender) -> Sent {
    let mut outcome = Sent::All;
    let (lines, mut receiver) = mpsc::channel(N_LINES_MAX);
    // A thread of its own: a read of a terminal can neither be awaited nor taken back.
    let spawned = std::thread::Builder::new().name("stdin".to_owned()).spawn(move || {
        read_lines(io::stdin().lock(), |line| lines.blocking_send(line).is_ok());
    });
    if let Err(error) = spawned {
        remark(&format!("trellis: cannot read standard input: {error}"));
        outcome = Sent::NotAll;
    }
    while let Some(line) = receiver.recv().await {
        let sent = match line {
            Ok(line) => sender.send(line).await,
            Err(error) => {
                remark(&format!("trellis: standard input: {error}"));
                outcome = Sent::NotAll;
                break;
            }
        };
        match sent {
            Ok(()) => {}
            // The guest's own stream tells how it ended.
            Err(Error::GuestEnded | Error::ConnectionLost(_)) => return outcome,
            Err(error) if error.is_retryable() => return outcome,
            Err(error) => {
                remark(&format!("trellis: message not sent: {error}"));
                outcome = Sent::NotAll;
            }
        }
    }
    let _ = sender.end_messages().await;
    outcome
}

/// Tells a guest that there will be no messages.
pub(crate) async fn send_nothing(sender: GuestSender) -> Sent {
    let _ = sender.end_messages().await;
    Sent::All
}

/// Why a line cannot be sent.
#[derive(Debug, thiserror::Error)]
enum LineError {
    #[error("line {n} is not UTF-8")]
    NotUtf8 { n: usize },
    #[error("line {n} is longer than {LINE_BYTES_MAX} bytes")]
    TooLong { n: usize },
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Gives each line, without its end, to `take` until that returns false. An error is the last item.
fn read_lines(mut input: impl BufRead, mut take: impl FnMut(Result<String, LineError>) -> bool) {
    for n in 1.. {
        let item = read_line(&mut input, n).transpose();
        let Some(item) = item else { return };
        let is_last = item.is_err();
        if !take(item) || is_last {
            return;
        }
    }
}

fn read_line(input: &mut impl BufRead, n: usize) -> Result<Option<String>, LineError> {
    let mut line = Vec::new();
    let n_bytes = input.take(LINE_BYTES_MAX as u64 + 2).read_until(b'\n', &mut line)?;
    if n_bytes == 0 {
        return Ok(None);
    }
    let line = line.strip_suffix(b"\n").map_or(&line[..], |line| line.strip_suffix(b"\r").unwrap_or(line));
    if line.len() > LINE_BYTES_MAX {
        return Err(LineError::TooLong { n });
    }
    let line = std::str::from_utf8(line).map_err(|_| LineError::NotUtf8 { n })?;
    Ok(Some(line.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(input: &[u8]) -> Vec<Result<String, String>> {
        let mut lines = Vec::new();
        read_lines(input, |line| {
            lines.push(line.map_err(|error| error.to_string()));
            true
        });
        lines
    }

    #[test]
    fn lines_come_without_their_ends() {
        let ok = |text: &str| Ok(text.to_owned());
        assert_eq!(lines(b""), []);
        assert_eq!(lines(b"a\n\r\nb c\r\nlast"), [ok("a"), ok(""), ok("b c"), ok("last")]);
    }

    #[test]
    fn what_cannot_be_sent_is_named_and_ends_the_input() {
        assert_eq!(lines(b"a\n\xff\nb\n"), [Ok("a".to_owned()), Err("line 2 is not UTF-8".to_owned())]);
        let longest = vec![b'x'; LINE_BYTES_MAX];
        assert_eq!(lines(&longest).len(), 1);
        assert!(lines(&longest)[0].is_ok());
        assert!(lines(&[&longest[..], b"\r\n"].concat())[0].is_ok());
        let too_long = lines(&[&longest[..], b"xyz\n"].concat());
        assert_eq!(too_long, [Err("line 1 is longer than 262144 bytes".to_owned())]);
    }
}
