//! Steps that wait for masks, against the same draws with their masks in time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use trellis_engine::batch::{Input, LateMask, OutputKind, Row, Token};
use trellis_engine::model::Dtype;
use trellis_engine::sampling::{Sampler, TokenMask};

use super::tests::{card, load_on, random_models, row, tokens};
use super::*;
use crate::testing::Random;

const N_ROUNDS: usize = 6;

fn mask(random: &mut Random, vocab_size: usize) -> Arc<TokenMask> {
    let mut mask = TokenMask::none(vocab_size);
    for token in tokens(random, vocab_size / 50, vocab_size) {
        mask.set(token, true);
    }
    Arc::new(mask)
}

fn wait_for_layers(backend: &mut CudaBackend) {
    let begun = Instant::now();
    while !backend.waits_for_masks().expect("the layers run") {
        assert!(begun.elapsed() < Duration::from_secs(10), "the layers never end");
    }
}

fn drawn(output: &Output) -> (Token, f32) {
    let Output::Sampled(candidate) = output else { panic!("{output:?}") };
    (candidate.token, candidate.logprob)
}

/// Rows of three contexts: one that draws freely, one whose mask comes, one whose mask does not. At last a prompt is beside
/// them, so that the step is not captured.
#[test]
fn late_masks_draw_what_masks_in_time_draw_and_rows_without_sit_out() {
    let Some(card) = card() else { return };
    for model in random_models() {
        let mut backend = load_on(&card, &model, Dtype::F32);
        let vocab_size = model.config.vocab_size;
        let mut random = Random(11);
        let sampler = Arc::new(Sampler { temperature: 1.0, seed: 9, ..Sampler::greedy() });
        let mut contexts: Vec<Vec<Token>> = (0..3).map(|_| tokens(&mut random, 20, vocab_size)).collect();
        // All but the last token.
        let rows = contexts.iter().enumerate();
        let rows = rows.map(|(idx, tokens)| row(idx as u32, &tokens[..19], 0, idx * 8, Vec::new()));
        backend.forward(&Batch { copies: &[], rows: rows.collect() }).expect("it runs");
        let prompt = tokens(&mut random, 40, vocab_size);
        // The first steps of a kind are launched, then captured, then run as captured.
        for round in 0..N_ROUNDS {
            let masks = [mask(&mut random, vocab_size), mask(&mut random, vocab_size)];
            let last = contexts[0].len() - 1;
            let step = |in_time: bool| -> Vec<Row<'_>> {
                let kinds = [
                    OutputKind::Sample(&sampler),
                    OutputKind::Masked { sampler: &sampler, mask: in_time.then_some(&masks[0]) },
                    OutputKind::Masked { sampler: &sampler, mask: in_time.then_some(&masks[1]) },
                ];
                let rows = contexts.iter().zip(kinds).enumerate();
                rows.map(|(idx, (tokens, kind))| row(idx as u32, tokens, last, idx * 8, vec![(last, kind)]))
                    .collect()
            };
            let expected = backend.forward(&Batch { copies: &[], rows: step(true) }).expect("it runs");
            let mut rows = step(false);
            if round + 2 >= N_ROUNDS {
                rows.push(row(3, &prompt, 0, 24, vec![(39, OutputKind::Top { n: 2 })]));
            }
            backend.submit(&Batch { copies: &[], rows }).expect("it is submitted");
            if round % 2 == 0 {
                wait_for_layers(&mut backend);
            }
            let come = [LateMask { row_idx: 1, mask: &masks[0] }];
            backend.supply(&come).expect("it draws");
            // What was drawn is known to the device: the next step begins with it.
            let free = contexts[0].clone();
            let masked = contexts[1].clone();
            let next = [(0, &free), (1, &masked)].map(|(idx, tokens)| {
                let asked = vec![(last + 1, OutputKind::Sample(&sampler))];
                Row {
                    input: Input::Drawn(SlotId(idx)),
                    ..row(idx, tokens, last + 1, idx as usize * 8, asked)
                }
            });
            backend.submit(&Batch { copies: &[], rows: next.into() }).expect("it is submitted");
            let found = backend.collect().expect("it ran").outputs;
            let after = backend.collect().expect("it ran").outputs;
            let is_close = |a: f32, b: f32| (a - b).abs() <= 1e-3;
            for idx in 0..2 {
                let (expected, found) = (drawn(&expected[idx]), drawn(&found[idx]));
                assert!(
                    expected.0 == found.0 && is_close(expected.1, found.1),
                    "{}, round {round}, row {idx}: {expected:?} {found:?}",
                    model.name
                );
            }
            assert!(masks[0].allows(drawn(&found[1]).0));
            assert_eq!(found[2], Output::SatOut);
            // The one that sat out draws once its mask is there.
            let tokens = contexts[2].clone();
            let kind = OutputKind::Masked { sampler: &sampler, mask: Some(&masks[1]) };
            let again = row(2, &tokens, last, 16, vec![(last, kind)]);
            let again = backend.forward(&Batch { copies: &[], rows: vec![again] }).expect("it runs");
            assert_eq!(drawn(&again[0]).0, drawn(&expected[2]).0);
            for (idx, output) in [&found[0], &found[1], &again[0]].into_iter().enumerate() {
                contexts[idx].push(drawn(output).0);
            }
            for idx in 0..2 {
                let tokens = &contexts[idx];
                let asked = vec![(last + 1, OutputKind::Sample(&sampler))];
                let known = row(idx as u32, tokens, last + 1, idx * 8, asked);
                let known = backend.forward(&Batch { copies: &[], rows: vec![known] }).expect("it runs");
                assert_eq!(drawn(&known[0]).0, drawn(&after[idx]).0, "the device had another token");
            }
        }
    }
}
