//! Continues a text as its prompt says, more than the model would by itself: classifier-free guidance (G. Sanchez and others,
//! "Stay on topic with Classifier-Free Guidance", 2023). Beside the prompt a second context has what is to be kept off, or
//! nothing but the end of the prompt; each token is drawn from the logits of both, and appended to both.
//!
//! The formula over the logits is the paper's, and so is the second context, without a negative prompt and with one (`--off`).
//!
//! ```text
//! trellis run cfg "Once upon a time"
//! trellis run cfg --scale 2 --off "A sad story." "Once upon a time"
//! trellis run cfg --scale 1 --json "Once upon a time"     # as without
//! ```

use serde::Serialize;
use trellis_guest::programs::{Definition, Source, library};
use trellis_guest::{Args, Context, Mixture, Model, Result, Sampler, emit, emit_json, seed};

trellis_guest::main!(run);

const USAGE: &str = "cfg [--scale S] [--off TEXT] [--temperature T] [--max-tokens N] [--json] TEXT";

#[derive(Serialize)]
struct Report {
    tokens: Vec<u32>,
    text: String,
    /// Of the text, to the model with the prompt and with the other.
    logprobs: [f32; 2],
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let scale: f32 = args.option("--scale")?.unwrap_or(1.5);
    let off: Option<String> = args.option("--off")?;
    let temperature: f32 = args.option("--temperature")?.unwrap_or(0.8);
    let max_tokens = args.option("--max-tokens")?.unwrap_or(60);
    if !scale.is_finite() {
        return Err(args.mistake(format!("--scale is {scale}, and has to be finite")));
    }
    if !(temperature.is_finite() && temperature >= 0.0) {
        let problem = format!("--temperature is {temperature}, and has to be finite and at least 0");
        return Err(args.mistake(problem));
    }
    let text = args.text()?;

    let model = Model::open_default()?;
    let prompted = context(&model, &text)?;
    let other = match off {
        Some(off) => context(&model, &off)?,
        None => {
            // The paper's: the last token of the prompt.
            let end = prompted.tokens_from(prompted.length() - 1);
            let other = model.context()?;
            other.append(model.info().bos_token.as_slice())?;
            other.append(&end)?;
            other
        }
    };

    let definition = Definition::build(|b| {
        let x = library::guidance(b.logits(), b.member(0), b.parameter(0));
        library::temperature(x, b.parameter(1)).draw(Source::SEED)
    });
    let sampler = Sampler::by_program(&model.program(&definition)?, seed())?;
    // A thousandth is as greedy as 0, by which nothing is divided.
    sampler.set_parameters(&[scale, temperature.max(1e-3)])?;
    let before = other.fork()?;
    let guided = Mixture::of(&prompted, [&other]).generate(&sampler).max_tokens(max_tokens).run()?;

    if !json {
        return emit!("{text}{}\n", guided.text);
    }
    let without = if guided.tokens.is_empty() { Vec::new() } else { before.score(&guided.tokens)? };
    let logprobs = [guided.logprob(), without.iter().sum()];
    emit_json(&Report { tokens: guided.tokens, text: guided.text, logprobs })
}

fn context(model: &Model, text: &str) -> Result<Context> {
    let context = model.context()?;
    context.append(model.info().bos_token.as_slice())?;
    context.append_text(text)?;
    Ok(context)
}
