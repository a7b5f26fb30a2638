//! The launches of a step, in the decoder's order.

use trellis_engine::model::ModelConfig;
use trellis_engine::sampling::Sampler;

use super::contexts::kv_bytes;
use super::ops::{Bench, Work, upload};
use super::products::{NormPlace, Projection, Target};
use super::{OpSpeed, OpStep};
use crate::CudaError;
use crate::ops::attention::AttentionInputs;
use crate::ops::common::RowCount;
use crate::ops::embedding::{TokenIds, TokenPlaces};
use crate::ops::gemv::N_ROWS_MAX;
use crate::ops::logits::{LogitsBuffers, OutputRow, RowOutput, Stages};
use crate::ops::norm::NormWeights;
use crate::ops::rope::{HeadNorm, HeadShape, HeadTensors, HeadWeights};

impl Bench<'_> {
    pub(super) fn embedding(&self, speeds: &mut Vec<OpSpeed>) -> Result<(), CudaError> {
        let ModelConfig { vocab_size, hidden_size, .. } = *self.config;
        let tokens = self.tokens();
        let ids: Vec<i32> = (0..tokens.n_max).map(|i| (i * 7919 % vocab_size) as i32).collect();
        let ids = upload(self.card, self.stream, &ids)?;
        let table = self.products.matrix(vocab_size * hidden_size * self.dtype.n_bytes(), 0);
        let work = Work { n_bytes: tokens.n_max * hidden_size * (self.dtype.n_bytes() + 4), n_operations: 0 };
        let residual = self.activations.residual;
        // No id is negative, so that no slot is read.
        let slots = self.tokens.slice();
        let places =
            TokenPlaces { cells: self.contexts.kv_cells.slice(), page_tokens: self.contexts.page_tokens() };
        self.time(speeds, ("embedding", "embedding"), 1, work, |_| {
            self.kernels.embedding.run(
                self.stream,
                tokens,
                hidden_size,
                TokenIds { ids: ids.slice(), slots },
                places,
                table,
                residual,
            )
        })
    }

    /// One decoder layer.
    pub(super) fn layer(&self, speeds: &mut Vec<OpSpeed>) -> Result<(), CudaError> {
        let ModelConfig { n_layers, hidden_size, intermediate_size, n_heads, n_kv_heads, head_dim, .. } =
            *self.config;
        let n = self.step.n_tokens();
        let a = &self.activations;
        let qkv = Projection { name: "qkv", n_out: (n_heads + 2 * n_kv_heads) * head_dim, n_in: hidden_size };
        let mut norms =
            vec![self.normed_product(speeds, qkv, n, a.normed, Target::Model(a.qkv), n_layers)?];
        self.rope(speeds)?;
        self.attention(speeds)?;
        let output = Projection { name: "attention output", n_out: hidden_size, n_in: n_heads * head_dim };
        self.product(speeds, output, n, a.attended, Target::Residual(a.residual), n_layers)?;

        let gate_up = Projection { name: "gate, up", n_out: 2 * intermediate_size, n_in: hidden_size };
        if n <= N_ROWS_MAX {
            norms.push(self.gated_product(speeds, gate_up, n, n_layers)?);
        } else {
            self.product(speeds, gate_up, n, a.mlp_normed, Target::Model(a.gate_up), n_layers)?;
            norms.push(NormPlace::Apart);
            self.swiglu(speeds)?;
        }
        let down = Projection { name: "down", n_out: hidden_size, n_in: intermediate_size };
        self.product(speeds, down, n, a.inner, Target::Residual(a.residual), n_layers)?;
        match norms.iter().filter(|&&place| place == NormPlace::Apart).count() {
            0 => Ok(()),
            n_apart => self.norm(speeds, n_apart * n_layers),
        }
    }

    /// From the last residual stream to tokens; and the copies that forks need.
    pub(super) fn outputs(&self, speeds: &mut Vec<OpSpeed>) -> Result<(), CudaError> {
        if !matches!(self.step, OpStep::Decode { .. }) {
            // As in a decode step of one row.
            return Ok(());
        }
        let ModelConfig { vocab_size, hidden_size, .. } = *self.config;
        let a = &self.activations;
        let head = Projection { name: "logits", n_out: vocab_size, n_in: hidden_size };
        self.normed_product(speeds, head, self.logits_rows().n_max, a.hidden, Target::F32(a.logits), 1)?;
        self.sample(speeds, ("greedy", "scan"), 1, &Sampler::greedy())?;
        let sampler =
            Sampler { temperature: 0.8, top_k: Some(50), top_p: Some(0.95), seed: 1, ..Sampler::greedy() };
        self.sample(speeds, ("top-k and top-p", "scan, bins, draw"), 0, &sampler)?;
        self.page_copies(speeds)
    }

    fn norm(&self, speeds: &mut Vec<OpSpeed>, n_a_step: usize) -> Result<(), CudaError> {
        let hidden_size = self.config.hidden_size;
        let rows = self.tokens();
        let weights =
            NormWeights { hidden_size, weight: self.numbers.slice(), eps: self.config.rms_norm_eps };
        let n_bytes = rows.n_max * hidden_size * (4 + self.dtype.n_bytes());
        let (x, y) = (self.activations.residual, self.activations.normed);
        self.time(speeds, ("norm", "norm"), n_a_step, Work { n_bytes, n_operations: 0 }, |_| {
            self.kernels.norm.run(self.stream, rows, weights, x, y)
        })
    }

    fn rope(&self, speeds: &mut Vec<OpSpeed>) -> Result<(), CudaError> {
        let ModelConfig { n_layers, n_heads, n_kv_heads, head_dim, rms_norm_eps: eps, .. } = *self.config;
        let tokens = self.tokens();
        let row_len = (n_heads + 2 * n_kv_heads) * head_dim;
        let n_bytes = 2 * tokens.n_max * row_len * self.dtype.n_bytes();
        let weight = self.numbers.slice();
        let norm = self.config.qk_norm.then_some(HeadNorm { q_weight: weight, k_weight: weight, eps });
        let weights = HeadWeights { bias: None, norm, inv_freq: self.inv_freq.slice() };
        let tensors = HeadTensors {
            qkv: self.activations.qkv,
            positions: self.contexts.positions.slice(),
            kv_cells: self.contexts.kv_cells.slice(),
            q: self.activations.q,
            kv: self.contexts.kv(),
        };
        let work = Work { n_bytes, n_operations: 0 };
        self.time(speeds, ("rotation, KV", "rope"), n_layers, work, |idx| {
            let shape = HeadShape {
                n_heads,
                n_kv_heads,
                head_dim,
                page_stride: self.contexts.page_len(),
                layer_idx: self.contexts.layer_of(idx),
            };
            self.kernels.rope.run(self.stream, tokens, shape, weights, tensors)
        })
    }

    pub(super) fn attention(&self, speeds: &mut Vec<OpSpeed>) -> Result<(), CudaError> {
        let ModelConfig { n_layers, n_heads, n_kv_heads, head_dim, .. } = *self.config;
        let window = self.config.windows.first().copied().flatten();
        let (n_pairs, n_keys) = self.contexts.n_pairs_and_keys(window);
        let n_tokens = self.step.n_tokens();
        let work = Work {
            n_bytes: kv_bytes(self.dtype, n_keys, n_kv_heads, head_dim)
                + 2 * n_tokens * n_heads * head_dim * self.dtype.n_bytes(),
            n_operations: 4 * n_pairs * n_heads * head_dim,
        };
        let inputs = |idx| AttentionInputs {
            n_tokens_max: n_tokens,
            q: self.activations.q,
            out: self.activations.attended,
            kv: self.contexts.layer(idx),
            entries: self.contexts.entries(),
            window,
            holes: None,
        };
        let (attention, work_lists) = (&self.kernels.attention, self.contexts.work());
        let workspace = self.contexts.workspace(self.activations.partial);
        let forms = ["attention_decode", "attention_few", "attention_prompt"];
        let kernel = forms[attention.cuttings().form(self.step.n_row_tokens()) as usize];
        self.time(speeds, ("attention", kernel), n_layers, work, |idx| {
            attention.run(self.stream, &inputs(idx), &work_lists, workspace)
        })
    }

    fn swiglu(&self, speeds: &mut Vec<OpSpeed>) -> Result<(), CudaError> {
        let ModelConfig { n_layers, intermediate_size, .. } = *self.config;
        let tokens = self.tokens();
        let n_bytes = 3 * tokens.n_max * intermediate_size * self.dtype.n_bytes();
        let gate_up = self.activations.gate_up;
        let inner = self.activations.inner;
        self.time(speeds, ("SwiGLU", "swiglu"), n_layers, Work { n_bytes, n_operations: 0 }, |_| {
            self.kernels.swiglu.run(self.stream, tokens, intermediate_size, gate_up, None, inner)
        })
    }

    /// Every row with the same settings, and no history.
    fn sample(
        &self,
        speeds: &mut Vec<OpSpeed>,
        names: (&'static str, &'static str),
        n_a_step: usize,
        sampler: &Sampler,
    ) -> Result<(), CudaError> {
        let vocab_size = self.config.vocab_size;
        let RowCount { n_max: n_rows, n } = self.logits_rows();
        let rows: Vec<OutputRow> = (0..n_rows)
            .map(|row| OutputRow { logits_row: row as u32, ..OutputRow::draw(sampler, row as u64) })
            .collect();
        let stages = Stages::of(&rows);
        self.kernels.logits.load(stages)?;
        let rows = upload(self.card, self.stream, &rows)?;
        let outputs = upload(self.card, self.stream, &vec![RowOutput::default(); n_rows])?;
        let zeros = upload(self.card, self.stream, &[0u64; 2])?;
        let nothing = zeros.slice();
        let buffers = LogitsBuffers {
            logits: self.activations.logits,
            rows: rows.slice(),
            n_rows: n,
            tables: nothing,
            page_tokens: nothing,
            slots: nothing,
            biases: nothing,
            masks: nothing,
            score_tokens: nothing,
            scratch: self.activations.scratch,
            outputs: outputs.slice(),
            top: nothing,
            scores: nothing,
            program_outputs: nothing,
        };
        let work = Work { n_bytes: 4 * n_rows * vocab_size, n_operations: 0 };
        self.time(speeds, names, n_a_step, work, |_| {
            // SAFETY: every row names a row of logits, and neither history nor lists; the buffers live until the
            // timer has waited for the launches.
            unsafe { self.kernels.logits.run(self.stream, &buffers, n_rows, vocab_size, stages, None) }
        })
    }

    fn page_copies(&self, speeds: &mut Vec<OpSpeed>) -> Result<(), CudaError> {
        let (pairs, list) = self.contexts.copies();
        let page_bytes = self.contexts.page_bytes();
        let work = Work { n_bytes: 2 * pairs.n_max * page_bytes, n_operations: 0 };
        self.time(speeds, ("a page of each context", "copy_pages"), 0, work, |_| {
            let (kv, tokens) = (self.contexts.kv(), self.contexts.page_tokens());
            self.kernels.pages.run(self.stream, pairs, page_bytes, kv, tokens, list)
        })
    }
}
