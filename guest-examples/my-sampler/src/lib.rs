//! A sampler that has no name, to be changed into one of your own: of the most probable tokens it keeps as many as the model
//! hesitates between, and draws among them at a temperature. A distribution of entropy H is as undecided as an even choice among
//! e^H tokens, its perplexity (F. Jelinek and others, "Perplexity—a measure of the difficulty of speech recognition tasks",
//! 1977), so `--factor` times e^H tokens are kept: one where the model is sure, dozens where a story may go anywhere.
//! Nothing else of it comes from a paper.
//!
//! ```text
//! trellis run my-sampler "Once upon a time"
//! trellis run my-sampler --factor 2 --temperature 1.5 --texts 4 "Once upon a time"
//! trellis run my-sampler --json "Ownership is"
//! ```

use serde::Serialize;
use trellis_guest::programs::{Definition, Source, library};
use trellis_guest::{Args, Model, Result, Sampler, Token, emit, emit_json, generate_all, seed};

trellis_guest::main!(run);

const USAGE: &str = "my-sampler [--factor F] [--temperature T] [--texts N] [--max-tokens N] [--json] TEXT";

/// The sampler: parameter 0 is the factor, parameter 1 the temperature. It reports how many tokens it has kept.
fn definition() -> Definition {
    Definition::build(|b| {
        let x = b.logits();
        let n_kept = (x.entropy().exp() * b.parameter(0)).at_least(1.0);
        let kept = x.largest(n_kept);
        b.report(kept.count());
        library::temperature(x.keep(kept), b.parameter(1)).draw(Source::SEED)
    })
}

#[derive(Serialize)]
struct Continuation {
    text: String,
    tokens: Vec<Token>,
    /// Among how many tokens the last one was drawn.
    n_kept: f32,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let factor: f32 = args.option("--factor")?.unwrap_or(1.0);
    let temperature: f32 = args.option("--temperature")?.unwrap_or(1.0);
    let n_texts = args.option("--texts")?.unwrap_or(1);
    let max_tokens = args.option("--max-tokens")?.unwrap_or(60);
    for (name, value) in [("--factor", factor), ("--temperature", temperature)] {
        if !(value > 0.0 && value.is_finite()) {
            return Err(args.mistake(format!("{name} is {value}, and has to be finite and above 0")));
        }
    }
    let text = args.text()?;

    let model = Model::open_default()?;
    let prompt = model.context()?;
    prompt.append(model.info().bos_token.as_slice())?;
    prompt.append_text(&text)?;
    prompt.prefill()?;
    let sampler = Sampler::by_program(&model.program(&definition())?, seed())?;
    sampler.set_parameters(&[factor, temperature])?;

    let forks = prompt.forks(n_texts, &sampler)?;
    let requests = forks.iter().map(|(fork, sampler)| fork.generate(sampler).max_tokens(max_tokens));
    let all = forks.iter().zip(generate_all(requests)?).map(|((fork, _), completion)| {
        let n_kept = fork.reports().first().copied().unwrap_or_default();
        Continuation { text: completion.text, tokens: completion.tokens, n_kept }
    });
    let all: Vec<_> = all.collect();
    if json {
        return emit_json(&all);
    }
    all.iter().try_for_each(|one| emit!("{text}{}\n", one.text))
}
