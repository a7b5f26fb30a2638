//! Answers with a direction added to what one layer makes of each token: from what the text `--from` is about to what `--to` is
//! about. It is the difference of the means of their hidden states in that layer, times `--strength` (A. Turner and others,
//! "Steering Language Models With Activation Engineering", arXiv 2308.10248, where single prompts are contrasted; N. Rimsky and
//! others, "Steering Llama 2 via Contrastive Activation Addition", ACL 2024, arXiv 2312.06681, where many pairs are, at their last
//! tokens). As in the second, the prompt stays as it is but for its last token, from which the first of the answer is drawn. At a
//! strength of 0 the answer is what it is without.
//!
//! ```text
//! trellis run steering "The"                                              # towards a story, away from the Rust book
//! trellis run steering --to "I am so happy!" --from "I am so sad." --layer 4 --strength 4 "Today"
//! trellis run steering --strength -1 --json "The"
//! ```

use serde::Serialize;
use trellis_guest::{
    Args, Context, Model, Pooling, Result, Sampler, Steering, Token, emit, emit_json, hidden_all, seed,
};

trellis_guest::main!(run);

const USAGE: &str = "steering [--to TEXT] [--from TEXT] [--layer N] [--strength S] [--temperature T] \
                     [--max-tokens N] [--json] TEXT";

/// Two that the bundled model has seen many of.
const STORY: &str =
    "Once upon a time, there lived a curious robot named Olga. Every morning Olga walked to the long bridge.";
const RULES: &str = "Ownership is a set of rules that govern how a Rust program manages memory.";

#[derive(Serialize)]
struct Report {
    tokens: Vec<Token>,
    text: String,
    layer: u32,
    /// Of the text to which it points, after the prompt: steered, and without.
    logprobs: [f32; 2],
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let to = args.option("--to")?.unwrap_or_else(|| STORY.to_owned());
    let from = args.option("--from")?.unwrap_or_else(|| RULES.to_owned());
    let layer: Option<u32> = args.option("--layer")?;
    let strength: f32 = args.option("--strength")?.unwrap_or(1.0);
    let temperature = args.option("--temperature")?.unwrap_or(0.8);
    let max_tokens = args.option("--max-tokens")?.unwrap_or(60);
    let model = Model::open_default()?;
    let n_layers = model.info().n_layers;
    let layer = layer.unwrap_or(n_layers / 3);
    if layer >= n_layers {
        // After the last one, hidden states have been through the final norm.
        return Err(args.mistake(format!("--layer is {layer}, and has to be less than {n_layers}")));
    }
    if !strength.is_finite() {
        return Err(args.mistake(format!("--strength is {strength}, and has to be finite")));
    }
    let text = args.text()?;

    let pair = [context(&model, &to)?, context(&model, &from)?];
    // All tokens but the first, which every text has.
    let states = hidden_all(&pair, &[layer], Pooling::MeanFrom(1))?;
    let direction = Steering::difference(&[layer], &states[0], &states[1]).times(strength);

    let plain = context(&model, &text)?;
    let steered = plain.fork()?;
    steered.steer(&direction, steered.length() - 1)?;
    let answering = steered.fork()?;
    let sampler = Sampler::seeded(seed()).temperature(temperature).build()?;
    let answer = answering.generate(&sampler).max_tokens(max_tokens).run()?;
    if !json {
        return emit!("{text}{}\n", answer.text);
    }
    let to = model.encode(&to)?;
    let logprob = |context: &Context| Ok::<f32, trellis_guest::Error>(context.score(&to)?.iter().sum());
    let logprobs = [logprob(&steered)?, logprob(&plain)?];
    emit_json(&Report { tokens: answer.tokens, text: answer.text, layer, logprobs })
}

fn context(model: &Model, text: &str) -> Result<Context> {
    let context = model.context()?;
    context.append(model.info().bos_token.as_slice())?;
    context.append_text(text)?;
    Ok(context)
}
