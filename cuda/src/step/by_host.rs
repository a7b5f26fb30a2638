//! What no kernel works out.

use trellis_engine::batch::{Output, OutputKind};
use trellis_engine::sampling::{Distribution, Scratch, sample};

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
