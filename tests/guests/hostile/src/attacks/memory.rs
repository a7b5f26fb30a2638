//! Memory: the guest's own, and what the host holds for it.

use std::hint::black_box;
use std::time::Duration;

use trellis_guest::{Constraint, Context, Error, Model, Sampler, Steering, Token, TokenMask};

use trellis_guest::programs::TokenBias;

use super::processor::definition;
use super::{hoard, number};
use crate::Outcome;

/// Bytes between two places that are touched.
const PAGE_BYTES: usize = 4096;

pub(crate) fn attack(mode: &str, rest: &[String]) -> Option<Outcome> {
    Some(match mode {
        "hog" => hog(rest),
        "hog-all" => hog_all(),
        "token-lists" => token_lists(),
        "masks" => with_model(|model| hoard(|| Ok(TokenMask::allow(model, &[1, 2, 3])?))),
        "biases" => with_model(|model| {
            let values = vec![0.5; model.info().vocab_size as usize];
            hoard(|| Ok(TokenBias::dense(model, &values)?))
        }),
        "grammars" => with_model(|model| {
            let mut salt = 0;
            hoard(|| {
                salt += 1;
                Ok(constraint(model, "choice", salt)?)
            })
        }),
        "programs" => with_model(|model| {
            let definition = definition("long")?;
            hoard(|| Ok(model.program(&definition)?))
        }),
        "seeded-samplers" => {
            let base = Sampler::greedy();
            hoard(|| Ok(base.with_seed(7)))
        }
        "steerings" => steerings(),
        "searches" => searches(),
        "generations" => generations(),
        "generations-of-nothing" => generations_of_nothing(),
        "generations-of-long-tokens" => generations_of_long_tokens(),
        _ => return None,
    })
}

fn with_model(act: impl FnOnce(&Model) -> Outcome) -> Outcome {
    act(&Model::open_default()?)
}

/// `hog N_MIB`: takes so much, touches every page of it, and keeps it.
fn hog(rest: &[String]) -> Outcome {
    let mut memory = vec![0u8; number(rest, 0)? << 20];
    let mut round = 0;
    loop {
        round += 1;
        memory.iter_mut().step_by(PAGE_BYTES).for_each(|byte| *byte = round);
        black_box(&memory);
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Takes a piece more until it gets none, touches all, and keeps what it has.
fn hog_all() -> Outcome {
    loop {
        // Nothing of it is given back, whatever the host says.
        let before = core::arch::wasm32::memory_grow::<0>(16);
        if before == usize::MAX {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Contexts as long as they can be, of which nothing is computed.
fn token_lists() -> Outcome {
    let model = Model::open_default()?;
    hoard(|| {
        let context = model.context()?;
        let tokens: Vec<Token> = (0..context.capacity()).map(|i| 300 + i % 3000).collect();
        context.append(&tokens)?;
        Ok(context)
    })
}

fn steerings() -> Outcome {
    let model = Model::open_default()?;
    let (width, n_layers) = (model.info().hidden_size as usize, model.info().n_layers);
    hoard(|| {
        let context = model.context()?;
        context.append_markup("<|begin_of_text|>Once")?;
        let all = (0..n_layers).fold(Steering::none(), |all, layer| all.and(layer, vec![0.25; width]));
        context.steer(&all, 0)?;
        Ok(context)
    })
}

fn prompt(model: &Model) -> Result<Context, Error> {
    let context = model.context()?;
    context.append_markup("<|begin_of_text|>Once upon a time")?;
    Ok(context)
}

fn searches() -> Outcome {
    let context = prompt(&Model::open_default()?)?;
    hoard(|| Ok(context.beams(64).max_tokens(500).open()?))
}

fn generations() -> Outcome {
    let root = prompt(&Model::open_default()?)?;
    let sampler = Sampler::greedy();
    // Each holds a context that decodes on, and whose tokens nobody takes.
    let mut all = Vec::new();
    loop {
        let fork: &'static Context = Box::leak(Box::new(root.fork()?));
        let request = fork.generate(&sampler).stop_tokens(&[]).max_tokens(400);
        all.push(trellis_guest::generate_each([request])?);
        black_box(&all);
    }
}

/// Generations that are over before they begin: many behind one handle, and each with settings of its own.
fn generations_of_nothing() -> Outcome {
    let model = Model::open_default()?;
    let contexts = (0..200).map(|_| model.context()).collect::<Result<Vec<Context>, _>>()?;
    let sampler = Sampler::greedy();
    let bias: Vec<(Token, f32)> = (0..1000).map(|token| (token, 0.5)).collect();
    sampler.set_bias(&bias)?;
    let mut all = Vec::new();
    loop {
        let requests = contexts
            .iter()
            .zip(0..)
            .map(|(context, seed)| context.generate(&sampler).seed(seed).max_tokens(0));
        all.push(trellis_guest::generate_each(requests)?);
        black_box(&all);
    }
}

/// Generations of nothing but the longest token, one after the other over the same contexts, each of which keeps what it has drawn
/// though its context has lost it.
fn generations_of_long_tokens() -> Outcome {
    let model = Model::open_default()?;
    let root = prompt(&model)?;
    let contexts = (0..16).map(|_| root.fork()).collect::<Result<Vec<_>, _>>()?;
    let vocabulary = model.vocabulary()?.iter().zip(0..);
    let longest: Token = vocabulary.max_by_key(|(bytes, _)| bytes.len()).map_or(0, |(_, token)| token);
    let sampler = Sampler::greedy();
    sampler.set_mask(Some(&TokenMask::allow(&model, &[longest])?))?;
    let mut all = Vec::new();
    loop {
        for context in &contexts {
            context.truncate(root.length())?;
        }
        let requests =
            contexts.iter().map(|context| context.generate(&sampler).stop_tokens(&[]).max_tokens(800));
        let mut generations = trellis_guest::generate_each(requests)?;
        for ended in generations.reach(790) {
            ended.completion?;
        }
        all.push(generations);
        black_box(&all);
    }
}

/// A grammar of a kind, another one for each salt.
pub(crate) fn constraint(model: &Model, kind: &str, salt: usize) -> Result<Constraint, Error> {
    match kind {
        "choice" => Constraint::choice(model, (0..200).map(|i| format!("text {i} of {salt}"))),
        "many-choices" => Constraint::choice(model, (0..6_000).map(|i| format!("text number {i} of {salt}"))),
        "regex" => Constraint::regex(model, &format!("(a|b|{salt}){{1,200}}[a-z]{{1,300}}")),
        "regex-blow-up" => Constraint::regex(model, &format!("(.*a.{{14}}){{3}}{salt}")),
        "schema" => {
            let properties: Vec<String> = (0..300)
                .map(|i| format!(r#""p{i}_{salt}":{{"type":"array","items":{{"type":"number"}}}}"#))
                .collect();
            Constraint::json_schema(
                model,
                &format!(r#"{{"type":"object","properties":{{{}}}}}"#, properties.join(",")),
            )
        }
        "deep-schema" => {
            let n = 200;
            let schema = r#"{"type":"array","items":"#.repeat(n) + "{}" + &"}".repeat(n);
            Constraint::json_schema(model, &schema)
        }
        "lark" => {
            Constraint::lark(model, &format!("start: a | b\na: \"x\" a \"y\" | a a | \"{salt}\"\nb: a b | a"))
        }
        "optional" => Constraint::regex(model, &format!("{salt}{}", "a?".repeat(100_000))),
        "doubled" => {
            let rules: String = (0..17).map(|n| format!("A{}: A{n} A{n}\n", n + 1)).collect();
            Constraint::lark(model, &format!("start: A17 \"{salt}\"\nA0: \"a\"?\n{rules}"))
        }
        "patterns" => {
            let patterns: Vec<String> =
                (0..1_000).map(|i| format!(r#""^[a-z]*(a|b)[a-z]{{9}}{i}x{salt}$":{{}}"#)).collect();
            Constraint::json_schema(model, &format!(r#"{{"patternProperties":{{{}}}}}"#, patterns.join(",")))
        }
        "lark-endless" => Constraint::lark(model, "start: start start | \"a\" start | start \"b\""),
        _ => Constraint::regex(model, "a+"),
    }
}
