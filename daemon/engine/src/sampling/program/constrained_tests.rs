//! A program with its constraint written out draws what it draws under the constraint.

use std::sync::Arc;

use trellis_programs::{Source, library, random};

use super::*;
use crate::batch::{OutputFault, Token};
use crate::sampling::{Bias, Sampler, Scratch, TokenMask, philox4x32, sample_by_program};

const SHAPE: RowShape = RowShape { vocab_size: 65, n_positions: 512 };
const N: u32 = SHAPE.vocab_size as u32;

type Drawn = Result<(Token, ProgramState, [f32; N_REPORTS_MAX]), OutputFault>;

struct Case {
    put_on: PutOn,
    logits: Vec<f32>,
    members: Vec<Vec<f32>>,
    history: Vec<Token>,
    constraint: Arc<TokenMask>,
}

impl Case {
    fn random(definition: Definition, seed: u32) -> Option<Self> {
        let program = Arc::new(Program::new(definition, SHAPE).ok()?);
        let words = |idx: u32| philox4x32([idx, seed, 0, 0], [5, 6]);
        let mask = |which: u32, n: u32| {
            let mut mask = TokenMask::none(SHAPE.vocab_size);
            (0..N).for_each(|token| mask.set(token, words(1000 * which + token)[0].is_multiple_of(n)));
            Arc::new(mask)
        };
        let logits = |which: u32| {
            let logit = |token: u32| match words(1000 * which + token)[1] % 16 {
                0 => f32::NEG_INFINITY,
                1 => 2.0,
                x => x as f32 / 2.0 - 4.0 + (words(1000 * which + token)[2] % 1000) as f32 / 800.0,
            };
            (0..N).map(logit).collect::<Vec<f32>>()
        };
        let dense = (0..N).map(|token| (words(token)[3] % 100) as f32 / 30.0).collect();
        let put_on = PutOn {
            parameters: (0..4).map(|idx| (words(idx)[0] % 90) as f32 / 11.0 - 1.0).collect(),
            masks: vec![mask(2, 2), mask(3, 3)],
            biases: vec![Arc::new(Bias::Dense(dense))],
            ..PutOn::new(program)
        };
        Some(Self {
            put_on,
            logits: logits(0),
            members: (0..seed % 4).map(|which| logits(10 + which)).collect(),
            history: (0..40).map(|idx| words(idx)[2] % 9).collect(),
            constraint: mask(1, 1 + seed % 40),
        })
    }

    fn members(&self) -> Vec<&[f32]> {
        self.members.iter().map(Vec::as_slice).collect()
    }

    /// As the engine draws under a constraint.
    fn under(&self) -> Drawn {
        let sampler = Sampler { seed: 7, program: Some(Box::new(self.put_on.clone())), ..Sampler::greedy() };
        let (start, within) = (self.put_on.start, Some(&*self.constraint));
        let before = self.history.len().into();
        let scratch = &mut Scratch::default();
        let draw = DrawPlace { members: &self.members(), before, seed: sampler.seed, start, within };
        sample_by_program(&self.logits, &self.history, &sampler, draw, scratch)
            .map(|(candidate, left)| (candidate.token, left.next.numbers, left.reports))
    }

    /// Where the constraint is nothing but the operation's mask.
    fn written_out(&self) -> Drawn {
        let program = self.put_on.program.constrained();
        let n_tokens = self.history.len();
        let place = DrawInputs {
            logits: &self.logits,
            members: &self.members(),
            history: &self.history,
            n_tokens,
            position: n_tokens as u64,
            n_drawn: self.put_on.start.n_drawn,
            seed: 7,
            parameters: &self.put_on.parameters,
            state: self.put_on.start.numbers,
            masks: &self.put_on.masks,
            biases: &self.put_on.biases,
            constraint: Some(&self.constraint),
            within: None,
        };
        Machine::default().draw(&program, &place).map(|out| (out.end, out.state, out.reports))
    }
}

#[test]
fn a_constraint_written_out_leaves_the_same_tokens_state_and_reports() {
    let (mut n_drawn, mut n_faults, mut n_asking) = (0, 0, 0);
    for seed in 0..3000u32 {
        let definition = random::definition(u64::from(seed), 8 + seed as usize % 121);
        let Some(case) = Case::random(definition, seed) else { continue };
        let (under, written_out) = (case.under(), case.written_out());
        assert_eq!(format!("{under:?}"), format!("{written_out:?}"), "{seed}: {:?}", case.put_on.program);
        n_asking += usize::from(case.put_on.program.asks_for_constraint());
        match under {
            Ok((token, ..)) => {
                assert!(case.constraint.allows(token));
                n_drawn += 1;
            }
            Err(_) => n_faults += 1,
        }
    }
    println!("{n_drawn} drawn, {n_faults} without a token, {n_asking} ask for the constraint");
    assert!(n_drawn > 500 && n_faults > 100 && n_asking > 100);
}

#[test]
fn a_token_from_elsewhere_is_drawn_only_where_the_constraint_allows_it() {
    let definition = Definition::build(|b| b.parameter_token(0));
    for seed in 0..200 {
        let case = Case::random(definition.clone(), seed).expect("it is in order");
        let token = (case.put_on.parameters[0].max(0.0) as Token).min(N - 1);
        let expected = if case.constraint.allows(token) { Some(token) } else { None };
        assert_eq!(case.under().ok().map(|(token, ..)| token), expected);
        assert_eq!(case.written_out().ok().map(|(token, ..)| token), expected);
    }
}

#[test]
fn a_sampler_of_the_library_becomes_three_operations_longer() {
    let definition = Definition::build(|b| library::top_p(b.logits(), 0.9).draw(Source::SEED));
    let program = Program::new(definition, SHAPE).expect("it is in order");
    let constrained = program.constrained();
    let n_more = constrained.definition().operations.len() - program.definition().operations.len();
    // The mask, the logits under it, the row of the draw under it; −∞ was there.
    assert_eq!(n_more, 3);
    assert_ne!(constrained.id(), program.id());
    assert_eq!(constrained.id(), program.constrained().id());
}
