//! Single queries among holes on the device against the reference in f64, and how holes are described.

use trellis_engine::batch::Stretch;

use super::super::attention::{Attention, Cuttings, Form};
use super::super::attention_case::{Case, HEADS, Modules, shape};
use super::*;
use crate::ops::common::check::{DTYPES, assert_compiles};
use crate::testing::gpu;

#[test]
fn compiles() {
    for (dtype, head_dim) in
        [(Dtype::Bf16, 128), (Dtype::F16, 64), (Dtype::F32, 64), (Dtype::F32, 256), (Dtype::Bf16, 256)]
    {
        assert_compiles(AttentionHoles::source(&shape(dtype, 8, 2, head_dim)));
    }
    assert_compiles(AttentionHoles::source(&shape(Dtype::Bf16, 6, 2, 80)));
}

#[test]
fn blocks_fit_the_smallest_devices() {
    for dtype in DTYPES {
        for head_dim in (8..=256).step_by(8) {
            // What a block may ask for on sm_86 and sm_89.
            let n_bytes = blocks(&shape(dtype, 8, 2, head_dim)).shared_bytes;
            assert!(n_bytes <= 99 << 10, "{dtype:?}, {head_dim}: {n_bytes}");
        }
    }
}

#[test]
fn holes_are_described_word_by_word() {
    let stretches =
        [Stretch { first_cell: 5, extra_rotation: -7 }, Stretch { first_cell: 18, extra_rotation: 0 }];
    let live = [0b1111_0000, 0xffff, 0b11];
    let evicted = Evicted {
        n_evicted: 3,
        rotation: 9,
        cell: 40,
        n_whole: None,
        live: &live,
        open: 34,
        stretches: &stretches,
        packs: &[],
    };
    let mut holes = Holes::default();
    holes.words.push(99);
    assert_eq!(holes.push(&evicted), 1);
    let words = &holes.words()[1..];
    assert_eq!(words.len(), N_HEADER_WORDS + 2);
    assert_eq!(
        words[..5],
        [2, 0, 3, 0, 18],
        "stretches and pages; the first stretch begins with the context"
    );
    assert_eq!(words[11..13], [-7i32 as u32, 0]);
    // Cells from the open one on are all seen.
    assert_eq!(words[N_HEADER_WORDS..], [0xffff_00f0, 0xffff]);
    assert!(holes.words().len() <= 1 + Holes::n_words_max(1, 3));
    // Of pages in which every cell is seen there is nothing to say.
    holes.clear();
    holes.push(&Evicted { n_whole: Some(2), live: &[0b11], ..evicted });
    assert_eq!(holes.words()[..3], [2, 2, 1]);
    assert_eq!(holes.words()[N_HEADER_WORDS..], [0xffff]);
    // The last node of a tree that begins in the last cell of a page.
    holes.clear();
    holes.push(&Evicted { n_whole: Some(1000), live: &[1; 5], open: 16_078, cell: 16_078, ..evicted });
    assert!(holes.words().len() <= Holes::n_words_max(1, 0), "{} words", holes.words().len());
}

/// As the kernel wants it, but with at most so many workers.
fn with_workers(attention: &Attention, n_workers: usize) -> Cuttings {
    let mut cuttings = attention.cuttings();
    cuttings.holed.n_workers = cuttings.holed.n_workers.min(n_workers);
    cuttings
}

fn check(modules: &mut Modules, shape: AttentionShape, rows: &[(usize, usize)], n_workers: &[usize]) {
    let attention = modules.get(shape);
    let case = Case::among_holes(shape, rows);
    for &n_workers in n_workers {
        let device = case.upload(&modules.test, &attention, &with_workers(&attention, n_workers));
        assert_eq!(device.forms(), [Form::Holed]);
        device.run(&modules.test, &attention);
        case.assert_outputs(&modules.test, &device);
    }
}

/// (tokens, cell of the first) of each row: decoded tokens, guesses that are verified, parts of prompts.
const MIXED: [(usize, usize); 12] = [
    (1, 0),
    (1, 14),
    (1, 15),
    (1, 16),
    (1, 63),
    (1, 200),
    (1, 999),
    (5, 125),
    (2, 0),
    (9, 500),
    (40, 77),
    (100, 300),
];

#[test]
fn agrees_with_the_reference() {
    let Some(mut modules) = gpu().map(Modules::new) else { return };
    for dtype in DTYPES {
        for (n_heads, n_kv_heads, head_dim) in HEADS {
            let shape = shape(dtype, n_heads, n_kv_heads, head_dim);
            check(&mut modules, shape, &MIXED, &[1, 2, 7, 1000]);
        }
    }
}

#[test]
fn every_group_agrees() {
    let Some(mut modules) = gpu().map(Modules::new) else { return };
    for group in (1..=9).chain([16]) {
        let shape = shape(Dtype::Bf16, 2 * group, 2, 64);
        check(&mut modules, shape, &[(1, 200), (8, 0), (3, 300), (1, 700)], &[3, 1000]);
    }
}

#[test]
fn long_contexts_agree() {
    let Some(mut modules) = gpu().map(Modules::new) else { return };
    for dtype in DTYPES {
        for head_dim in [64, 128] {
            let rows = [(1, 8191), (1, 3000), (1, 1), (30, 4000)];
            check(&mut modules, shape(dtype, 8, 2, head_dim), &rows, &[1, 5, 33, 1000]);
        }
    }
}

#[test]
fn many_launches_give_the_same_bits() {
    let Some(mut modules) = gpu().map(Modules::new) else { return };
    let shape = shape(Dtype::Bf16, 8, 2, 128);
    let attention = modules.get(shape);
    let test = &modules.test;
    let case = Case::among_holes(shape, &[(1, 4000), (1, 900), (20, 2000), (1, 30)]);
    let device = case.upload(test, &attention, &with_workers(&attention, 40));
    device.run(test, &attention);
    let first = device.out_bits(test);
    for _ in 0..50 {
        device.run(test, &attention);
        assert_eq!(device.out_bits(test), first);
    }
}
