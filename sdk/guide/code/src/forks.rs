//! Forks and batches.

use trellis_guest::{Completion, Context, Result, Sampler, generate_all, generate_each};

// ANCHOR: tries
/// So many answers to one prompt, decoded in one batch.
pub fn tries(prompt: &Context, sampler: &Sampler, n: u64) -> Result<Vec<Completion>> {
    prompt.prefill()?;
    let forks = prompt.forks(n, sampler)?;
    generate_all(forks.iter().map(|(fork, sampler)| fork.generate(sampler).max_tokens(48)))
}
// ANCHOR_END: tries

// ANCHOR: first
/// The first of so many answers that ends and passes a test; the others are given up.
pub fn first(
    prompt: &Context,
    sampler: &Sampler,
    n: u64,
    passes: impl Fn(&str) -> bool,
) -> Result<Option<String>> {
    let forks = prompt.forks(n, sampler)?;
    let requests = forks.iter().map(|(fork, sampler)| fork.generate(sampler).max_tokens(160));
    for ended in generate_each(requests)? {
        let text = ended.completion?.text;
        if passes(&text) {
            return Ok(Some(text));
        }
    }
    Ok(None)
}
// ANCHOR_END: first

// ANCHOR: scores
/// Which of these texts the model finds most probable after the prompt.
pub fn likeliest<'t>(prompt: &Context, texts: &[&'t str]) -> Result<Option<&'t str>> {
    let model = prompt.model();
    let encoded = texts.iter().map(|text| model.encode(text)).collect::<Result<Vec<_>>>()?;
    let forks = texts.iter().map(|_| prompt.fork()).collect::<Result<Vec<_>>>()?;
    let requests = forks.iter().zip(&encoded).map(|(fork, tokens)| (fork, tokens.as_slice()));
    let scores = trellis_guest::score_all(requests)?;
    let sums = scores.iter().map(|logprobs| logprobs.iter().sum::<f32>());
    let best = sums.zip(texts).max_by(|(a, _), (b, _)| a.total_cmp(b));
    Ok(best.map(|(_, text)| *text))
}
// ANCHOR_END: scores

#[cfg(test)]
mod tests {
    use super::*;
    use crate::asked;
    use trellis_guest::{seed, usage};

    // ANCHOR: shared
    #[test]
    fn forks_share_the_pages_of_their_prompt() -> Result {
        let prompt = asked(&"What is 37 + 48? ".repeat(20))?;
        prompt.prefill()?;
        let n_pages = usage().pages.used;
        let forks = prompt.forks(16, &Sampler::greedy())?;
        assert_eq!(usage().pages.used, n_pages);
        assert_eq!(usage().contexts.used, 17);
        drop(forks);
        assert_eq!(usage().contexts.used, 1);
        Ok(())
    }
    // ANCHOR_END: shared

    #[test]
    fn the_first_that_passes_ends_the_others() -> Result {
        let prompt = asked("Think step by step: what is 468 + 275?")?;
        let sampler = Sampler::seeded(seed()).temperature(2.0).build()?;
        let answer = first(&prompt, &sampler, 8, |text| text.ends_with("743"))?;
        assert!(answer.is_some_and(|text| text.ends_with("Answer: 743")));
        assert_eq!(first(&prompt, &sampler, 2, |text| text.is_empty())?, None);
        assert_eq!(usage().contexts.used, 1);
        Ok(())
    }

    #[test]
    fn tries_differ_and_the_first_is_that_of_the_sampler() -> Result {
        let prompt = asked("Tell me a short story.")?;
        let sampler = Sampler::seeded(seed()).temperature(1.0).build()?;
        let tries = tries(&prompt, &sampler, 4)?;
        let alone = prompt.fork()?.generate(&sampler).max_tokens(48).run()?;
        assert_eq!(tries[0].tokens, alone.tokens);
        assert_ne!(tries[0].tokens, tries[1].tokens);
        Ok(())
    }

    #[test]
    fn the_right_answer_is_the_likeliest() -> Result {
        let prompt = asked("What is 37 + 48?")?;
        assert_eq!(likeliest(&prompt, &["84", "85", "95"])?, Some("85"));
        Ok(())
    }
}
