//! The fixed chain draws what its program draws.

use std::sync::Arc;

use trellis_programs::library::{self, Chain, Penalties};
use trellis_programs::{BiasId, MaskId};

use super::*;
use crate::batch::{OutputFault, Token};
use crate::sampling::{Bias, Sampler, Scratch, TokenMask, philox4x32, sample};

fn definition(sampler: &Sampler) -> Definition {
    let penalties = Penalties {
        last_n: sampler.penalty_last_n,
        repetition: sampler.repetition_penalty,
        frequency: sampler.frequency_penalty,
        presence: sampler.presence_penalty,
    };
    let chain = Chain {
        mask: sampler.mask.is_some().then_some(MaskId(0)),
        bias: (!sampler.bias.is_empty()).then_some(BiasId(0)),
        bias_over: None,
        penalties: sampler.penalizes().then_some(penalties),
        temperature: sampler.temperature,
        top_k: sampler.top_k,
        top_p: sampler.top_p,
        min_p_log: sampler.min_p.map(f32::ln),
    };
    Definition::build(|b| library::chain(b, chain))
}

fn drawn(logits: &[f32], history: &[Token], position: u64, sampler: &Sampler) -> Result<Token, OutputFault> {
    let shape = RowShape { vocab_size: logits.len(), n_positions: 4096 };
    let program = Program::new(definition(sampler), shape).expect("it is in order");
    let masks: Vec<Arc<TokenMask>> = sampler.mask.iter().cloned().collect();
    let bias = Bias::sparse(sampler.bias.clone(), logits.len()).expect("it is in order");
    let place = DrawInputs {
        logits,
        members: &[],
        history,
        n_tokens: history.len(),
        position,
        n_drawn: 0,
        seed: sampler.seed,
        parameters: &[],
        state: program.first_state(),
        masks: &masks,
        biases: &[Arc::new(bias)],
        constraint: None,
        within: None,
    };
    Machine::default().draw(&program, &place).map(|outcome| outcome.end)
}

#[test]
fn the_chain_draws_what_its_program_draws() {
    let words = |idx: u32, seed: u32| philox4x32([idx, seed, 0, 0], [3, 4]);
    let mut scratch = Scratch::default();
    let mut n_drawn = 0;
    for seed in 0..3000u32 {
        let vocab_size = [1, 5, 64, 700][seed as usize % 4];
        let logits: Vec<f32> = (0..vocab_size)
            .map(|token| match words(token, seed)[0] % 20 {
                0 => [f32::NEG_INFINITY, 1e38, -1e38, 1e-40][words(token, seed)[1] as usize % 4],
                1 | 2 => 2.0,
                x => x as f32 / 3.0 + (words(token, seed)[2] % 1000) as f32 / 700.0 - 6.0,
            })
            .collect();
        if logits.iter().all(|x| *x == f32::NEG_INFINITY) {
            continue;
        }
        let mut mask = TokenMask::none(logits.len());
        (0..vocab_size).for_each(|token| mask.set(token, words(token, seed)[3] % 3 > 0));
        let chosen = words(vocab_size, seed);
        let is_on = |bit: u32| chosen[0] >> bit & 1 == 1;
        let share = chosen[1] as f32 / u32::MAX as f32;
        let sampler = Sampler {
            temperature: [0.0, 0.3, 1.0, 4.0, 1e-30][chosen[2] as usize % 5],
            top_k: is_on(0).then_some(1 + chosen[3] % 40),
            top_p: is_on(1).then_some(share.max(1e-6)),
            min_p: is_on(2).then_some(share / 5.0),
            repetition_penalty: if is_on(3) { 1.3 } else { 1.0 },
            frequency_penalty: if is_on(4) { 0.4 } else { 0.0 },
            presence_penalty: if is_on(5) { -0.7 } else { 0.0 },
            penalty_last_n: is_on(6).then_some(4),
            bias: if is_on(7) && vocab_size > 1 {
                vec![(0, f32::NEG_INFINITY), (vocab_size - 1, 3.5)]
            } else {
                Vec::new()
            },
            mask: is_on(8).then(|| Arc::new(mask)),
            seed: u64::from(seed),
            ..Sampler::greedy()
        };
        let history: Vec<Token> = (0..seed % 9).map(|idx| words(idx, seed)[1] % vocab_size).collect();
        let position = u64::from(seed) << 20;
        let expected = sample(&logits, &history, position, &sampler, &mut scratch).map(|drawn| drawn.token);
        assert_eq!(drawn(&logits, &history, position, &sampler), expected, "{seed}: {sampler:?}");
        n_drawn += usize::from(expected.is_ok());
    }
    assert!(n_drawn > 2000, "{n_drawn}");
}
