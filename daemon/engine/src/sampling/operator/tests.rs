//! What is drawn behind the operator's front is what is drawn over its row, under its set.

use trellis_programs::{Builder, Noise, Row, Source, library, random};

use super::*;
use crate::batch::OutputFault;
use crate::sampling::program::{DrawInputs, DrawPlace, Machine, ProgramState, PutOn};
use crate::sampling::{Bias, Scratch, philox4x32, rank, sample_by_program, sample_under};

const SHAPE: RowShape = RowShape { vocab_size: 65, n_positions: 512 };
const N: u32 = SHAPE.vocab_size as u32;
const KEY: library::KgwKey = library::KgwKey { key: 9, n_tokens: 2 };

/// A front that marks, one that leaves tokens out by what stands before, and one that does both.
fn marked<'b>(b: &'b Builder, which: u32) -> Row<'b> {
    let x = b.logits();
    let noise = b.noise(Noise::Uniform, Source::Key { key: 5, n_tokens: 3, lane: 1 });
    match which {
        0 => library::kgw(x, KEY, 0.5, 3.0),
        1 => x.keep(noise.lt(0.6)),
        _ => library::kgw(x, KEY, 0.25, 2.0).keep(noise.lt(0.9)),
    }
}

fn words(idx: u32, seed: u32) -> [u32; 4] {
    philox4x32([idx, seed, 0, 0], [15, 6])
}

fn operator(seed: u32) -> Option<Operator> {
    let forbidden: Vec<Token> = (0..N)
        .filter(|&token| !seed.is_multiple_of(3) && words(token, seed)[0].is_multiple_of(2 + seed % 5))
        .collect();
    let front = (!seed.is_multiple_of(4)).then(|| Definition::build_row(|b| marked(b, seed % 4 - 1)));
    Operator::new(&forbidden, front, SHAPE).expect("it may stand in front")
}

fn row(which: u32, seed: u32) -> Vec<f32> {
    let logit = |token: u32| match words(1000 * which + token, seed)[1] % 16 {
        0 => f32::NEG_INFINITY,
        1 => 2.0,
        x => x as f32 / 2.0 - 4.0 + (words(1000 * which + token, seed)[2] % 1000) as f32 / 800.0,
    };
    (0..N).map(logit).collect()
}

fn history(seed: u32) -> Vec<Token> {
    (0..40).map(|idx| words(idx, seed)[2] % 9).collect()
}

impl Operator {
    /// What the front makes of a row, by itself.
    fn row_of(&self, logits: &[f32], history: &[Token]) -> Vec<f32> {
        let Some(front) = &self.front else { return logits.to_vec() };
        let place = DrawInputs {
            logits,
            members: &[],
            history,
            n_tokens: history.len(),
            position: history.len() as u64,
            n_drawn: 0,
            seed: 7,
            parameters: &[],
            state: ProgramState::default(),
            masks: &[],
            biases: &[],
            constraint: None,
            within: None,
        };
        Machine::default().row(front, &place).expect("it draws nothing").end
    }

    /// What of this set may be drawn from that row.
    fn set_of(&self, row: &[f32], set: Option<&TokenMask>) -> TokenMask {
        let mut allowed = set.cloned().unwrap_or_else(|| TokenMask::all(SHAPE.vocab_size));
        if let Some(mask) = &self.allowed {
            allowed = allowed.and(mask);
        }
        if self.front.is_some() {
            let mut above = TokenMask::none(SHAPE.vocab_size);
            (0..N).for_each(|token| above.set(token, row[token as usize] > f32::NEG_INFINITY));
            allowed = allowed.and(&above);
        }
        allowed
    }
}

fn mask(which: u32, n: u32, seed: u32) -> Arc<TokenMask> {
    let mut mask = TokenMask::none(SHAPE.vocab_size);
    (0..N).for_each(|token| mask.set(token, words(1000 * which + token, seed)[3].is_multiple_of(n)));
    Arc::new(mask)
}

/// A sampler of this program, as a guest would have it.
fn by(definition: Definition, seed: u32) -> Option<Sampler> {
    let program = Arc::new(Program::new(definition, SHAPE).ok()?);
    let dense = (0..N).map(|token| (words(token, seed)[3] % 100) as f32 / 30.0).collect();
    let put_on = PutOn {
        parameters: (0..4).map(|idx| (words(idx, seed)[0] % 90) as f32 / 11.0 - 1.0).collect(),
        masks: vec![mask(2, 2, seed), mask(3, 3, seed)],
        biases: vec![Arc::new(Bias::Dense(dense))],
        within: seed.is_multiple_of(5).then(|| mask(4, 2, seed)),
        ..PutOn::new(program)
    };
    Some(Sampler { seed: 7, program: Some(Box::new(put_on)), ..Sampler::greedy() })
}

type Drawn = Result<(Token, ProgramState, [f32; 4]), OutputFault>;

/// As backends draw by a sampler's program.
fn drawn(sampler: &Sampler, rows: &[Vec<f32>], history: &[Token], within: Option<&TokenMask>) -> Drawn {
    let members: Vec<&[f32]> = rows[1..].iter().map(Vec::as_slice).collect();
    let before = history.len().into();
    let draw = DrawPlace { members: &members, before, seed: sampler.seed, start: sampler.start(), within };
    sample_by_program(&rows[0], history, sampler, draw, &mut Scratch::default())
        .map(|(candidate, left)| (candidate.token, left.next.numbers, left.reports))
}

#[test]
fn programs_draw_what_they_draw_over_the_row_of_the_front_and_no_token_that_may_not_be_drawn() {
    let (mut n_drawn, mut n_faults, mut n_changed) = (0, 0, 0);
    for seed in 0..3000u32 {
        let definition = random::definition(u64::from(seed), 8 + seed as usize % 121);
        let (Some(operator), Some(sampler)) = (operator(seed), by(definition, seed)) else { continue };
        let (sampler, history) = (Arc::new(sampler), history(seed));
        let n_members = seed as usize % 4;
        let rows: Vec<Vec<f32>> = (0..=n_members as u32).map(|which| row(which, seed)).collect();
        let behind = operator.before(&sampler, Purpose::Draws { n_members });
        let put_on = behind.program.as_ref().expect("it has a program");
        let got = drawn(&behind, &rows, &history, put_on.within.as_deref());
        let fronts: Vec<Vec<f32>> = rows.iter().map(|row| operator.row_of(row, &history)).collect();
        let own = sampler.program.as_ref().and_then(|put_on| put_on.within.as_deref());
        let allowed = operator.set_of(&fronts[0], own);
        // A row of nothing is a fault of the model's, and not of the front.
        let has_one = fronts[0].iter().any(|x| *x > f32::NEG_INFINITY);
        let expected = if has_one { drawn(&sampler, &fronts, &history, Some(&allowed)) } else { continue };
        assert_eq!(format!("{got:?}"), format!("{expected:?}"), "{seed}");
        let alone = drawn(&sampler, &rows, &history, own);
        n_changed += usize::from(alone.as_ref().ok().map(|it| it.0) != got.as_ref().ok().map(|it| it.0));
        match got {
            Ok((token, ..)) => {
                assert!(allowed.allows(token), "{seed}: {token}");
                n_drawn += 1;
            }
            Err(_) => n_faults += 1,
        }
    }
    println!("{n_drawn} drawn, {n_faults} without a token, {n_changed} others than without an operator");
    assert!(n_drawn > 1000 && n_faults > 50 && n_changed > 300);
}

fn chain(seed: u32) -> Sampler {
    let chosen = words(N, seed);
    let is_on = |bit: u32| chosen[0] >> bit & 1 == 1;
    let share = chosen[1] as f32 / u32::MAX as f32;
    Sampler {
        temperature: [0.0, 0.3, 1.0, 4.0][chosen[2] as usize % 4],
        top_k: is_on(0).then_some(1 + chosen[3] % 40),
        top_p: is_on(1).then_some(share.max(1e-6)),
        min_p: is_on(2).then_some(share / 5.0),
        repetition_penalty: if is_on(3) { 1.3 } else { 1.0 },
        frequency_penalty: if is_on(4) { 0.4 } else { 0.0 },
        penalty_last_n: is_on(6).then_some(4),
        bias: if is_on(7) { vec![(0, f32::NEG_INFINITY), (3, 30.0), (5, 90.0)] } else { Vec::new() },
        mask: is_on(8).then(|| mask(4, 2, seed)),
        seed: u64::from(seed),
        ..Sampler::greedy()
    }
}

#[test]
fn chains_draw_what_they_draw_over_the_row_of_the_front_under_the_set() {
    let (mut n_drawn, mut n_of_program) = (0, 0);
    for seed in 0..2000u32 {
        let Some(operator) = operator(seed) else { continue };
        let (sampler, history, logits) = (Arc::new(chain(seed)), history(seed), row(0, seed));
        let front = operator.row_of(&logits, &history);
        let allowed = operator.set_of(&front, sampler.mask.as_deref());
        let position = history.len() as u64;
        let scratch = &mut Scratch::default();
        let expected = sample_under(Some(&allowed), &front, &history, position, &sampler, scratch);
        let behind = operator.before(&sampler, Purpose::Draws { n_members: 0 });
        let got = match &behind.program {
            Some(put_on) => {
                n_of_program += 1;
                let rows = [logits.clone()];
                drawn(&behind, &rows, &history, put_on.within.as_deref()).map(|(token, ..)| token)
            }
            None => {
                let mask = behind.mask.as_deref();
                sample_under(mask, &logits, &history, position, &behind, scratch).map(|it| it.token)
            }
        };
        assert_eq!(got, expected.map(|candidate| candidate.token), "{seed}: {sampler:?}");
        n_drawn += usize::from(got.is_ok());
    }
    assert!(n_drawn > 1000 && n_of_program > 500, "{n_drawn} {n_of_program}");
}

#[test]
fn searches_rank_the_row_of_the_front_and_nothing_that_may_not_come() {
    for seed in 0..600u32 {
        let Some(operator) = operator(seed) else { continue };
        let (history, logits) = (history(seed), row(0, seed));
        let by_chain = Sampler { temperature: 0.0, top_k: None, top_p: None, min_p: None, ..chain(seed) };
        let definition = Definition::build_row(|b| b.bias(trellis_programs::BiasId(0)) + b.logits() * 0.5);
        let by_program = by(definition, seed).expect("it is in order");
        for sampler in [by_chain, by_program] {
            let within = seed.is_multiple_of(2).then(|| mask(6, 2, seed));
            let behind = operator.before(&Arc::new(sampler.clone()), Purpose::Ranks);
            let narrowed = within.as_ref().map(|within| operator.within(within));
            let before = history.len().into();
            let scratch = &mut Scratch::default();
            let got =
                rank(&logits, &history, before, &behind, narrowed.as_deref(), 9, scratch).expect("numbers");
            let logprobs = crate::sampling::Distribution::new(&logits).expect("numbers").logprobs();
            let allowed = operator.set_of(&operator.row_of(&logprobs, &history), within.as_deref());
            assert!(got.iter().all(|candidate| allowed.allows(candidate.token)), "{seed}");
            if operator.front.is_none() {
                let expected = rank(&logits, &history, before, &sampler, Some(&allowed), 9, scratch);
                assert_eq!(Ok(got), expected, "{seed}");
            }
        }
    }
}

#[test]
fn nobody_forces_a_forbidden_token() {
    let forbidden = [3, 7];
    let front = Definition::build_row(|b| library::kgw(b.logits(), KEY, 0.5, 3.0));
    for front in [None, Some(front)] {
        let operator = Operator::new(&forbidden, front, SHAPE).expect("in order").expect("it forbids");
        let force = |definition: Definition| {
            let mut sampler = by(definition, 1).expect("in order");
            let put_on = sampler.program.as_mut().expect("a program");
            let mut only = TokenMask::none(SHAPE.vocab_size);
            only.set(7, true);
            put_on.masks = vec![Arc::new(only)];
            put_on.parameters = vec![7.0];
            let behind = operator.before(&Arc::new(sampler), Purpose::Draws { n_members: 0 });
            let within = behind.program.as_ref().expect("a program").within.clone();
            drawn(&behind, &[row(0, 2)], &history(2), within.as_deref()).map(|(token, ..)| token)
        };
        let mask = trellis_programs::MaskId(0);
        for (what, definition) in [
            ("a token of a parameter", Definition::build(|b| b.parameter_token(0))),
            ("a mask", Definition::build(|b| b.logits().keep(b.mask(mask)).argmax())),
            ("a set of one", Definition::build(|b| b.parameter_token(0).only().row().ln().argmax())),
            ("the others forbidden", Definition::build(|b| b.mask(mask).row().ln().draw(Source::SEED))),
        ] {
            assert_eq!(force(definition), Err(OutputFault::NothingToDraw), "{what}");
        }
        let constant = Definition::build(|b| (b.mask(mask).row() * 1e30).argmax());
        let token = force(constant).expect("others are left");
        assert!(!forbidden.contains(&token), "{token}");
    }
}

#[test]
fn the_longest_program_fits_behind_the_longest_front() {
    // Draws of rows that differ, over as many members as there may be: all that grows behind a front.
    let definition = Definition::build(|b| {
        let members = (0..4).fold(b.logits(), |x, idx| x + b.member(idx));
        let long = (0..111).fold(members, |x, _| x + x).argmax();
        b.parameter(0).select_token(long, (b.member(0) + 1.0).argmax())
    });
    let front = Definition::build_row(|b| {
        let noise = |lane| b.uniform(Source::Key { key: 5, n_tokens: 3, lane });
        let sum = (1..20).fold(noise(0), |sum, lane| sum + noise(lane));
        (0..8).fold(b.logits(), |x, _| x + sum)
    });
    assert!(definition.operations.len() > 120, "{}", definition.operations.len());
    let operator = Operator::new(&[], Some(front), SHAPE).expect("in order").expect("there is a front");
    let sampler = Arc::new(by(definition, 1).expect("in order"));
    let behind = operator.before(&sampler, Purpose::Draws { n_members: 4 });
    let n = behind.program.as_ref().expect("a program").program.definition().operations.len();
    assert!(n <= 256, "{n}");
}

#[test]
fn what_may_not_stand_in_front_is_refused_with_the_operation_and_the_numbers() {
    let refused = |write: fn(&Builder) -> Row<'_>| {
        Operator::new(&[], Some(Definition::build_row(write)), SHAPE).expect_err("it may not").to_string()
    };
    assert_eq!(
        refused(|b| b.logits() + b.parameter(0)),
        "operation 1 of the operator's program is parameter, which may not stand in front of samplers"
    );
    let long = refused(|b| (0..50).fold(b.logits(), |x, i| x + i as f32));
    assert!(long.contains("operations, at most 48 are allowed"), "{long}");
    let deep = refused(|b| (0..9).fold(b.logits(), |x, _| x + x));
    assert_eq!(
        deep,
        "the operator's program has 9 operations that depend on the logits, at most 8 are allowed"
    );
    let token = Definition::build(|b| b.logits().argmax());
    assert!(Operator::new(&[], Some(token), SHAPE).is_err());
    let all: Vec<Token> = (0..N).collect();
    let none_left = Operator::new(&all, None, SHAPE).expect_err("nothing is left");
    assert_eq!(none_left, OperatorError::NothingLeft { n_forbidden: SHAPE.vocab_size });
    let strange = Operator::new(&[N], None, SHAPE).expect_err("no such token");
    assert_eq!(strange, OperatorError::TokenOutOfRange { token: N, vocab_size: SHAPE.vocab_size });
    assert!(Operator::new(&[], None, SHAPE).expect("nothing to do").is_none());
}

#[test]
fn what_comes_of_a_sampler_is_worked_out_once_and_kept_no_longer_than_the_sampler() {
    let operator = operator(1).expect("it does something");
    let sampler = Arc::new(chain(3));
    let behind = operator.before(&sampler, Purpose::Draws { n_members: 0 });
    assert!(Arc::ptr_eq(&behind, &operator.before(&sampler, Purpose::Draws { n_members: 0 })));
    drop(sampler);
    for seed in 0..1000 {
        operator.before(&Arc::new(chain(seed)), Purpose::Draws { n_members: 0 });
    }
    assert_eq!(operator.kept().samplers.len(), 1);
    assert!(operator.kept().programs.len() <= N_KEPT_MAX);
    assert_eq!(Arc::strong_count(&behind), 1);
}
