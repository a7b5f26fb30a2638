//! One text continued by many samplers side by side, each a logit program from the library with its paper there
//! (`trellis_guest::programs::library`). Those that leave a mark are in `watermarks`, those of several contexts in `cfg`.
//!
//! ```text
//! trellis run samplers "Once upon a time"
//! trellis run samplers --only mirostat --max-tokens 200 "Once upon a time"
//! trellis run samplers --json "Once upon a time"
//! ```
//!
//! The prompt is computed once, and all continuations are decoded in one batch: a program is data that the engine runs
//! where the logits lie, so none of them costs a call from the guest for each token.

use serde::Serialize;
use trellis_guest::programs::library::{self, Chain, Dry};
use trellis_guest::programs::{Definition, MaskId, Row, Source};
use trellis_guest::{Args, Model, Result, Sampler, Token, TokenMask, emit, emit_json, generate_all, seed};

trellis_guest::main!(run);

const USAGE: &str = "samplers [--only NAME] [--max-tokens N] [--json] TEXT";

#[derive(Serialize)]
struct Continuation {
    sampler: &'static str,
    cost: f32,
    tokens: Vec<Token>,
    text: String,
    mean_logprob: f32,
}

/// Each sampler with usual settings; the first mask is that of the tokens that end a text.
fn samplers() -> Vec<(&'static str, Definition)> {
    let ends = MaskId(0);
    let dry = Dry { window: 512, allowed_length: 2.0, multiplier: 0.8, base: 1.75, breakers: Some(ends) };
    let chain = Chain { temperature: 0.8, top_p: Some(0.95), ..Chain::default() };
    vec![
        ("greedy", Definition::build(|b| library::greedy(b.logits()))),
        ("chain", Definition::build(|b| library::chain(b, chain))),
        ("mirostat", Definition::build(|b| library::mirostat(b.logits(), 3.0, 3.0, 0.1))),
        ("temperature", stage(|x| library::temperature(x, 0.8))),
        ("dynamic", stage(|x| library::dynamic_temperature(x, 1.0, 0.7, 1.0))),
        ("top-k", stage(|x| library::top_k(x, 40.0))),
        ("top-p", stage(|x| library::top_p(x, 0.9))),
        ("min-p", stage(|x| library::min_p(x, 0.1))),
        ("typical", stage(|x| library::typical(x, 0.9))),
        ("eta", stage(|x| library::eta(x, 0.002))),
        ("top-n-sigma", stage(|x| library::top_n_sigma(x, 1.0))),
        ("xtc", stage(|x| library::xtc(x, 0.5, 0.1))),
        ("dry", stage(|x| library::dry(x, dry))),
        ("repetition", stage(|x| library::repetition(x, Some(64), 1.2))),
        ("no-repeat-3", stage(|x| library::no_repeat_ngram(x, 3))),
        ("at-least-20", stage(|x| library::minimum_length(x, x.builder().mask(ends), 20.0))),
        ("at-most-10", stage(|x| library::maximum_length(x, x.builder().mask(ends), 10.0))),
    ]
}

/// Draws from what a stage makes of the logits.
fn stage(of: impl for<'b> FnOnce(Row<'b>) -> Row<'b>) -> Definition {
    Definition::build(|b| of(b.logits()).draw(Source::SEED))
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let only: Option<String> = args.option("--only")?;
    let max_tokens = args.option("--max-tokens")?.unwrap_or(48);
    let mut all = samplers();
    let names: Vec<_> = all.iter().map(|(name, _)| *name).collect();
    all.retain(|(name, _)| only.as_ref().is_none_or(|only| only == name));
    if all.is_empty() {
        return Err(args.mistake(format!("--only is one of {}", names.join(", "))));
    }
    let text = args.text()?;

    let model = Model::open_default()?;
    let base = model.context()?;
    base.append(model.info().bos_token.as_slice())?;
    base.append_text(&text)?;
    base.prefill()?;
    let ends = TokenMask::allow(&model, &model.info().stop_tokens)?;

    let mut tries = Vec::new();
    for (_, definition) in &all {
        let program = model.program(definition)?;
        let sampler = Sampler::by_program(&program, seed())?;
        sampler.set_program_masks(&[&ends])?;
        tries.push((program.cost(), base.fork()?, sampler));
    }
    let requests = tries.iter().map(|(_, fork, sampler)| fork.generate(sampler).max_tokens(max_tokens));
    let completions = generate_all(requests)?;
    for (((sampler, _), (cost, ..)), completion) in all.into_iter().zip(tries).zip(completions) {
        let mean_logprob = completion.mean_logprob();
        let (tokens, text) = (completion.tokens, completion.text);
        if json {
            emit_json(&Continuation { sampler, cost, tokens, text, mean_logprob })?;
        } else {
            let text = text.replace('\n', " ");
            emit!("{sampler:>12} | cost {cost:4.1} | {mean_logprob:6.2} nat | {text}\n")?;
        }
    }
    Ok(())
}
