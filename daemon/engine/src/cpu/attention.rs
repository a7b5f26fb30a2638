//! Attention of one position over the pages of its context.
//!
//! Scores, weights and sums are formed page by page from the first page of the window, in an order that depends
//! on nothing but the position: not on the batch, nor on how the prompt was cut, nor on where the pages lie.

mod holes;

use rten_simd::ops::{BitOps, NumOps};
use rten_simd::{Isa, SimdOp};
use rten_vecmath::Softmax;

pub(super) use self::holes::HolesScratch;
use super::pages::{BLOCK_LEN, KvPages};
use crate::backend::PAGE_LEN;
use crate::batch::PageId;

/// One position and one KV head with the query heads that share it.
#[derive(Clone, Copy)]
pub(super) struct Attention<'a> {
    pub(super) kv: &'a KvPages,
    pub(super) layer_idx: usize,
    pub(super) kv_head_idx: usize,
    pub(super) head_dim: usize,
    /// Pages of the context.
    pub(super) pages: &'a [PageId],
    /// The cell that looks back: its position, where no token was evicted.
    pub(super) cell: usize,
    /// Positions it sees, itself included; all when `None`.
    pub(super) window: Option<usize>,
    /// Its query heads.
    pub(super) queries: &'a [f32], // [n_queries, head_dim]
}

impl Attention<'_> {
    /// Writes the attended values of each query head.
    pub(super) fn run(
        self,
        weights: &mut Vec<f32>,
        out: &mut [f32], // [n_queries, head_dim]
    ) {
        let seen = self.weigh(weights);
        out.fill(0.0);
        WeightedValues { attention: &self, seen: &seen, weights, out }.dispatch();
    }

    /// Adds the weights of all query heads to those of the context's tokens.
    pub(super) fn add_weights(
        &self,
        weights: &mut Vec<f32>,
        sums: &mut [f32], // [n_tokens]
    ) {
        let seen = self.weigh(weights);
        for weights in weights.chunks_exact(seen.pages.len() * PAGE_LEN) {
            let weights = &weights[seen.start % PAGE_LEN..seen.n_slots_to_end()];
            sums[seen.start..seen.end].iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight);
        }
    }

    /// Works out the weights of each query head, of every slot of the pages that hold what it sees: 0 outside.
    fn weigh(&self, weights: &mut Vec<f32>) -> Seen<'_> {
        let end = self.cell + 1;
        let start = self.window.map_or(0, |window| end.saturating_sub(window));
        let seen = Seen { start, end, pages: &self.pages[start / PAGE_LEN..end.div_ceil(PAGE_LEN)] };
        let n_slots = seen.pages.len() * PAGE_LEN;
        weights.resize(self.queries.len() / self.head_dim * n_slots, 0.0);
        Scores { attention: self, seen: &seen, out: weights }.dispatch();
        for weights in weights.chunks_exact_mut(n_slots) {
            weights[..seen.start % PAGE_LEN].fill(f32::NEG_INFINITY);
            weights[seen.n_slots_to_end()..].fill(f32::NEG_INFINITY);
            Softmax::new_mut(weights).dispatch();
        }
        seen
    }
}

/// The positions `start..end` and the pages they lie in.
struct Seen<'a> {
    start: usize,
    end: usize,
    pages: &'a [PageId],
}

impl Seen<'_> {
    /// Slots from the beginning of the first page to `end`.
    fn n_slots_to_end(&self) -> usize {
        self.end - self.start / PAGE_LEN * PAGE_LEN
    }
}

/// `q · k / sqrt(head_dim)` for every slot of the pages, those outside the window included.
struct Scores<'a> {
    attention: &'a Attention<'a>,
    seen: &'a Seen<'a>,
    out: &'a mut [f32], // [n_queries, n_slots]
}

impl SimdOp for Scores<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        /// Enough sums in flight to hide the latency of an addition.
        const N_SUMS: usize = 4;
        let ops = isa.f32();
        let Attention { kv, layer_idx, kv_head_idx, head_dim, queries, .. } = *self.attention;
        let scale = ops.splat(1.0 / (head_dim as f32).sqrt());
        let n_slots = self.seen.pages.len() * PAGE_LEN;
        for (page_idx, &page) in self.seen.pages.iter().enumerate() {
            let (keys, _) = kv.head(page, layer_idx, kv_head_idx);
            let (keys, last_keys) = keys.as_chunks::<N_SUMS>();
            for (query_idx, query) in queries.chunks_exact(head_dim).enumerate() {
                let (query, last_query) = query.as_chunks::<N_SUMS>();
                let out = &mut self.out[query_idx * n_slots + page_idx * PAGE_LEN..][..PAGE_LEN];
                for (lanes_idx, out) in out.chunks_exact_mut(ops.len()).enumerate() {
                    let first = lanes_idx * ops.len();
                    let mut sums = [ops.zero(); N_SUMS];
                    for (query, keys) in query.iter().zip(keys) {
                        for i in 0..N_SUMS {
                            sums[i] = ops.mul_add(ops.splat(query[i]), ops.load(&keys[i][first..]), sums[i]);
                        }
                    }
                    for (&x, keys) in last_query.iter().zip(last_keys) {
                        sums[0] = ops.mul_add(ops.splat(x), ops.load(&keys[first..]), sums[0]);
                    }
                    let sum = ops.add(ops.add(sums[0], sums[1]), ops.add(sums[2], sums[3]));
                    ops.store(ops.mul(sum, scale), out);
                }
            }
        }
    }
}

/// Adds the values of every seen position, weighted.
struct WeightedValues<'a> {
    attention: &'a Attention<'a>,
    seen: &'a Seen<'a>,
    weights: &'a [f32], // [n_queries, n_slots]
    out: &'a mut [f32], // [n_queries, head_dim]
}

impl SimdOp for WeightedValues<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        let ops = isa.f32();
        let Attention { kv, layer_idx, kv_head_idx, head_dim, .. } = *self.attention;
        let n_slots = self.seen.pages.len() * PAGE_LEN;
        for (page_idx, &page) in self.seen.pages.iter().enumerate() {
            // Slots outside the window may hold anything, NaN too: they are left out, not weighted by 0.
            let first = if page_idx == 0 { self.seen.start % PAGE_LEN } else { 0 };
            let end = PAGE_LEN.min(self.seen.n_slots_to_end() - page_idx * PAGE_LEN);
            let (_, blocks) = kv.head(page, layer_idx, kv_head_idx);
            for (query_idx, out) in self.out.chunks_exact_mut(head_dim).enumerate() {
                let weights = &self.weights[query_idx * n_slots + page_idx * PAGE_LEN..][first..end];
                for (out, block) in out.chunks_mut(BLOCK_LEN).zip(blocks) {
                    let mut sums = [0.0; BLOCK_LEN];
                    sums[..out.len()].copy_from_slice(out);
                    for (lanes_idx, sums) in sums.chunks_exact_mut(ops.len()).enumerate() {
                        let mut sum = ops.load(sums);
                        for (values, &weight) in block[first..end].iter().zip(weights) {
                            let values = ops.load(&values[lanes_idx * ops.len()..]);
                            sum = ops.mul_add(ops.splat(weight), values, sum);
                        }
                        ops.store(sum, sums);
                    }
                    out.copy_from_slice(&sums[..out.len()]);
                }
            }
        }
    }
}
