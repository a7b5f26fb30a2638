//! Particles.

use trellis_guest::{Context, Particle, Particles, Result, Sampler};

// ANCHOR: short_words
/// A text of 24 tokens at most in which no word is longer than so many letters, about as probable as the model finds it among
/// all such texts.
pub fn short_words(prompt: &Context, n_letters: usize, seed: u64) -> Result<Option<String>> {
    let model = prompt.model().clone();
    let n_before = prompt.length();
    let sampler = Sampler::seeded(seed).build()?; // at temperature 1, as the model says
    let mut particles = Particles::new(prompt, &sampler, 16)?;
    let tokens_of = |particle: &Particle| particle.context.tokens_from(n_before);
    let goes_on =
        |particle: &Particle| !tokens_of(particle).last().is_some_and(|&token| model.is_stop(token));
    for _ in 0..24 {
        for (idx, _) in particles.step(goes_on)? {
            let text = model.decode(&tokens_of(&particles[idx]))?;
            if longest_word(&text) > n_letters {
                particles[idx].log_weight = f64::NEG_INFINITY;
            }
        }
        if particles.effective_size() < 8.0 && !particles.resample()? {
            return Ok(None); // all are out
        }
    }
    let Some(one) = particles.draw() else { return Ok(None) };
    model.decode(&tokens_of(one)).map(Some)
}
// ANCHOR_END: short_words

fn longest_word(text: &str) -> usize {
    text.split(|letter: char| !letter.is_alphabetic()).map(|word| word.chars().count()).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::begun;

    #[test]
    fn what_is_left_keeps_to_the_rule() -> Result {
        let text = short_words(&begun("Once upon a time")?, 5, 7)?.expect("some are left");
        assert!(longest_word(&text) <= 5, "{text}");
        Ok(())
    }

    #[test]
    fn a_text_that_has_ended_does_not_go_on() -> Result {
        let context = crate::asked("What is the capital of France?")?;
        assert_eq!(short_words(&context, 7, 7)?.as_deref(), Some("The capital of France is Paris."));
        Ok(())
    }

    #[test]
    fn a_rule_that_nothing_keeps_leaves_nothing() -> Result {
        assert_eq!(short_words(&begun("Once upon a time")?, 0, 7)?, None);
        Ok(())
    }
}
