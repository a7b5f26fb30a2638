//! A sampler of its own: as data that the engine runs where the logits lie, so that it costs no call for each token.

use trellis_guest::programs::{Builder, Definition, Row, Source};
use trellis_guest::{Args, Chat, Completion, Model, Result, Sampler, emit, seed};

trellis_guest::main!(run);

fn run() -> Result {
    let mut args = Args::of_session("{guest} [--width N] QUESTION");
    let width = args.option("--width")?.unwrap_or(1.0);
    let question = args.text()?;
    emit!("{}\n", answer(&question, width, seed())?.text)
}

/// Tokens at most so many times the entropy below the best one: many where the model is at a loss, few where it is sure.
fn by_entropy<'b>(b: &'b Builder, logits: Row<'b>) -> Row<'b> {
    let width = b.parameter(0);
    let below = logits.max() - logits.entropy() * width;
    logits.keep(logits.ge(below))
}

/// An answer by that sampler.
fn answer(question: &str, width: f32, seed: u64) -> Result<Completion> {
    let model = Model::open_default()?;
    let context = model.context()?;
    context.set_chat(&Chat::new().user(question))?;

    let definition = Definition::build(|b| by_entropy(b, b.logits()).draw(Source::SEED));
    let sampler = Sampler::by_program(&model.program(&definition)?, seed)?;
    sampler.set_parameters(&[width])?;
    context.generate(&sampler).max_tokens(64).run()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_width_it_is_greedy() -> Result {
        let first = answer("Tell me a story.", 0.0, 1)?;
        assert_eq!(first.tokens, answer("Tell me a story.", 0.0, 2)?.tokens);
        Ok(())
    }

    #[test]
    fn with_width_the_seed_decides() -> Result {
        let first = answer("Tell me a story.", 2.0, 1)?;
        assert_ne!(first.tokens, answer("Tell me a story.", 2.0, 2)?.tokens);
        assert_eq!(first.tokens, answer("Tell me a story.", 2.0, 1)?.tokens);
        Ok(())
    }
}
