//! Contexts that are saved, opened and forgotten by many guests of a user at once, under names that they share.
//!
//! What is saved under a name is always one of a few contexts, so that whoever opens it knows whether it is whole.

use trellis_guest::{Context, Error, Model, Sampler, Token, emit, seed};

use super::{number, without_end};
use crate::Outcome;

/// Names that are shared.
const N_NAMES: usize = 16;

/// Contexts that are saved under them.
const N_KINDS: u32 = 4;

/// Tokens of one that is saved by turns: some pages, the last not full.
const N_TOKENS: u32 = 60;

/// Tokens that are drawn after one that is opened.
const N_DRAWN: u32 = 8;

/// What another user saves; nobody saves it by turns.
const SET_ASIDE: u32 = N_KINDS;

pub(crate) fn attack(mode: &str, rest: &[String]) -> Option<Outcome> {
    let of_name = |act: fn(&str) -> Outcome| match rest {
        [name] => act(name),
        _ => Err("a name is needed".into()),
    };
    Some(match mode {
        "save-by-turns" => save_by_turns(),
        "save-lengths" => number(rest, 0).and_then(save_lengths),
        "open-in-vain" => open_in_vain(),
        "forget-turns" => forget_turns(),
        "set-aside" => of_name(set_aside),
        "is-aside" => of_name(is_aside),
        "save-and-wait" => of_name(save_and_wait),
        "forget-one" => of_name(|name| Ok(forgotten(name)?)),
        _ => return None,
    })
}

fn turn(idx: usize) -> String {
    format!("turn {}", idx % N_NAMES)
}

/// Tokens that no other kind begins with.
fn tokens(kind: u32, n_tokens: u32) -> Vec<Token> {
    (0..n_tokens).map(|i| 300 + (i * 7 + kind * 11) % 3000).collect()
}

fn context(model: &Model, kind: u32, n_tokens: u32) -> Result<Context, Error> {
    let context = model.context()?;
    context.append(&tokens(kind, n_tokens))?;
    context.prefill()?;
    Ok(context)
}

fn contexts(model: &Model, n_tokens: u32) -> Result<Vec<Context>, Error> {
    (0..N_KINDS).map(|kind| context(model, kind, n_tokens)).collect()
}

/// Forgets what may have been forgotten by another guest.
fn forgotten(name: &str) -> Result<(), Error> {
    match trellis_guest::forget(name) {
        Err(Error::NotFound { .. }) => Ok(()),
        forgotten => forgotten,
    }
}

/// Saves, forgets and opens by chance, half the time under one and the same name. What is opened is what somebody saved.
fn save_by_turns() -> Outcome {
    let model = Model::open_default()?;
    let contexts = contexts(&model, N_TOKENS)?;
    let mut chance = seed();
    let mut below = |n: usize| {
        chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (chance >> 33) as usize % n
    };
    without_end(|| -> Outcome {
        let name = turn(below(2) * below(N_NAMES));
        match below(4) {
            0 | 1 => contexts[below(contexts.len())].save(&name)?,
            2 => forgotten(&name)?,
            _ => match model.saved_context(&name) {
                Ok(opened) => {
                    let found = opened.tokens();
                    if !(0..N_KINDS).any(|kind| tokens(kind, N_TOKENS) == found) {
                        return Err(format!("{name} is opened as {found:?}, which nobody saved").into());
                    }
                }
                Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(error.into()),
            },
        }
        Ok(())
    })
}

/// `save-lengths N_TOKENS`: saves contexts of so many tokens under one name after the other, and begins again.
fn save_lengths(n_tokens: usize) -> Outcome {
    let model = Model::open_default()?;
    let contexts = contexts(&model, n_tokens as u32)?;
    let mut idx = 0;
    without_end(|| {
        idx += 1;
        // Each time another one under the same name.
        contexts[(idx + idx / N_NAMES) % contexts.len()].save(&turn(idx))
    })
}

/// Opens what nobody has saved, which its model has to ask for each time.
fn open_in_vain() -> Outcome {
    let model = Model::open_default()?;
    emit("opens")?;
    let mut idx = 0u64;
    loop {
        idx += 1;
        match model.saved_context(&format!("nothing {idx}")) {
            Err(Error::NotFound { .. }) => {}
            Ok(_) => return Err("there is what nobody has saved".into()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Takes away what guests that save by turns leave.
fn forget_turns() -> Outcome {
    for idx in 0..N_NAMES {
        forgotten(&turn(idx))?;
    }
    Ok(())
}

/// `set-aside NAME`: saves what no attack saves.
fn set_aside(name: &str) -> Outcome {
    Ok(context(&Model::open_default()?, SET_ASIDE, N_TOKENS)?.save(name)?)
}

/// `is-aside NAME`: whether what was set aside is opened as what it was, and continued as what it was.
fn is_aside(name: &str) -> Outcome {
    let model = Model::open_default()?;
    let drawn = |context: &Context| -> Result<Vec<Token>, Error> {
        let sampler = Sampler::seeded(7).temperature(1.0).build()?;
        context.generate(&sampler).stop_tokens(&[]).max_tokens(N_DRAWN).run()?;
        Ok(context.tokens())
    };
    let opened = model.saved_context(name)?;
    if opened.tokens() != tokens(SET_ASIDE, N_TOKENS) {
        return Err(format!("{name} is opened as {:?}", opened.tokens()).into());
    }
    let (found, wanted) = (drawn(&opened)?, drawn(&context(&model, SET_ASIDE, N_TOKENS)?)?);
    match found == wanted {
        true => Ok(()),
        false => Err(format!("{name} goes on as {found:?} and not as {wanted:?}").into()),
    }
}

/// `save-and-wait NAME`: saves, says so and stays, so that its client can leave before the context is on disk.
fn save_and_wait(name: &str) -> Outcome {
    context(&Model::open_default()?, 0, N_TOKENS)?.save(name)?;
    emit("saved")?;
    while trellis_guest::receive()?.is_some() {}
    Ok(())
}
