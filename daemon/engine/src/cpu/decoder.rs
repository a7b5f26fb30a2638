//! The decoder layers: one pass over the tokens of a step.

use rayon::prelude::*;

use super::attention::{Attention, HolesScratch};
use super::elementwise::{gated_silu, rms_norm, rms_norm_mut, rotate};
use super::linear::Gemm;
use super::masses::{Masses, Queries};
use super::output::{self, Answers};
use super::pages::KvPages;
use super::plan::{Hidden, PlacedToken, TokenLayout};
use super::weights::{LayerWeights, Weights};
use crate::batch::Output;
use crate::model::{ModelConfig, inverse_frequencies};

/// Rows that one task takes at least, where a row is a few microseconds of work.
const N_ROWS_MIN: usize = 8;

/// A model's weights with the activations of one step.
pub(super) struct Decoder {
    config: ModelConfig,
    weights: Weights,
    frequencies: Vec<f32>, // [head_dim / 2]
    activations: Activations,
}

/// Buffers that grow to the largest step seen.
#[derive(Default)]
struct Activations {
    hidden: Vec<f32>,     // [n_tokens, hidden_size]
    normed: Vec<f32>,     // [n_tokens, hidden_size]
    qkv: Vec<f32>,        // [n_tokens, n_heads + 2 n_kv_heads, head_dim]
    attended: Vec<f32>,   // [n_tokens, n_heads, head_dim]
    gate_up: Vec<f32>,    // [n_tokens, 2, intermediate_size]
    inner: Vec<f32>,      // [n_tokens, intermediate_size]
    turns: Vec<[f32; 2]>, // [n_tokens, head_dim / 2]
    logits: Vec<f32>,     // [n_rows, vocab_size]
    /// After the final norm, of the token that each context was asked about last.
    kept: Vec<f32>, // [n_slots, hidden_size]
}

/// What one task of attention works in.
type Scratch = (Vec<f32>, HolesScratch);

impl Decoder {
    pub(super) fn new(config: &ModelConfig, weights: Weights) -> Self {
        Self {
            config: config.clone(),
            weights,
            frequencies: inverse_frequencies(&config.rope, config.head_dim),
            activations: Activations::default(),
        }
    }

    pub(super) fn n_layers(&self) -> usize {
        self.config.n_layers
    }

    /// Computes the tokens of the plan, stores their keys and values, and answers its questions.
    pub(super) fn run(&mut self, plan: &TokenLayout<'_>, kv: &mut KvPages) -> Answers {
        let gemm = Gemm::new();
        let Self { config, weights, frequencies, activations } = self;
        activations.begin(config, weights, frequencies, &plan.places);
        let mut taps = plan.taps.iter().copied().peekable();
        let mut tapped = Vec::with_capacity(plan.taps.len());
        let mut masses = Masses::of(&plan.weighed);
        // Where all is asked about states that were kept, there are no tokens.
        for (layer_idx, layer) in weights.layers.iter().enumerate().filter(|_| !plan.places.is_empty()) {
            activations.steer(layer_idx, &plan.places);
            while let Some(tap) = taps.next_if(|tap| tap.n_layers == layer_idx) {
                let state = &activations.hidden[tap.token_idx * config.hidden_size..][..config.hidden_size];
                tapped.push((tap.output_idx, output::hidden_state(state).unwrap_or_else(Output::Failed)));
            }
            activations.attend(config, (layer_idx, layer), frequencies, &gemm, &plan.places, kv);
            masses.add(config, layer_idx, Queries { qkv: &activations.qkv, frequencies, plan, kv });
            activations.think(config, layer, &gemm);
        }
        activations.steer(weights.layers.len(), &plan.places);
        let mut answers = activations.answer(config, weights, &gemm, plan);
        let weighed = masses.outputs(config);
        tapped
            .into_iter()
            .chain(weighed)
            .for_each(|(output_idx, output)| answers.outputs[output_idx] = output);
        answers
    }
}

impl Activations {
    /// Embeds the tokens and works out their rotations.
    fn begin(
        &mut self,
        config: &ModelConfig,
        weights: &Weights,
        frequencies: &[f32],
        places: &[PlacedToken<'_>],
    ) {
        let ModelConfig { hidden_size, intermediate_size, n_heads, n_kv_heads, head_dim, .. } = *config;
        let n_tokens = places.len();
        self.hidden.clear();
        self.turns.clear();
        for place in places {
            let start = place.token as usize * hidden_size;
            self.hidden.extend_from_slice(&weights.embedding[start..start + hidden_size]);
            self.turns.extend(frequencies.iter().map(|frequency| {
                let (sin, cos) = (place.rotation as f32 * frequency).sin_cos();
                [cos, sin]
            }));
        }
        self.normed.resize(n_tokens * hidden_size, 0.0);
        self.qkv.resize(n_tokens * (n_heads + 2 * n_kv_heads) * head_dim, 0.0);
        self.attended.resize(n_tokens * n_heads * head_dim, 0.0);
        self.gate_up.resize(n_tokens * 2 * intermediate_size, 0.0);
        self.inner.resize(n_tokens * intermediate_size, 0.0);
    }

    /// Adds to the hidden states of steered tokens, behind so many layers.
    fn steer(&mut self, n_layers: usize, places: &[PlacedToken<'_>]) {
        let Some(hidden_size) = self.hidden.len().checked_div(places.len()) else { return };
        for (place, hidden) in places.iter().zip(self.hidden.chunks_exact_mut(hidden_size)) {
            if let Some(vector) = place.steering.and_then(|steering| steering.after(n_layers)) {
                hidden.iter_mut().zip(vector).for_each(|(hidden, value)| *hidden += value);
            }
        }
    }

    /// The attention block, added to the hidden states.
    fn attend(
        &mut self,
        config: &ModelConfig,
        (layer_idx, layer): (usize, &LayerWeights),
        frequencies: &[f32], // [head_dim / 2]
        gemm: &Gemm,
        places: &[PlacedToken<'_>],
        kv: &mut KvPages,
    ) {
        let ModelConfig { hidden_size, n_heads, n_kv_heads, head_dim, rms_norm_eps: eps, .. } = *config;
        norm_rows(&self.hidden, &layer.input_norm, eps, &mut self.normed, hidden_size);
        layer.qkv.write(gemm, &self.normed, &mut self.qkv);

        let qkv_len = (n_heads + 2 * n_kv_heads) * head_dim;
        let turns = self.turns.par_chunks_exact(head_dim / 2);
        self.qkv.par_chunks_exact_mut(qkv_len).zip(turns).with_min_len(N_ROWS_MIN).for_each(
            |(qkv, turns)| {
                for (head_idx, head) in qkv.chunks_exact_mut(head_dim).take(n_heads + n_kv_heads).enumerate()
                {
                    if let Some(norms) = &layer.head_norms {
                        let weight = if head_idx < n_heads { &norms.query } else { &norms.key };
                        rms_norm_mut(head, weight, eps);
                    }
                    rotate(head, turns);
                }
            },
        );

        for (place, qkv) in places.iter().zip(self.qkv.chunks_exact(qkv_len)) {
            let (page, slot) = place.page();
            let (key, value) = qkv[n_heads * head_dim..].split_at(n_kv_heads * head_dim);
            kv.store(page, slot, layer_idx, key, value);
        }

        let kv = &*kv;
        let qkv = &self.qkv;
        let group_len = n_heads / n_kv_heads * head_dim;
        let tasks = self.attended.par_chunks_exact_mut(group_len).enumerate();
        tasks.for_each_init(Scratch::default, |(scratch, among_holes), (task_idx, out)| {
            let (token_idx, kv_head_idx) = (task_idx / n_kv_heads, task_idx % n_kv_heads);
            let place = &places[token_idx];
            let attention = Attention {
                kv,
                layer_idx,
                kv_head_idx,
                head_dim,
                pages: place.pages,
                cell: place.cell,
                window: config.windows[layer_idx],
                queries: &qkv[token_idx * qkv_len + kv_head_idx * group_len..][..group_len],
            };
            match place.evicted {
                None => attention.run(scratch, out),
                Some(evicted) => attention.run_among_holes(evicted, frequencies, among_holes, out),
            }
        });
        layer.attention_output.add(gemm, &self.attended, &mut self.hidden);
    }

    /// The MLP block, added to the hidden states.
    fn think(&mut self, config: &ModelConfig, layer: &LayerWeights, gemm: &Gemm) {
        let ModelConfig { hidden_size, intermediate_size, rms_norm_eps: eps, .. } = *config;
        norm_rows(&self.hidden, &layer.mlp_norm, eps, &mut self.normed, hidden_size);
        layer.gate_up.write(gemm, &self.normed, &mut self.gate_up);
        self.inner
            .par_chunks_exact_mut(intermediate_size)
            .zip(self.gate_up.par_chunks_exact(2 * intermediate_size))
            .with_min_len(N_ROWS_MIN)
            .for_each(|(inner, gate_up)| gated_silu(gate_up, inner));
        layer.down.add(gemm, &self.inner, &mut self.hidden);
    }

    /// The final norm and the outputs, for the tokens that are asked about.
    fn answer(
        &mut self,
        config: &ModelConfig,
        weights: &Weights,
        gemm: &Gemm,
        plan: &TokenLayout<'_>,
    ) -> Answers {
        let hidden_size = config.hidden_size;
        self.normed.resize(plan.questions.len() * hidden_size, 0.0);
        for (question, normed) in plan.questions.iter().zip(self.normed.chunks_exact_mut(hidden_size)) {
            match question.hidden {
                Hidden::Computed(token_idx) => {
                    let hidden = &self.hidden[token_idx * hidden_size..][..hidden_size];
                    rms_norm(hidden, &weights.final_norm, config.rms_norm_eps, normed);
                }
                Hidden::Kept(slot) => {
                    normed.copy_from_slice(&self.kept[slot.0 as usize * hidden_size..][..hidden_size]);
                }
            }
            if let Some(slot) = question.keeper {
                let start = slot.0 as usize * hidden_size;
                self.kept.resize(self.kept.len().max(start + hidden_size), 0.0);
                self.kept[start..start + hidden_size].copy_from_slice(normed);
            }
        }
        output::answer(plan, gemm, &weights.lm_head, &self.normed, &mut self.logits)
    }
}

fn norm_rows(
    x: &[f32], // [n_rows, width]
    weight: &[f32],
    eps: f32,
    out: &mut [f32], // [n_rows, width]
    width: usize,
) {
    out.par_chunks_exact_mut(width)
        .zip(x.par_chunks_exact(width))
        .with_min_len(N_ROWS_MIN)
        .for_each(|(out, x)| rms_norm(x, weight, eps, out));
}
