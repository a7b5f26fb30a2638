//! A policy that keeps e-mail addresses and keys out of what guests send, and writes down how many there were.
//!
//! trellis serve --config redact.toml, with `[policy] component = "redact.wasm"`
//!
//! An address or a key has no space in it. Text behind the last space is held back until more comes, so that none gets through
//! in two pieces.

use serde_json::Value;
use trellis_guest::policy::{GuestInfo, Outcome, Output, Policy, Settings, Used, Verdict, log};

/// What stands in the place of an address or a key.
const REDACTED: &str = "[redacted]";

/// Longer words are sent in parts: they are no address.
const WORD_BYTES_MAX: usize = 1 << 10;

struct Redact {
    prefixes: Vec<String>,
    held: String,
    n_redacted: usize,
}

impl Policy for Redact {
    fn begin(settings: &Settings) -> Result<Self, String> {
        settings.only(&["key-prefixes"])?;
        let prefixes = settings.list("key-prefixes").map(str::to_owned).collect();
        Ok(Self { prefixes, held: String::new(), n_redacted: 0 })
    }

    fn emitted(&mut self, _: &GuestInfo, output: Output) -> Verdict {
        Verdict::Replace(match output {
            Output::Text(text) => self.text(&text),
            // Tokens could spell what texts may not.
            Output::Tokens(_) => Vec::new(),
            Output::Json(json) => self.rest().into_iter().chain([Output::Json(self.json(&json))]).collect(),
            Output::Log(line) => vec![Output::Log(self.redacted(&line))],
            Output::Error(text) => vec![Output::Error(self.redacted(&text))],
        })
    }

    fn ended(&mut self, guest: &GuestInfo, used: Used, outcome: Outcome) -> Vec<Output> {
        let GuestInfo { number, uid, program, .. } = guest;
        let (rest, n, tokens) = (self.rest(), self.n_redacted, used.tokens);
        log(&format!("guest {number} ({program:?}), user {uid}: {n} redacted, {tokens} tokens, {outcome:?}"));
        rest
    }
}

impl Redact {
    fn text(&mut self, text: &str) -> Vec<Output> {
        self.held.push_str(text);
        let end = self.held.rfind(char::is_whitespace).map_or(0, |at| self.held.ceil_char_boundary(at + 1));
        let end = if self.held.len() - end > WORD_BYTES_MAX { self.held.len() } else { end };
        let whole: String = self.held.drain(..end).collect();
        if whole.is_empty() { Vec::new() } else { vec![Output::Text(self.redacted(&whole))] }
    }

    fn rest(&mut self) -> Vec<Output> {
        let held = std::mem::take(&mut self.held);
        if held.is_empty() { Vec::new() } else { vec![Output::Text(self.redacted(&held))] }
    }

    /// By its values: an escape hides nothing.
    fn json(&mut self, json: &str) -> String {
        let mut value: Value = serde_json::from_str(json).expect("what a guest sends as JSON is JSON");
        self.value(&mut value);
        value.to_string()
    }

    fn value(&mut self, value: &mut Value) {
        match value {
            Value::String(text) => *text = self.redacted(text),
            Value::Array(values) => values.iter_mut().for_each(|value| self.value(value)),
            Value::Object(fields) => {
                for (name, mut value) in std::mem::take(fields) {
                    self.value(&mut value);
                    fields.insert(self.redacted(&name), value);
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    fn redacted(&mut self, text: &str) -> String {
        // Quotes and brackets end a word as spaces do.
        let is_end = |c: char| c.is_whitespace() || "\"'<>()[]{},;\\".contains(c);
        let mut redacted = String::with_capacity(text.len());
        for part in text.split_inclusive(is_end) {
            let word = part.trim_end_matches(is_end);
            let is_kept_out =
                is_address(word) || self.prefixes.iter().any(|it| word.starts_with(it.as_str()));
            self.n_redacted += usize::from(is_kept_out);
            redacted.push_str(if is_kept_out { REDACTED } else { word });
            redacted.push_str(&part[word.len()..]);
        }
        redacted
    }
}

/// Something, an `@`, and a name with a dot in it.
fn is_address(word: &str) -> bool {
    let parts = word.split_once('@').filter(|(name, _)| !name.is_empty());
    parts.is_some_and(|(_, host)| host.trim_matches('.').contains('.'))
}

trellis_guest::policy!(Redact);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_in_two_pieces_is_one() {
        let mut policy = Redact::begin(&Settings::of(&[("key-prefixes", "sk-")])).expect("in order");
        let mut sent = String::new();
        for piece in ["write to ann@exam", "ple.org, or sk-12", "34 ", "b@c"] {
            for output in policy.text(piece) {
                let Output::Text(text) = output else { panic!("{output:?}") };
                sent.push_str(&text);
            }
        }
        assert_eq!(sent, "write to [redacted], or [redacted] ");
        assert_eq!((policy.n_redacted, policy.rest()), (2, vec![Output::Text("b@c".to_owned())]));
    }

    #[test]
    fn json_stays_json() {
        let mut policy = Redact::begin(&Settings::default()).expect("in order");
        let json = policy.json(r#"{"to":"ann\u0040example.org","n":[1]}"#);
        assert_eq!(json, r#"{"n":[1],"to":"[redacted]"}"#);
    }
}
