//! Particles.

use trellis_guest::{Context, Particles, Result, Sampler};

// ANCHOR: short_words
/// A text in which no word is longer than so many letters, as probable as the model finds it among all such texts.
pub fn short_words(prompt: &Context, n_letters: usize, seed: u64) -> Result<Option<String>> {
    let model = prompt.model().clone();
    let n_before = prompt.length();
    let sampler = Sampler::seeded(seed).temperature(0.8).build()?;
    let mut particles = Particles::new(prompt, &sampler, 16)?;
    for _ in 0..24 {
        for (idx, _) in particles.step(|_| true)? {
            let text = model.decode(&particles[idx].context.tokens_from(n_before))?;
            if longest_word(&text) > n_letters {
                particles[idx].log_weight = f64::NEG_INFINITY;
            }
        }
        if particles.effective_size() < 8.0 && !particles.resample()? {
            return Ok(None); // all are out
        }
    }
    let Some(one) = particles.draw() else { return Ok(None) };
    model.decode(&one.context.tokens_from(n_before)).map(Some)
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
    fn a_rule_that_nothing_keeps_leaves_nothing() -> Result {
        assert_eq!(short_words(&begun("Once upon a time")?, 0, 7)?, None);
        Ok(())
    }
}
