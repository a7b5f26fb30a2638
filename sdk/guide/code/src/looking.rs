//! Looking at what is computed.

use trellis_guest::{Context, Model, Pooling, Result, Sampler, Steering, hidden_all};

// ANCHOR: top
/// How unsure the model was before each token, in nats.
pub fn entropies(context: &Context) -> Result<Vec<f32>> {
    let answer = context.generate(&Sampler::greedy()).max_tokens(40).top(1).run()?;
    Ok(answer.tops.iter().map(|place| place.entropy).collect())
}
// ANCHOR_END: top

// ANCHOR: embed
/// How alike two texts are: the cosine of the means of their hidden states.
pub fn alike(model: &Model, one: &str, other: &str) -> Result<f32> {
    let states = model.embed([one, other], Pooling::MeanFrom(1))?;
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let (one, other) = (&states[0], &states[1]);
    Ok(dot(one, other) / (dot(one, one) * dot(other, other)).sqrt())
}
// ANCHOR_END: embed

// ANCHOR: hidden
/// The hidden states behind layer 2 from which each token of an answer was drawn.
pub fn states(context: &Context) -> Result<Vec<Vec<f32>>> {
    let sampler = Sampler::greedy();
    let mut stream = context.stream(&sampler).max_tokens(16).hidden(&[2]).open()?;
    let mut states = Vec::new();
    while let Some(drawn) = stream.next() {
        drawn?;
        states.extend(stream.hidden());
    }
    Ok(states)
}
// ANCHOR_END: hidden

// ANCHOR: attention
/// The token that the last one attends to most, by its place.
pub fn most_attended(context: &Context, layers: &[u32]) -> Result<Option<usize>> {
    let attention = context.attention(layers)?;
    Ok((0..attention.len()).max_by(|&a, &b| attention[a].total_cmp(&attention[b])))
}
// ANCHOR_END: attention

// ANCHOR: steer
/// Moves what comes next from what one text is about towards what another is about, in one layer.
pub fn steer(prompt: &Context, to: &Context, from: &Context, strength: f32) -> Result {
    let layer = prompt.model().info().n_layers / 3;
    let states = hidden_all([to, from], &[layer], Pooling::MeanFrom(1))?;
    let direction = Steering::difference(&[layer], &states[0], &states[1]).times(strength);
    prompt.steer(&direction, prompt.length() - 1)
}
// ANCHOR_END: steer

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{asked, begun};

    const STORY: &str = "Once upon a time, there lived a curious robot named Olga.";
    const RULES: &str = "Ownership is a set of rules that govern how a Rust program manages memory.";

    #[test]
    fn a_sum_is_surer_than_a_story() -> Result {
        let mean = |question: &str| -> Result<f32> {
            let entropies = entropies(&asked(question)?)?;
            Ok(entropies.iter().sum::<f32>() / entropies.len() as f32)
        };
        assert!(mean("What is 37 + 48?")? < mean("Tell me a short story.")?);
        Ok(())
    }

    #[test]
    fn stories_are_more_alike_than_a_story_and_a_rule() -> Result {
        let model = Model::open_default()?;
        let story = "One day a small fox named Finn found an old map.";
        assert!(alike(&model, STORY, story)? > alike(&model, STORY, RULES)?);
        Ok(())
    }

    #[test]
    fn a_state_comes_with_each_token() -> Result {
        let context = asked("What is 37 + 48?")?;
        let n_before = context.length();
        let states = states(&context)?;
        assert_eq!(states.len(), (context.length() - n_before) as usize);
        let size = context.model().info().hidden_size as usize;
        assert!(states.iter().all(|state| state.len() == size));
        Ok(())
    }

    #[test]
    fn attention_is_a_share_of_each_token() -> Result {
        let context = begun(STORY)?;
        let sum: f32 = context.attention(&[0, 1])?.iter().sum();
        assert!((sum - 1.0).abs() < 1e-4, "{sum}");
        assert!(most_attended(&context, &[0])?.expect("there are some") < context.length() as usize);
        Ok(())
    }

    #[test]
    fn steering_makes_a_story_more_probable_and_none_changes_nothing() -> Result {
        let plain = begun("The")?;
        let tokens = plain.model().encode(STORY)?;
        let logprob = |strength: f32| -> Result<f32> {
            let steered = plain.fork()?;
            steer(&steered, &begun(STORY)?, &begun(RULES)?, strength)?;
            Ok(steered.score(&tokens)?.iter().sum())
        };
        let without: f32 = plain.score(&tokens)?.iter().sum();
        assert!(logprob(1.0)? > without);
        assert_eq!(logprob(0.0)?, without);
        Ok(())
    }
}
