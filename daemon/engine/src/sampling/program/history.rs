//! What a program sees of the tokens before the draw.

use trellis_programs::{Definition, Operation, Source};

use crate::batch::Token;
use trellis_programs::philox4x32;

/// How many of the last tokens a program looks at.
pub(super) fn n_tokens(definition: &Definition, n_positions: usize) -> usize {
    let of_source = |source: &Source| match *source {
        Source::Seed { .. } => 0,
        Source::Key { n_tokens, .. } => usize::from(n_tokens),
    };
    let of = |operation: &Operation| match operation {
        Operation::CountLast { n } => n.map_or(n_positions, |n| n as usize),
        Operation::CountSince(_) => n_positions,
        Operation::Repeats { window, .. } => *window as usize,
        Operation::Ngrams { window, .. } => window.map_or(n_positions, |window| window as usize),
        Operation::NoiseRow { source, .. } | Operation::Uniform(source) | Operation::Draw(_, source) => {
            of_source(source)
        }
        _ => 0,
    };
    definition.operations.iter().map(of).max().unwrap_or(0).min(n_positions)
}

/// The last `n` tokens, or all.
pub(super) fn last(history: &[Token], n: usize) -> &[Token] {
    &history[history.len().saturating_sub(n)..]
}

/// Adds 1 to the entry of each token.
pub(super) fn count(tokens: &[Token], counts: &mut [f32]) {
    for &token in tokens {
        counts[token as usize] += 1.0;
    }
}

/// Writes for each token the length of the longest repetition that it would continue.
pub(super) fn repeats(
    tokens: &[Token],
    cap: usize,
    breaks: impl Fn(Token) -> bool,
    lengths: &mut [f32], // [vocab_size], 0
) {
    let Some((&last, before)) = tokens.split_last() else { return };
    if breaks(last) {
        return;
    }
    for (idx, &token) in before.iter().enumerate() {
        let next = tokens[idx + 1];
        if token != last || breaks(next) {
            continue;
        }
        // The run before `idx + 1` against the run at the end.
        let mut length = 1;
        while length < cap && length <= idx {
            let token = tokens[idx - length];
            if token != tokens[tokens.len() - 1 - length] || breaks(token) {
                break;
            }
            length += 1;
        }
        let entry = &mut lengths[next as usize];
        *entry = entry.max(length as f32);
    }
}

/// Marks the tokens that would complete a run of `n` that is there already.
pub(super) fn ngrams(tokens: &[Token], n: usize, set: &mut [bool]) {
    if tokens.len() < n {
        return;
    }
    let end = &tokens[tokens.len() - (n - 1)..];
    for run in tokens.windows(n) {
        if run[..n - 1] == *end {
            set[run[n - 1] as usize] = true;
        }
    }
}

/// The hash of tokens that keys noise, as two words.
pub(super) fn hash(tokens: &[Token]) -> [u32; 2] {
    let mut hash = [0; 2];
    for (idx, &token) in tokens.iter().enumerate() {
        let [low, high, ..] = philox4x32([token, idx as u32, hash[0], hash[1]], [0; 2]);
        hash = [low, high];
    }
    hash
}
