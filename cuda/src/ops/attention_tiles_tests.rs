//! Tiles of queries on the device against the reference in f64.

use super::super::attention::{Attention, Cuttings, Form};
use super::super::attention_case::{Case, Modules, shape};
use super::*;
use crate::ops::common::check::assert_compiles;
use crate::testing::gpu;

const DTYPES: [Dtype; 2] = [Dtype::Bf16, Dtype::F16];

#[test]
fn compiles() {
    for (dtype, head_dim) in [(Dtype::Bf16, 128), (Dtype::F16, 64), (Dtype::Bf16, 80), (Dtype::Bf16, 256)] {
        AttentionTiles::sources(&shape(dtype, 8, 2, head_dim)).into_iter().for_each(assert_compiles);
    }
    AttentionTiles::sources(&shape(Dtype::Bf16, 8, 1, 128)).into_iter().for_each(assert_compiles);
}

#[test]
fn shapes_without_tiles_are_told_apart() {
    assert!(AttentionTiles::supports(&shape(Dtype::Bf16, 32, 8, 128)));
    assert!(!AttentionTiles::supports(&shape(Dtype::F32, 32, 8, 128)));
    assert!(!AttentionTiles::supports(&shape(Dtype::Bf16, 32, 8, 72)), "a step of mma has 16 dimensions");
    assert!(
        !AttentionTiles::supports(&shape(Dtype::Bf16, 129, 1, 128)),
        "more heads than a tile has queries"
    );
}

/// Query heads, KV heads, length of a head.
type Heads = (usize, usize, usize);

/// As the kernels want it, but with at most so many workers.
fn with_workers(attention: &Attention, n_workers: usize) -> Cuttings {
    let mut cuttings = attention.cuttings();
    for cutting in [&mut cuttings.single].into_iter().chain(cuttings.tiles.iter_mut().flatten()) {
        cutting.n_workers = cutting.n_workers.min(n_workers);
    }
    cuttings
}

fn check(
    modules: &mut Modules,
    dtype: Dtype,
    heads: Heads,
    rows: &[(usize, usize)],
    window: Option<usize>,
    n_workers: &[usize],
) {
    let attention = modules.get(shape(dtype, heads.0, heads.1, heads.2));
    let test = &modules.test;
    let case = Case::new(attention.shape(), rows, window);
    for &n_workers in n_workers {
        let device = case.upload(test, &attention, &with_workers(&attention, n_workers));
        device.run(test, &attention);
        case.assert_outputs(test, &device);
    }
}

/// (tokens, position of the first) of each row: lengths around the tiles' and pages' edges, chunks that begin
/// anywhere, rows of one token and of few.
const MIXED: [(usize, usize); 11] = [
    (1, 0),
    (15, 0),
    (16, 0),
    (17, 0),
    (63, 5),
    (64, 64),
    (65, 1000),
    (1, 700),
    (129, 127),
    (9, 991),
    (3, 14),
];

#[test]
fn agrees_with_the_reference() {
    let Some(mut modules) = gpu().map(Modules::new) else { return };
    for dtype in DTYPES {
        for heads in [(4, 4, 64), (8, 2, 128), (8, 1, 64), (6, 2, 80), (7, 1, 16), (4, 2, 256), (12, 1, 64)] {
            check(&mut modules, dtype, heads, &MIXED, None, &[1, 7, 1000]);
        }
        // No tiles: all of it goes through single queries.
        check(&mut modules, dtype, (3, 1, 72), &MIXED, None, &[1, 1000]);
    }
    check(&mut modules, Dtype::F32, (8, 2, 64), &MIXED, None, &[1, 1000]);
}

#[test]
fn rows_of_few_tokens_agree() {
    let Some(mut modules) = gpu().map(Modules::new) else { return };
    for heads in [(8, 2, 64), (8, 2, 128), (8, 1, 128), (4, 4, 64), (14, 2, 64)] {
        let attention = modules.get(shape(Dtype::Bf16, heads.0, heads.1, heads.2));
        let test = &modules.test;
        for n_tokens in 1..=16 {
            let rows = [(n_tokens, 0), (n_tokens, 500), (n_tokens, 16 - n_tokens), (n_tokens, 3000)];
            let case = Case::new(attention.shape(), &rows, None);
            for n_workers in [3, 1000] {
                let cuttings = with_workers(&attention, n_workers);
                let device = case.upload(test, &attention, &cuttings);
                assert_eq!(device.forms(), [cuttings.form(n_tokens)]);
                assert_ne!(device.forms(), [Form::Prompt], "{n_tokens} tokens");
                device.run(test, &attention);
                case.assert_outputs(test, &device);
            }
        }
    }
}

#[test]
fn a_window_hides_what_lies_before_it() {
    let Some(mut modules) = gpu().map(Modules::new) else { return };
    for dtype in DTYPES {
        for window in [1, 16, 50, 64, 333, 5000] {
            check(&mut modules, dtype, (4, 1, 64), &MIXED, Some(window), &[2, 1000]);
        }
        check(&mut modules, dtype, (4, 1, 256), &MIXED, Some(40), &[2, 1000]);
    }
}

#[test]
fn long_rows_agree() {
    let Some(mut modules) = gpu().map(Modules::new) else { return };
    for dtype in DTYPES {
        for head_dim in [64, 128] {
            let rows = [(1000, 0), (100, 8092), (8192, 0), (12, 8000)];
            check(&mut modules, dtype, (4, 1, head_dim), &rows, None, &[1000]);
            check(&mut modules, dtype, (2, 2, head_dim), &[(2000, 3000)], Some(1024), &[1000]);
            // Fewer tiles than fill a device: cut along the keys.
            check(&mut modules, dtype, (4, 1, head_dim), &[(50, 16_334)], None, &[9, 1000]);
        }
    }
    check(&mut modules, Dtype::F32, (2, 1, 128), &[(1000, 0), (20, 8172)], None, &[1000]);
}

#[test]
fn many_launches_give_the_same_bits() {
    let Some(mut modules) = gpu().map(Modules::new) else { return };
    let attention = modules.get(shape(Dtype::Bf16, 8, 2, 128));
    let test = &modules.test;
    let case = Case::new(attention.shape(), &[(9, 4000), (70, 3000), (1, 2000)], None);
    let device = case.upload(test, &attention, &attention.cuttings());
    assert_eq!(device.forms(), [Form::Single, Form::Few, Form::Prompt]);
    device.run(test, &attention);
    let first = device.out_bits(test);
    for _ in 0..50 {
        device.run(test, &attention);
        assert_eq!(device.out_bits(test), first);
    }
}

/// Hypotheses of two searches, with what they share read once, beside streams and a prompt.
#[test]
fn what_rows_share_is_read_once_for_them() {
    let Some(mut modules) = gpu().map(Modules::new) else { return };
    let alone = (0..3).map(|idx| (1, 700 + 50 * idx));
    let alike = (0..41).map(|idx| (1, 1290 + 3 * idx));
    let rows: Vec<(usize, usize)> = alike.chain(alone).chain([(70, 100)]).collect();
    for dtype in DTYPES {
        for heads in [(8, 2, 128), (32, 8, 64), (8, 1, 64), (6, 2, 80), (7, 1, 16), (4, 2, 256), (12, 1, 64)]
        {
            let attention = modules.get(shape(dtype, heads.0, heads.1, heads.2));
            let test = &modules.test;
            // A number of pages that is no multiple of a key tile's.
            let case = Case::sharing(attention.shape(), &rows, None, 41, 77);
            for n_workers in [7, 33, 1000] {
                let device = case.upload(test, &attention, &with_workers(&attention, n_workers));
                assert!(device.forms().ends_with(&[Form::Shared, Form::Own]), "{heads:?}");
                device.run(test, &attention);
                case.assert_outputs(test, &device);
                let first = device.out_bits(test);
                device.run(test, &attention);
                assert_eq!(device.out_bits(test), first);
            }
        }
    }
}

/// Prints, with `--ignored --nocapture`, operations and bytes a second for the 8B and 1B shapes.
#[test]
#[ignore = "measures"]
fn speed() {
    let Some(mut modules) = gpu().map(Modules::new) else { return };
    for head_dim in [128, 64] {
        for rows in [
            vec![(2048, 0)],
            vec![(8192, 0)],
            vec![(1024, 0)],
            vec![(200, 16_184)],
            vec![(9, 1271)],
            vec![(9, 1271); 8],
            vec![(9, 1271); 32],
            vec![(16, 1264); 32],
        ] {
            let attention = modules.get(shape(Dtype::Bf16, 32, 8, head_dim));
            let test = &modules.test;
            let device = Case::random_on_device(test, &attention, &attention.cuttings(), &rows);
            let seconds = device.seconds(test, || device.launch(test, &attention));
            let n_pairs: usize = rows.iter().flat_map(|&(n, position)| position + 1..position + n + 1).sum();
            let n_positions: usize = rows.iter().map(|&(n_tokens, position)| position + n_tokens).sum();
            println!(
                "32/8 heads of {head_dim}, {} rows of {} tokens after {}: {:.1} µs, {:.0} TFLOP/s, {:.0} GB/s",
                rows.len(),
                rows[0].0,
                rows[0].1,
                seconds * 1e6,
                4.0 * (32 * head_dim * n_pairs) as f64 / seconds * 1e-12,
                4.0 * (n_positions * 8 * head_dim) as f64 / seconds * 1e-9
            );
        }
    }
}
