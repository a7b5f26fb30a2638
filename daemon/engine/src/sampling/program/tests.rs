use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use trellis_programs::{Source, Unary, Value, library, random};

use super::*;
use crate::batch::{OutputFault, Token};
use crate::sampling::{Bias, TokenMask};

const SHAPE: RowShape = RowShape { vocab_size: 37, n_positions: 512 };
const INFINITY: f32 = f32::INFINITY;

fn place<'a>(logits: &'a [f32], history: &'a [Token]) -> DrawInputs<'a> {
    DrawInputs {
        logits,
        members: &[],
        history,
        n_tokens: history.len(),
        position: history.len() as u64,
        n_drawn: 2,
        seed: 9,
        parameters: &[],
        state: ProgramState::default(),
        masks: &[],
        biases: &[],
        constraint: None,
        within: None,
    }
}

fn row_of(definition: Definition, logits: &[f32], history: &[Token]) -> Vec<f32> {
    let shape = RowShape { vocab_size: logits.len(), ..SHAPE };
    let program = Program::new(definition, shape).expect("it is in order");
    Machine::default().row(&program, &place(logits, history)).expect("nothing is drawn").end
}

fn refused(definition: Definition) -> String {
    Program::new(definition, SHAPE).expect_err("it is out of order").to_string()
}

fn of_operations(operations: Vec<Operation>, end: End) -> Definition {
    Definition { operations, end, first_state: Vec::new(), next_state: Vec::new(), reports: Vec::new() }
}

#[test]
fn values_are_never_nan_and_never_above_the_largest_number() {
    let logits = [-INFINITY, -1.0, 0.0, f32::MAX, 1e-40, 2.0];
    let expect = |definition: Definition, expected: [f32; 6]| {
        let row = row_of(definition, &logits, &[]);
        let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&row), bits(&expected), "{row:?} for {expected:?}");
    };
    expect(Definition::build_row(|b| -b.logits()), [f32::MAX, 1.0, -0.0, f32::MIN, -1e-40, -2.0]);
    expect(
        Definition::build_row(|b| b.logits() / 0.0),
        [-INFINITY, -INFINITY, -INFINITY, f32::MAX, f32::MAX, f32::MAX],
    );
    expect(
        Definition::build_row(|b| b.logits().sqrt().at_most(1.5)),
        [-INFINITY, -INFINITY, 0.0, 1.5, 1e-40f32.sqrt(), 2f32.sqrt()],
    );
    expect(Definition::build_row(|b| b.logits() - b.logits()), [-INFINITY, 0.0, 0.0, 0.0, 0.0, 0.0]);
    expect(Definition::build_row(|b| b.logits() * 0.0), [-INFINITY, -0.0, 0.0, 0.0, 0.0, 0.0]);
    // As a number, what IEEE calls NaN is 0.
    expect(
        Definition::build_row(|b| b.logits() * 0.0 + (b.constant(-1.0).ln() + 4.0)),
        [-INFINITY, 4.0, 4.0, 4.0, 4.0, 4.0],
    );
}

#[test]
fn reductions_over_nothing_are_what_is_written_down() {
    let definition = Definition::build(|b| {
        let (x, nothing) = (b.logits(), b.nothing());
        let sum =
            x.sum_over(nothing) + x.mean_over(nothing) + x.variance_over(nothing) + x.entropy_over(nothing);
        b.report(sum + nothing.count());
        b.report(x.max_over(nothing));
        b.report(x.log_sum_exp_over(nothing));
        x.argmax()
    });
    let program = Program::new(definition, SHAPE).expect("it is in order");
    let outcome = Machine::default().draw(&program, &place(&[0.0, 1.0], &[])).expect("a token is left");
    assert_eq!(outcome.reports, [0.0, -INFINITY, -INFINITY, 0.0]);
    assert_eq!(outcome.end, 1);
}

#[test]
fn sums_run_over_a_tree_of_neighbours() {
    // 1e8 + 1 rounds to 1e8: only the tree keeps the ones that stand together.
    let logits = [1e8, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
    let definition = Definition::build(|b| {
        b.report(b.logits().sum_over(b.all()));
        b.logits().argmax()
    });
    let program = Program::new(definition, SHAPE).expect("it is in order");
    let outcome = Machine::default().draw(&program, &place(&logits, &[])).expect("a token is left");
    let tree = ((1e8f32 + 1.0) + (1.0 + 1.0)) + ((1.0 + 1.0) + (1.0 + 0.0));
    assert_eq!(outcome.reports[0], tree);
}

#[test]
fn a_draw_without_a_token_is_the_only_failure() {
    let definition = Definition::build(|b| b.logits().keep(b.nothing()).draw(Source::SEED));
    let program = Program::new(definition, SHAPE).expect("it is in order");
    let outcome = Machine::default().draw(&program, &place(&[0.0, 1.0], &[]));
    assert_eq!(outcome, Err(OutputFault::NothingToDraw));
}

#[test]
fn state_is_what_the_token_before_left() {
    let definition = Definition::build(|b| {
        let n = b.state(3.0);
        n.set(n.get() + 1.0);
        let kept = b.state(7.0);
        b.report(n.get());
        b.report(kept.get());
        b.logits().argmax()
    });
    let program = Program::new(definition, SHAPE).expect("it is in order");
    let mut state = program.first_state();
    for expected in [3.0, 4.0, 5.0] {
        let place = DrawInputs { state, ..place(&[0.0, 1.0], &[]) };
        let outcome = Machine::default().draw(&program, &place).expect("a token is left");
        assert_eq!(outcome.reports[..2], [expected, 7.0]);
        state = outcome.state;
    }
}

#[test]
fn what_is_wrong_is_named_with_its_place() {
    let end = End::Token(Value(1));
    let argmax = |x| Operation::Argmax(Value(x));
    let cases = [
        (of_operations(vec![Operation::Logits; 129], End::Row(Value(0))), "129 operations, at most 128"),
        (of_operations(vec![Operation::Logits, argmax(5)], end), "operation 1, argmax, takes value 5"),
        (of_operations(vec![Operation::Logits, argmax(1)], end), "takes value 1, which is not made before"),
        (of_operations(vec![Operation::All, argmax(0)], end), "argmax, takes a row, and value 0 is a set"),
        (of_operations(vec![Operation::Logits, Operation::All], end), "end is value 1, which is not a token"),
        (of_operations(vec![Operation::Logits], end), "end is value 1, which is not a token"),
        (of_operations(vec![Operation::Constant(f32::NAN)], end), "the number is NaN"),
        (of_operations(vec![Operation::Parameter(16)], end), "the parameter is 16"),
        (of_operations(vec![Operation::State(0)], end), "the number of state is 0"),
        (
            Definition { first_state: vec![0.0], ..of_operations(vec![Operation::Logits, argmax(0)], end) },
            "has 1 numbers of state and leaves 0",
        ),
        (
            Definition { reports: vec![Value(0)], ..of_operations(vec![Operation::Logits, argmax(0)], end) },
            "report is value 0, which is not a number",
        ),
        (
            Definition::build(|b| {
                let mut x = b.logits();
                for _ in 0..9 {
                    x = x.log_softmax() * 0.5;
                }
                x.argmax()
            }),
            "log-softmax, is 9 reductions deep, at most 8",
        ),
        (
            Definition::build_row(|b| {
                (0..12).fold(b.logits(), |x, i| {
                    let other = b.logits().at_least(i as f32).exp();
                    x + other.entropy() + other.variance_over(b.all())
                })
            }),
            "readings of the row, at most 16",
        ),
        (
            Definition::build_row(|b| {
                b.repeats(512, 1024, None) + b.repeats(512, 1023, None) + b.repeats(512, 1022, None)
            }),
            "readings of the row, at most 16",
        ),
        (
            Definition::build_row(|b| (0..5).fold(b.logits(), |x, i| x + b.member(i))),
            "5 operations over members, at most 4",
        ),
    ];
    for (definition, expected) in cases {
        let error = refused(definition);
        assert!(error.contains(expected), "{error}: expected {expected}");
    }
}

#[test]
fn a_check_is_quick_whatever_is_sent() {
    // Each value is used twice by the next: paths double, and values do not.
    let mut operations = vec![Operation::Logits];
    for idx in 0..125u8 {
        operations.push(Operation::Binary(trellis_programs::Binary::Add, Value(idx), Value(idx)));
    }
    operations.push(Operation::Nucleus { order: Value(125), row: Value(0), p: Value(0) });
    let error = refused(of_operations(operations.clone(), End::Row(Value(0))));
    assert!(error.contains("nucleus, takes a number"), "{error}");
    operations.pop();
    assert!(Program::new(of_operations(operations, End::Row(Value(125))), SHAPE).is_ok());
}

#[test]
fn what_nobody_needs_is_neither_paid_for_nor_worked_out() {
    let noise =
        |lane| Operation::NoiseRow { noise: trellis_programs::Noise::Gumbel, source: Source::Seed { lane } };
    let mut operations = vec![Operation::Logits, Operation::Argmax(Value(0))];
    operations.extend((0..120).map(noise));
    let program =
        Program::new(of_operations(operations, End::Token(Value(1))), SHAPE).expect("it is in order");
    let plain = Program::new(Definition::build(|b| b.logits().argmax()), SHAPE).expect("it is in order");
    assert_eq!(program.cost(), plain.cost());
    assert_eq!(program.is_needed.iter().filter(|&&is_needed| is_needed).count(), 2);

    // What is needed is paid for though no reduction looks at it, and few rows are alive at once.
    let at = |n: u16| {
        Definition::build(move |b| {
            let token = b.logits().argmax();
            let rows: Vec<_> =
                (0..n).map(|lane| b.noise(trellis_programs::Noise::Gumbel, Source::Seed { lane })).collect();
            b.report(rows.iter().fold(b.constant(0.0), |sum, row| sum + row.at(token)));
            token
        })
    };
    let cost = Program::new(at(4), SHAPE).expect("it is in order").cost();
    assert!(cost > plain.cost() + 4.0, "{cost}");
    let error = refused(Definition::build(|b| {
        let token = b.logits().argmax();
        let rows: Vec<_> = (0..17).map(|idx| b.logits() + idx as f32).collect();
        b.report(rows.iter().fold(b.constant(0.0), |sum, row| sum + row.at(token)));
        token
    }));
    assert!(error.contains("17 rows and sets that are alive at once, at most 16"), "{error}");
}

#[test]
fn programs_that_have_names_cost_what_is_expected() {
    let shape = RowShape { vocab_size: 128_256, n_positions: 8192 };
    let cost = |definition| Program::new(definition, shape).expect("it is in order").cost();
    let plain = cost(Definition::build(|b| library::temperature(b.logits(), 0.8).draw(Source::SEED)));
    let typical = cost(Definition::build(|b| library::typical(b.logits(), 0.9).draw(Source::SEED)));
    println!("plain {plain}, typical {typical}");
    assert!((2.0..5.0).contains(&plain), "{plain}");
    assert!((5.0..12.0).contains(&typical), "{typical}");
}

/// Logits with everything that is hard: −∞, ties, denormals, the largest numbers.
fn hard_logits(seed: u64, n: usize) -> Vec<f32> {
    let mut numbers = seed;
    let mut next = || {
        numbers = numbers.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (numbers >> 33) as u32
    };
    let mut row: Vec<f32> = (0..n)
        .map(|_| match next() % 16 {
            0 => -INFINITY,
            1 => f32::from_bits(next() % 1000),
            2 => [1e38, -1e38, f32::MAX, f32::MIN][next() as usize % 4],
            3 => 1.5,
            4 => [0.0, -0.0][next() as usize % 2],
            _ => (next() % 20_000) as f32 / 1000.0 - 10.0,
        })
        .collect();
    row[n / 2] = 1.0;
    row
}

#[test]
fn random_programs_run_and_every_operation_is_among_them() {
    let mut names: BTreeMap<&str, usize> = BTreeMap::new();
    let mask = |step: usize| {
        let mut mask = TokenMask::none(SHAPE.vocab_size);
        (0..SHAPE.vocab_size).step_by(step).for_each(|token| mask.set(token as Token, true));
        Arc::new(mask)
    };
    let masks = [mask(1), mask(2), mask(3)];
    let biases = [
        Arc::new(Bias::Dense(hard_logits(1, SHAPE.vocab_size))),
        Arc::new(Bias::Sparse(vec![(1, 4.0), (7, -INFINITY)])),
        Arc::new(Bias::Sparse(Vec::new())),
    ];
    let (mut n_drawn, mut n_refused) = (0, 0);
    for seed in 0..3000u64 {
        let definition = random::definition(seed, 8 + seed as usize % 121);
        let program = match Program::new(definition, SHAPE) {
            Ok(program) => program,
            Err(ProgramError::TooCostly { .. } | ProgramError::TooDeep { .. }) => {
                n_refused += 1;
                continue;
            }
            Err(error) => panic!("program {seed}: {error}"),
        };
        for operation in &program.definition().operations {
            *names.entry(operation.name()).or_default() += 1;
        }
        let logits = hard_logits(seed, SHAPE.vocab_size);
        let other = hard_logits(seed + 1, SHAPE.vocab_size);
        let history: Vec<Token> = (0..seed % 60).map(|idx| ((idx * seed) % 5) as Token).collect();
        let place = DrawInputs {
            members: &[&other, &logits],
            state: program.first_state(),
            parameters: &[0.9, 3.0],
            masks: &masks,
            biases: &biases,
            constraint: Some(&masks[1]),
            ..place(&logits, &history)
        };
        if let Ok(outcome) = Machine::default().draw(&program, &place) {
            n_drawn += 1;
            assert!((outcome.end as usize) < SHAPE.vocab_size);
            let numbers = outcome.state.iter().chain(&outcome.reports);
            assert!(numbers.copied().all(|x| !x.is_nan() && x < INFINITY), "program {seed}: {outcome:?}");
        }
    }
    println!("{n_drawn} of 3000 drew, {n_refused} were refused; {names:?}");
    assert!(n_drawn > 500 && n_refused < 1500, "{n_drawn} drew, {n_refused} were refused");
    assert!(names.len() >= 42, "{names:?}");
    assert!(names.values().all(|&n| n >= 100), "{names:?}");
}

proptest! {
    /// Whatever is sent is taken or refused, and what is taken runs.
    #[test]
    fn what_is_taken_runs(seed in any::<u64>(), idx in 0usize..40, operand in any::<u8>()) {
        let mut definition = random::definition(seed, 40);
        definition.operations[idx] = Operation::Unary(Unary::Abs, Value(operand % 48));
        if let Ok(program) = Program::new(definition, SHAPE) {
            let logits = hard_logits(seed, SHAPE.vocab_size);
            let _ = Machine::default().draw(&program, &place(&logits, &[3, 4, 3]));
        }
    }
}
