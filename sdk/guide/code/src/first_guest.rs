//! Lets the model answer several times and keeps the answer that it was surest of.

use trellis_guest::{Args, Chat, Model, Result, Sampler, emit, generate_all, seed};

trellis_guest::main!(run);

fn run() -> Result {
    let question = Args::of_session("asks QUESTION").text()?;
    emit!("{}\n", surest(&question, 4)?)
}

/// The answer of so many that the model was surest of.
fn surest(question: &str, n_tries: u64) -> Result<String> {
    let prompt = Model::open_default()?.context()?;
    prompt.set_chat(&Chat::new().user(question))?;
    prompt.prefill()?;

    let sampler = Sampler::seeded(seed()).temperature(0.8).top_p(0.95).build()?;
    let forks = prompt.forks(n_tries, &sampler)?;
    let tries = forks.iter().map(|(fork, sampler)| fork.generate(sampler).max_tokens(64));
    let answers = generate_all(tries)?;

    let surest = answers.into_iter().max_by(|a, b| a.mean_logprob().total_cmp(&b.mean_logprob()));
    Ok(surest.map(|answer| answer.text).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_knows_its_sums() -> Result {
        assert_eq!(surest("What is 37 + 48?", 4)?.trim(), "85");
        Ok(())
    }
}
