//! The three speeds.

use trellis_guest::{Context, Result, Sampler, Token};

// ANCHOR: generate
/// Declarative: the whole answer in one call.
pub fn generated(context: &Context, sampler: &Sampler) -> Result<Vec<Token>> {
    Ok(context.generate(sampler).max_tokens(32).run()?.tokens)
}
// ANCHOR_END: generate

// ANCHOR: stream
/// Scripted: one call for each token, and whatever the guest does between two of them.
pub fn streamed(context: &Context, sampler: &Sampler) -> Result<Vec<Token>> {
    let mut tokens = Vec::new();
    for drawn in context.stream(sampler).max_tokens(32).open()? {
        tokens.push(drawn?.token);
    }
    Ok(tokens)
}
// ANCHOR_END: stream

// ANCHOR: raw
/// Raw: the guest looks at the distribution, chooses, and appends what it has chosen.
pub fn chosen(context: &Context) -> Result<Vec<Token>> {
    let mut tokens = Vec::new();
    while tokens.len() < 32 {
        let best = context.top(1)?.candidates[0].token;
        context.append(&[best])?;
        tokens.push(best);
        if context.model().is_stop(best) {
            break;
        }
    }
    Ok(tokens)
}
// ANCHOR_END: raw

#[cfg(test)]
mod tests {
    use super::*;
    use crate::asked;
    use trellis_guest::usage;

    // ANCHOR: same
    #[test]
    fn the_most_probable_tokens_are_the_same_at_every_speed() -> Result {
        let question = "Think step by step: what is 468 + 275?";
        let declared = generated(&asked(question)?, &Sampler::greedy())?;
        assert_eq!(declared, streamed(&asked(question)?, &Sampler::greedy())?);
        assert_eq!(declared, chosen(&asked(question)?)?);
        Ok(())
    }
    // ANCHOR_END: same

    #[test]
    fn what_is_drawn_is_computed_once() -> Result {
        let context = asked("Tell me a short story.")?;
        context.prefill()?;
        let before = usage().tokens.used;
        let n_drawn = generated(&context, &Sampler::greedy())?.len() as u64;
        // The last token of the prompt is computed, the last one that is drawn is not.
        assert_eq!(usage().tokens.used - before, n_drawn);
        Ok(())
    }

    #[test]
    fn a_dropped_stream_has_computed_ahead() -> Result {
        let context = asked("Tell me a short story.")?;
        let mut stream = context.stream(&Sampler::greedy()).open()?;
        for _ in 0..8 {
            stream.next().expect("a story is longer")?;
        }
        drop(stream);
        context.append_text("and")?;
        assert!(usage().tokens_in_vain <= 16);
        Ok(())
    }
}
