//! A fixed JSON skeleton in which the model fills the values, so the keys and the form are always right.
//!
//! ```text
//! trellis run json-fields "Ada, a pilot from Oslo, is 36."
//! ```
//!
//! The guest writes what it knows and lets the model write the rest: a string up to its closing quote, a
//! number under a mask that allows digits only. Of what is drawn the context keeps the value and not what ended it,
//! so that it holds exactly the text of the skeleton and the values.

use std::error::Error;

use serde_json::value::RawValue;
use trellis_guest::{Args, Chat, Model, Result, Sampler, TokenMask, emit_json};

trellis_guest::main!(run);

const USAGE: &str = "json-fields [--ask TEXT] TEXT";

enum Kind {
    Text,
    Number,
}

const FIELDS: [(&str, Kind); 4] =
    [("name", Kind::Text), ("age", Kind::Number), ("city", Kind::Text), ("job", Kind::Text)];

fn run() -> Result<(), Box<dyn Error>> {
    let mut args = Args::of_session(USAGE);
    let ask = args.option::<String>("--ask")?.unwrap_or("Give me JSON".to_owned());
    let text = args.text()?;

    let model = Model::open_default()?;
    let context = model.context()?;
    context.set_chat(&Chat::new().user(&format!("{ask}: {text}")))?;

    let greedy = Sampler::greedy();
    let digits = Sampler::greedy();
    let is_number_or_end =
        |bytes: &[u8]| bytes == b"," || (!bytes.is_empty() && bytes.iter().all(u8::is_ascii_digit));
    digits.set_mask(Some(&TokenMask::allow_where(&model, is_number_or_end)?))?;

    let mut json = String::new();
    let write = |json: &mut String, part: &str| {
        json.push_str(part);
        context.append_text(part)
    };
    for (idx, (key, kind)) in FIELDS.iter().enumerate() {
        let (before, sampler, end, after) = match kind {
            Kind::Text => ("\"", &greedy, "\"", "\""),
            Kind::Number => ("", &digits, ",", ""),
        };
        write(&mut json, &format!("{}\"{key}\": {before}", if idx == 0 { "{" } else { ", " }))?;
        let value = context.generate(sampler).max_tokens(16).stop_at(end).keep_text_only().run()?.text;
        json.push_str(&value);
        write(&mut json, after)?;
    }
    write(&mut json, "}")?;

    let checked: Box<RawValue> = serde_json::from_str(&json)
        .map_err(|problem| format!("the model left the form: {json} ({problem})"))?;
    Ok(emit_json(&checked)?)
}
