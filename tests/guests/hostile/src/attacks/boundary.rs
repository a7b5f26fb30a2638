//! Values that the host has to refuse or to bear: long, deep, many, out of range.

use std::error::Error;

use trellis_guest::bindings::trellis::host::session::{emit_json as emit_raw_json, emit_text};
use trellis_guest::{Chat, ChatEnd, Model, Sampler, TokenMask, emit};

use super::number;
use crate::Outcome;

pub(crate) fn attack(mode: &str, rest: &[String]) -> Option<Outcome> {
    Some(match mode {
        "panic-with" => number(rest, 0).map(|n| panic!("{}", "x".repeat(n))),
        "error-of" => number(rest, 0).and_then(|n| Err("x\u{202e}\u{1b}[2J".repeat(n / 10).into())),
        "call-of" => {
            number(rest, 0).and_then(|n| Ok(emit_text(&"x".repeat(n)).map_err(trellis_guest::Error::from)?))
        }
        "json" => json(rest),
        "role" => role(rest),
        "save-as" => save_as(rest),
        "open-as" => open_as(rest),
        "token" => token(rest),
        "settings" => settings(),
        "beams-of" => beams_of(rest),
        "masks-of-rubbish" => masks_of_rubbish(),
        _ => return None,
    })
}

/// What was refused, said by the host in its own words; an error where it let it pass.
fn refused<T>(what: &str, outcome: Result<T, impl Error + 'static>) -> Outcome {
    match outcome {
        Ok(_) => Err(format!("{what} was let pass").into()),
        Err(error) => {
            let message = error.to_string();
            let n_shown = message.floor_char_boundary(200);
            Ok(emit(&message[..n_shown])?)
        }
    }
}

/// `json KIND`: a JSON text that parsers trip over.
fn json(rest: &[String]) -> Outcome {
    let (text, is_json) = match rest[0].as_str() {
        "deep" => ("[".repeat(100_000) + &"]".repeat(100_000), true),
        "deep-open" => ("[".repeat(100_000), false),
        "wide" => (format!("[{}0]", "0,".repeat(100_000)), true),
        "number" => ("1".repeat(200_000), true),
        "exponent" => ("1e99999".to_owned(), true),
        "surrogate" => (r#""\ud800""#.to_owned(), true),
        "nul" => ("\"\0\"".to_owned(), false),
        "mark" => ("\u{feff}{}".to_owned(), false),
        "rubbish" => ("x".repeat(1_000_000), false),
        "empty" => (String::new(), false),
        kind => return Err(format!("there is no kind of JSON {kind:?}").into()),
    };
    match emit_raw_json(&text) {
        Ok(()) if is_json => Ok(()),
        Ok(()) => Err("it was let pass".into()),
        // Some parsers refuse what is right and extreme; that is as good.
        Err(error) => refused("it", Err::<(), _>(trellis_guest::Error::from(error))),
    }
}

/// `role KIND`: a role that is none.
fn role(rest: &[String]) -> Outcome {
    let role = match rest[0].as_str() {
        "empty" => String::new(),
        "code" => "{{ ''.__class__ }}{% for i in range(999999999) %}x{% endfor %}".to_owned(),
        "bidi" => "user\u{202e}metsys".to_owned(),
        "long" => "x".repeat(900_000),
        kind => return Err(format!("there is no kind of role {kind:?}").into()),
    };
    let model = Model::open_default()?;
    let mut chat = Chat::new();
    chat.push(&role, "hello");
    refused("the role", model.encode_chat(&chat, ChatEnd::Assistant))?;
    // As the content of a message it is a text like any other.
    let mut chat = Chat::new();
    chat.push("user", &role[..role.floor_char_boundary(1_000)]);
    let context = model.context()?;
    match context.set_chat(&chat) {
        Ok(()) => Ok(()),
        Err(error) => refused("the text", Err::<(), _>(error)),
    }
}

fn name(kind: &str) -> String {
    match kind {
        "long" => "x".repeat(900_000),
        "path" => "../../../etc/passwd".to_owned(),
        "other-path" => "../../../etc/shadow".to_owned(),
        "nul" => "a\0b".to_owned(),
        _ => String::new(),
    }
}

/// `save-as KIND`: names that mean something elsewhere.
fn save_as(rest: &[String]) -> Outcome {
    let name = name(&rest[0]);
    let model = Model::open_default()?;
    let context = model.context()?;
    context.append_markup("<|begin_of_text|>Once")?;
    match context.save(&name) {
        // A name is a name; it leads nowhere.
        Ok(()) => {
            let opened = model.saved_context(&name)?;
            assert_eq!(opened.tokens(), context.tokens());
            Ok(trellis_guest::forget(&name)?)
        }
        Err(error) => refused("the name", Err::<(), _>(error)),
    }
}

/// `open-as KIND`: a model of such a name, and a context.
fn open_as(rest: &[String]) -> Outcome {
    let name = name(&rest[0]);
    refused("the model", Model::open(&name))?;
    refused("the context", Model::open_default()?.saved_context(&name))
}

/// `token N`: a token that is none, where one is expected.
fn token(rest: &[String]) -> Outcome {
    let token = number(rest, 0)? as u32;
    let model = Model::open_default()?;
    let context = model.context()?;
    context.append_markup("<|begin_of_text|>")?;
    refused("an appended token", context.append(&[token]))?;
    refused("a scored token", context.score(&[token]))?;
    refused("a token of a mask", TokenMask::allow(&model, &[token]))?;
    refused(
        "a biased token",
        Sampler::seeded(1).bias([(token, 1.0)]).build().and_then(|s| context.step(&s)),
    )?;
    refused("a decoded token", model.decode(&[token]))
}

/// Numbers that are none in each setting of a sampler.
fn settings() -> Outcome {
    let sampler = Sampler::greedy();
    for number in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0, f32::MIN] {
        refused("a temperature", sampler.set_temperature(number))?;
        refused("a top-p", sampler.set_top_p(Some(number)))?;
        refused("a min-p", sampler.set_min_p(Some(number)))?;
        refused("a repetition penalty", sampler.set_repetition_penalty(number))?;
    }
    Ok(())
}

/// `beams-of N`: more beams than there may be.
fn beams_of(rest: &[String]) -> Outcome {
    let context = Model::open_default()?.context()?;
    context.append_markup("<|begin_of_text|>")?;
    refused("the search", context.beams(number(rest, 0)? as u32).max_tokens(4).open())
}

fn masks_of_rubbish() -> Outcome {
    let model = Model::open_default()?;
    refused("a mask of too few bits", TokenMask::from_bits(&model, &[1]))?;
    refused("a mask of too many bits", TokenMask::from_bits(&model, &vec![u64::MAX; 100_000]))
}
