//! The library of samplers against its sources, written down in f64.

mod cases;
mod draws;
mod references;
mod watermarks;

use std::sync::Arc;

use trellis_engine::batch::Token;
use trellis_engine::sampling::program::{Definition, DrawInputs, Machine, Outcome, Program, RowShape};
use trellis_engine::sampling::{Bias, TokenMask};

/// Numbers that depend on a seed alone.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// SplitMix64.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// In (0, 1).
    pub(crate) fn uniform(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// A row of normal numbers of this deviation.
    pub(crate) fn logits(&mut self, n: usize, deviation: f64) -> Vec<f32> {
        let normal = |numbers: &mut Self| {
            let (u, v) = (numbers.uniform(), numbers.uniform());
            (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
        };
        (0..n).map(|_| (deviation * normal(self)) as f32).collect()
    }
}

/// Where a program is run.
pub(crate) struct Setting {
    pub(crate) logits: Vec<f32>,
    pub(crate) amateur: Vec<f32>,
    pub(crate) history: Vec<Token>,
    pub(crate) parameters: Vec<f32>,
    pub(crate) n_drawn: u32,
    pub(crate) seed: u64,
    pub(crate) masks: Vec<Arc<TokenMask>>,
    pub(crate) biases: Vec<Arc<Bias>>,
}

impl Setting {
    pub(crate) fn random(numbers: &mut Numbers, vocab_size: usize, n_history: usize) -> Self {
        Self {
            logits: numbers.logits(vocab_size, 2.5),
            amateur: numbers.logits(vocab_size, 2.5),
            // Few tokens, so that runs of them repeat.
            history: (0..n_history).map(|_| numbers.below(7) as Token).collect(),
            parameters: Vec::new(),
            n_drawn: 0,
            seed: numbers.next(),
            masks: Vec::new(),
            biases: Vec::new(),
        }
    }

    fn with<T>(
        &self,
        definition: &Definition,
        run: impl FnOnce(&mut Machine, &Program, &DrawInputs<'_>) -> T,
    ) -> T {
        let program =
            Program::new(definition.clone(), shape(self.logits.len())).expect("the program is in order");
        let members: [&[f32]; 1] = [&self.amateur];
        let place = DrawInputs {
            logits: &self.logits,
            members: &members,
            history: &self.history,
            n_tokens: self.history.len(),
            position: self.history.len() as u64,
            n_drawn: self.n_drawn,
            seed: self.seed,
            parameters: &self.parameters,
            state: program.first_state(),
            masks: &self.masks,
            biases: &self.biases,
            constraint: None,
            within: None,
        };
        run(&mut Machine::default(), &program, &place)
    }

    pub(crate) fn row(&self, definition: &Definition) -> Vec<f32> {
        self.with(definition, |machine, program, place| {
            machine.row(program, place).expect("a token is left").end
        })
    }

    pub(crate) fn draw(&self, definition: &Definition) -> Outcome<Token> {
        self.with(definition, |machine, program, place| {
            machine.draw(program, place).expect("a token is left")
        })
    }
}

pub(crate) fn shape(vocab_size: usize) -> RowShape {
    RowShape { vocab_size, n_positions: 4096 }
}

/// The softmax, in f64.
pub(crate) fn softmax(row: &[f64]) -> Vec<f64> {
    let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = row.iter().map(|x| (x - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / sum).collect()
}
