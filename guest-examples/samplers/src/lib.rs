//! One text continued by many samplers side by side, each a logit program from the library with its paper there
//! (`trellis_guest::programs::library`).
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
use trellis_guest::programs::library::{self, Chain, Dry, KgwKey};
use trellis_guest::programs::{Definition, MaskId, Source};
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
    let dry =
        Dry { window: 512, allowed_length: 2.0, multiplier: 0.8, base: 1.75, breakers: Some(MaskId(0)) };
    let chain = Chain { temperature: 0.8, top_p: Some(0.95), ..Chain::default() };
    let key = KgwKey { key: 15_485_863, n_tokens: 1 };
    let draw = Source::SEED;
    vec![
        ("greedy", Definition::build(|b| library::greedy(b.logits()))),
        ("chain", Definition::build(|b| library::chain(b, chain))),
        ("temperature", Definition::build(|b| library::temperature(b.logits(), 0.8).draw(draw))),
        (
            "dynamic",
            Definition::build(|b| library::dynamic_temperature(b.logits(), 1.0, 0.7, 1.0).draw(draw)),
        ),
        ("top-k", Definition::build(|b| library::top_k(b.logits(), 40.0).draw(draw))),
        ("top-p", Definition::build(|b| library::top_p(b.logits(), 0.9).draw(draw))),
        ("min-p", Definition::build(|b| library::min_p(b.logits(), 0.1).draw(draw))),
        ("typical", Definition::build(|b| library::typical(b.logits(), 0.9).draw(draw))),
        ("eta", Definition::build(|b| library::eta(b.logits(), 0.002).draw(draw))),
        ("epsilon", Definition::build(|b| library::epsilon(b.logits(), 0.002).draw(draw))),
        ("top-n-sigma", Definition::build(|b| library::top_n_sigma(b.logits(), 1.0).draw(draw))),
        ("xtc", Definition::build(|b| library::xtc(b.logits(), 0.5, 0.1).draw(draw))),
        ("dry", Definition::build(|b| library::dry(b.logits(), dry).draw(draw))),
        ("repetition", Definition::build(|b| library::repetition(b.logits(), Some(64), 1.2).draw(draw))),
        ("no-repeat-3", Definition::build(|b| library::no_repeat_ngram(b.logits(), 3).draw(draw))),
        ("mirostat", Definition::build(|b| library::mirostat(b.logits(), 3.0, 3.0, 0.1))),
        ("kgw", Definition::build(|b| library::kgw(b.logits(), key, 0.25, 3.0).draw(draw))),
        ("unigram", Definition::build(|b| library::unigram(b.logits(), key.key, 0.25, 3.0).draw(draw))),
        ("gumbel", Definition::build(|b| library::gumbel_watermark(b.logits(), key.key, 4))),
        (
            "at-least-20",
            Definition::build(|b| library::minimum_length(b.logits(), b.mask(MaskId(0)), 20.0).draw(draw)),
        ),
        (
            "at-most-10",
            Definition::build(|b| library::maximum_length(b.logits(), b.mask(MaskId(0)), 10.0).draw(draw)),
        ),
    ]
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let only: Option<String> = args.option("--only")?;
    let max_tokens = args.option("--max-tokens")?.unwrap_or(48);
    let chosen = |name: &str| only.as_ref().is_none_or(|only| only == name);
    let all: Vec<_> = samplers().into_iter().filter(|(name, _)| chosen(name)).collect();
    if all.is_empty() {
        let names: Vec<_> = samplers().iter().map(|(name, _)| *name).collect();
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
    for (name, definition) in &all {
        let program = model.program(definition)?;
        let sampler = Sampler::by_program(&program, seed())?;
        sampler.set_program_masks(&[&ends])?;
        tries.push((*name, program.cost(), base.fork()?, sampler));
    }
    let stops = &model.info().stop_tokens;
    let completions = generate_all(
        tries
            .iter()
            .map(|(_, _, fork, sampler)| fork.generate(sampler).max_tokens(max_tokens).stop_tokens(stops)),
    )?;
    for ((sampler, cost, ..), completion) in tries.iter().zip(completions) {
        let mean_logprob = completion.mean_logprob();
        let (tokens, text) = (completion.tokens, completion.text);
        if json {
            emit_json(&Continuation { sampler, cost: *cost, tokens, text, mean_logprob })?;
        } else {
            emit!(
                "{sampler:>12} | cost {cost:4.1} | {:6.2} nat | {}\n",
                mean_logprob,
                text.replace('\n', " ")
            )?;
        }
    }
    Ok(())
}
