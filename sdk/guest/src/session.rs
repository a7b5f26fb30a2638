//! The connection to the client that started the guest.

use std::time::Duration;

use serde::Serialize;

use crate::bindings::trellis::host::session as raw;
use crate::{Error, Result, Token};

pub use raw::{LogLevel, Meter, Usage};

/// Sends text to the client. Waits while the client reads slowly. See also [`emit!`](crate::emit!).
///
/// # Errors
/// [`Error::Cancelled`] when the client went away.
pub fn emit(text: &str) -> Result {
    Ok(raw::emit_text(text)?)
}

/// Sends tokens to the client.
///
/// # Errors
/// As [`emit`].
pub fn emit_tokens(tokens: &[Token]) -> Result {
    Ok(raw::emit_tokens(tokens)?)
}

/// Sends a value to the client as JSON.
///
/// # Errors
/// [`Error::InvalidArgument`] when the value has no JSON form, otherwise as [`emit`].
pub fn emit_json<T: Serialize + ?Sized>(value: &T) -> Result {
    let json = serde_json::to_string(value).map_err(|error| Error::InvalidArgument {
        name: "value".to_owned(),
        value: std::any::type_name::<T>().to_owned(),
        expected: format!("something that JSON can express ({error})"),
    })?;
    Ok(raw::emit_json(&json)?)
}

/// The next message that the client sends; none once it will send no more.
///
/// # Errors
/// As [`emit`].
pub fn receive() -> Result<Option<String>> {
    Ok(raw::receive()?)
}

/// The messages of the client until it sends no more, for a `for` loop.
pub fn messages() -> impl Iterator<Item = Result<String>> {
    std::iter::from_fn(|| receive().transpose())
}

/// Sends a line to the client's log.
pub fn log(level: LogLevel, line: &str) {
    raw::log(level, line);
}

/// What the guest has used and may use: tokens, pages, contexts.
pub fn usage() -> Usage {
    raw::get_usage()
}

/// How long the guest may still run.
pub fn time_left() -> Duration {
    Duration::from_millis(raw::deadline_ms())
}

/// A number that the client or the daemon chose for this run, for seeds. The same number, the same text.
pub fn seed() -> u64 {
    raw::seed()
}

pub(crate) fn arguments() -> Vec<String> {
    raw::arguments()
}

/// Formats text as [`format!`] does and sends it to the client: `emit!("{n} votes\n")?`.
#[macro_export]
macro_rules! emit {
    ($($format:tt)*) => { $crate::emit(&::std::format!($($format)*)) };
}
