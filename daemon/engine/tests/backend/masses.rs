//! Attention as an output, against the plain f64 implementation: for every variant of the family, in windows, and among holes.

use trellis_engine::backend::PAGE_LEN;
use trellis_engine::batch::{Output, OutputFault, OutputKind, Token};
use trellis_engine::model::{Architecture, ModelConfig};
use trellis_engine::sampling::philox4x32;

use crate::architectures::{backend, base, random_tensors};
use crate::evictions::{GONE, N_BEFORE, N_TOKENS, after_hole, seen_after_hole, tokens};
use crate::reference::Reference;
use crate::support::{forward, full, row};

/// Rounding in f32, as for log-probabilities of the same models; a weight is at most 1.
const TOLERANCE: f64 = 1e-4;

/// Means over the heads and these layers, of each position, by what it sees: `[n_positions][n_seen]`.
fn expected(
    config: &ModelConfig,
    tokens: &[Token],
    layers: &[usize],
    seen: impl Fn(usize, usize) -> Vec<(usize, usize)>,
) -> Vec<Vec<f64>> {
    let weights = random_tensors(config, 1);
    let mut means: Vec<Vec<f64>> = (0..tokens.len()).map(|position| vec![0.0; position + 1]).collect();
    let n = (layers.len() * config.n_heads) as f64;
    Reference { config, tensors: &weights }.run_watching(tokens, &seen, |layer_idx, position, weights| {
        if layers.contains(&layer_idx) {
            for (&(token, _), weight) in seen(layer_idx, position).iter().zip(weights) {
                means[position][token] += weight / n;
            }
        }
    });
    means
}

fn in_windows(config: &ModelConfig) -> impl Fn(usize, usize) -> Vec<(usize, usize)> {
    |layer_idx, position| {
        let first = config.windows[layer_idx].map_or(0, |window| (position + 1).saturating_sub(window));
        (first..=position).map(|seen| (seen, position - seen)).collect()
    }
}

fn masses(output: &Output) -> &[f32] {
    match output {
        Output::Attention(masses) => masses,
        other => panic!("expected attention, got {other:?}"),
    }
}

fn assert_near(found: &[f32], expected: &[f64], about: &str) {
    assert_eq!(found.len(), expected.len(), "{about}");
    let sum: f64 = found.iter().copied().map(f64::from).sum();
    assert!((sum - 1.0).abs() <= 1e-5, "{about}: {sum} in all");
    for (idx, (&found, expected)) in found.iter().zip(expected).enumerate() {
        let diff = (f64::from(found) - expected).abs();
        assert!(diff <= TOLERANCE, "{about}, token {idx}: {found} instead of {expected}");
        assert!(*expected != 0.0 || found == 0.0, "{about}, token {idx}: out of sight");
    }
}

fn check(config: &ModelConfig) {
    let weights = random_tensors(config, 1);
    let mut backend = backend(config, &weights);
    let tokens: Vec<Token> =
        (0..75).map(|i| philox4x32([i, 0, 0, 0], [2, 0])[0] % config.vocab_size as u32).collect();
    for layers in [&[0][..], &[1], &[0, 1], &[1, 0]] {
        let expected = expected(config, &tokens, layers, in_windows(config));
        let positions = [0, 14, 15, 16, 31, 40, 73, 74];
        let asked = || positions.iter().map(|&position| (position, OutputKind::Attention { layers }));
        let whole = forward(&mut backend, vec![row(&tokens, 0, 3, asked().collect())]);
        for (output, &position) in whole.iter().zip(&positions) {
            assert_near(masses(output), &expected[position], &format!("{layers:?}, position {position}"));
        }

        // The last token again, and a prompt in pieces beside the row of another context: the same bits.
        let last = vec![(74, OutputKind::Attention { layers }), (74, OutputKind::Full)];
        let again = forward(&mut backend, vec![row(&tokens, 74, 3, last)]);
        assert_eq!(again[0], whole[7]);
        let plain = forward(&mut backend, vec![row(&tokens, 74, 3, vec![(74, OutputKind::Full)])]);
        assert_eq!(full(again[1].clone()), full(plain[0].clone()), "looking changes nothing");
        for (start, end) in [(0, 7), (7, 41), (41, 74), (74, 75)] {
            let asked = asked().filter(|(position, _)| (start..end).contains(position)).collect();
            let other = row(&tokens[..12], 0, 40, vec![(11, OutputKind::Attention { layers })]);
            let outputs = forward(&mut backend, vec![row(&tokens[..end], start, 20, asked), other]);
            let first = positions.iter().filter(|&&position| position < start).count();
            let (last, outputs) = outputs.split_last().expect("of the other");
            assert_eq!(outputs, &whole[first..first + outputs.len()]);
            assert_eq!(masses(last).len(), 12);
        }
    }
}

#[test]
fn grouped_heads() {
    check(&base());
    check(&ModelConfig { n_kv_heads: 1, ..base() });
    check(&ModelConfig { n_kv_heads: 4, ..base() });
    check(&ModelConfig { n_heads: 1, n_kv_heads: 1, head_dim: 2, ..base() });
}

#[test]
fn windows() {
    for window in [1, 7, PAGE_LEN, 33, 200] {
        let windows = vec![Some(window), None];
        check(&ModelConfig { architecture: Architecture::Mistral, windows, ..base() });
    }
}

#[test]
fn norms_of_heads_and_biases() {
    check(&ModelConfig { architecture: Architecture::Qwen3, qk_norm: true, ..base() });
    check(&ModelConfig { architecture: Architecture::Qwen2, qkv_bias: true, ..base() });
}

#[test]
fn among_holes_tokens_count_by_their_index_after_what_is_gone() {
    const LAYERS: &[usize] = &[1, 0];
    let config = base();
    let weights = random_tensors(&config, 1);
    let mut backend = backend(&config, &weights);
    let tokens = tokens(&config);
    for n_closed in [0, GONE.len()] {
        let expected = expected(&config, &tokens, LAYERS, |_, position| seen_after_hole(position, n_closed));
        let mut after_hole = |first_cell, n_piece| {
            let kind = || OutputKind::Attention { layers: LAYERS };
            after_hole(&mut backend, &tokens, first_cell, -(n_closed as i64), n_piece, kind)
        };
        let found = after_hole(0, N_TOKENS);
        assert_eq!(found.len(), N_TOKENS - N_BEFORE);
        for (idx, found) in found.iter().enumerate() {
            let seen = seen_after_hole(N_BEFORE + idx, n_closed);
            let expected: Vec<f64> = seen.iter().map(|&(token, _)| expected[N_BEFORE + idx][token]).collect();
            assert_near(masses(found), &expected, &format!("{n_closed} closed up, {idx} after the hole"));
        }
        for (first_cell, n_piece) in [(3, 1), (11, 4), (16, 7), (29, N_TOKENS)] {
            assert_eq!(after_hole(first_cell, n_piece), found, "from cell {first_cell} on");
        }
    }
}

#[test]
fn what_is_no_number_is_a_fault() {
    let config = base();
    let mut weights = random_tensors(&config, 1);
    let name = "model.layers.1.self_attn.q_proj.weight";
    weights.get_mut(name).expect("it has a query projection").fill(f32::NAN);
    let mut backend = backend(&config, &weights);
    let asked =
        vec![(4, OutputKind::Attention { layers: &[1] }), (4, OutputKind::Attention { layers: &[0] })];
    let outputs = forward(&mut backend, vec![row(&[1, 2, 3, 4, 5], 0, 0, asked)]);
    assert_eq!(outputs[0], Output::Failed(OutputFault::NotANumber));
    assert_eq!(masses(&outputs[1]).len(), 5);
}
