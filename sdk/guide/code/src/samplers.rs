//! Samplers and logit programs.

use trellis_guest::programs::{Builder, Definition, Row, Source, library};
use trellis_guest::{Completion, Context, Model, Result, Sampler, TokenMask};

// ANCHOR: chain
/// Settings of the chain, checked by `build`.
pub fn usual(seed: u64) -> Result<Sampler> {
    Sampler::seeded(seed).temperature(0.8).top_k(50).top_p(0.95).repetition_penalty(1.1).build()
}
// ANCHOR_END: chain

// ANCHOR: mask
/// A number: no token but those of digits can be drawn.
pub fn digits(context: &Context) -> Result<String> {
    let model = context.model();
    let digits = TokenMask::allow_where(model, |bytes| bytes.iter().all(u8::is_ascii_digit))?;
    let sampler = Sampler::greedy();
    sampler.set_mask(Some(&digits))?;
    Ok(context.generate(&sampler).max_tokens(4).run()?.text)
}
// ANCHOR_END: mask

// ANCHOR: cooling
/// A text that begins wild and cools down.
pub fn cooling(context: &Context, seed: u64) -> Result<String> {
    let sampler = Sampler::seeded(seed).temperature(1.5).build()?;
    let mut stream = context.stream(&sampler).max_tokens(40).open()?;
    let mut tokens = Vec::new();
    while let Some(drawn) = stream.next() {
        tokens.push(drawn?.token);
        sampler.set_temperature(1.5 / (1.0 + tokens.len() as f32))?;
        stream.set_sampler(&sampler)?;
    }
    context.model().decode(&tokens)
}
// ANCHOR_END: cooling

// ANCHOR: program
/// Tokens whose surprise is near what was expected (Meister and others, "Locally Typical Sampling", 2023).
pub fn typical<'b>(b: &'b Builder, share: f32) -> Row<'b> {
    let x = library::temperature(b.logits(), b.parameter(0));
    let logprobs = x.log_softmax();
    let surprise = (logprobs + x.entropy()).abs();
    x.keep(logprobs.nucleus_by(-surprise, share))
}

/// A sampler of it.
pub fn typical_sampler(model: &Model, temperature: f32, seed: u64) -> Result<Sampler> {
    let definition = Definition::build(|b| typical(b, 0.9).draw(Source::SEED));
    let sampler = Sampler::by_program(&model.program(&definition)?, seed)?;
    sampler.set_parameters(&[temperature])?;
    Ok(sampler)
}
// ANCHOR_END: program

/// What a sampler makes of a beginning.
pub fn drawn(context: &Context, sampler: &Sampler) -> Result<Completion> {
    context.fork()?.generate(sampler).max_tokens(40).run()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{asked, begun};

    // ANCHOR: same
    #[test]
    fn a_program_draws_what_the_chain_draws() -> Result {
        let context = begun("Once upon a time")?;
        let definition = Definition::build(|b| library::temperature(b.logits(), 0.8).draw(Source::SEED));
        let program = Sampler::by_program(&context.model().program(&definition)?, 7)?;
        let chain = Sampler::seeded(7).temperature(0.8).build()?;
        assert_eq!(drawn(&context, &program)?.tokens, drawn(&context, &chain)?.tokens);
        Ok(())
    }
    // ANCHOR_END: same

    // ANCHOR: seed
    #[test]
    fn the_seed_decides() -> Result {
        let context = begun("Once upon a time")?;
        assert_eq!(drawn(&context, &usual(1)?)?.tokens, drawn(&context, &usual(1)?)?.tokens);
        assert_ne!(drawn(&context, &usual(1)?)?.tokens, drawn(&context, &usual(2)?)?.tokens);
        Ok(())
    }
    // ANCHOR_END: seed

    #[test]
    fn a_program_is_one_of_the_library() -> Result {
        let context = begun("Once upon a time")?;
        let ours = typical_sampler(context.model(), 0.8, 7)?;
        let definition = Definition::build(|b| {
            library::typical(library::temperature(b.logits(), 0.8), 0.9).draw(Source::SEED)
        });
        let theirs = Sampler::by_program(&context.model().program(&definition)?, 7)?;
        assert_eq!(drawn(&context, &ours)?.tokens, drawn(&context, &theirs)?.tokens);
        Ok(())
    }

    #[test]
    fn a_mask_leaves_digits() -> Result {
        let number = digits(&asked("What is the capital of France?")?)?;
        assert!(!number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()), "{number}");
        Ok(())
    }

    #[test]
    fn a_sampler_changes_between_tokens() -> Result {
        let text = cooling(&begun("Once upon a time")?, 7)?;
        assert_ne!(
            text,
            drawn(&begun("Once upon a time")?, &Sampler::seeded(7).temperature(1.5).build()?)?.text
        );
        Ok(())
    }

    // ANCHOR: refused
    #[test]
    fn what_is_out_of_range_is_named() {
        let refused = Sampler::seeded(7).top_p(1.5).build().expect_err("p is at most 1");
        assert_eq!(refused.to_string(), "top-p is 1.5, expected a number in (0, 1]");
    }
    // ANCHOR_END: refused
}
