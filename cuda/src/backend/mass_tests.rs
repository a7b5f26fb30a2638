//! Attention that is asked for, against the CPU: in prompts, of the last token again, and beside rows that ask for other things.

use trellis_engine::batch::OutputKind;
use trellis_engine::model::{Dtype, ModelConfig};
use trellis_engine::sampling::Sampler;

use super::tests::{assert_same, bundled, card, cpu, load_on, random_models, row, tokens};
use super::*;
use crate::testing::Random;

/// Weights are at most 1; rounding in f32 over a few layers.
const TOLERANCE: f32 = 1e-4;

#[test]
fn attention_agrees_with_the_cpu() {
    let Some(card) = card() else { return };
    for model in random_models().into_iter().chain([bundled("tiny")]) {
        let ModelConfig { vocab_size, n_layers, n_positions, .. } = model.config;
        let (mut device, mut host) = (load_on(&card, &model, Dtype::F32), cpu(&model));
        let mut random = Random(21);
        let lengths = [1, 15, 16, 17, 33, 64, 100, 255].map(|n: usize| n.min(n_positions - 1));
        let prompts = lengths.map(|n| tokens(&mut random, n, vocab_size));
        let all: Vec<usize> = (0..n_layers).rev().collect();
        let greedy = Sampler::greedy();
        // The prompts as a whole, the last tokens again, and these once more.
        for is_there in [false, true, true] {
            let rows = || {
                let each = prompts.iter().enumerate().map(|(idx, prompt)| {
                    let last = prompt.len() - 1;
                    let start = if is_there { last } else { 0 };
                    let layers = [&all[..], &all[..1], &all[1..]][idx % 3];
                    let attention = |position| (position, OutputKind::Attention { layers });
                    let asked = match idx % 4 {
                        0 => vec![(last, OutputKind::Sample(&greedy)), attention(last), attention(start)],
                        1 => vec![(last, OutputKind::Full), (last, OutputKind::Hidden { n_layers: 1 })],
                        2 => vec![
                            attention(last),
                            (last, OutputKind::Top { n: 9 }),
                            attention(last / 2 + start / 2),
                        ],
                        _ => vec![attention(last)],
                    };
                    let asked = asked.into_iter().filter(|(position, _)| *position >= start);
                    row(idx as u32, prompt, start, idx * 30, asked.collect())
                });
                each.collect::<Vec<_>>()
            };
            let found = device.forward(&Batch { copies: &[], rows: rows() }).expect("a step");
            let expected = host.forward(&Batch { copies: &[], rows: rows() }).expect("a step");
            assert_eq!(found.len(), expected.len());
            for (idx, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let about = format!("{}, output {idx}, only the last: {is_there}", model.name);
                assert_same(found, expected, &about);
                if let (Output::Attention(found), Output::Attention(expected)) = (found, expected) {
                    let is_near = |(a, b): (&f32, &f32)| (a - b).abs() <= TOLERANCE;
                    assert!(found.iter().zip(expected).all(is_near), "{about}: {found:?} for {expected:?}");
                    assert!((found.iter().sum::<f32>() - 1.0).abs() <= TOLERANCE, "{about}");
                }
            }
        }
    }
}
