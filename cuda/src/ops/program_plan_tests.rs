use std::fmt::Write;

use trellis_engine::sampling::program::{Definition, Program, RowShape};
use trellis_programs::{Source, library, random};

use super::super::program_encode::{N_PLAIN_SHIFT, N_SMALL_SHIFT};
use super::super::program_library::library_programs;
use super::*;

const SHAPE: RowShape = RowShape { vocab_size: 128_256, n_positions: 8192 };

fn plan(definition: Definition) -> EncodedProgram {
    let program = Program::new(definition, SHAPE).expect("it is in order");
    EncodedProgram::new(&program).expect("it fits")
}

#[test]
fn programs_of_the_library_fit() {
    for (name, definition) in library_programs() {
        let plan = plan(definition);
        println!("{name}: {} passes, {} entries", plan.n_passes(), plan.entries().len());
        assert!(plan.n_passes() <= 7, "{name} reads the row {} times", plan.n_passes());
    }
}

#[test]
fn nearly_all_random_programs_fit() {
    let (mut n_fit, mut n) = (0, 0);
    let mut refused = String::new();
    for seed in 0..4000u64 {
        let definition = random::definition(seed, 8 + seed as usize % 121);
        let Ok(program) = Program::new(definition, SHAPE) else { continue };
        for program in [program.constrained(), program] {
            n += 1;
            match EncodedProgram::new(&program) {
                Ok(_) => n_fit += 1,
                Err(error) => writeln!(refused, "{seed}: {error}").expect("a text takes lines"),
            }
        }
    }
    println!("{n_fit} of {n} fit\n{refused}");
    assert!(n > 4000 && 100 * n_fit >= 99 * n, "{n_fit} of {n}");
}

/// As many numbers as a program may have: the largest entry of each row of a long chain, for several reductions.
#[test]
fn numbers_of_a_long_chain_are_worked_out_once() {
    let definition = Definition::build(|b| {
        let mut row = b.logits();
        let mut sum = b.constant(0.0);
        for idx in 0..60 {
            row = row + 1.0;
            if idx >= 57 {
                sum = sum + row.log_sum_exp();
            }
        }
        for _ in 0..50 {
            sum = sum + sum;
        }
        b.report(sum);
        b.parameter_token(0)
    });
    let program = Program::new(definition, SHAPE).expect("it is in order");
    for program in [program.constrained(), program] {
        let plan = EncodedProgram::new(&program).expect("it fits");
        assert!(plan.n_passes() <= 5, "{}", plan.n_passes());
    }
}

#[test]
fn what_is_the_same_is_made_once() {
    let twice = plan(Definition::build(|b| {
        b.report(b.logits().max());
        b.report(b.logits().max());
        (b.logits() - b.logits().max()).draw(Source::SEED)
    }));
    let once = plan(Definition::build(|b| {
        let max = b.logits().max();
        b.report(max);
        b.report(max);
        (b.logits() - max).draw(Source::SEED)
    }));
    assert_eq!(twice.n_passes(), 2);
    assert_eq!(twice.entries().len(), once.entries().len());
}

#[test]
fn what_nothing_needs_is_left_out() {
    let plan = plan(Definition::build(|b| {
        let x = b.logits();
        let _ = (x.exp() * 3.0).variance_over(x.gt(0.0));
        x.argmax()
    }));
    // One pass: the best of the logits, which are where they are taken.
    assert_eq!(plan.n_passes(), 1);
    let pass = passes(&plan)[0];
    assert_eq!((pass.0[3], pass.0[0] >> N_PLAIN_SHIFT), (2, 2), "one plain root: {:?}", plan.entries());
}

/// Steps that read the row.
fn passes(plan: &EncodedProgram) -> Vec<Entry> {
    let n_steps = (plan.entries()[0].0[0] & ((1 << N_SMALL_SHIFT) - 1)) as usize;
    let is_pass = |step: &&Entry| {
        [Code::Pass, Code::Largest, Code::Nucleus].iter().any(|&code| step.0[0] & 255 == code as u32)
    };
    plan.entries()[N_HEADER..][..n_steps].iter().filter(is_pass).copied().collect()
}

#[test]
fn usual_samplers_are_plain() {
    let drawn = |row: for<'b> fn(trellis_programs::Row<'b>) -> trellis_programs::Row<'b>| {
        plan(Definition::build(|b| row(b.logits()).draw(Source::SEED)))
    };
    let plans = [
        ("temperature", drawn(|x| library::temperature(x, 0.7))),
        ("min-p", drawn(|x| library::min_p(x, 0.05))),
        ("top-k", drawn(|x| library::top_k(x, 50.0))),
        ("top-p", drawn(|x| library::top_p(library::temperature(x, 0.7), 0.9))),
        ("typical", drawn(|x| library::typical(x, 0.9))),
    ];
    for (name, plan) in plans {
        for pass in passes(&plan) {
            assert!(pass.0[0] >> N_PLAIN_SHIFT > 0, "{name} has {pass:?} that is not plain");
        }
    }
}

/// What follows a row that is kept in part, or comes in another order, has registers.
#[test]
fn what_is_out_of_order_is_not_plain() {
    let drawn = |row: for<'b> fn(trellis_programs::Row<'b>) -> trellis_programs::Row<'b>| {
        plan(Definition::build(|b| row(b.logits()).draw(Source::SEED)))
    };
    let plans = [
        (
            "kept twice",
            drawn(|x| {
                let once = x.keep(x.ge(1.0));
                once.keep(once.ge(2.0))
            }),
        ),
        ("divided twice", drawn(|x| x / 0.7 / 0.7)),
        ("moved three times", drawn(|x| ((x + 1.0) - 2.0) + 3.0)),
    ];
    for (name, plan) in plans {
        let last = *passes(&plan).last().expect("a draw");
        assert_eq!(last.0[0] >> N_PLAIN_SHIFT, 0, "{name}");
    }
}

#[test]
fn a_draw_that_nothing_needs_can_fail() {
    let plan = plan(Definition::build(|b| {
        let x = b.logits();
        let _ = x.keep(b.nothing()).draw(Source::SEED);
        x.argmax()
    }));
    let n_tokens = plan.entries().iter().filter(|entry| entry.0[0] & 255 == Code::Token as u32).count();
    assert!(n_tokens >= 2, "{:?}", plan.entries());
}

#[test]
fn passes_are_as_many_as_reductions_are_deep() {
    let n_passes = |definition| plan(definition).n_passes();
    assert_eq!(n_passes(Definition::build(|b| library::greedy(b.logits()))), 1);
    assert_eq!(n_passes(Definition::build(|b| b.logits().draw(Source::SEED))), 1);
    assert_eq!(n_passes(Definition::build(|b| library::temperature(b.logits(), 0.7).draw(Source::SEED))), 2);
    // max, then ln Σ and entropy, then the draw; a selection reads by itself.
    assert_eq!(n_passes(Definition::build(|b| library::typical(b.logits(), 0.9).draw(Source::SEED))), 3);
    // The largest of a row over another temperature is that of the logits, but where a program asks for it.
    let top_p = Definition::build(|b| library::top_p(b.logits() / 0.8, 0.9).draw(Source::SEED));
    assert_eq!(n_passes(top_p), 2);
}

#[test]
fn what_does_not_fit_is_refused() {
    // Rows of the history are as many as the engine lets a program have.
    let rows = |n_rows: u32| {
        let add = |n| Definition::build(|b| (0..n).fold(b.logits(), |x, n| x + b.counts(Some(n))).argmax());
        Program::new(add(n_rows), SHAPE)
    };
    let most = rows(N_PLANES_MAX as u32).expect("it is in order");
    assert!(EncodedProgram::new(&most).is_ok());
    assert!(rows(N_PLANES_MAX as u32 + 1).is_err());
    let row = Program::new(Definition::build_row(|b| b.logits()), SHAPE).expect("it is in order");
    let error = EncodedProgram::new(&row).expect_err("a row");
    assert_eq!(error, PlanError::EndsInRow);
}
