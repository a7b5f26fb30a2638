//! The connection to the client that started the guest.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::bindings::trellis::host::session as raw;
use crate::panics::expect_host;
use crate::{Error, Result, Token};

#[doc(inline)]
pub use raw::{Causes, Event, Inbox, Limit, LogLevel, Meter, Usage};

/// Bytes that every host takes in one call, unless it was told to take less.
const PIECE_BYTES: usize = 64 << 10;

/// Characters of a message that an error repeats.
const N_CHARS_SHOWN: usize = 100;

/// Sends text to the client. Waits while the client reads slowly. See also [`emit!`](crate::emit!).
///
/// # Errors
/// [`Error::Cancelled`] when the client went away.
pub fn emit(text: &str) -> Result {
    expect_host();
    for piece in pieces(text) {
        raw::emit_text(piece)?;
    }
    Ok(())
}

/// Sends tokens to the client.
///
/// # Errors
/// As [`emit`].
pub fn emit_tokens(tokens: &[Token]) -> Result {
    expect_host();
    for piece in tokens.chunks(PIECE_BYTES / size_of::<Token>()) {
        raw::emit_tokens(piece)?;
    }
    Ok(())
}

/// Sends a value to the client as JSON.
///
/// # Errors
/// [`Error::InvalidArgument`] when the value has no JSON form, [`Error::BudgetExceeded`] when that is longer than one
/// piece of output may be; otherwise as [`emit`]. Numbers that JSON does not know become `null`.
pub fn emit_json<T: Serialize + ?Sized>(value: &T) -> Result {
    let json = serde_json::to_string(value).map_err(|error| Error::InvalidArgument {
        name: "value".to_owned(),
        value: std::any::type_name::<T>().to_owned(),
        expected: format!("something that JSON can express ({error})"),
    })?;
    check_call(json.len())?;
    expect_host();
    Ok(raw::emit_json(&json)?)
}

/// The next message that the client sends; none once it will send no more.
///
/// # Errors
/// As [`emit`].
pub fn receive() -> Result<Option<String>> {
    expect_host();
    match raw::receive(None)? {
        Inbox::Message(message) => Ok(Some(message)),
        Inbox::Closed => Ok(None),
        Inbox::NothingYet => unreachable!("the host waits as long as it takes"),
    }
}

/// The next message of the client if it is there already.
///
/// # Errors
/// As [`emit`].
pub fn try_receive() -> Result<Inbox> {
    expect_host();
    Ok(raw::receive(Some(0))?)
}

/// The next message that the client sends within this time, in whole milliseconds, rounded up.
///
/// # Errors
/// As [`emit`].
pub fn receive_within(time: Duration) -> Result<Inbox> {
    expect_host();
    Ok(raw::receive(Some(whole_ms(time)))?)
}

/// Rounded up.
fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// The next message of the client, or that the daemon is about to end, as soon as that is known: for a guest that has something
/// to save then. Waits this long at most, in whole milliseconds, rounded up; as long as it takes where there is no time given. Once
/// the daemon is on its way out, each call says so at once; [`receive`] gives what messages there are.
///
/// # Errors
/// As [`emit`].
pub fn next_event(wait: Option<Duration>) -> Result<Event> {
    expect_host();
    Ok(raw::next_event(wait.map(whole_ms))?)
}

/// How long the daemon goes on, once it is on its way out; none as long as it is not. Then guests are ended, unless all have come to
/// their ends before. A guest that computes for long may ask between tokens, and save what it has:
///
/// ```no_run
/// # fn save(context: &trellis_guest::Context) -> trellis_guest::Result {
/// if trellis_guest::leaving().is_some() {
///     context.save("half done")?;
/// }
/// # Ok(())
/// # }
/// ```
pub fn leaving() -> Option<Duration> {
    expect_host();
    raw::leaving_ms().map(Duration::from_millis)
}

/// The next message that the client sends, as JSON; none once it will send no more.
///
/// # Errors
/// [`Error::InvalidArgument`] when the message is not JSON, or not of a `T`; it is gone then. Otherwise as [`emit`].
pub fn receive_json<T: DeserializeOwned>() -> Result<Option<T>> {
    receive()?.map(|message| parse(&message)).transpose()
}

/// As [`receive_json`]; none also as soon as the daemon is on its way out, of which [`leaving`] tells.
///
/// # Errors
/// As [`receive_json`].
pub fn receive_json_until_leaving<T: DeserializeOwned>() -> Result<Option<T>> {
    match next_event(None)? {
        Event::Message(message) => parse(&message).map(Some),
        Event::Leaving(_) | Event::Closed => Ok(None),
        Event::NothingYet => unreachable!("the host waits as long as it takes"),
    }
}

fn parse<T: DeserializeOwned>(message: &str) -> Result<T> {
    serde_json::from_str(message).map_err(|error| Error::InvalidArgument {
        name: "message".to_owned(),
        value: pieces(message).next().unwrap_or_default().chars().take(N_CHARS_SHOWN).collect(),
        expected: format!("JSON of a {} ({error})", std::any::type_name::<T>()),
    })
}

/// The messages of the client until it sends no more, for a `for` loop.
pub fn messages() -> impl Iterator<Item = Result<String>> {
    std::iter::from_fn(|| receive().transpose())
}

/// Sends a line to the client's log.
pub fn log(level: LogLevel, line: &str) {
    expect_host();
    raw::log(level, line);
}

/// What the guest has used and may use: tokens, pages, contexts.
pub fn usage() -> Usage {
    expect_host();
    raw::get_usage()
}

/// Every limit of the guest that the daemon can be told to change, by the names of its configuration: `memory_bytes`, `cpu_ms`,
/// `n_pages`; with what is in use, where that is counted. They are the figures that `trellis limits` and `trellis ps --json`
/// show.
///
/// ```no_run
/// let limits = trellis_guest::limits();
/// let memory = limits.iter().find(|limit| limit.name == "memory_bytes");
/// let bytes_left = memory.map(|memory| memory.limit - memory.used.unwrap_or_default());
/// ```
pub fn limits() -> Vec<Limit> {
    expect_host();
    raw::limits()
}

/// The most bytes of all arguments of one call of the host: of texts their length, of lists that of what is in them. Text
/// and tokens that are emitted go in as many calls as it takes.
pub fn call_bytes() -> u64 {
    expect_host();
    raw::call_bytes()
}

/// Refuses what is longer than a call may be; the host would end a guest whose call is far longer.
pub(crate) fn check_call(n_bytes: usize) -> Result {
    if n_bytes <= PIECE_BYTES {
        return Ok(());
    }
    let (requested, limit) = (n_bytes as u64, raw::call_bytes());
    if requested <= limit {
        return Ok(());
    }
    Err(Error::BudgetExceeded { what: "bytes of one call".to_owned(), used: 0, requested, limit })
}

/// A text in pieces that go in one call each.
fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (piece, after) = rest.split_at(rest.floor_char_boundary(PIECE_BYTES));
        rest = after;
        (!piece.is_empty()).then_some(piece)
    })
}

/// How long the guest may still run if it does not wait for messages.
pub fn time_left() -> Duration {
    expect_host();
    Duration::from_millis(raw::deadline_ms())
}

/// A number that the client or the daemon chose for this run, for seeds. The same number, the same text.
pub fn seed() -> u64 {
    expect_host();
    raw::seed()
}

pub(crate) fn arguments() -> Vec<String> {
    expect_host();
    raw::arguments()
}

/// Formats text as [`format!`] does and sends it to the client: `emit!("{n} votes\n")?`.
#[macro_export]
macro_rules! emit {
    ($($format:tt)*) => { $crate::emit(&::std::format!($($format)*)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_join_to_the_text_and_split_no_character() {
        let text = "é".repeat(PIECE_BYTES) + "x";
        let all: Vec<&str> = pieces(&text).collect();
        assert_eq!(all.len(), 3);
        assert!(all.iter().all(|piece| piece.len() <= PIECE_BYTES));
        assert_eq!(all.concat(), text);
        assert_eq!(pieces("").next(), None);
    }

    #[test]
    fn a_message_of_the_wrong_form_is_shown_in_part() {
        assert_eq!(parse::<Vec<u32>>("[1, 2]"), Ok(vec![1, 2]));
        let message = "é".repeat(300);
        let Err(Error::InvalidArgument { name, value, expected }) = parse::<u32>(&message) else {
            panic!("it is no number");
        };
        assert_eq!((name.as_str(), value.chars().count()), ("message", 100));
        assert!(expected.contains("JSON of a u32"), "{expected}");
    }
}
