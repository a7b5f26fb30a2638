//! Single queries on the device against the reference in f64.

use super::super::attention::{Attention, AttentionShape, Cuttings, Form};
use super::super::attention_case::{Case, HEADS, Modules, shape};
use super::super::shares::Cutting;
use super::*;
use crate::ops::common::check::{DTYPES, assert_compiles};
use crate::testing::gpu;

#[test]
fn compiles() {
    for (dtype, head_dim) in
        [(Dtype::Bf16, 128), (Dtype::F16, 64), (Dtype::F32, 64), (Dtype::F32, 256), (Dtype::Bf16, 256)]
    {
        let shape = shape(dtype, 8, 2, head_dim);
        let blocks = [Some(Blocks::whole(&shape)), Blocks::many(&shape)];
        blocks.into_iter().flatten().for_each(|blocks| assert_compiles(AttentionDecode::source(blocks)));
    }
}

#[test]
fn blocks_fit_the_smallest_devices() {
    for dtype in DTYPES {
        for head_dim in (8..=256).step_by(8) {
            // What a block may ask for on sm_86 and sm_89.
            let shape = shape(dtype, 8, 2, head_dim);
            for blocks in [Some(Blocks::whole(&shape)), Blocks::many(&shape)].into_iter().flatten() {
                assert!(blocks.shared_bytes <= 99 << 10, "{dtype:?}, {head_dim}");
            }
        }
    }
}

/// Everything through the kernel for single queries, with so many workers.
fn singles(attention: &Attention, n_workers: usize) -> Cuttings {
    let single = Cutting { n_workers, ..attention.cuttings().single };
    Cuttings { single, tiles: None, n_single_tokens_max: usize::MAX, many: None, ..attention.cuttings() }
}

fn check(
    modules: &mut Modules,
    shape: AttentionShape,
    rows: &[(usize, usize)],
    window: Option<usize>,
    n_workers: &[usize],
) {
    let attention = modules.get(shape);
    let case = Case::new(shape, rows, window);
    let most = attention.cuttings().single.n_workers;
    for n_workers in n_workers.iter().map(|&n| n.min(most)) {
        let device = case.upload(&modules.test, &attention, &singles(&attention, n_workers));
        assert_eq!(device.forms(), [Form::Single]);
        device.run(&modules.test, &attention);
        case.assert_outputs(&modules.test, &device);
    }
}

/// (tokens, position of the first) of each row: contexts of 1, 15, 16, 17, 63, 64, 65 and 1000 positions, and rows
/// of a few tokens.
const MIXED: [(usize, usize); 10] =
    [(1, 0), (1, 14), (1, 15), (1, 16), (1, 62), (1, 63), (1, 64), (1, 999), (5, 125), (2, 0)];

#[test]
fn agrees_with_the_reference() {
    let Some(mut modules) = gpu().map(Modules::new) else { return };
    for dtype in DTYPES {
        for (n_heads, n_kv_heads, head_dim) in HEADS {
            let shape = shape(dtype, n_heads, n_kv_heads, head_dim);
            check(&mut modules, shape, &MIXED, None, &[1, 2, 7, 128]);
        }
    }
}

/// Contexts by the hundred, one of them long, and so few workers that most are cut.
#[test]
fn many_contexts_agree() {
    let Some(mut modules) = gpu().map(Modules::new) else { return };
    for (dtype, head_dim) in [(Dtype::Bf16, 64), (Dtype::F16, 128)] {
        let shape = shape(dtype, 8, 2, head_dim);
        let attention = modules.get(shape);
        let many = attention.cuttings().many.expect("a form of its own");
        for (n_workers, n_rows) in [(many.n_workers, 2 * many.n_workers), (7, 40)] {
            let rows: Vec<_> =
                (0..n_rows).map(|idx| (1, if idx == 5 { 3000 } else { idx * 7 % 200 })).collect();
            for window in [None, Some(50)] {
                let case = Case::new(shape, &rows, window);
                let cuttings = Cuttings { many: Some(Cutting { n_workers, ..many }), ..attention.cuttings() };
                let device = case.upload(&modules.test, &attention, &cuttings);
                assert_eq!(device.forms(), [Form::Many]);
                device.run(&modules.test, &attention);
                case.assert_outputs(&modules.test, &device);
            }
        }
    }
}

#[test]
fn every_group_agrees() {
    let Some(mut modules) = gpu().map(Modules::new) else { return };
    for group in (1..=9).chain([16]) {
        let shape = shape(Dtype::Bf16, 2 * group, 2, 64);
        check(&mut modules, shape, &[(1, 200), (8, 0), (3, 300)], None, &[3]);
    }
}

#[test]
fn a_window_hides_what_lies_before_it() {
    let Some(mut modules) = gpu().map(Modules::new) else { return };
    for dtype in DTYPES {
        for window in [1, 16, 50, 64, 333, 5000] {
            for head_dim in [64, 128] {
                for n_heads in [1, 4] {
                    let shape = shape(dtype, n_heads, 1, head_dim);
                    check(&mut modules, shape, &MIXED, Some(window), &[1, 3, 20]);
                }
            }
        }
    }
}

#[test]
fn long_contexts_agree() {
    let Some(mut modules) = gpu().map(Modules::new) else { return };
    for dtype in DTYPES {
        for head_dim in [64, 128] {
            let rows = [(1, 8191), (1, 3000), (1, 1)];
            check(&mut modules, shape(dtype, 8, 2, head_dim), &rows, None, &[1, 5, 33, 128]);
        }
    }
}

#[test]
fn many_launches_give_the_same_bits() {
    let Some(mut modules) = gpu().map(Modules::new) else { return };
    let shape = shape(Dtype::Bf16, 8, 2, 128);
    let attention = modules.get(shape);
    let test = &modules.test;
    let case = Case::new(shape, &[(1, 4000), (1, 900), (2, 2000), (1, 30)], None);
    let device = case.upload(test, &attention, &singles(&attention, 40));
    device.run(test, &attention);
    let first = device.out_bits(test);
    for _ in 0..50 {
        device.run(test, &attention);
        assert_eq!(device.out_bits(test), first);
    }
}

/// Prints, with `--ignored --nocapture`, bytes a second for the 8B and 1B shapes, for several numbers of workers.
#[test]
#[ignore = "measures"]
fn speed() {
    let Some(mut modules) = gpu().map(Modules::new) else { return };
    for (head_dim, rows) in [
        (128, vec![(1, 1279); 256]),
        (64, vec![(1, 1279); 256]),
        (128, vec![(1, 1279); 32]),
        (64, vec![(1, 1279); 32]),
        (128, vec![(1, 1279)]),
        (64, vec![(1, 8191)]),
        (128, vec![(1, 131_071)]),
        (128, [vec![(1, 255); 31], vec![(1, 99_999)]].concat()),
    ] {
        let attention = modules.get(shape(Dtype::Bf16, 32, 8, head_dim));
        let test = &modules.test;
        let most = attention.cuttings().single.n_workers;
        let n_positions: usize = rows.iter().map(|&(n_tokens, position)| position + n_tokens).sum();
        for n_workers in [4, 8, 10, 16, 20, most * 3 / 4, most] {
            let cuttings = singles(&attention, n_workers);
            let device = Case::random_on_device(test, &attention, &cuttings, &rows);
            let seconds = device.seconds(test, || device.launch(test, &attention));
            let n_bytes = 2.0 * (n_positions * 8 * head_dim * 2) as f64;
            println!(
                "32/8 heads of {head_dim}, {} contexts of {} and less, {n_workers} workers of {most}: {:.1} µs, \
                 {:.0} GB/s",
                rows.len(),
                rows[rows.len() - 1].1 + 1,
                seconds * 1e6,
                n_bytes / seconds * 1e-9
            );
        }
    }
}
