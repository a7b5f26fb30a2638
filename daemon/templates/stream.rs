//! Looks at each token as it comes, and stops where the model no longer knows what to say.

use trellis_guest::{Args, Chat, Model, Result, Sampler, emit, seed};

trellis_guest::main!(run);

fn run() -> Result {
    let mut args = Args::of_session("{guest} [--nats N] QUESTION");
    let n_nats = args.option("--nats")?.unwrap_or(2.5);
    let question = args.text()?;
    emit!("{}\n", until_unsure(&question, n_nats)?)
}

/// What the model says until the entropy of a token's place is above so many nats.
fn until_unsure(question: &str, n_nats: f32) -> Result<String> {
    let model = Model::open_default()?;
    let context = model.context()?;
    context.set_chat(&Chat::new().user(question))?;
    let sampler = Sampler::seeded(seed()).temperature(0.7).build()?;

    // The engine decodes ahead while this loop looks at a token.
    let mut stream = context.stream(&sampler).max_tokens(64).top(1).open()?;
    let mut said = Vec::new();
    while let Some(drawn) = stream.next() {
        let token = drawn?.token;
        let is_unsure = stream.top().is_some_and(|place| place.entropy > n_nats);
        if is_unsure || model.info().stop_tokens.contains(&token) {
            break;
        }
        said.push(token);
    }
    model.decode(&said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_what_it_knows() -> Result {
        assert_eq!(until_unsure("What is 37 + 48?", 2.5)?.trim(), "85");
        Ok(())
    }

    #[test]
    fn it_says_nothing_where_it_has_to_be_sure_of_everything() -> Result {
        assert_eq!(until_unsure("Tell me a story.", 0.0)?, "");
        Ok(())
    }
}
