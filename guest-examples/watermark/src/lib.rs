//! A custom sampler that hides a watermark in the text, and its detector: "A Watermark for Large Language
//! Models" (Kirchenbauer et al., 2023).
//!
//! ```text
//! trellis run watermark "Ownership is"               continues the text, and reports on it as JSON
//! trellis run watermark --delta 0 "Ownership is"     without the watermark, to compare
//! trellis run watermark --detect "Ownership is ..."  the report on a text from elsewhere
//! ```
//!
//! The token before decides which tokens are green. The sampler adds `--delta` to their logits, so the text
//! holds more green tokens than chance would have it; `z` says by how many standard deviations. A holder of
//! the `--key` can measure it without the model's probabilities. Text that could hardly be otherwise, such as
//! a sum, cannot be marked. Shows the raw speed: the guest takes the distribution and draws by its own rule.

mod green;

use green::Rule;
use trellis_guest::{Args, Error, Model, Result, emit, emit_json, seed};

trellis_guest::main!(run);

const USAGE: &str = "watermark [--delta D] [--gamma SHARE] [--key N] [--temperature T] [--max-tokens N] \
                     [--detect] TEXT";

/// How much of the distribution the guest looks at; what lies beyond is too improbable to be drawn.
const N_CANDIDATES: u32 = 64;

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let rule = Rule {
        key: args.option("--key")?.unwrap_or(15485863),
        gamma: args.option("--gamma")?.unwrap_or(0.5),
    };
    let delta: f32 = args.option("--delta")?.unwrap_or(3.0);
    let temperature: f32 = args.option("--temperature")?.unwrap_or(1.0);
    let max_tokens: u32 = args.option("--max-tokens")?.unwrap_or(200);
    if !(rule.gamma > 0.0 && rule.gamma < 1.0 && temperature > 0.0 && delta.is_finite()) {
        return Err(args.mistake("0 < gamma < 1, temperature > 0 and a finite delta are needed".to_owned()));
    }
    let detect = args.flag("--detect");
    let text = args.text()?;

    let model = Model::open_default()?;
    if detect {
        return emit_json(&rule.measure(&model.encode(&text)?));
    }

    let context = model.context()?;
    context.append(model.info().bos_token.as_slice())?;
    context.append_text(&text)?;
    let mut decoder = model.text_decoder();
    let mut tokens = Vec::new();
    // The first token's colour depends on the last one of the prompt, which a detector does not see.
    let mut previous = *context.tokens().last().ok_or(Error::EmptyContext)?;
    let n_candidates = N_CANDIDATES.min(model.info().vocab_size);
    for position in 0..max_tokens.min(context.capacity() - context.length()) {
        let candidates = context.top(n_candidates)?.candidates;
        let weigh = |token, logprob: f32| {
            let bias = if rule.is_green(previous, token) { delta } else { 0.0 };
            ((logprob + bias) / temperature).exp()
        };
        let weights: Vec<f32> = candidates.iter().map(|next| weigh(next.token, next.logprob)).collect();
        let token = candidates[green::draw(&weights, seed(), position)].token;
        if model.is_stop(token) {
            break;
        }
        context.append(&[token])?;
        emit(&decoder.push(token)?)?;
        tokens.push(token);
        previous = token;
    }
    emit!("{}\n", decoder.finish())?;
    emit_json(&rule.measure(&tokens))
}
