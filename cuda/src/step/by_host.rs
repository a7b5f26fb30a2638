//! What no kernel works out.

use trellis_engine::batch::{Output, OutputKind, Token, Tokens};
use trellis_engine::sampling::{Distribution, Sampler, Scratch, sample, sample_under};

/// What the definition says of a row of logits.
pub(super) fn output_of(
    kind: &OutputKind<'_>,
    logits: &[f32],
    history: Tokens<'_>,
    scratch: &mut Scratch,
) -> Output {
    let output = match kind {
        OutputKind::Sample(sampler) => {
            let (history, position) = (penalized(sampler, history), history.len() as u64);
            sample(logits, &history, position, sampler, scratch).map(Output::Sampled)
        }
        OutputKind::Masked { sampler, mask: Some(mask) } => {
            let (history, position) = (penalized(sampler, history), history.len() as u64);
            sample_under(Some(mask), logits, &history, position, sampler, scratch).map(Output::Sampled)
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

/// The tokens that the penalties of a draw look at.
fn penalized(sampler: &Sampler, history: Tokens<'_>) -> Vec<Token> {
    let n_tokens = history.len();
    history.copy_of(n_tokens - sampler.n_penalized(n_tokens)..n_tokens)
}
