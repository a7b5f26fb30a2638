//! The attention that tokens put on those of their contexts, where it is asked for: worked out once more after the layers'
//! own attention, by the same code.

use rayon::prelude::*;

use super::attention::{Attention, HolesScratch};
use super::pages::KvPages;
use super::plan::{TokenLayout, Weighed};
use crate::batch::{Output, OutputFault};
use crate::model::ModelConfig;

/// Sums over the layers so far.
pub(super) struct Masses<'a> {
    sums: Vec<(Weighed<'a>, Vec<f32>)>, // each [n_tokens]
}

/// The rotated queries of a step in one layer, and the keys that they see.
#[derive(Clone, Copy)]
pub(super) struct Queries<'a> {
    pub(super) qkv: &'a [f32],         // [n_tokens, n_heads + 2 n_kv_heads, head_dim]
    pub(super) frequencies: &'a [f32], // [head_dim / 2]
    pub(super) plan: &'a TokenLayout<'a>,
    pub(super) kv: &'a KvPages,
}

impl<'a> Masses<'a> {
    pub(super) fn of(weighed: &[Weighed<'a>]) -> Self {
        Self { sums: weighed.iter().map(|&weighed| (weighed, vec![0.0; weighed.n_tokens])).collect() }
    }

    /// Adds the weights of a layer where they are asked for.
    pub(super) fn add(&mut self, config: &ModelConfig, layer_idx: usize, queries: Queries<'_>) {
        if self.sums.is_empty() {
            return;
        }
        let Queries { qkv, frequencies, plan, kv } = queries;
        let ModelConfig { n_heads, n_kv_heads, head_dim, .. } = *config;
        let (qkv_len, group_len) = ((n_heads + 2 * n_kv_heads) * head_dim, n_heads / n_kv_heads * head_dim);
        let add = |(weights, among_holes): &mut (Vec<f32>, HolesScratch),
                   (weighed, sums): &mut (Weighed<'_>, Vec<f32>)| {
            if !weighed.layers.contains(&layer_idx) {
                return;
            }
            let place = &plan.places[weighed.token_idx];
            let heads = &qkv[weighed.token_idx * qkv_len..][..n_heads * head_dim];
            for (kv_head_idx, queries) in heads.chunks_exact(group_len).enumerate() {
                let attention = Attention {
                    kv,
                    layer_idx,
                    kv_head_idx,
                    head_dim,
                    pages: place.pages,
                    cell: place.cell,
                    window: config.windows[layer_idx],
                    queries,
                };
                match place.evicted {
                    None => attention.add_weights(weights, sums),
                    Some(evicted) => {
                        attention.add_weights_among_holes(evicted, frequencies, among_holes, sums);
                    }
                }
            }
        };
        self.sums.par_iter_mut().for_each_init(Default::default, add);
    }

    /// The means over heads and layers, with their places among all outputs of the step.
    pub(super) fn outputs(self, config: &ModelConfig) -> impl Iterator<Item = (usize, Output)> {
        let n_heads = config.n_heads;
        self.sums.into_iter().map(move |(weighed, mut sums)| {
            let n = (n_heads * weighed.layers.len()) as f32;
            sums.iter_mut().for_each(|sum| *sum /= n);
            let output = match sums.iter().any(|x| x.is_nan()) {
                true => Output::Failed(OutputFault::NotANumber),
                false => Output::Attention(sums),
            };
            (weighed.output_idx, output)
        })
    }
}
