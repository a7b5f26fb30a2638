//! Work for the processor: the guest's own, and the host's in its name.

use std::hint::black_box;
use std::time::Instant;

use trellis_guest::bindings::trellis::host::{models, session};
use trellis_guest::programs::{Definition, TokenBias, library};
use trellis_guest::{Chat, ChatEnd, Constraint, Model, Random, TokenMask, log_softmax};

use super::{number, without_end};
use crate::Outcome;

pub(crate) fn attack(mode: &str, rest: &[String]) -> Option<Outcome> {
    Some(match mode {
        "encode" => encode(rest),
        "encode-markup" => encode_markup(rest),
        "decode" => decode(rest),
        "token-bytes" => token_bytes(),
        "chat" => chat(rest),
        "vocabulary" => vocabulary(),
        "model-info" => model_info(),
        "usage" => without_end(|| ok(session::get_usage())),
        "arguments" => without_end(|| ok(session::arguments())),
        "clock" => without_end(|| ok(Instant::now())),
        "names" => without_end(|| ok(models::names())),
        "grammar" => grammar(rest),
        "refused-grammar" => refused_grammar(rest),
        "program" => program(rest),
        "mask" => mask(),
        "dense-bias" => bias(),
        "softmax" => softmax(),
        _ => return None,
    })
}

fn ok<T>(value: T) -> Result<(), trellis_guest::Error> {
    black_box(value);
    Ok(())
}

/// So many bytes of a kind of text, which tokenizers find hard or easy.
fn text(kind: &str, n_bytes: usize) -> Result<String, String> {
    let mut random = Random::new(7);
    let mut repeated = |pieces: &[&str]| {
        let mut text = String::with_capacity(n_bytes + 8);
        while text.len() < n_bytes {
            text.push_str(pieces[random.bits() as usize % pieces.len()]);
        }
        text
    };
    let letters: Vec<String> = ('a'..='z').map(String::from).collect();
    let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
    Ok(match kind {
        "spaces" => repeated(&[" "]),
        "letter" => repeated(&["a"]),
        "random" => repeated(&letters),
        "digits" => repeated(&["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]),
        "white" => repeated(&[" ", "\t", "\n", "\r\n", "\u{a0}", "\u{2003}"]),
        "specials" => repeated(&["<|begin_of_text|>"]),
        "half-specials" => repeated(&["<|begin_of_", "<|", "|>", "<|begin_of_text|"]),
        "combining" => repeated(&["a\u{301}\u{302}\u{303}", "\u{308}"]),
        "emoji" => repeated(&["\u{1f600}", "\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}"]),
        "lines" => repeated(&["\n"]),
        "words" => repeated(&["word ", "another ", "the "]),
        kind => return Err(format!("there is no kind of text {kind:?}")),
    })
}

/// `encode KIND N_BYTES`.
fn encode(rest: &[String]) -> Outcome {
    let text = text(&rest[0], number(rest, 1)?)?;
    let model = Model::open_default()?;
    without_end(|| model.encode(&text).map(drop))
}

/// `encode-markup KIND N_BYTES`: the names of special tokens count.
fn encode_markup(rest: &[String]) -> Outcome {
    let text = text(&rest[0], number(rest, 1)?)?;
    let model = Model::open_default()?;
    without_end(|| model.encode_markup(&text).map(drop))
}

/// `decode N_TOKENS`.
fn decode(rest: &[String]) -> Outcome {
    let model = Model::open_default()?;
    let tokens: Vec<u32> = (0..number(rest, 0)? as u32).map(|i| 300 + i % 3000).collect();
    without_end(|| model.decode(&tokens).map(drop))
}

fn token_bytes() -> Outcome {
    let model = Model::open_default()?;
    let mut token = 0;
    without_end(|| {
        token = (token + 1) % model.info().vocab_size;
        model.token_bytes(token).map(drop)
    })
}

/// `chat N_MESSAGES`: the model's template over so many of them.
fn chat(rest: &[String]) -> Outcome {
    let mut chat = Chat::new();
    for i in 0..number(rest, 0)? {
        chat.push(if i % 2 == 0 { "user" } else { "assistant" }, "again and again");
    }
    let model = Model::open_default()?;
    without_end(|| model.encode_chat(&chat, ChatEnd::Assistant).map(drop))
}

fn vocabulary() -> Outcome {
    let model = models::Model::open(None).map_err(trellis_guest::Error::from)?;
    without_end(|| model.vocabulary().map(drop).map_err(trellis_guest::Error::from))
}

fn model_info() -> Outcome {
    let model = models::Model::open(None).map_err(trellis_guest::Error::from)?;
    without_end(|| ok(model.info()))
}

/// `grammar KIND`: compiles one after the other.
fn grammar(rest: &[String]) -> Outcome {
    let model = Model::open_default()?;
    let mut salt = 0;
    without_end(|| {
        salt += 1;
        super::memory::constraint(&model, &rest[0], salt).map(drop::<Constraint>)
    })
}

/// `refused-grammar KIND`: has one after the other refused.
fn refused_grammar(rest: &[String]) -> Outcome {
    let model = Model::open_default()?;
    let mut salt = 0;
    without_end(|| {
        salt += 1;
        match super::memory::constraint(&model, &rest[0], salt) {
            Ok(_) => panic!("it is taken"),
            Err(_) => ok(()),
        }
    })
}

/// `program KIND`: checks one definition after the other.
fn program(rest: &[String]) -> Outcome {
    let model = Model::open_default()?;
    let definition = definition(&rest[0])?;
    without_end(|| model.program(&definition).map(drop))
}

/// A logit program that the host has to look at.
pub(crate) fn definition(kind: &str) -> Result<Definition, String> {
    Ok(match kind {
        "small" => Definition::build(|b| b.logits().argmax()),
        "long" => Definition::build(|b| {
            let mut x = b.logits();
            // More of them cost more than a program may.
            for _ in 0..2 {
                x = library::temperature(x.log_softmax(), b.parameter(0));
            }
            for _ in 0..20 {
                x = x.abs();
            }
            x.argmax()
        }),
        kind => return Err(format!("there is no kind of program {kind:?}")),
    })
}

fn mask() -> Outcome {
    let model = Model::open_default()?;
    let tokens: Vec<u32> = (0..200_000).map(|i| i % model.info().vocab_size).collect();
    without_end(|| TokenMask::allow(&model, &tokens).map(drop))
}

fn bias() -> Outcome {
    let model = Model::open_default()?;
    let values = vec![0.5; model.info().vocab_size as usize];
    without_end(|| TokenBias::dense(&model, &values).map(drop))
}

/// In the guest itself, with floating-point numbers.
fn softmax() -> Outcome {
    let row: Vec<f32> = (0..100_000).map(|i| (i as f32).sin()).collect();
    without_end(|| ok(log_softmax(black_box(&row))))
}
