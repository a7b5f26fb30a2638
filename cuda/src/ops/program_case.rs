//! What the tests of logit programs share: rows by chance and with all that programs look at.

use std::sync::Arc;

use trellis_engine::batch::Token;
use trellis_engine::sampling::program::Program;
use trellis_engine::sampling::{Bias, TokenMask};

use super::program_plan::EncodedProgram;
pub(super) use super::program_trial::{CaseRow, Host, Launched, difference, kernel, run, run_small};
use crate::testing::Random;

impl CaseRow {
    /// A row with nothing but logits, at a position that the seed decides.
    pub(super) fn plain(program: Program, logits: Vec<f32>, seed: u64) -> Self {
        let plan = EncodedProgram::new(&program).expect("it fits");
        let state = program.first_state();
        Self {
            program,
            plan,
            logits,
            members: Vec::new(),
            history: Vec::new(),
            position: seed.wrapping_mul(0x1_0000_0003),
            n_drawn: 1,
            seed,
            parameters: Vec::new(),
            state,
            masks: Vec::new(),
            biases: Vec::new(),
            constraint: None,
        }
    }

    /// A row that has everything, with logits that are hard.
    pub(super) fn full(program: Program, plan: EncodedProgram, vocab_size: usize, seed: u64) -> Self {
        let mut random = Random(seed);
        let mask = |random: &mut Random, n: usize| {
            let mut mask = TokenMask::none(vocab_size);
            (0..vocab_size).for_each(|token| mask.set(token as Token, random.below(n) == 0));
            Arc::new(mask)
        };
        let masks = [1, 2, 3].map(|n| mask(&mut random, n)).to_vec();
        let mut pairs: Vec<(Token, f32)> = (0..20.min(vocab_size))
            .map(|_| (random.below(vocab_size) as Token, 3.0 * random.normal()))
            .collect();
        pairs.push((random.below(vocab_size) as Token, f32::NEG_INFINITY));
        let sparse = Bias::sparse(pairs, vocab_size).expect("it is in order");
        let n_distinct = [2, 5, 40, vocab_size][random.below(4)].min(vocab_size);
        let n_history = random.below(301);
        let history = (0..n_history).map(|_| random.below(n_distinct) as Token).collect();
        let members = (0..random.below(3)).map(|_| hard_logits(&mut random, vocab_size)).collect();
        Self {
            logits: hard_logits(&mut random, vocab_size),
            members,
            history,
            n_drawn: random.below(50) as u32,
            seed: random.next(),
            position: if random.below(2) == 0 { n_history as u64 } else { random.next() },
            parameters: (0..random.below(5)).map(|_| 2.0 * random.normal()).collect(),
            biases: vec![
                Arc::new(Bias::Dense(hard_logits(&mut random, vocab_size))),
                Arc::new(sparse),
                Arc::new(Bias::Sparse(Vec::new())),
            ][..random.below(4)]
                .to_vec(),
            constraint: (random.below(2) == 0).then(|| mask(&mut random, 2)),
            masks: masks[..random.below(4)].to_vec(),
            state: program.first_state(),
            program,
            plan,
        }
    }
}

/// Logits with everything that is hard: −∞, ties, denormals, the largest numbers; or without the largest, which make the rest
/// of no account.
pub(super) fn hard_logits(random: &mut Random, n: usize) -> Vec<f32> {
    let has_largest = random.below(2) == 0;
    let mut row: Vec<f32> = (0..n)
        .map(|_| match random.below(16) {
            0 => f32::NEG_INFINITY,
            1 => f32::from_bits(random.below(1000) as u32),
            2 if has_largest => [1e38, -1e38, f32::MAX, f32::MIN][random.below(4)],
            3 => 1.5,
            4 => [0.0, -0.0][random.below(2)],
            _ => random.below(20_000) as f32 / 1000.0 - 10.0,
        })
        .collect();
    row[n / 2] = 1.0;
    row
}

/// Logits like a model's: normal, with a deviation of 2.5.
pub(super) fn plain_logits(random: &mut Random, n: usize) -> Vec<f32> {
    random.normals(n).iter().map(|x| 2.5 * x).collect()
}
