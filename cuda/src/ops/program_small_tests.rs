use std::collections::BTreeMap;

use trellis_engine::sampling::program::{Definition, Machine, Program, RowShape};
use trellis_programs::{BiasId, Builder, MaskId, Noise, Row, Set, Source, Token, library, random};

use super::super::program_case::{CaseRow, difference, plain_logits, run_small};
use super::super::program_library::library_programs;
use super::super::program_plan::EncodedProgram;
use super::ProgramKind::{self, Any, Passes, SinglePass};
use crate::testing::{Random, gpu};

fn program(definition: Definition, vocab_size: usize) -> Program {
    Program::new(definition, RowShape { vocab_size, n_positions: 512 }).expect("it is in order")
}

fn kind(definition: Definition) -> ProgramKind {
    EncodedProgram::new(&program(definition, 128_256)).expect("it fits").kind()
}

/// The samplers of the library, and what a guest may write.
#[test]
fn a_program_takes_the_kernel_for_what_it_does() {
    let expected = [
        (SinglePass, &["greedy", "draw", "guidance", "unigram", "kgw", "gumbel watermark"][..]),
        (Passes, &["temperature", "dynamic temperature", "min-p", "epsilon", "contrastive"]),
        (Any, &["top-k", "top-p", "typical", "top-n-sigma", "mirostat", "repetition", "no repeat", "chain"]),
    ];
    let library = library_programs();
    for (expected, names) in expected {
        for name in names {
            let (_, definition) = library.iter().find(|of| of.0 == *name).expect("the library has it");
            assert_eq!(kind(definition.clone()), expected, "{name}");
        }
    }
    type Write = for<'b> fn(&'b Builder) -> Token<'b>;
    let written: [(&str, ProgramKind, Write); 10] = [
        ("a temperature", SinglePass, |b| (b.logits() / 0.8).draw(Source::SEED)),
        ("twelve operations", SinglePass, |b| {
            let x = b.logits() / 0.8;
            (0..8).fold(x, |x, idx| if idx % 2 == 0 { x + 0.8 } else { x - 0.8 }).draw(Source::SEED)
        }),
        ("what is given", SinglePass, |b| {
            let x = b.logits() + b.bias(BiasId(0)) * b.parameter(0);
            x.keep(b.mask(MaskId(0))).draw(Source::SEED)
        }),
        ("a draw with the largest beside it", SinglePass, |b| {
            b.report(b.logits().max());
            b.logits().draw(Source::SEED)
        }),
        ("a row over another", SinglePass, |b| (b.logits() / (b.logits().abs() + 1.0)).argmax()),
        ("a bound by the largest", Passes, |b| {
            let x = b.logits();
            x.keep(x.gt(x.max() - 4.0)).draw(Source::SEED)
        }),
        ("a count", Passes, |b| {
            b.report(b.logits().gt(1.0).count());
            b.logits().argmax()
        }),
        ("a sum", Any, |b| {
            b.report(b.logits().sum_over(b.all()));
            b.logits().argmax()
        }),
        ("the value at the token", Any, |b| {
            let token = b.logits().argmax();
            b.report(b.logits().at(token));
            token
        }),
        ("tokens of the context", Any, |b| (b.logits() - b.counts(None)).argmax()),
    ];
    for (name, expected, write) in written {
        assert_eq!(kind(Definition::build(write)), expected, "{name}");
    }
}

/// A program of so many operations by chance over rows and sets, which gathers something that later ones take up to
/// `n_reductions` times.
fn elementwise(seed: u64, n_operations: usize, n_reductions: usize) -> Definition {
    let mut random = Random(seed);
    Definition::build(|b| {
        let mut rows: Vec<Row<'_>> = vec![b.logits()];
        let mut sets: Vec<Set<'_>> = vec![b.all()];
        let mut found = b.parameter(0);
        for idx in 0..n_operations {
            let n = rows.len();
            if idx % 4 == 3 && idx / 4 < n_reductions {
                let (row, set) = (rows[n - 1], sets[sets.len() - 1]);
                found = match random.below(6) {
                    0 => row.max(),
                    1 => row.max_over(set),
                    2 => row.log_sum_exp_over(set),
                    3 => row.entropy(),
                    4 => set.count(),
                    _ => row.log_sum_exp(),
                };
            }
            // The last ones more often: what is not used again needs no register.
            let (x, y) = (rows[n - 1 - random.below(n.min(2))], rows[random.below(n)]);
            let (set, other) = (sets[sets.len() - 1], sets[random.below(sets.len())]);
            let number = match random.below(4) {
                0 => b.parameter(random.below(3) as u8),
                1 | 2 if n_reductions > 0 => found,
                1 => b.constant([0.0, -1.0, 1e38, 1e-40, f32::NEG_INFINITY][random.below(5)]),
                _ => b.constant(random.below(4001) as f32 / 1000.0 - 2.0),
            };
            match random.below(30) {
                0 => rows.push(x + number),
                1 => rows.push(x - number),
                2 => rows.push(x * number),
                3 => rows.push(x / number),
                4 => rows.push(x.at_least(number)),
                5 => rows.push(x.at_most(number)),
                6 => rows.push(-x),
                7 => rows.push(x.abs()),
                8 => rows.push(x.sqrt()),
                9 => rows.push(x.exp()),
                10 => rows.push(x.ln()),
                11 => rows.push(x + y),
                12 => rows.push(x - y),
                13 => rows.push(x * y),
                14 => rows.push(x / y),
                15 => rows.push(x.at_least(y)),
                16 => rows.push(x.at_most(y)),
                17 => rows.push(b.bias(BiasId(random.below(3) as u8))),
                18 => rows.push(b.member(random.below(2) as u8)),
                19 => {
                    let noise = [Noise::Uniform, Noise::Gumbel][random.below(2)];
                    rows.push(b.noise(noise, Source::Seed { lane: random.below(2) as u16 }));
                }
                20 => rows.push(set.select(x, y)),
                21 => rows.push(x.keep(set)),
                22 => {
                    let compare = [Row::gt, Row::ge, Row::lt, Row::le, Row::eq, Row::ne][random.below(6)];
                    sets.push(compare(x, number));
                }
                23 => {
                    let compare = [Row::gt, Row::ge, Row::lt, Row::le, Row::eq, Row::ne][random.below(6)];
                    sets.push(compare(x, y));
                }
                24 => sets.push(set & other),
                25 => sets.push(set | other),
                26 => sets.push(!set),
                27 => sets.push(b.mask(MaskId(random.below(3) as u8))),
                28 => sets.push(b.constraint()),
                _ => rows.push(x.keep(x.ge(number))),
            }
        }
        let row = rows[rows.len() - 1];
        b.report(found);
        if random.below(2) == 0 {
            b.report(row.max_over(sets[sets.len() - 1]));
        }
        match random.below(2) {
            0 => row.argmax(),
            _ => row.draw(Source::SEED),
        }
    })
}

/// Programs by chance that the kernels of a kind run: such as above, and those of [`random::definition`] that are.
fn programs(kind: ProgramKind, n: usize, vocab_size: usize) -> Vec<(String, CaseRow)> {
    let mut rows = Vec::new();
    for seed in 0.. {
        let n_reductions = if kind == SinglePass { 0 } else { seed as usize % 5 };
        let definition = match seed % 4 {
            0 => random::definition(seed, 5 + seed as usize % 12),
            _ => elementwise(seed, 1 + seed as usize % 24, n_reductions),
        };
        let shape = RowShape { vocab_size, n_positions: 512 };
        let Ok(program) = Program::new(definition, shape) else { continue };
        let program = if seed % 3 == 0 { program.constrained() } else { program };
        let Ok(plan) = EncodedProgram::new(&program) else { continue };
        if plan.kind() == kind {
            rows.push((format!("seed {seed}"), CaseRow::full(program, plan, vocab_size, seed)));
        }
        if rows.len() == n {
            break;
        }
    }
    rows
}

#[test]
fn programs_by_chance_have_every_elementwise_operation() {
    let rows = [programs(SinglePass, 400, 1000), programs(Passes, 400, 1000)];
    let operations = rows.iter().flatten().flat_map(|(_, row)| &row.program.definition().operations);
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    operations.for_each(|operation| *counts.entry(operation.name()).or_default() += 1);
    let wanted = "logits member bias noise neg abs sqrt exp log add sub mul div min max compare and or not mask constraint \
                  select argmax draw reduce count";
    for name in wanted.split_whitespace() {
        assert!(counts.get(name).is_some_and(|&n| n >= 20), "{name}: {counts:?}");
    }
}

#[test]
fn small_programs_are_those_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let mut machine = Machine::default();
    let (mut n_run, mut n_wrong) = (0, 0);
    for (vocab_size, n) in [(1, 60), (31, 200), (33, 200), (1024, 300), (4099, 300), (128_256, 72)] {
        for kind in [SinglePass, Passes] {
            let rows = programs(kind, n, vocab_size);
            // One row, which the most blocks share; some; and all, of which each has few.
            for n_rows in [1, 7, 15, 31, 63, n] {
                for some in rows.chunks(n_rows).take(20) {
                    let cases: Vec<&CaseRow> = some.iter().map(|it| &it.1).collect();
                    for ((name, row), answer) in some.iter().zip(run_small(&gpu, &cases, vocab_size, kind)) {
                        n_run += 1;
                        if let Some(difference) = difference(&row.expected(&mut machine), &answer) {
                            n_wrong += 1;
                            if n_wrong <= 3 {
                                let definition = row.program.definition();
                                println!(
                                    "{name}, {n_rows} rows of {vocab_size}: {difference}\n{definition:?}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }
    assert_eq!(n_wrong, 0, "of {n_run}");
    assert!(n_run > 2000, "{n_run}");
}

/// Rows that no token can be drawn from, and rows of nothing but ties.
#[test]
fn rows_without_a_token_fail_and_of_ties_the_first_wins() {
    let Some(gpu) = gpu() else { return };
    let mut machine = Machine::default();
    for vocab_size in [1, 257, 128_256] {
        let greedy = program(Definition::build(|b| library::greedy(b.logits())), vocab_size);
        let drawn = program(Definition::build(|b| (b.logits() / 0.7).draw(Source::SEED)), vocab_size);
        let bounded = Definition::build(|b| library::min_p(b.logits(), 0.1).draw(Source::SEED));
        let bounded = program(bounded, vocab_size);
        let plain = plain_logits(&mut Random(1), vocab_size);
        let mut rows = Vec::new();
        for program in [greedy, drawn, bounded] {
            for logits in [&vec![f32::NEG_INFINITY; vocab_size], &vec![1.0; vocab_size], &plain] {
                rows.push(CaseRow::plain(program.clone(), logits.clone(), rows.len() as u64));
            }
        }
        for kind in [SinglePass, Passes] {
            let rows: Vec<&CaseRow> = rows.iter().filter(|row| row.plan.kind() <= kind).collect();
            assert!(rows.len() >= 6, "{kind:?}");
            for (row, answer) in rows.iter().zip(run_small(&gpu, &rows, vocab_size, kind)) {
                assert_eq!(
                    difference(&row.expected(&mut machine), &answer),
                    None,
                    "{kind:?}, {vocab_size} tokens"
                );
            }
        }
    }
}
