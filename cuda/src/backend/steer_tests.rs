//! Steered contexts against the CPU: in prompts, decoded in captured steps, looked at between layers, and beside others.

use trellis_engine::batch::{Output, OutputFault, OutputKind};
use trellis_engine::model::{Dtype, ModelConfig};
use trellis_engine::sampling::Sampler;
use trellis_engine::{Steered, Steering};

use super::beside_cpu::compare;
use super::tests::{bundled, card, cpu, load_on, random_models, row, tokens};
use super::*;
use crate::testing::Random;

fn steering(random: &mut Random, config: &ModelConfig, n_layers: &[usize]) -> Steering {
    let ModelConfig { hidden_size, n_layers: n_layers_max, .. } = *config;
    let mut vector = || random.normals(hidden_size).iter().map(|value| 0.3 * value).collect();
    let vectors = n_layers.iter().map(|&n_layers| (n_layers, vector())).collect();
    Steering::new(vectors, n_layers_max, hidden_size).expect("it fits").expect("it is some")
}

#[test]
fn steered_contexts_agree_with_the_cpu() {
    let Some(card) = card() else { return };
    for model in random_models().into_iter().chain([bundled("tiny")]) {
        let ModelConfig { vocab_size, n_layers, n_positions, .. } = model.config;
        let (mut device, mut host) = (load_on(&card, &model, Dtype::F32), cpu(&model));
        let mut random = Random(31);
        let all: Vec<usize> = (0..=n_layers).collect();
        let steerings = [&all[..], &all[..1], &all[1..2], &all[n_layers..]]
            .map(|it| steering(&mut random, &model.config, it));
        let lengths = [1, 15, 16, 17, 33, 64, 100, 255].map(|n: usize| n.min(n_positions - 30));
        let mut contexts = lengths.map(|n| tokens(&mut random, n, vocab_size));
        // Each fifth is not steered; the others from the first token on, from the middle, and from what is drawn on.
        let steered = |idx: usize| {
            let steering = steerings.get(idx % 5)?;
            Some(Steered { steering, from: [0, lengths[idx] / 2, lengths[idx]][idx % 3] })
        };
        let greedy = Sampler::greedy();
        let mut n_other_draws = 0;
        for step in 0..8 {
            let rows = contexts.iter().enumerate().map(|(idx, tokens)| {
                let last = tokens.len() - 1;
                let start = if step == 0 { 0 } else { last };
                let asked = match idx % 3 {
                    0 => vec![(last, OutputKind::Sample(&greedy))],
                    1 => vec![(last, OutputKind::Full)],
                    // Such steps are launched call by call: in every second one nothing is looked at.
                    _ if step % 2 == 0 => vec![
                        (last, OutputKind::Hidden { n_layers: 1 }),
                        (last, OutputKind::Hidden { n_layers: 0 }),
                        (last, OutputKind::Embedding),
                    ],
                    _ => vec![(last, OutputKind::Scores(&tokens[..1]))],
                };
                let steered = steered(idx).filter(|steered| steered.from < tokens.len());
                Row { steered, ..row(idx as u32, tokens, start, idx * 30, asked) }
            });
            let about = format!("{}, step {step}", model.name);
            n_other_draws +=
                compare(&mut device, &mut host, Batch { copies: &[], rows: rows.collect() }, &about);
            contexts.iter_mut().for_each(|tokens| tokens.push(random.below(vocab_size) as Token));
        }
        assert!(n_other_draws <= 1, "{n_other_draws} draws of other tokens in {}", model.name);
    }
}

/// Steps of as many rows and tokens: the launches are the same but for what is added.
#[test]
fn neighbours_of_steered_contexts_get_the_bits_that_they_get_beside_others() {
    let Some(card) = card() else { return };
    let model = bundled("tiny");
    let vocab_size = model.config.vocab_size;
    let mut device = load_on(&card, &model, Dtype::F32);
    let mut random = Random(32);
    let added = steering(&mut random, &model.config, &[0, 2]);
    let texts = [20, 33].map(|n| tokens(&mut random, n, vocab_size));
    let mut run = |steered: Option<Steered<'_>>| {
        let mut found = Vec::new();
        // Both prompts, then the last tokens again: met once, captured, and from the graph.
        for is_there in [false, true, true, true] {
            let rows = texts.iter().enumerate().map(|(idx, text)| {
                let last = text.len() - 1;
                let start = if is_there { last } else { 0 };
                let row = row(idx as u32, text, start, idx * 30, vec![(last, OutputKind::Full)]);
                Row { steered: steered.filter(|_| idx == 1), ..row }
            });
            let outputs = device.forward(&Batch { copies: &[], rows: rows.collect() }).expect("a step");
            found.push(outputs);
        }
        found
    };
    let plain = run(None);
    let beside = run(Some(Steered { steering: &added, from: 3 }));
    let again = run(None);
    for ((plain, beside), again) in plain.iter().zip(&beside).zip(&again) {
        assert_eq!(plain[0], beside[0], "the neighbour");
        assert_ne!(plain[1], beside[1], "the steered one");
        assert_eq!(plain, again);
    }
}

/// As on the CPU: what overflows is told, and nothing of it stays in pages or slots.
#[test]
fn a_residual_that_overflows_is_not_a_number() {
    let Some(card) = card() else { return };
    let model = bundled("tiny");
    let ModelConfig { vocab_size, hidden_size, n_layers, .. } = model.config;
    let mut random = Random(33);
    let texts = [20, 33].map(|n| tokens(&mut random, n, vocab_size));
    let greedy = Sampler::greedy();
    let fault = Output::Failed(OutputFault::NotANumber);
    for dtype in [Dtype::F32, Dtype::F16] {
        let mut device = load_on(&card, &model, dtype);
        for after in [0, 2, n_layers] {
            let added = Steering::new(vec![(after, vec![1e38; hidden_size])], n_layers, hidden_size);
            let added = added.expect("it fits").expect("it is some");
            let mut run = |steered: Option<Steered<'_>>| {
                let rows = texts.iter().enumerate().map(|(idx, text)| {
                    let last = text.len() - 1;
                    let asked = vec![(last, OutputKind::Sample(&greedy)), (last, OutputKind::Full)];
                    Row { steered: steered.filter(|_| idx == 1), ..row(idx as u32, text, 0, idx * 30, asked) }
                });
                device.forward(&Batch { copies: &[], rows: rows.collect() }).expect("a step")
            };
            let plain = run(None);
            let beside = run(Some(Steered { steering: &added, from: 3 }));
            assert_eq!(beside[2..], [fault.clone(), fault.clone()], "after {after} layers");
            assert_eq!((&beside[..2], run(None)), (&plain[..2], plain.clone()), "the neighbour");
        }
    }
}
