//! Speculation.

use trellis_guest::{Context, Guesses, Model, Result, Sampler, Token};

// ANCHOR: lookup
/// An answer that repeats parts of its question: what followed the last tokens before is guessed.
pub fn looked_up(context: &Context, sampler: &Sampler) -> Result<Vec<Token>> {
    Ok(context.generate(sampler).guess_by(Guesses::lookup()).max_tokens(60).run()?.tokens)
}
// ANCHOR_END: lookup

// ANCHOR: draft
/// A smaller model with the same tokenizer guesses.
pub fn drafted(context: &Context, sampler: &Sampler, draft: &Model) -> Result<Vec<Token>> {
    let guesses = Guesses::draft(draft).at_most(4);
    Ok(context.generate(sampler).guess_by(guesses).max_tokens(60).run()?.tokens)
}
// ANCHOR_END: draft

// ANCHOR: own
/// The guest guesses itself: it expects this text, of which up to 15 tokens are verified in one step.
pub fn expected(context: &Context, sampler: &Sampler, text: &str) -> Result<Vec<Token>> {
    let guess = context.model().encode(text)?;
    let drawn = context.speculate(sampler, &guess[..guess.len().min(15)])?;
    Ok(drawn.iter().map(|one| one.token).collect())
}
// ANCHOR_END: own

#[cfg(test)]
mod tests {
    use super::*;
    use crate::asked;
    use trellis_guest::usage;

    const QUESTION: &str = "Think step by step: what is 468 + 275?";

    // ANCHOR: same
    #[test]
    fn a_guess_changes_the_cost_and_not_the_text() -> Result {
        let sampler = Sampler::seeded(7).temperature(0.7).build()?;
        let plain = asked(QUESTION)?.generate(&sampler).max_tokens(60).run()?.tokens;
        assert_eq!(looked_up(&asked(QUESTION)?, &sampler)?, plain);
        let context = asked(QUESTION)?;
        assert_eq!(drafted(&context, &sampler, context.model())?, plain);
        Ok(())
    }
    // ANCHOR_END: same

    #[test]
    fn what_was_expected_comes_in_one_step() -> Result {
        let context = asked("What is 37 + 48?")?;
        let plain = context.fork()?.generate(&Sampler::greedy()).max_tokens(8).run()?;
        let drawn = expected(&context, &Sampler::greedy(), &plain.text)?;
        assert_eq!(drawn, plain.tokens);
        let usage = usage();
        assert_eq!(usage.tokens_accepted, plain.tokens.len() as u64 - 1);
        assert_eq!(usage.tokens_accepted, usage.tokens_guessed);
        Ok(())
    }
}
