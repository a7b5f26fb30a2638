use std::collections::BTreeMap;

use trellis_engine::sampling::program::{Definition, Machine, Program, RowShape};
use trellis_programs::{Source, library, random};

use super::super::common::check::assert_compiles_for;
use super::super::program_case::{
    CaseRow, Host, Launched, difference, hard_logits, kernel, plain_logits, run, run_small,
};
use super::super::program_library::library_programs;
use super::super::program_plan::EncodedProgram;
use super::*;
use crate::testing::{Random, gpu};

/// Rows of one launch.
const N_ROWS: usize = 64;

/// What a row comes to, and the state that lies where it goes.
type Answer = (ProgramOutput, [f32; 8]);

fn bits((output, state_out): &Answer) -> (u32, u32, Vec<u32>) {
    let numbers = output.reports.iter().chain(&output.state).chain(state_out);
    (output.token, output.fault_code, numbers.map(|x| x.to_bits()).collect())
}

fn shape(vocab_size: usize) -> RowShape {
    RowShape { vocab_size, n_positions: 512 }
}

/// Runs the rows on the device and says how many answers differ from the CPU's.
fn n_different(rows: &[(String, CaseRow)], vocab_size: usize, answers: &[Answer]) -> usize {
    let mut machine = Machine::default();
    let mut n = 0;
    for ((name, row), answer) in rows.iter().zip(answers) {
        if let Some(difference) = difference(&row.expected(&mut machine), answer) {
            n += 1;
            if n <= 3 {
                println!("{name}, {vocab_size} tokens: {difference}\n{:?}\n", row.program.definition());
            }
        }
    }
    n
}

fn compare(rows: Vec<(String, CaseRow)>, vocab_size: usize) -> usize {
    let Some(gpu) = gpu() else { return 0 };
    let (names, rows): (Vec<_>, Vec<_>) = rows.into_iter().unzip();
    // Mostly more chains than the kernels for some take, and then no more than they do: a bucket has one more.
    let all: Vec<&CaseRow> = rows.iter().collect();
    let answers = run(&gpu, &all, 2, vocab_size);
    for n_chains in [N_CHAINS_SOME, N_CHAINS_FEW, N_CHAINS_LEAST / 2] {
        let some = all.chunks(3 * (n_chains - 1));
        let of_some: Vec<Answer> = some.flat_map(|rows| run(&gpu, rows, 3, vocab_size)).collect();
        let is_other = |(many, some): &(&Answer, &Answer)| bits(many) != bits(some);
        let n_other = answers.iter().zip(&of_some).filter(is_other).count();
        assert_eq!(
            n_other,
            0,
            "of {} rows differ between launches of many and of {n_chains} chains",
            rows.len()
        );
    }
    for kind in [ProgramKind::SinglePass, ProgramKind::Passes] {
        let small: Vec<usize> = (0..rows.len()).filter(|&idx| rows[idx].plan.kind() <= kind).collect();
        for n_rows in [64, 20, 5] {
            for some in small.chunks(n_rows) {
                let rows: Vec<&CaseRow> = some.iter().map(|&idx| &rows[idx]).collect();
                for (&idx, answer) in some.iter().zip(run_small(&gpu, &rows, vocab_size, kind)) {
                    let name = &names[idx];
                    assert_eq!(bits(&answers[idx]), bits(&answer), "{name}, {kind:?} of {n_rows} rows");
                }
            }
        }
    }
    n_different(&names.into_iter().zip(rows).collect::<Vec<_>>(), vocab_size, &answers)
}

#[test]
fn source_compiles_for_every_architecture() {
    for capability in [(8, 0), (9, 0)] {
        sources(capability).into_iter().for_each(|source| assert_compiles_for(source, capability));
    }
}

#[test]
fn there_is_a_kernel_for_any_number_of_chains() {
    for capability in [(8, 0), (9, 0)] {
        let shapes = shapes(capability);
        assert!(shapes.is_sorted_by_key(|shape| shape.n_chains_max), "{shapes:?}");
        assert_eq!(shapes.last().map(|shape| shape.n_chains_max), Some(usize::MAX));
        assert!(capability >= (9, 0) || shapes.iter().all(|shape| shape.n_blocks == 1), "{shapes:?}");
    }
}

#[test]
fn a_device_that_does_not_take_large_clusters_has_a_kernel_for_every_chain_all_the_same() {
    let refused = || CudaError::Call {
        call: "cuOccupancyMaxActiveClusters",
        code: None,
        reason: "not supported".to_owned(),
    };
    let shapes = shapes((9, 0));
    let large = shapes.iter().filter(|shape| shape.n_blocks > N_CLUSTER_BLOCKS);
    assert!(large.clone().count() > 0);
    for &shape in large {
        let n_chains = |n_clusters| with_room(shape, n_clusters).map(|shape| shape.n_chains_max);
        assert_eq!(n_chains(Ok(100)), Some(shape.n_chains_max));
        assert_eq!(n_chains(Ok(3)), Some(3), "others would wait for one of them to end");
        assert_eq!((n_chains(Ok(0)), n_chains(Err(refused()))), (None, None));
    }
    let others: Vec<&Shape> = shapes.iter().filter(|shape| shape.n_blocks <= N_CLUSTER_BLOCKS).collect();
    assert_eq!(others.last().map(|shape| shape.n_chains_max), Some(usize::MAX));
}

#[test]
fn random_programs_are_those_of_the_cpu() {
    if gpu().is_none() {
        return;
    }
    let mut names: BTreeMap<&str, usize> = BTreeMap::new();
    let (mut n_run, mut n_refused, mut n_wrong, mut seed) = (0, 0, 0, 0);
    // Most over short rows, which take the CPU no time.
    let plan = [(1, 100), (2, 60), (31, 500), (33, 500), (4096, 700), (128_256, 80), (151_936, 60)];
    for (vocab_size, n_programs) in plan {
        let end = n_run + n_programs;
        while n_run < end {
            let mut rows = Vec::new();
            while rows.len() < N_ROWS.min(end - n_run) {
                seed += 1;
                let definition = random::definition(seed, 8 + seed as usize % 121);
                let Ok(program) = Program::new(definition, shape(vocab_size)) else { continue };
                let program = if seed % 3 == 0 { program.constrained() } else { program };
                let Ok(plan) = EncodedProgram::new(&program) else {
                    n_refused += 1;
                    continue;
                };
                for operation in &program.definition().operations {
                    *names.entry(operation.name()).or_default() += 1;
                }
                rows.push((format!("seed {seed}"), CaseRow::full(program, plan, vocab_size, seed)));
            }
            n_run += rows.len();
            n_wrong += compare(rows, vocab_size);
        }
    }
    println!("{n_run} programs, {n_refused} refused; {names:?}");
    assert_eq!(n_wrong, 0, "of {n_run} programs");
    assert!(100 * n_refused <= n_run, "{n_refused} refused");
    assert!(names.values().all(|&n| n >= 100), "{names:?}");
}

#[test]
fn samplers_of_the_library_are_those_of_the_cpu() {
    if gpu().is_none() {
        return;
    }
    let mut n_wrong = 0;
    for vocab_size in [1, 33, 5000, 128_256] {
        let mut random = Random(vocab_size as u64);
        let mut rows = Vec::new();
        for (name, definition) in library_programs() {
            for seed in 0..3 {
                let program = Program::new(definition.clone(), shape(vocab_size)).expect("it is in order");
                let logits = match seed {
                    0 | 1 => plain_logits(&mut random, vocab_size),
                    _ => hard_logits(&mut random, vocab_size),
                };
                let mut row = CaseRow::plain(program, logits, seed);
                row.history = (0..90).map(|_| random.below(vocab_size.min(12)) as u32).collect();
                row.members = vec![plain_logits(&mut random, vocab_size)];
                rows.push((name.to_owned(), row));
            }
        }
        n_wrong += compare(rows, vocab_size);
    }
    assert_eq!(n_wrong, 0);
}

/// Rows in which selections find no bin that is small enough to be listed, or nothing at all.
#[test]
fn selections_end_whatever_the_row_is() {
    if gpu().is_none() {
        return;
    }
    let mut n_wrong = 0;
    for vocab_size in [1, 31, 4096, 20_011, 128_256] {
        let mut random = Random(3);
        let mut steps = vec![1.5; vocab_size];
        steps.iter_mut().for_each(|x| *x -= random.below(3) as f32);
        let mut alone = vec![f32::NEG_INFINITY; vocab_size];
        alone[vocab_size / 3] = -1e30;
        let near: Vec<f32> =
            (0..vocab_size).map(|_| 1.0 + random.below(1000) as f32 * f32::EPSILON).collect();
        let far: Vec<f32> = random.normals(vocab_size).iter().map(|x| x * 1e20).collect();
        let all = [vec![-2.0; vocab_size], steps, alone, near, far, vec![f32::NEG_INFINITY; vocab_size]];
        let mut rows = Vec::new();
        for (idx, logits) in all.iter().enumerate() {
            for k in [0.0, 1.0, 5.5, 2000.0, 1e5, 3e38] {
                let definition = Definition::build(|b| {
                    let x = b.logits();
                    let (kept, p) = (x.largest(k), b.constant(k / 2001.0));
                    b.report(kept.count());
                    b.report(x.nucleus(p).count());
                    b.report((-x).max_over(x.nucleus_by(-x, p)));
                    x.keep(kept).draw(Source::SEED)
                });
                let program = Program::new(definition, shape(vocab_size)).expect("it is in order");
                rows.push((format!("row {idx}, {k}"), CaseRow::plain(program, logits.clone(), idx as u64)));
            }
        }
        n_wrong += compare(rows, vocab_size);
    }
    assert_eq!(n_wrong, 0);
}

/// What is timed, by name.
fn timed_programs() -> [(&'static str, Definition); 6] {
    // 12 operations each.
    let one_reduction = Definition::build(|b| {
        let x = b.logits() / 0.8;
        (0..8).fold(x, |x, idx| if idx % 2 == 0 { x + 0.8 } else { x - 0.8 }).draw(Source::SEED)
    });
    let two_reductions = Definition::build(|b| {
        let x = b.logits() / 0.8;
        let bound = -(4.0 - x.max());
        x.keep(x.gt(bound)).draw(Source::SEED)
    });
    [
        ("greedy", Definition::build(|b| library::greedy(b.logits()))),
        ("draw at a temperature", Definition::build(|b| (b.logits() / 0.8).draw(Source::SEED))),
        ("12 operations that read once", one_reduction),
        ("two reductions", two_reductions),
        ("typical 0.9", Definition::build(|b| library::typical(b.logits(), 0.9).draw(Source::SEED))),
        (
            "top-k 50, top-p 0.95",
            Definition::build(|b| library::top_p(library::top_k(b.logits(), 50.0), 0.95).draw(Source::SEED)),
        ),
    ]
}

/// Medians over launches, at one row and at many, beside what the programs cost.
#[test]
#[ignore = "times launches"]
fn speed() {
    const VOCAB_SIZE: usize = 128_256;
    let Some(gpu) = gpu() else { return };
    let mut random = Random(1);
    let normal = plain_logits(&mut random, VOCAB_SIZE);
    let kernel = kernel(&gpu);
    let heads = ["1", "1, equal", "32", "32, equal", "256", "256, equal"].map(|head| format!(" {head:>14}"));
    println!("{:<30} {:>5}{}", "us", "cost", heads.concat());
    for (name, definition) in timed_programs() {
        let program = Program::new(definition, shape(VOCAB_SIZE)).expect("it is in order");
        let cost = program.cost();
        let mut line = format!("{name:<30} {cost:>5.1}");
        for n_rows in [1, 32, 256] {
            for logits in [&normal, &vec![0.5; VOCAB_SIZE]] {
                let row = |idx| CaseRow::plain(program.clone(), logits.clone(), idx as u64);
                let rows: Vec<CaseRow> = (0..n_rows).map(row).collect();
                let host = Host::of(&rows.iter().collect::<Vec<_>>(), 1);
                let launched = Launched::new(&gpu, &host, VOCAB_SIZE, rows[0].plan.kind());
                let time = gpu.median_us(|| launched.run(&gpu, &kernel, VOCAB_SIZE));
                line += &format!(" {time:>14.1}");
            }
        }
        println!("{line}");
    }
}

/// As [`speed`], of one row whose kernel and logits are no longer in the device's cache: medians over launches, each behind
/// the writing of more memory than the cache holds.
#[test]
#[ignore = "times launches"]
fn speed_with_a_cold_cache() {
    const VOCAB_SIZE: usize = 128_256;
    let Some(gpu) = gpu() else { return };
    let elsewhere = gpu.gpu.allocate("a buffer", 256 << 20).expect("memory");
    let evict = || elsewhere.slice().fill(&gpu.stream, 1).expect("filled");
    let empty = gpu.median_us(evict);
    let normal = plain_logits(&mut Random(1), VOCAB_SIZE);
    let kernel = kernel(&gpu);
    for (name, definition) in timed_programs() {
        let program = Program::new(definition, shape(VOCAB_SIZE)).expect("it is in order");
        let row = CaseRow::plain(program, normal.clone(), 0);
        let launched = Launched::new(&gpu, &Host::of(&[&row], 1), VOCAB_SIZE, row.plan.kind());
        let time = gpu.median_us(|| {
            evict();
            launched.run(&gpu, &kernel, VOCAB_SIZE);
        });
        println!("{name:<30} {:>14.1} us", time - empty);
    }
}
