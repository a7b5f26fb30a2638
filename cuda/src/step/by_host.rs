//! What no kernel works out: draws for which a step has no room, and programs before their kernel is ready.

use trellis_engine::batch::{Output, OutputKind, Token, Tokens};
use trellis_engine::sampling::program::{DrawPlace, DrawState};
use trellis_engine::sampling::{
    Before, Distribution, Sampler, Scratch, rank, sample, sample_by_program, sample_under,
};

/// A row of logits, and those of the others of a mixture.
#[derive(Clone, Copy, Debug)]
pub(super) struct Logits<'a> {
    pub(super) own: &'a [f32],          // [vocab_size]
    pub(super) others: &'a [&'a [f32]], // [vocab_size] each
}

/// What the definition says of a row of logits, in a context from which so many tokens were evicted; a program starts here.
pub(super) fn output_of(
    kind: &OutputKind<'_>,
    logits: Logits<'_>,
    history: Tokens<'_>,
    n_evicted: usize,
    start: DrawState,
    scratch: &mut Scratch,
) -> Output {
    let Logits { own: logits, others } = logits;
    let before = Before { n_tokens: history.len(), n_evicted };
    let output = match kind {
        OutputKind::Sample(sampler) => {
            let (history, position) = (looked_at(sampler, history), before.position());
            sample(logits, &history, position, sampler, scratch).map(Output::Sampled)
        }
        OutputKind::Program { sampler, within, .. } => {
            let within = within.mask().map(|mask| &**mask);
            let draw = DrawPlace { members: others, before, seed: sampler.seed, start, within };
            let drawn = sample_by_program(logits, &looked_at(sampler, history), sampler, draw, scratch);
            drawn.map(|(candidate, left)| Output::Programmed(candidate, Box::new(left)))
        }
        OutputKind::Masked { sampler, mask: Some(mask) } => {
            let (history, position) = (looked_at(sampler, history), before.position());
            sample_under(Some(mask), logits, &history, position, sampler, scratch).map(Output::Sampled)
        }
        OutputKind::Masked { mask: None, .. } => Ok(Output::SatOut),
        OutputKind::Ranked { sampler, within, n } => {
            let looked_at = looked_at(sampler, history);
            rank(logits, &looked_at, before, sampler, within.map(|mask| &**mask), *n, scratch)
                .map(Output::Ranked)
        }
        OutputKind::Top { n } => Distribution::new(logits).map(|distribution| Output::Top {
            candidates: distribution.top(*n),
            entropy: distribution.entropy(),
        }),
        OutputKind::Scores(tokens) => Distribution::new(logits).map(|distribution| {
            Output::Scores(tokens.iter().map(|&token| distribution.logprob(token)).collect())
        }),
        OutputKind::Logits => Distribution::new(logits).map(|_| Output::Full(logits.to_vec())),
        OutputKind::Keep(_) => Distribution::new(logits).map(|_| Output::Kept),
        _ => Distribution::new(logits).map(|distribution| Output::Full(distribution.logprobs())),
    };
    output.unwrap_or_else(Output::Failed)
}

/// The tokens that a draw looks at.
fn looked_at(sampler: &Sampler, history: Tokens<'_>) -> Vec<Token> {
    let n_tokens = history.len();
    history.copy_of(n_tokens - sampler.n_history(n_tokens)..n_tokens)
}
