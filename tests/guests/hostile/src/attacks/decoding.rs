//! Work for the engine, without end.

use std::hint::black_box;

use trellis_guest::{
    Context, Error, Model, Particles, Pooling, Positions, Sampler, Steering, Token, embedding_all, full_all,
    generate_all, hidden_all, score_all, step_all, top_all,
};

use super::{fill, number, without_end};
use crate::Outcome;

/// Tokens of a long context: as many as the forks of it have to keep.
const N_LONG: usize = 950;

/// A context that grows is cut back to its prompt when it has so many tokens.
const N_TOKENS_MAX: u32 = 900;

pub(crate) fn attack(mode: &str, rest: &[String]) -> Option<Outcome> {
    Some(match mode {
        "prefill" => prefill(),
        "score" => number(rest, 0).and_then(score),
        "step" => with_contexts(rest, |contexts, samplers| step_all(contexts.iter().zip(samplers)).map(drop)),
        "full" => with_contexts(rest, |contexts, _| full_all(contexts).map(drop)),
        "top" => with_contexts(rest, |contexts, _| top_all(contexts, 1024).map(drop)),
        "embedding" => with_contexts(rest, |contexts, _| embedding_all(contexts).map(drop)),
        "hidden" => with_contexts(rest, |contexts, _| {
            hidden_all(contexts.iter(), &[0, 1], Pooling::MeanFrom(0)).map(drop)
        }),
        "generate" => with_contexts(rest, |contexts, samplers| {
            let requests = contexts.iter().zip(samplers);
            generate_all(
                requests.map(|(context, sampler)| context.generate(sampler).stop_tokens(&[]).max_tokens(200)),
            )
            .map(drop)
        }),
        "generations-of" => with_contexts(rest, |contexts, samplers| {
            let requests = contexts.iter().zip(samplers);
            let requests =
                requests.map(|(context, sampler)| context.generate(sampler).stop_tokens(&[]).max_tokens(200));
            let mut all = trellis_guest::generate_each(requests)?;
            all.reach(2);
            Ok(())
        }),
        "beams" => number(rest, 0).and_then(beams),
        "streams-in-vain" => streams_in_vain(),
        "fork-and-drop" => number(rest, 0).and_then(fork_and_drop),
        "create-and-drop" => with_prompt(|model, _| model.context().map(drop)),
        "append-and-truncate" => append_and_truncate(),
        "evict" => evict(),
        "steer" => steer(),
        "particles" => particles(),
        "speculate" => speculate(),
        "attention" => attention(),
        "save-one" => with_prompt(|_, context| context.save("one 0")),
        "save-many" => save_many(),
        "forget" => forget(&rest[0]),
        "prompt-logprobs" => prompt_logprobs(),
        _ => return None,
    })
}

fn prompt(model: &Model) -> Result<Context, Error> {
    let context = model.context()?;
    context.append_markup("<|begin_of_text|>Once upon a time")?;
    Ok(context)
}

fn with_prompt(mut act: impl FnMut(&Model, &Context) -> Result<(), Error>) -> Outcome {
    let model = Model::open_default()?;
    let context = prompt(&model)?;
    without_end(|| act(&model, &context))
}

/// `MODE N_CONTEXTS`: does it with so many contexts at a time, that begin again when they are long.
fn with_contexts(
    rest: &[String],
    mut act: impl FnMut(&[Context], &[Sampler]) -> Result<(), Error>,
) -> Outcome {
    let n = number(rest, 0)?;
    let root = prompt(&Model::open_default()?)?;
    let contexts = (0..n).map(|_| root.fork()).collect::<Result<Vec<_>, _>>()?;
    let samplers: Vec<Sampler> =
        (0..n).map(|seed| Sampler::seeded(seed as u64).temperature(1.0).build()).collect::<Result<_, _>>()?;
    without_end(|| {
        act(&contexts, &samplers)?;
        for context in contexts.iter().filter(|context| context.length() > N_TOKENS_MAX - 200) {
            context.truncate(root.length())?;
        }
        Ok::<(), Error>(())
    })
}

/// A prompt of a thousand tokens after the other, none of which was computed before.
fn prefill() -> Outcome {
    let context = Model::open_default()?.context()?;
    let mut salt = trellis_guest::seed() as Token % 1000;
    without_end(|| {
        salt += 1;
        context.truncate(0)?;
        fill(&context, salt)
    })
}

fn long_tokens(salt: usize) -> Vec<Token> {
    (0..N_LONG).map(|i| 300 + ((i * 7 + salt * 13) % 3000) as Token).collect()
}

/// `score N_CONTEXTS`: a continuation of 950 tokens after one, of 20 after each of more.
fn score(n: usize) -> Outcome {
    let root = prompt(&Model::open_default()?)?;
    let contexts = (0..n).map(|_| root.fork()).collect::<Result<Vec<_>, _>>()?;
    let mut salt = 0;
    without_end(|| {
        salt += 1;
        let mut tokens = long_tokens(salt);
        tokens.truncate(if n == 1 { N_LONG } else { 20 });
        score_all(contexts.iter().map(|context| (context, &tokens[..]))).map(drop)
    })
}

fn beams(n: usize) -> Outcome {
    with_prompt(|_, context| {
        black_box(context.beams(n as u32).max_tokens(30).stop_tokens(&[]).run(1)?);
        Ok(())
    })
}

fn streams_in_vain() -> Outcome {
    let sampler = Sampler::greedy();
    with_prompt(|_, context| {
        // The engine decodes ahead of the first token; the rest is for nothing.
        let fork = context.fork()?;
        let mut stream = fork.stream(&sampler).open()?;
        stream.next().transpose()?;
        Ok(())
    })
}

/// `fork-and-drop N`: so many forks of a long context at a time.
fn fork_and_drop(n: usize) -> Outcome {
    let context = Model::open_default()?.context()?;
    context.append(&long_tokens(1))?;
    context.prefill()?;
    without_end(|| {
        black_box((0..n).map(|_| context.fork()).collect::<Result<Vec<_>, _>>()?);
        Ok::<(), Error>(())
    })
}

fn append_and_truncate() -> Outcome {
    let tokens = long_tokens(1);
    let context = Model::open_default()?.context()?;
    without_end(|| {
        context.append(&tokens)?;
        context.truncate(0)
    })
}

fn evict() -> Outcome {
    let context = Model::open_default()?.context()?;
    let tokens = long_tokens(2);
    without_end(|| {
        context.truncate(0)?;
        context.append(&tokens)?;
        context.prefill()?;
        for start in (16..800).step_by(16).rev() {
            // Of many holes some are refused.
            let _ = context.evict(start, start + 8, Positions::CloseUp);
        }
        Ok::<(), Error>(())
    })
}

fn steer() -> Outcome {
    with_prompt(|model, context| {
        let width = model.info().hidden_size as usize;
        let fork = context.fork()?;
        fork.steer(&Steering::none().and(1, vec![0.5; width]), 0)?;
        fork.top(1).map(drop)
    })
}

fn particles() -> Outcome {
    let sampler = Sampler::seeded(3).temperature(1.0).build()?;
    with_prompt(|_, context| {
        let mut all = Particles::new(context, &sampler, 128)?;
        for _ in 0..4 {
            for (idx, drawn) in all.step(|_| true)? {
                all[idx].log_weight += f64::from(drawn.logprob);
            }
            all.resample()?;
        }
        Ok(())
    })
}

/// Guesses that are wrong.
fn speculate() -> Outcome {
    let sampler = Sampler::seeded(3).temperature(1.0).build()?;
    let mut salt = 0;
    with_prompt(|_, context| {
        salt += 1;
        let guess = long_tokens(salt);
        let fork = context.fork()?;
        fork.speculate(&sampler, &guess[..15]).map(drop)
    })
}

fn attention() -> Outcome {
    let context = Model::open_default()?.context()?;
    context.append(&long_tokens(3))?;
    without_end(|| context.attention(&[0, 1]).map(drop))
}

fn prompt_logprobs() -> Outcome {
    let context = Model::open_default()?.context()?;
    let mut salt = 0;
    without_end(|| {
        salt += 1;
        context.truncate(0)?;
        context.append(&long_tokens(salt))?;
        context.prompt_logprobs(1).map(drop)
    })
}

fn save_many() -> Outcome {
    let context = prompt(&Model::open_default()?)?;
    for i in 0.. {
        context.save(&format!("kept {i}"))?;
    }
    Ok(())
}

/// `forget PREFIX`: forgets what was saved under names of this, which outlives who saved it: from the last name down, so that what is left is there from 0 on when the time
/// of this guest is up before it is done.
fn forget(prefix: &str) -> Outcome {
    let model = Model::open_default()?;
    let is_kept = |i: usize| model.saved_context(&format!("{prefix} {i}")).is_ok();
    let mut n_step = 1;
    while is_kept(n_step - 1) {
        n_step *= 2;
    }
    let (mut n_kept, mut n_gone) = (n_step / 2, n_step);
    while n_kept + 1 < n_gone {
        let middle = n_kept.midpoint(n_gone);
        if is_kept(middle - 1) {
            n_kept = middle;
        } else {
            n_gone = middle;
        }
    }
    for i in (0..n_kept).rev() {
        trellis_guest::forget(&format!("{prefix} {i}"))?;
    }
    Ok(())
}
