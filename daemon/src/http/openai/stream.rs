//! Whether an answer of completions comes in chunks.

use super::super::failure::Failure;
use super::super::fields::Fields;

/// What comes after the last chunk.
pub(super) const DONE: &str = "[DONE]";

/// How an answer comes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Streaming {
    /// As a whole.
    #[default]
    No,
    /// In chunks.
    Yes,
    /// In chunks, of which the last has what it took.
    WithUsage,
}

/// By `stream` and `stream_options`.
pub(super) fn read(fields: &mut Fields) -> Result<Streaming, Failure> {
    let is_streamed = fields.take::<bool>("stream")?.unwrap_or_default();
    let plain = if is_streamed { Streaming::Yes } else { Streaming::No };
    let Some(mut options) = fields.object("stream_options")? else { return Ok(plain) };
    if !is_streamed {
        return Err(Failure::invalid("stream_options", "stream_options are for a stream that is true"));
    }
    let with_usage = options.take::<bool>("include_usage")?.unwrap_or_default();
    // It would pad what is sent, which no network carries.
    options.pass_over(&["include_obfuscation"]);
    options.finish()?;
    Ok(if with_usage { Streaming::WithUsage } else { plain })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn usage_comes_where_it_is_asked_for() {
        let of = |value| read(&mut Fields::of(value, "").expect("an object"));
        assert_eq!(of(json!({})), Ok(Streaming::No));
        assert_eq!(of(json!({ "stream": true })), Ok(Streaming::Yes));
        let options = json!({ "stream": true, "stream_options": { "include_usage": true } });
        assert_eq!(of(options), Ok(Streaming::WithUsage));
        let error = of(json!({ "stream_options": {} })).expect_err("there is no stream");
        assert_eq!(error.param.as_deref(), Some("stream_options"));
    }
}
