//! One attack each. Those that are named by a word alone are here, those with arguments in the files of their kind.

mod boundary;
mod decoding;
mod memory;
mod output;
mod processor;
mod saving;

use std::hint::black_box;
use std::time::Duration;

use trellis_guest::bindings::trellis::host::session::emit_text;
use trellis_guest::bindings::trellis::host::types::Error as ApiError;
use trellis_guest::{
    Chat, ChatEnd, Context, Error, LogLevel, Model, Sampler, Token, emit, emit_json, emit_tokens, log,
};

use crate::Outcome;

/// Length of a context that is not the longest, so that appending never fails for the model's own limit.
const N_LONG: u32 = 1000;

pub(crate) fn attack(mode: &str, rest: &[String]) -> Outcome {
    let of_a_kind = [
        processor::attack,
        memory::attack,
        boundary::attack,
        decoding::attack,
        output::attack,
        saving::attack,
    ];
    match of_a_kind.iter().find_map(|attack| attack(mode, rest)) {
        Some(outcome) => outcome,
        None => attack_by_name(mode),
    }
}

/// The number at this place of the arguments.
fn number(rest: &[String], idx: usize) -> Result<usize, Box<dyn std::error::Error>> {
    let text = rest.get(idx).ok_or_else(|| format!("number {idx} of the arguments is needed"))?;
    Ok(text.parse()?)
}

/// Does something again and again, until the guest is ended or the host refuses.
fn without_end<E: Into<Box<dyn std::error::Error>>>(mut act: impl FnMut() -> Result<(), E>) -> Outcome {
    loop {
        act().map_err(Into::into)?;
    }
}

fn attack_by_name(mode: &str) -> Outcome {
    match mode {
        "loop" => loop {
            black_box(());
        },
        "memory" => grow(64 << 10),
        "huge-allocation" => grow(1 << 30),
        "flood-text" => loop {
            emit(&"flood ".repeat(100))?;
        },
        "drip" => loop {
            emit("x")?;
        },
        "flood-tokens" => loop {
            emit_tokens(&[7; 100])?;
        },
        "flood-log" => loop {
            log(LogLevel::Warn, "flood");
        },
        "flood-stderr" => loop {
            eprintln!("flood");
        },
        "flood-stderr-without-lines" => loop {
            eprint!("{}", "flood".repeat(1000));
        },
        "abort" => std::process::abort(),
        "panic" => panic!("the guest gives up at {}", black_box(7)),
        "stack" => {
            descend(1);
            Ok(())
        }
        "stack-in-memory" => {
            descend_with_arrays(1);
            Ok(())
        }
        "exit" => std::process::exit(3),
        "exit-well" => std::process::exit(0),
        "error" => Err("the guest is not content".into()),
        "long-error" => Err("x".repeat(1 << 20).into()),
        "sleep" => {
            std::thread::sleep(Duration::from_secs(1 << 30));
            Ok(())
        }
        "wait-for-messages" => {
            while trellis_guest::receive()?.is_some() {}
            Ok(())
        }
        "contexts" => {
            let model = Model::open_default()?;
            hoard(|| Ok(model.context()?))
        }
        "fork-bomb" => {
            let root = Model::open_default()?.context()?;
            root.append_markup("<|begin_of_text|>")?;
            let mut all = vec![root];
            loop {
                let forks = all.iter().map(Context::fork).collect::<Result<Vec<_>, _>>()?;
                all.extend(forks);
            }
        }
        "models" => hoard(|| Ok(Model::open_default()?)),
        "samplers" => hoard(|| Ok(Sampler::greedy())),
        "decoders" => {
            let model = Model::open_default()?;
            hoard(|| Ok(model.text_decoder()))
        }
        "streams" => {
            let context = Model::open_default()?.context()?;
            context.append_markup("<|begin_of_text|>")?;
            let sampler = Sampler::greedy();
            hoard(|| Ok(context.stream(&sampler).open()?))
        }
        "long-call" => match emit_text(&"x".repeat(2 << 20)) {
            Err(ApiError::BudgetExceeded(budget)) => {
                emit_json(&[budget.requested, budget.limit])?;
                // The SDK knows better.
                emit(&"x".repeat(2 << 20))?;
                let text = Model::open_default()?.encode(&"x".repeat(17 << 20)).map(|tokens| tokens.len());
                Ok(emit(&text.expect_err("it is too long").to_string())?)
            }
            other => Err(format!("{other:?}").into()),
        },
        // Longer than what the host looks at.
        "longest-call" => Ok(emit_text(&"x".repeat(17 << 20)).map_err(Error::from)?),
        "deep-template" => {
            let mut chat = Chat::new();
            for _ in 0..10_000 {
                chat.push("user", "again");
            }
            let n_tokens = Model::open_default()?.encode_chat(&chat, ChatEnd::Assistant)?.len();
            Ok(emit(&n_tokens.to_string())?)
        }
        "pages" => {
            let model = Model::open_default()?;
            let mut salt = 0;
            hoard(|| {
                salt += 1;
                let context = model.context()?;
                fill(&context, salt)?;
                Ok(context)
            })
        }
        "tokens-budget" => {
            let context = Model::open_default()?.context()?;
            for salt in 0.. {
                context.truncate(0)?;
                fill(&context, salt)?;
            }
            Ok(())
        }
        "save" => {
            let context = Model::open_default()?.context()?;
            context.append_markup("<|begin_of_text|>Once upon a time")?;
            for i in 0.. {
                context.save(&format!("kept {i}"))?;
            }
            Ok(())
        }
        "full-rows" => {
            let context = Model::open_default()?.context()?;
            context.append_markup("<|begin_of_text|>")?;
            loop {
                context.full()?;
            }
        }
        mode => Err(format!("there is no mode {mode:?}").into()),
    }
}

fn grow(n_piece_bytes: usize) -> Outcome {
    hoard(|| Ok(vec![1u8; n_piece_bytes]))
}

/// Makes one thing after the other and keeps them all.
fn hoard<T>(mut make: impl FnMut() -> Result<T, Box<dyn std::error::Error>>) -> Outcome {
    let mut all = Vec::new();
    loop {
        all.push(make()?);
        black_box(&all);
    }
}

/// Uses up the stack of calls, which lies with the host.
fn descend(depth: u64) -> u64 {
    if depth == 0 { 0 } else { descend(depth + 1).rotate_left(1) ^ depth }
}

/// Uses up the stack of addressable values, which lies in the guest's memory.
fn descend_with_arrays(depth: u64) -> u64 {
    if depth == 0 {
        return 0;
    }
    let here = black_box([depth; 64]);
    black_box(descend_with_arrays(depth + 1)) ^ here[depth as usize % 64]
}

/// Computes a long context of tokens that no other salt has.
fn fill(context: &Context, salt: Token) -> Outcome {
    let tokens: Vec<Token> = (0..N_LONG).map(|i| 300 + (i * 7 + salt * 11) % 3000).collect();
    context.append(&tokens)?;
    Ok(context.prefill()?)
}
