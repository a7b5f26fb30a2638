//! Looking at what is computed, in the tour: beside draws, and at texts that are there.

use trellis_guest::programs::{Definition, Source};
use trellis_guest::{
    Constraint, Context, Distribution, Error, Guesses, Model, Pooling, Positions, Sampler, Token,
    attention_all, hidden_all,
};

use crate::Outcome;

/// The greatest difference of two numbers that are one, by their size and 1: a device rounds rows by the company they are in,
/// in every layer.
const TOLERANCE: f32 = 1e-4;

pub(crate) fn looked_at(model: &Model, prompt: &Context) -> Outcome {
    beside_draws(model, prompt)?;
    states(model, prompt)?;
    attention(model, prompt)?;
    prompts(prompt)
}

/// What is seen beside a draw is what a question in its place gets, and changes no draw.
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

/// Hidden states are the same however they are asked for.
fn states(model: &Model, prompt: &Context) -> Outcome {
    let n_layers = model.info().n_layers;
    let layers = [0, n_layers / 2, n_layers];
    let last = prompt.hidden(&layers, Pooling::Last)?;
    assert!(last.iter().all(|state| state.len() == model.info().hidden_size as usize));
    assert_eq!(last[2], prompt.embedding()?);
    let other = prompt.fork()?;
    other.append(&[100])?;
    let both = hidden_all([prompt, &other], &layers[..2], Pooling::MeanFrom(1))?;
    are_near(&prompt.hidden(&layers[..2], Pooling::MeanFrom(1))?, &both[0]);

    // A mean is over what questions at each place get.
    let mut sums = [0.0_f64; 2];
    for n_tokens in 2..=other.length() {
        let part = other.fork()?;
        part.truncate(n_tokens)?;
        for (sum, state) in sums.iter_mut().zip(part.hidden(&layers[..2], Pooling::Last)?) {
            *sum += f64::from(state[7]);
        }
    }
    for (sum, mean) in sums.iter().zip(&both[1]) {
        assert!(is_near((sum / f64::from(other.length() - 1)) as f32, mean[7]), "{sums:?}");
    }
    let embedded = model.embed(["One.", "Another one."], Pooling::MeanFrom(1))?;
    assert!(embedded.len() == 2 && embedded[0] != embedded[1]);

    let context = prompt.fork()?;
    let (hot, digits) = (Sampler::seeded(3).temperature(0.8).build()?, Constraint::regex(model, "[0-9]{9}")?);
    let digits = Sampler::seeded(3).temperature(0.8).constraint(&digits).build()?;
    for sampler in [&hot, &digits] {
        context.truncate(prompt.length())?;
        let mut stream =
            context.stream(sampler).stop_tokens(&[]).max_tokens(5).hidden(&layers).top(2).open()?;
        assert!(stream.hidden().is_empty());
        while let Some(drawn) = stream.next() {
            drawn?;
            let before = context.fork()?;
            before.truncate(context.length() - 1)?;
            are_near(&stream.hidden(), &before.hidden(&layers, Pooling::Last)?);
            are_alike(stream.top().as_slice(), &[before.top(2)?]);
            if context.length() == prompt.length() + 2 {
                stream.guess(&[9, 9])?;
            }
        }
        assert_eq!(context.length(), prompt.length() + 5);
    }

    let refused = [
        prompt.hidden(&[n_layers + 1], Pooling::Last).map(drop),
        prompt.hidden(&[0; 9], Pooling::Last).map(drop),
        prompt.hidden(&[0], Pooling::MeanFrom(prompt.length())).map(drop),
        context.stream(&hot).hidden(&[n_layers + 1]).open().map(drop),
    ];
    assert!(refused.iter().all(|it| matches!(it, Err(Error::InvalidArgument { .. }))), "{refused:?}");
    context.evict(1, 2, Positions::Keep)?;
    let refused = context.hidden(&[0], Pooling::MeanFrom(0));
    assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
    context.hidden(&[1], Pooling::Last)?;
    Ok(())
}

/// Attention is a mean over layers, also after tokens were taken out, and asking changes nothing.
fn attention(model: &Model, prompt: &Context) -> Outcome {
    let n_layers = model.info().n_layers;
    let layers: Vec<u32> = (0..n_layers).collect();
    let other = prompt.fork()?;
    other.append(&[100, 101])?;
    let top = other.top(5)?;
    for positions in [None, Some(Positions::Keep), Some(Positions::CloseUp)] {
        let context = other.fork()?;
        if let Some(positions) = positions {
            context.evict(1, 3, positions)?;
        }
        let masses = attention_all([prompt, &context], &layers)?;
        for (masses, context) in masses.iter().zip([prompt, &context]) {
            assert_eq!(masses.len(), context.length() as usize);
            assert!(masses.iter().all(|&mass| (0.0..=1.0).contains(&mass)), "{masses:?}");
            assert!(is_near(masses.iter().sum(), 1.0), "{masses:?}");
        }
        let mut mean = vec![0.0; masses[1].len()];
        for &layer in &layers {
            let of_layer = context.attention(&[layer])?;
            mean.iter_mut().zip(&of_layer).for_each(|(mean, mass)| *mean += mass / n_layers as f32);
        }
        are_near(&masses[1..], &[mean]);
    }
    are_alike(&[other.top(5)?], &[top]);

    let first = prompt.fork()?;
    first.truncate(1)?;
    are_near(&[first.attention(&[0])?], &[vec![1.0]]);
    let refused = [&[][..], &[n_layers], &[0, 0], &[u32::MAX]].map(|layers| prompt.attention(layers));
    assert!(refused.iter().all(|it| matches!(it, Err(Error::InvalidArgument { .. }))), "{refused:?}");
    let many = prompt.attention(&vec![0; 1 << 16]);
    assert!(matches!(many, Err(Error::InvalidArgument { .. })), "{many:?}");
    let empty = model.context()?.attention(&[0]);
    assert!(matches!(empty, Err(Error::EmptyContext)), "{empty:?}");
    Ok(())
}

/// A prompt that is there is scored as one that comes.
fn prompts(prompt: &Context) -> Outcome {
    let tokens = prompt.tokens();
    let first = prompt.fork()?;
    first.truncate(1)?;
    let (scores, tops) = (first.score(&tokens[1..])?, first.tops(&tokens[1..], 3)?);
    are_near(&[prompt.prompt_logprobs(1)?], &[scores]);
    are_alike(&prompt.prompt_tops(1, 3)?, &tops);
    assert_eq!(prompt.tokens(), tokens);
    let nothing = prompt.prompt_logprobs(prompt.length());
    assert!(matches!(nothing, Err(Error::InvalidArgument { .. })), "{nothing:?}");
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

/// As near as a device rounds that computes rows in other company.
fn are_near(found: &[Vec<f32>], expected: &[Vec<f32>]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.len(), expected.len());
        assert!(found.iter().zip(expected).all(|(a, b)| is_near(*a, *b)), "{found:?}, not {expected:?}");
    }
}

fn is_near(a: f32, b: f32) -> bool {
    (a - b).abs() <= TOLERANCE * (1.0 + b.abs())
}
