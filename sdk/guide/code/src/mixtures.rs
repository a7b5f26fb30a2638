//! Mixtures.

use trellis_guest::programs::{Definition, Source, library};
use trellis_guest::{Context, Mixture, Result, Sampler, Token};

// ANCHOR: guidance
/// What comes after a prompt, held to it by what would come without it (Sanchez and others, "Stay on topic with
/// Classifier-Free Guidance", 2023).
pub fn guided(prompt: &Context, bare: &Context, scale: f32) -> Result<Vec<Token>> {
    let model = prompt.model();
    let definition = Definition::build(|b| {
        let x = library::guidance(b.logits(), b.member(0), b.parameter(0));
        library::temperature(x, 0.8).draw(Source::SEED)
    });
    let sampler = Sampler::by_program(&model.program(&definition)?, 7)?;
    sampler.set_parameters(&[scale])?;
    Ok(Mixture::of(prompt, [bare]).generate(&sampler).max_tokens(40).run()?.tokens)
}
// ANCHOR_END: guidance

#[cfg(test)]
mod tests {
    use super::*;
    use crate::begun;

    #[test]
    fn guidance_makes_a_text_more_of_its_prompt() -> Result {
        let (prompt, bare) = (begun("Once upon a time")?, begun("Ownership is a set of rules")?);
        let owed = |scale: f32| -> Result<f32> {
            let tokens = guided(&prompt.fork()?, &bare.fork()?, scale)?;
            let logprob =
                |context: &Context| Ok::<f32, trellis_guest::Error>(context.score(&tokens)?.iter().sum());
            Ok((logprob(&prompt)? - logprob(&bare)?) / tokens.len() as f32)
        };
        assert!(owed(3.0)? > owed(1.0)?);
        Ok(())
    }

    #[test]
    fn all_members_get_the_tokens() -> Result {
        let (prompt, bare) = (begun("Once upon a time")?, begun(" time")?);
        let n_before = (prompt.length(), bare.length());
        let tokens = guided(&prompt, &bare, 1.5)?;
        assert_eq!(prompt.tokens_from(n_before.0), tokens);
        assert_eq!(bare.tokens_from(n_before.1), tokens);
        Ok(())
    }
}
