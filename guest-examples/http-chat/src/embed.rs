//! Texts as vectors: the mean of the last layer's hidden states over their tokens, of length 1. The token that begins every text says
//! nothing of this one, and is left out.

use trellis_guest::{Context, Model, Pooling, Result, hidden_all};

use crate::complete::of_prompt_text;
use crate::reply::{Refusal, Reply, Usage};
use crate::request::{Embed, Prompt};

/// Inputs that are computed together, each in a context.
const N_TOGETHER: usize = 16;

pub(crate) fn embed(model: &Model, embed: &Embed) -> Result<(), Refusal> {
    let mut usage = Usage::default();
    let n_layers = model.info().n_layers;
    let is_text = embed.inputs.iter().all(|input| matches!(input, Prompt::Text(_)));
    let start = u32::from(is_text && model.info().bos_token.is_some());
    Reply::Begun { model: &model.info().name, prompt_tokens: 0 }.send()?;
    for (chunk_idx, inputs) in embed.inputs.chunks(N_TOGETHER).enumerate() {
        let contexts = inputs.iter().map(|input| of_prompt_text(model, input));
        let contexts = contexts.collect::<Result<Vec<Context>, _>>()?;
        usage.prompt_tokens += contexts.iter().map(Context::length).sum::<u32>();
        if let Some(idx) = contexts.iter().position(|context| context.length() <= start) {
            let idx = chunk_idx * N_TOGETHER + idx;
            return Err(Refusal::invalid("input", format!("input {idx} has no token")));
        }
        for (idx, state) in
            hidden_all(&contexts, &[n_layers], Pooling::MeanFrom(start))?.into_iter().enumerate()
        {
            let vector = normalised(state.into_iter().flatten().collect());
            Reply::Embedding { index: chunk_idx * N_TOGETHER + idx, vector }.send()?;
        }
    }
    Ok(Reply::Ended(usage).send()?)
}

fn normalised(mut vector: Vec<f32>) -> Vec<f32> {
    let length = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|x| *x /= length);
    }
    vector
}

#[cfg(test)]
mod tests {
    use super::normalised;

    #[test]
    fn vectors_have_length_1() {
        assert_eq!(normalised(vec![3.0, 4.0]), [0.6, 0.8]);
        assert_eq!(normalised(vec![0.0, 0.0]), [0.0, 0.0]);
    }
}
