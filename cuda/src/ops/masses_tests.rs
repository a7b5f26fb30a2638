//! Attention written out on the device against the reference in f64.

use super::super::attention_case::{Case, Modules, Uploaded, shape};
use super::super::common::Dtype;
use super::*;
use crate::ops::common::check::{DTYPES, assert_compiles, download, poisoned, rounding};
use crate::testing::gpu;

#[test]
fn compiles() {
    for (dtype, head_dim) in
        [(Dtype::Bf16, 128), (Dtype::F16, 64), (Dtype::F32, 64), (Dtype::F32, 256), (Dtype::Bf16, 256)]
    {
        assert_compiles(Masses::source(&shape(dtype, 8, 2, head_dim)));
    }
    assert_compiles(Masses::source(&shape(Dtype::Bf16, 6, 2, 80)));
}

/// What is between the numbers of two queries, and behind the last.
const N_SPARE: usize = 5;

struct Asked {
    row_idx: usize,
    offset: usize,
    query: MassQuery,
    expected: Vec<f64>,
}

/// The first and the last token of each row.
fn asked(case: &Case, has_holes: bool) -> Vec<Asked> {
    let mut place = N_SPARE;
    let mut asked = Vec::new();
    for (row_idx, span) in case.spans().iter().enumerate() {
        let mut offsets = vec![0, span.n_tokens - 1];
        offsets.dedup();
        for offset in offsets {
            let expected = case.masses(row_idx, offset);
            let (token, cell, table) = (span.token + offset, span.position + offset, span.entries);
            let query = MassQuery { token, cell, table, place, has_holes, n_layers: 2 };
            place += expected.len() + N_SPARE;
            asked.push(Asked { row_idx, offset, query, expected });
        }
    }
    asked
}

/// Two layers, which are the same one.
fn run(modules: &Modules, masses: &Masses, device: &Uploaded, asked: &[Asked], n: usize) -> Vec<f32> {
    let out = poisoned(&modules.test, 4 * n);
    for is_first in [true, false] {
        let queries = asked.iter().map(|asked| (&asked.query, is_first));
        masses.run(&modules.test.stream, &device.inputs(), queries, out.slice()).expect("the launches");
    }
    download(&modules.test, out.slice(), n, 0f32)
}

fn check(modules: &mut Modules, shape: AttentionShape, case: &Case, has_holes: bool) {
    let attention = modules.get(shape);
    let masses = Masses::new(&modules.test.gpu, &modules.test.compiler(), shape);
    let device = case.upload(&modules.test, &attention, &attention.cuttings());
    let asked = asked(case, has_holes);
    let n = asked.last().map_or(0, |last| last.query.place + last.expected.len() + N_SPARE);
    let found = run(modules, &masses, &device, &asked, n);
    let mut end = 0;
    for Asked { row_idx, offset, query, expected } in &asked {
        let about = format!("{shape:?}, row {row_idx}, query {offset}");
        assert!(found[end..query.place].iter().all(|x| x.is_nan()), "{about}: written before it");
        end = query.place + expected.len();
        let found = &found[query.place..end];
        let sum: f64 = found.iter().map(|&mass| f64::from(mass)).sum();
        assert!((sum - 1.0).abs() <= 1e-4, "{about}: {sum} in all");
        for (idx, (&found, &expected)) in found.iter().zip(expected).enumerate() {
            // Dots of 256 numbers in f32 under an exponent. A turned query is rounded to T: the sine's last bit may move it to
            // the next number.
            let of_turns = if has_holes { 4.0 * rounding(shape.dtype) } else { 0.0 };
            let tolerance = expected * (2f64.powi(-12) + of_turns) + 1e-7;
            let diff = (f64::from(found) - expected).abs();
            assert!(diff <= tolerance, "{about}, token {idx}: {found}, not {expected} (±{tolerance:e})");
        }
    }
    assert!(found[end..].iter().all(|x| x.is_nan()), "written past the last");
    for _ in 0..3 {
        let again = run(modules, &masses, &device, &asked, n);
        assert!(again.iter().zip(&found).all(|(a, b)| a.to_bits() == b.to_bits()), "the same bits");
    }
    // What they wrote over, attention writes.
    device.run(&modules.test, &attention);
    case.assert_outputs(&modules.test, &device);
}

/// (tokens, position of the first) of each row.
const MIXED: [(usize, usize); 13] = [
    (1, 0),
    (1, 14),
    (1, 15),
    (1, 16),
    (1, 63),
    (1, 200),
    (1, 255),
    (1, 256),
    (1, 999),
    (5, 125),
    (2, 0),
    (40, 77),
    (100, 300),
];

const SHAPES: [(usize, usize, usize); 7] =
    [(4, 4, 64), (8, 2, 128), (8, 1, 64), (6, 2, 80), (12, 1, 128), (5, 1, 256), (2, 1, 8)];

#[test]
fn agrees_with_the_reference() {
    let Some(mut modules) = gpu().map(Modules::new) else { return };
    for dtype in DTYPES {
        for (n_heads, n_kv_heads, head_dim) in SHAPES {
            let shape = shape(dtype, n_heads, n_kv_heads, head_dim);
            check(&mut modules, shape, &Case::new(shape, &MIXED, None), false);
        }
    }
}

#[test]
fn what_lies_before_a_window_has_nothing() {
    let Some(mut modules) = gpu().map(Modules::new) else { return };
    let shape = shape(Dtype::Bf16, 8, 2, 64);
    for window in [1, 7, 16, 100, 300, 5000] {
        check(&mut modules, shape, &Case::new(shape, &MIXED, Some(window)), false);
    }
}

#[test]
fn agrees_among_holes() {
    let Some(mut modules) = gpu().map(Modules::new) else { return };
    for dtype in DTYPES {
        for (n_heads, n_kv_heads, head_dim) in SHAPES {
            let shape = shape(dtype, n_heads, n_kv_heads, head_dim);
            check(&mut modules, shape, &Case::among_holes(shape, &MIXED), true);
        }
    }
}

#[test]
fn long_contexts_and_many_of_them_agree() {
    let Some(mut modules) = gpu().map(Modules::new) else { return };
    let shape = shape(Dtype::Bf16, 8, 2, 128);
    let many: Vec<(usize, usize)> = (0..75).map(|idx| (1 + idx % 2, 7 * idx)).collect();
    for rows in [&[(1, 8191), (1, 3000), (30, 4000)][..], &many] {
        check(&mut modules, shape, &Case::new(shape, rows, None), false);
        check(&mut modules, shape, &Case::among_holes(shape, rows), true);
    }
}
