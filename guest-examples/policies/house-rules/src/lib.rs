//! A policy that marks what everybody draws, forbids tokens by their text, and caps what a guest is sent and sends.
//!
//! trellis serve --config rules.toml, with `[policy] component = "house_rules.wasm"`
//!
//! Whoever has the key finds the mark in a text (`trellis run watermarks --detect`); who draws cannot leave it out. Sources:
//! Kirchenbauer and others, "A Watermark for Large Language Models" (2023).

use trellis_guest::policy::{Front, GuestInfo, Input, Output, Policy, Ruling, Settings, Tokenizer, Verdict};
use trellis_guest::programs::library::{KgwKey, kgw};

struct HouseRules {
    forbidden: Vec<String>,
    key: Option<u64>,
    delta: f32,
    n_sent_max: usize,
    n_received_max: usize,
    n_sent: usize,
    n_received: usize,
}

impl Policy for HouseRules {
    fn begin(settings: &Settings) -> Result<Self, String> {
        settings.only(&["forbidden", "key", "delta", "sent-bytes", "received-bytes"])?;
        let key = settings.get("key").map(|_| settings.parsed("key", 0)).transpose()?;
        Ok(Self {
            forbidden: settings.list("forbidden").map(str::to_owned).collect(),
            key,
            delta: settings.parsed("delta", 2.0)?,
            n_sent_max: settings.parsed("sent-bytes", usize::MAX)?,
            n_received_max: settings.parsed("received-bytes", usize::MAX)?,
            n_sent: 0,
            n_received: 0,
        })
    }

    fn front(&mut self, _: &str, tokenizer: &Tokenizer) -> Result<Front, String> {
        let has = |bytes: &[u8], text: &str| bytes.windows(text.len()).any(|part| part == text.as_bytes());
        let is_forbidden = |bytes: &[u8]| self.forbidden.iter().any(|text| has(bytes, text));
        let front = Front::default().forbid(tokenizer.tokens_where(is_forbidden));
        Ok(match self.key {
            None => front,
            Some(key) => front.row(|b| kgw(b.logits(), KgwKey { key, n_tokens: 1 }, 0.5, self.delta)),
        })
    }

    fn emitted(&mut self, _: &GuestInfo, output: Output) -> Verdict {
        self.n_sent += match &output {
            Output::Text(text) | Output::Json(text) | Output::Log(text) | Output::Error(text) => text.len(),
            Output::Tokens(tokens) => size_of_val(tokens.as_slice()),
        };
        match self.n_sent > self.n_sent_max {
            true => Verdict::End(format!(
                "it sent {} bytes, at most {} are allowed",
                self.n_sent, self.n_sent_max
            )),
            false => Verdict::Pass,
        }
    }

    fn received(&mut self, _: &GuestInfo, input: Input) -> Ruling {
        self.n_received += match &input {
            Input::Arguments(arguments) => arguments.iter().map(String::len).sum(),
            Input::Message(text) => text.len(),
        };
        let (n, max) = (self.n_received, self.n_received_max);
        if n > max {
            Ruling::End(format!("it was sent {n} bytes, at most {max} are allowed"))
        } else {
            Ruling::Pass
        }
    }
}

trellis_guest::policy!(HouseRules);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_it_has_not_are_refused() {
        let error = HouseRules::begin(&Settings::of(&[("isolation", "process")])).err().expect("no setting");
        assert!(error.starts_with("there is no setting isolation; there are forbidden, key"), "{error}");
    }

    #[test]
    fn settings_that_are_no_numbers_are_refused() {
        let error = HouseRules::begin(&Settings::of(&[("sent-bytes", "many")])).err().expect("no number");
        assert!(error.starts_with("the setting sent-bytes is \"many\""), "{error}");
    }
}
