//! Attention in a context from which tokens were evicted, and of the nodes of trees of guesses.
//!
//! Scores, weights and sums are formed over the cells that are seen, in the order of their tokens: where the tokens lie makes
//! no difference to a bit. Nor does it that there are holes: weights are as wide as whole pages would be. Queries are rotated on for the keys of each stretch but the last.

use rten_simd::ops::{BitOps, NumOps};
use rten_simd::{Isa, SimdOp};
use rten_vecmath::Softmax;

use super::{Attention, Scores, Seen};
use crate::backend::PAGE_LEN;
use crate::batch::Evicted;
use crate::cpu::elementwise::rotate;
use crate::cpu::pages::BLOCK_LEN;

/// Memory of one task.
#[derive(Default)]
pub(in crate::cpu) struct HolesScratch {
    /// Cells that are seen, ascending.
    cells: Vec<usize>,
    turned: Vec<f32>,     // [n_queries, head_dim]
    turns: Vec<[f32; 2]>, // [head_dim / 2]
    scores: Vec<f32>,     // [n_queries, cells of some pages]
    weights: Vec<f32>,    // [n_queries, n_slots], of which the last are no cells'
}

impl Attention<'_> {
    /// As [`Attention::run`], where tokens were evicted.
    pub(in crate::cpu) fn run_among_holes(
        self,
        evicted: &Evicted<'_>,
        frequencies: &[f32], // [head_dim / 2]
        scratch: &mut HolesScratch,
        out: &mut [f32], // [n_queries, head_dim]
    ) {
        self.weigh_among_holes(evicted, frequencies, scratch);
        let HolesScratch { cells, weights, .. } = scratch;
        out.fill(0.0);
        WeightedCells { attention: &self, cells, weights, out }.dispatch();
    }

    /// As [`Attention::add_weights`], where tokens were evicted.
    pub(in crate::cpu) fn add_weights_among_holes(
        &self,
        evicted: &Evicted<'_>,
        frequencies: &[f32], // [head_dim / 2]
        scratch: &mut HolesScratch,
        sums: &mut [f32], // [n_tokens]
    ) {
        self.weigh_among_holes(evicted, frequencies, scratch);
        assert_eq!(scratch.cells.len(), sums.len(), "a cell for each token");
        for weights in scratch.weights.chunks_exact(n_slots_for(sums.len())) {
            sums.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight);
        }
    }

    /// Finds the cells that are seen, and the weights of each query head for them.
    fn weigh_among_holes(
        &self,
        evicted: &Evicted<'_>,
        frequencies: &[f32], // [head_dim / 2]
        scratch: &mut HolesScratch,
    ) {
        let HolesScratch { cells, turned, turns, scores, weights } = scratch;
        cells.clear();
        for page_idx in 0..=self.cell / PAGE_LEN {
            let bits = evicted.seen_in(page_idx, self.cell);
            cells.extend(
                (0..PAGE_LEN).filter(|slot| bits >> slot & 1 == 1).map(|slot| page_idx * PAGE_LEN + slot),
            );
        }
        let n_weights = n_slots_for(cells.len());
        weights.clear();
        weights.resize(self.queries.len() / self.head_dim * n_weights, f32::NEG_INFINITY);
        let ends = evicted.stretches[1..].iter().map(|stretch| stretch.first_cell).chain([self.cell + 1]);
        for (stretch, end) in evicted.stretches.iter().zip(ends) {
            let first = cells.partition_point(|&cell| cell < stretch.first_cell);
            let end = cells.partition_point(|&cell| cell < end);
            if first == end {
                continue;
            }
            turned.clear();
            turned.extend_from_slice(self.queries);
            if stretch.extra_rotation != 0 {
                turns.clear();
                turns.extend(frequencies.iter().map(|frequency| {
                    let (sin, cos) = (stretch.extra_rotation as f32 * frequency).sin_cos();
                    [cos, sin]
                }));
                turned.chunks_exact_mut(self.head_dim).for_each(|query| rotate(query, turns));
            }
            let (first_page, last_page) = (cells[first] / PAGE_LEN, cells[end - 1] / PAGE_LEN);
            let pages = &self.pages[first_page..=last_page];
            let n_slots = pages.len() * PAGE_LEN;
            scores.resize(weights.len() / n_weights * n_slots, 0.0);
            let seen = Seen { start: 0, end: n_slots, pages };
            let attention = Attention { queries: turned, ..*self };
            Scores { attention: &attention, seen: &seen, out: scores }.dispatch();
            for (weights, scores) in weights.chunks_exact_mut(n_weights).zip(scores.chunks_exact(n_slots)) {
                for (weight, &cell) in weights[first..end].iter_mut().zip(&cells[first..end]) {
                    *weight = scores[cell - first_page * PAGE_LEN];
                }
            }
        }
        weights.chunks_exact_mut(n_weights).for_each(|weights| {
            Softmax::new_mut(weights).dispatch();
        });
    }
}

/// Slots of the pages that so many tokens fill.
fn n_slots_for(n_cells: usize) -> usize {
    n_cells.next_multiple_of(PAGE_LEN)
}

/// Adds the values of every cell that is seen, weighted.
struct WeightedCells<'a> {
    attention: &'a Attention<'a>,
    cells: &'a [usize],
    weights: &'a [f32], // [n_queries, n_slots]
    out: &'a mut [f32], // [n_queries, head_dim]
}

impl SimdOp for WeightedCells<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        let ops = isa.f32();
        let Attention { kv, layer_idx, kv_head_idx, head_dim, pages, .. } = *self.attention;
        let mut n_before = 0;
        for cells in self.cells.chunk_by(|a, b| a / PAGE_LEN == b / PAGE_LEN) {
            let (_, blocks) = kv.head(pages[cells[0] / PAGE_LEN], layer_idx, kv_head_idx);
            let all = self.weights.chunks_exact(n_slots_for(self.cells.len()));
            for (out, weights) in self.out.chunks_exact_mut(head_dim).zip(all) {
                let weights = &weights[n_before..n_before + cells.len()];
                for (out, block) in out.chunks_mut(BLOCK_LEN).zip(blocks) {
                    let mut sums = [0.0; BLOCK_LEN];
                    sums[..out.len()].copy_from_slice(out);
                    for (lanes_idx, sums) in sums.chunks_exact_mut(ops.len()).enumerate() {
                        let mut sum = ops.load(sums);
                        for (&cell, &weight) in cells.iter().zip(weights) {
                            let values = ops.load(&block[cell % PAGE_LEN][lanes_idx * ops.len()..]);
                            sum = ops.mul_add(ops.splat(weight), values, sum);
                        }
                        ops.store(sum, sums);
                    }
                    out.copy_from_slice(&sums[..out.len()]);
                }
            }
            n_before += cells.len();
        }
    }
}
