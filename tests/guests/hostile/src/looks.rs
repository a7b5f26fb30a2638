//! Looking at what is computed, in the tour: beside draws, and at texts that are there.

use trellis_guest::programs::{Definition, Source};
use trellis_guest::{Constraint, Context, Distribution, Error, Guesses, Model, Sampler, Token};

use crate::Outcome;

/// The greatest difference of two numbers that are one.
const TOLERANCE: f32 = 1e-4;

pub(crate) fn looked_at(model: &Model, prompt: &Context) -> Outcome {
    beside_draws(model, prompt)
}

/// What is seen beside a draw is what is seen by who asks in its place, and changes no draw.
fn beside_draws(model: &Model, prompt: &Context) -> Outcome {
    let hot = Sampler::seeded(11).temperature(0.9).build()?;
    let by_program = model.program(&Definition::build(|b| b.logits().draw(Source::SEED)))?;
    let by_program = Sampler::by_program(&by_program, 3)?;
    let digits = Constraint::regex(model, "[0-9]{24}")?;
    let digits = Sampler::seeded(4).temperature(1.2).constraint(&digits).build()?;
    for sampler in [&hot, &by_program, &digits] {
        let generate = |n| prompt.fork()?.generate(sampler).stop_tokens(&[]).max_tokens(24).top(n).run();
        let (plain, seen) = (generate(0)?, generate(5)?);
        assert!(plain.tops.is_empty());
        assert_eq!((&seen.tokens, &seen.logprobs, &seen.text), (&plain.tokens, &plain.logprobs, &plain.text));
        let expected = prompt.tops(&seen.tokens, 5)?;
        are_alike(&seen.tops, &expected);

        let expects = prompt.fork()?;
        let guesses = Guesses::lookup_in(vec![plain.tokens.clone()]);
        let guessed =
            expects.generate(sampler).stop_tokens(&[]).max_tokens(24).guess_by(guesses).top(5).run()?;
        assert_eq!(guessed.tokens, plain.tokens);
        are_alike(&guessed.tops, &expected);
    }

    let context = prompt.fork()?;
    let mut stream = context.stream(&hot).stop_tokens(&[]).max_tokens(6).top(20).open()?;
    assert_eq!(stream.top(), None);
    let (mut tokens, mut tops): (Vec<Token>, Vec<Distribution>) = (Vec::new(), Vec::new());
    while let Some(drawn) = stream.next() {
        tokens.push(drawn?.token);
        tops.extend(stream.top());
        match tokens.len() {
            // Another sampler, and a guess, of which the first is mostly wrong.
            2 => stream.set_sampler(&Sampler::greedy())?,
            3 => stream.guess(&[7, 8])?,
            _ => {}
        }
    }
    assert_eq!(tops.len(), 6);
    are_alike(&tops, &prompt.tops(&tokens, 20)?);
    assert_eq!(tops[3].candidates[0].token, tokens[3], "it was drawn greedily");
    let many = context.stream(&hot).top(21).open().map(drop);
    assert!(matches!(many, Err(Error::InvalidArgument { .. })), "{many:?}");
    let many = context.generate(&hot).max_tokens(1).top(21).run();
    assert!(matches!(many, Err(Error::InvalidArgument { .. })), "{many:?}");
    Ok(())
}

fn are_alike(found: &[Distribution], expected: &[Distribution]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!(is_near(found.entropy, expected.entropy), "{found:?}, not {expected:?}");
        assert_eq!(found.candidates.len(), expected.candidates.len());
        for (a, b) in found.candidates.iter().zip(&expected.candidates) {
            assert!(a.token == b.token && is_near(a.logprob, b.logprob), "{found:?}, not {expected:?}");
        }
    }
}

fn is_near(a: f32, b: f32) -> bool {
    (a - b).abs() <= TOLERANCE
}
