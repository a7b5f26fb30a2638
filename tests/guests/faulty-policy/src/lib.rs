//! A policy that does one thing wrong, chosen by the setting `fault`: at its beginning, for a model, or once it sees "now".

use std::hint::black_box;

use trellis_guest::policy::{
    Front, GuestInfo, Input, Outcome, Output, Policy, Ruling, Settings, Tokenizer, Used, Verdict,
};

struct Faulty {
    fault: String,
}

impl Policy for Faulty {
    fn begin(settings: &Settings) -> Result<Self, String> {
        let fault = settings.get("fault").unwrap_or_default().to_owned();
        match fault.as_str() {
            "begin" => Err("it does not like its settings".to_owned()),
            "begin-loops" => forever(),
            "begin-panics" => panic!("as it was told"),
            _ => Ok(Self { fault }),
        }
    }

    fn front(&mut self, model: &str, tokenizer: &Tokenizer) -> Result<Front, String> {
        let front = Front::default();
        Ok(match self.fault.as_str() {
            "front" => return Err(format!("it does not know {model}")),
            "front-of-draft" if model == "draft" => return Err(format!("it does not know {model}")),
            "front-all" => front.forbid(tokenizer.tokens_where(|_| true)),
            "front-strange" => front.forbid([u32::MAX]),
            "front-parameter" => front.row(|b| b.logits() + b.parameter(0)),
            "front-long" => front.row(|b| (0..60).fold(b.logits(), |x, _| x + x)),
            _ => front,
        })
    }

    fn emitted(&mut self, _: &GuestInfo, output: Output) -> Verdict {
        if self.fault == "errors" && matches!(output, Output::Error(_)) {
            return Verdict::instead(Output::Error("it did not go well".to_owned()));
        }
        let Output::Text(text) = &output else { return Verdict::Pass };
        if !text.contains("now") {
            return Verdict::Pass;
        }
        match self.fault.as_str() {
            "panics" => panic!("as it was told"),
            "loops" => forever(),
            "sleeps" => {
                std::thread::sleep(std::time::Duration::from_secs(3600));
                Verdict::Pass
            }
            "eats" => {
                let mut eaten: Vec<Vec<u8>> = Vec::new();
                loop {
                    eaten.push(black_box(vec![7; 1 << 20]));
                }
            }
            "floods" => Verdict::instead(Output::Text("x".repeat(32 << 20))),
            "no-json" => Verdict::instead(Output::Json("{".to_owned())),
            "error" => Verdict::instead(Output::Error("none".to_owned())),
            "ends" => Verdict::End("it said the word".to_owned()),
            _ => Verdict::Pass,
        }
    }

    fn received(&mut self, _: &GuestInfo, input: Input) -> Ruling {
        match (self.fault.as_str(), &input) {
            ("received", Input::Message(text)) if text.contains("now") => panic!("as it was told"),
            ("arguments", Input::Arguments(_)) => Ruling::End("it may not start".to_owned()),
            ("replaces", Input::Message(text)) => {
                Ruling::Replace(vec![text.to_uppercase(), "twice".to_owned()])
            }
            _ => Ruling::Pass,
        }
    }

    fn ended(&mut self, _: &GuestInfo, _: Used, outcome: Outcome) -> Vec<Output> {
        match self.fault.as_str() {
            "ended" => panic!("as it was told"),
            "last-words" => vec![Output::Text(format!("it has ended: {outcome:?}"))],
            _ => Vec::new(),
        }
    }
}

fn forever() -> ! {
    let mut n = 0u64;
    loop {
        n = black_box(n.wrapping_add(1));
    }
}

trellis_guest::policy!(Faulty);
