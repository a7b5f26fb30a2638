//! Draws texts of a grammar as probable as the model finds them among all texts of the grammar: adaptive sampling with
//! approximate expected futures (K. Park and others, "Grammar-Aligned Decoding", 2024). A constraint alone leaves out, token by
//! token, what the grammar does not have, and knows nothing of what a token leads to: where the model would begin otherwise, it
//! is led to beginnings that are probable and go on improbably. Here each beginning that was drawn is weighed by how much of
//! what the model would write after it is in the grammar, as far as the texts so far have shown; the estimates fall towards
//! what is so, and the texts come to be distributed as the model has them. It is the paper's algorithm, over a regular expression
//! in the place of a context-free grammar. A text that is cut off at `--max-tokens` counts as if all that may follow it were in
//! the grammar: its share is an upper bound.
//!
//! ```text
//! trellis run asap --regex "[1-7][0-9]|8[0-9] apples" "What is 37 + 48?"
//! trellis run asap --samples 200 --json --regex "[1-7][0-9]|8[0-9] apples" "What is 37 + 48?"
//! trellis run asap --plain --regex "[1-7][0-9]|8[0-9] apples" "What is 37 + 48?"     # the constraint alone
//! ```
//!
//! No row of logits comes to the guest: a program adds the logarithms of the weights and reports how much is left of the model's
//! probability.

use std::collections::BTreeMap;

use serde::Serialize;
use trellis_guest::programs::{BiasId, Definition, Source, TokenBias};
use trellis_guest::{
    Args, Beginning, Chat, Constraint, Model, Random, Result, Sampler, Token, emit, emit_json,
};

trellis_guest::main!(run);

const USAGE: &str = "asap [--regex R] [--samples N] [--plain] [--max-tokens N] [--json] PROMPT";

#[derive(Serialize)]
struct Sample {
    text: String,
    tokens: Vec<Token>,
    /// The share of all that the model would write that is in the grammar, as far as is known after it.
    share: f64,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let (json, plain) = (args.flag("--json"), args.flag("--plain"));
    let regex = args.option("--regex")?.unwrap_or_else(|| "yes|no".to_owned());
    let n_samples = args.option("--samples")?.unwrap_or(20);
    let max_tokens = args.option("--max-tokens")?.unwrap_or(40);
    let question = args.text()?;

    let model = Model::open_default()?;
    let prompt = model.context()?;
    prompt.set_chat(&Chat::new().user(&question))?;
    prompt.prefill()?;
    let definition = Definition::build(|b| {
        let weighed = b.logits().log_softmax() + b.bias(BiasId(0));
        let token = weighed.keep(b.constraint()).draw(Source::SEED);
        // What is left beside the token, so that nothing has to be subtracted that is nearly as large.
        b.report(weighed.log_sum_exp_over(b.constraint() & !token.only()));
        token
    });
    let any = Sampler::by_program(&model.program(&definition)?, 0)?;
    any.set_constraint(Some(&Constraint::regex(&model, &regex)?), &Beginning::FirstDraw)?;

    let mut random = Random::of_session();
    // After each beginning, the logarithms of the shares of tokens that were drawn there; of others they are 0.
    let mut futures: BTreeMap<Vec<Token>, BTreeMap<Token, f32>> = BTreeMap::new();
    for _ in 0..n_samples {
        let (context, sampler) = (prompt.fork()?, any.with_seed(random.bits()));
        let (mut tokens, mut path) = (Vec::new(), Vec::new());
        while tokens.len() < max_tokens && !tokens.last().is_some_and(|&token| model.is_stop(token)) {
            let known = futures.entry(tokens.clone()).or_default();
            let known: Vec<_> = known.iter().map(|(&token, &share)| (token, share)).collect();
            sampler.set_program_biases(&[&TokenBias::sparse(&model, &known)?])?;
            let drawn = context.step(&sampler)?;
            path.push((f64::from(drawn.logprob).exp(), f64::from(context.reports()[0]).exp()));
            tokens.push(drawn.token);
        }
        // From the end on: what a text has shown of a token is known of the beginning before it.
        let mut share = 1f64;
        for (idx, (probability, rest)) in path.into_iter().enumerate().rev() {
            let known = futures.entry(tokens[..idx].to_vec()).or_default();
            if !plain {
                known.insert(tokens[idx], share.ln() as f32);
            }
            share = rest + probability * share;
        }
        let text = model.decode(&tokens)?;
        if json {
            emit_json(&Sample { text, tokens, share })?;
        } else {
            emit!("{text}\n")?;
        }
    }
    Ok(())
}
