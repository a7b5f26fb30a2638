//! Steered tokens, against the plain f64 implementation, and beside tokens that are not steered.

use trellis_engine::batch::{Output, OutputFault, OutputKind, Row, SlotId, Token};
use trellis_engine::cpu::CpuBackend;
use trellis_engine::model::{Architecture, ModelConfig};
use trellis_engine::sampling::{Sampler, philox4x32};
use trellis_engine::{Steered, Steering};

use crate::architectures::{backend, base, random_tensors};
use crate::reference::Reference;
use crate::support::{bundled, bundled_model, forward, full, row};

/// Rounding in f32, as for log-probabilities of the same models, relative to the size where that is above 1.
const TOLERANCE: f64 = 1e-4;

fn numbers(n: usize, seed: u32) -> Vec<f32> {
    let number = |i: usize| philox4x32([i as u32, 0, 0, 0], [seed, 7])[0] as f32 / u32::MAX as f32;
    (0..n).map(|i| 2.0 * number(i) - 1.0).collect()
}

fn steering(config: &ModelConfig, n_layers: &[usize]) -> Steering {
    let vectors = n_layers.iter().map(|&it| (it, numbers(config.hidden_size, it as u32)));
    let steering = Steering::new(vectors.collect(), config.n_layers, config.hidden_size);
    steering.expect("it fits the model").expect("it is not zero")
}

fn tokens(config: &ModelConfig, n: u32) -> Vec<Token> {
    (0..n).map(|i| philox4x32([i, 0, 0, 0], [2, 0])[0] % config.vocab_size as u32).collect()
}

/// The log-probabilities at each place of a context, computed in rows that end at these places.
fn in_pieces(
    backend: &mut CpuBackend,
    tokens: &[Token],
    ends: &[usize],
    steered: Option<Steered<'_>>,
) -> Vec<Vec<f32>> {
    let mut start = 0;
    let mut found = Vec::new();
    for &end in ends {
        let asked = (start..end).map(|position| (position, OutputKind::Full)).collect();
        let other = row(&tokens[..9], 0, 60, vec![(8, OutputKind::Full)]);
        let steered = steered.filter(|steered| steered.from < end);
        let outputs = forward(backend, vec![Row { steered, ..row(&tokens[..end], start, 3, asked) }, other]);
        found.extend(outputs.into_iter().take(end - start).map(full));
        start = end;
    }
    found
}

fn check(config: &ModelConfig) {
    let weights = random_tensors(config, 1);
    let mut backend = backend(config, &weights);
    let tokens = tokens(config, 40);
    for n_layers in [&[0][..], &[1], &[config.n_layers], &[0, 1, 2]] {
        let steering = steering(config, n_layers);
        for from in [0, 17, 39] {
            let reference = Reference { config, tensors: &weights };
            let added = |n_layers, position| (position >= from).then(|| steering.after(n_layers)).flatten();
            let expected = reference.run_steered(&tokens, added);
            let steered = Some(Steered { steering: &steering, from });
            let found = in_pieces(&mut backend, &tokens, &[40], steered);
            for (position, (found, (_, expected))) in found.iter().zip(&expected).enumerate() {
                for (found, expected) in found.iter().zip(expected) {
                    let diff = (f64::from(*found) - expected).abs();
                    let tolerance = TOLERANCE * expected.abs().max(1.0);
                    assert!(
                        diff <= tolerance,
                        "{n_layers:?} from {from}, {position}: {found} for {expected}"
                    );
                }
            }
            // However it is cut, and beside whatever: the same bits.
            assert_eq!(in_pieces(&mut backend, &tokens, &[7, 16, 18, 39, 40], steered), found);
            let plain = in_pieces(&mut backend, &tokens, &[40], None);
            assert_eq!(found[..from], plain[..from], "what comes before is not steered");
            assert_ne!(found[from], plain[from]);
        }
    }
}

#[test]
fn grouped_heads() {
    check(&base());
}

#[test]
fn windows_norms_of_heads_and_biases() {
    check(&ModelConfig { architecture: Architecture::Mistral, windows: vec![Some(7), None], ..base() });
    check(&ModelConfig { architecture: Architecture::Qwen3, qk_norm: true, ..base() });
    check(&ModelConfig { architecture: Architecture::Qwen2, qkv_bias: true, ..base() });
}

/// Of `tiny`, whose weights were trained: a step with a steered row, and the same without it.
#[test]
fn neighbours_of_a_steered_row_get_the_same_bits() {
    let config = bundled_model("tiny").config;
    let mut backend = bundled("tiny");
    let steering = steering(&config, &[0, 3]);
    let texts = [(0, 25), (40, 90), (100, 133)].map(|(a, b)| tokens(&config, b)[a as usize..].to_vec());
    let mut run = |steered: Option<Steered<'_>>| {
        let rows = texts.iter().enumerate().map(|(idx, text)| {
            let last = text.len() - 1;
            let asked = vec![(last, OutputKind::Full), (last, OutputKind::Hidden { n_layers: 2 })];
            let row = row(text, 0, idx * 20, asked);
            Row { slot: SlotId(idx as u32), steered: steered.filter(|_| idx == 1), ..row }
        });
        forward(&mut backend, rows.collect())
    };
    let (plain, beside) = (run(None), run(Some(Steered { steering: &steering, from: 4 })));
    assert_eq!((&plain[..2], &plain[4..]), (&beside[..2], &beside[4..]));
    assert!(plain[2] != beside[2] && plain[3] != beside[3], "the steered one");
    assert_eq!(run(None), plain);
}

/// What overflows is told, in place of a row that says nothing about any token; pages and neighbours are as good as before.
#[test]
fn a_residual_that_overflows_is_not_a_number() {
    let config = bundled_model("tiny").config;
    let mut backend = bundled("tiny");
    let greedy = Sampler::greedy();
    let texts = [30, 50].map(|n| tokens(&config, n));
    let fault = Output::Failed(OutputFault::NotANumber);
    for after in [0, 2, config.n_layers] {
        let added = vec![(after, vec![1e38; config.hidden_size])];
        let steering = Steering::new(added, config.n_layers, config.hidden_size);
        let steering = steering.expect("it fits the model").expect("it is not zero");
        let mut run = |steered: Option<Steered<'_>>| {
            let rows = texts.iter().enumerate().map(|(idx, text)| {
                let last = text.len() - 1;
                let asked = vec![
                    (last, OutputKind::Full),
                    (last, OutputKind::Sample(&greedy)),
                    (last, OutputKind::Embedding),
                ];
                let row = row(text, 0, idx * 20, asked);
                Row { slot: SlotId(idx as u32), steered: steered.filter(|_| idx == 1), ..row }
            });
            forward(&mut backend, rows.collect())
        };
        let (plain, beside) = (run(None), run(Some(Steered { steering: &steering, from: 4 })));
        assert_eq!(beside[3..], [fault.clone(), fault.clone(), fault.clone()], "after {after} layers");
        assert_eq!((&beside[..3], run(None)), (&plain[..3], plain.clone()));
    }
}

/// A hidden state has what was added before it.
#[test]
fn hidden_states_are_seen_steered() {
    let config = base();
    let weights = random_tensors(&config, 1);
    let mut backend = backend(&config, &weights);
    let steering = steering(&config, &[1]);
    let tokens = tokens(&config, 20);
    let mut run = |steered| {
        let asked = (0..2).map(|n_layers| (19, OutputKind::Hidden { n_layers })).collect();
        forward(&mut backend, vec![Row { steered, ..row(&tokens, 0, 0, asked) }])
    };
    let (plain, steered) = (run(None), run(Some(Steered { steering: &steering, from: 19 })));
    assert_eq!(plain[0], steered[0]);
    let [Output::Embedding(plain), Output::Embedding(steered)] = [&plain[1], &steered[1]] else {
        panic!("hidden states")
    };
    let vector = steering.after(1).expect("it has one");
    let expected: Vec<f32> = plain.iter().zip(vector).map(|(state, added)| state + added).collect();
    assert_eq!(steered, &expected);
}
