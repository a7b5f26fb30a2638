//! The Llama family written plainly in f64, from the equations in transformers' `modeling_llama.py` and its
//! relatives. Slow, and shares no code with the engine.

use std::collections::HashMap;

use trellis_engine::batch::Token;
use trellis_engine::model::{ModelConfig, RopeScaling};

/// Tensors by the names of Hugging Face, row by row.
pub(crate) type Tensors = HashMap<String, Vec<f32>>;

pub(crate) struct Reference<'a> {
    pub(crate) config: &'a ModelConfig,
    pub(crate) tensors: &'a Tensors,
}

impl Reference<'_> {
    /// Final hidden states and log-probabilities of every position.
    pub(crate) fn run(&self, tokens: &[Token]) -> Vec<(Vec<f64>, Vec<f64>)> {
        self.run_seeing(tokens, |layer_idx, position| self.seen_in_windows(layer_idx, position))
    }

    /// The same, where a vector is added to a token behind so many layers, by its position.
    pub(crate) fn run_steered<'a>(
        &self,
        tokens: &[Token],
        added: impl Fn(usize, usize) -> Option<&'a [f32]>,
    ) -> Vec<(Vec<f64>, Vec<f64>)> {
        let seen = |layer_idx, position| self.seen_in_windows(layer_idx, position);
        self.run_changing(tokens, seen, |_, _, _| {}, added)
    }

    fn seen_in_windows(&self, layer_idx: usize, position: usize) -> Vec<(usize, usize)> {
        let window = self.config.windows[layer_idx];
        let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
        (first..=position).map(|seen| (seen, position - seen)).collect()
    }

    /// The same, where a token in a layer sees those of these indices, each so many positions back.
    pub(crate) fn run_seeing(
        &self,
        tokens: &[Token],
        seen: impl Fn(usize, usize) -> Vec<(usize, usize)>,
    ) -> Vec<(Vec<f64>, Vec<f64>)> {
        self.run_watching(tokens, seen, |_, _, _| {})
    }

    /// The same, where each head's attention is told: of this layer and position, to what it sees in that order.
    pub(crate) fn run_watching(
        &self,
        tokens: &[Token],
        seen: impl Fn(usize, usize) -> Vec<(usize, usize)>,
        watch: impl FnMut(usize, usize, &[f64]),
    ) -> Vec<(Vec<f64>, Vec<f64>)> {
        self.run_changing(tokens, seen, watch, |_, _| None)
    }

    fn run_changing<'a>(
        &self,
        tokens: &[Token],
        seen: impl Fn(usize, usize) -> Vec<(usize, usize)>,
        mut watch: impl FnMut(usize, usize, &[f64]),
        added: impl Fn(usize, usize) -> Option<&'a [f32]>,
    ) -> Vec<(Vec<f64>, Vec<f64>)> {
        let steer = |n_layers: usize, hidden: &mut [Vec<f64>]| {
            for (position, x) in hidden.iter_mut().enumerate() {
                if let Some(vector) = added(n_layers, position) {
                    add(x, &vector.iter().copied().map(f64::from).collect::<Vec<_>>());
                }
            }
        };
        let c = self.config;
        let embedding = self.tensor("model.embed_tokens.weight");
        let mut hidden: Vec<Vec<f64>> = tokens
            .iter()
            .map(|&token| embedding[token as usize * c.hidden_size..][..c.hidden_size].to_vec())
            .collect();
        for layer_idx in 0..c.n_layers {
            steer(layer_idx, &mut hidden);
            let name = |suffix: &str| format!("model.layers.{layer_idx}.{suffix}");
            let normed: Vec<_> =
                hidden.iter().map(|x| self.norm(x, &name("input_layernorm.weight"))).collect();
            let heads = |projection: &str, n_heads: usize, norm: Option<&str>| -> Vec<Vec<Vec<f64>>> {
                let project = |x: &Vec<f64>| {
                    let y = self.linear(x, &name(projection));
                    assert_eq!(y.len(), n_heads * c.head_dim);
                    let heads = y.chunks(c.head_dim).map(|head| match norm {
                        Some(norm) if c.qk_norm => self.norm(head, &name(norm)),
                        _ => head.to_vec(),
                    });
                    heads.collect()
                };
                normed.iter().map(project).collect()
            };
            let q = heads("self_attn.q_proj", c.n_heads, Some("self_attn.q_norm.weight"));
            let k = heads("self_attn.k_proj", c.n_kv_heads, Some("self_attn.k_norm.weight"));
            let v = heads("self_attn.v_proj", c.n_kv_heads, None);
            for position in 0..tokens.len() {
                let seen = seen(layer_idx, position);
                let mut attended = Vec::new();
                for (head_idx, query) in q[position].iter().enumerate() {
                    let kv_head_idx = head_idx * c.n_kv_heads / c.n_heads;
                    // What counts between a query and a key is how far they are apart.
                    let scores: Vec<f64> = seen
                        .iter()
                        .map(|&(p, n_back)| {
                            let query = self.turn(query, n_back);
                            dot(&query, &k[p][kv_head_idx]) / (c.head_dim as f64).sqrt()
                        })
                        .collect();
                    let weights = log_softmax(&scores);
                    watch(layer_idx, position, &weights.iter().map(|it| it.exp()).collect::<Vec<_>>());
                    let mut sums = vec![0.0; c.head_dim];
                    for (&(p, _), weight) in seen.iter().zip(&weights) {
                        let values = v[p][kv_head_idx].iter().map(|value| weight.exp() * value);
                        add(&mut sums, &values.collect::<Vec<_>>());
                    }
                    attended.extend(sums);
                }
                add(&mut hidden[position], &self.linear(&attended, &name("self_attn.o_proj")));
            }
            for x in &mut hidden {
                let normed = self.norm(x, &name("post_attention_layernorm.weight"));
                let gate = self.linear(&normed, &name("mlp.gate_proj"));
                let up = self.linear(&normed, &name("mlp.up_proj"));
                let inner: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
                add(x, &self.linear(&inner, &name("mlp.down_proj")));
            }
        }
        steer(c.n_layers, &mut hidden);
        let head = if c.tied_embeddings { "model.embed_tokens" } else { "lm_head" };
        let finish = |x: &Vec<f64>| {
            let normed = self.norm(x, "model.norm.weight");
            let logprobs = log_softmax(&self.linear(&normed, head));
            (normed, logprobs)
        };
        hidden.iter().map(finish).collect()
    }

    fn tensor(&self, name: &str) -> Vec<f64> {
        self.tensors[name].iter().map(|&x| f64::from(x)).collect()
    }

    fn linear(&self, x: &[f64], name: &str) -> Vec<f64> {
        let weight = self.tensor(&format!("{name}.weight"));
        let mut y: Vec<f64> = weight.chunks(x.len()).map(|row| dot(row, x)).collect();
        if self.tensors.contains_key(&format!("{name}.bias")) {
            add(&mut y, &self.tensor(&format!("{name}.bias")));
        }
        y
    }

    fn norm(&self, x: &[f64], name: &str) -> Vec<f64> {
        let mean = dot(x, x) / x.len() as f64;
        let scale = 1.0 / (mean + f64::from(self.config.rms_norm_eps)).sqrt();
        x.iter().zip(self.tensor(name)).map(|(x, w)| x * scale * w).collect()
    }

    /// Only the forms of RoPE that need no more than a line.
    fn turn(&self, head: &[f64], position: usize) -> Vec<f64> {
        let rope = &self.config.rope;
        let factor = match rope.scaling {
            RopeScaling::Default => 1.0,
            RopeScaling::Linear { factor } => factor,
            ref other => panic!("{other:?} is tested with the frequencies"),
        };
        let half = head.len() / 2;
        let at = |i: usize| {
            let exponent = (2 * (i % half)) as f64 / head.len() as f64;
            let angle = position as f64 / factor / rope.theta.powf(exponent);
            let partner = if i < half { -head[i + half] } else { head[i - half] };
            head[i] * angle.cos() + partner * angle.sin()
        };
        (0..head.len()).map(at).collect()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(to: &mut [f64], x: &[f64]) {
    assert_eq!(to.len(), x.len());
    to.iter_mut().zip(x).for_each(|(to, x)| *to += x);
}

fn log_softmax(x: &[f64]) -> Vec<f64> {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let log_sum = x.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
    x.iter().map(|x| x - max - log_sum).collect()
}
