//! What no kernel works out.

use trellis_engine::batch::{Output, OutputKind};
use trellis_engine::sampling::{Distribution, Scratch, sample, sample_under};

/// What the definition says of a row of logits.
pub(super) fn output_of(
    kind: &OutputKind<'_>,
    logits: &[f32],
    history: &[u32],
    scratch: &mut Scratch,
) -> Output {
    let output = match kind {
        OutputKind::Sample(sampler) => {
            sample(logits, history, history.len() as u64, sampler, scratch).map(Output::Sampled)
        }
        OutputKind::Masked { sampler, mask: Some(mask) } => {
            let position = history.len() as u64;
            sample_under(Some(mask), logits, history, position, sampler, scratch).map(Output::Sampled)
        }
        OutputKind::Masked { mask: None, .. } => Ok(Output::SatOut),
        OutputKind::Top { n } => Distribution::new(logits).map(|distribution| Output::Top {
            candidates: distribution.top(*n),
            entropy: distribution.entropy(),
        }),
        OutputKind::Scores(tokens) => Distribution::new(logits).map(|distribution| {
            Output::Scores(tokens.iter().map(|&token| distribution.logprob(token)).collect())
        }),
        _ => Distribution::new(logits).map(|distribution| Output::Full(distribution.logprobs())),
    };
    output.unwrap_or_else(Output::Failed)
}
