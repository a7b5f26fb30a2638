//! What a step has to read and to compute at least.

use trellis_engine::backend::WeightsInfo;
use trellis_engine::model::ModelConfig;

/// The work of one model.
#[derive(Clone, Debug)]
pub(super) struct Work {
    config: ModelConfig,
    weights: WeightsInfo,
}

impl Work {
    pub(super) fn new(config: &ModelConfig, weights: WeightsInfo) -> Self {
        Self { config: config.clone(), weights }
    }

    /// Bytes of weights that a step reads: all, but of an embedding table that is not the output projection too only
    /// the rows of its tokens.
    pub(super) fn weight_bytes(&self, n_tokens: usize) -> f64 {
        let element_bytes = self.weights.dtype.n_bytes();
        let ModelConfig { vocab_size, hidden_size, tied_embeddings, .. } = self.config;
        let unread = if tied_embeddings { 0 } else { vocab_size.saturating_sub(n_tokens) * hidden_size };
        self.weights.n_bytes as f64 - (unread * element_bytes) as f64
    }

    /// Bytes of keys and values that a token at the end of `n_positions` attends to; a fraction where the length is a
    /// mean.
    pub(super) fn kv_bytes(&self, n_positions: f64) -> f64 {
        let ModelConfig { n_kv_heads, head_dim, windows, .. } = &self.config;
        let position_bytes = 2 * n_kv_heads * head_dim * self.weights.dtype.n_bytes();
        let read =
            |window: &Option<usize>| window.map_or(n_positions, |window| n_positions.min(window as f64));
        windows.iter().map(read).sum::<f64>() * position_bytes as f64
    }

    /// Bytes of a step that decodes a token of each of `n_contexts`.
    pub(super) fn decode_bytes(&self, n_contexts: usize, n_positions: f64) -> f64 {
        self.weight_bytes(n_contexts) + n_contexts as f64 * self.kv_bytes(n_positions)
    }

    /// Multiplications and additions from a prompt to the logits of its last token.
    pub(super) fn prompt_operations(&self, n_tokens: usize) -> f64 {
        let ModelConfig { hidden_size, intermediate_size, n_layers, n_heads, n_kv_heads, head_dim, .. } =
            self.config;
        let attention_weights = hidden_size * (2 * n_heads + 2 * n_kv_heads) * head_dim;
        let layer = attention_weights + 3 * hidden_size * intermediate_size;
        let products = 2.0 * n_tokens as f64 * (n_layers * layer) as f64;
        let logits = 2.0 * (self.config.vocab_size * hidden_size) as f64;
        products + logits + self.attention_operations(n_tokens)
    }

    /// Q K^T and its product with V, of the pairs that a causal mask and a window leave.
    fn attention_operations(&self, n_tokens: usize) -> f64 {
        let ModelConfig { n_heads, head_dim, windows, .. } = &self.config;
        let triangle = |n: f64| n * (n + 1.0) / 2.0;
        let n_pairs = |window: &Option<usize>| {
            let n = n_tokens as f64;
            let beyond = window.map_or(0.0, |window| (n - window as f64).max(0.0));
            triangle(n) - triangle(beyond)
        };
        4.0 * (n_heads * head_dim) as f64 * windows.iter().map(n_pairs).sum::<f64>()
    }
}

#[cfg(test)]
mod tests {
    use trellis_engine::model::{Dtype, shape};

    use super::*;

    fn work(name: &str, n_bytes: u64) -> Work {
        Work::new(&shape(name).expect("a shape"), WeightsInfo { dtype: Dtype::Bf16, n_bytes })
    }

    /// Sizes of the checkpoints, and the floors in the table of peers: 2.47 GB and 15.0 GB a step; 256 contexts of 1,280
    /// positions are 43 GB of KV for 8B.
    #[test]
    fn published_models_read_what_is_known() {
        let small = work("llama-3.2-1b", 2_471_645_608);
        assert_eq!(small.weight_bytes(1), 2_471_645_608.0);
        let large = work("llama-3.1-8b", 16_060_522_496);
        assert!((large.weight_bytes(1) / 15.01e9 - 1.0).abs() < 1e-3, "{}", large.weight_bytes(1));
        let kv_bytes = large.decode_bytes(256, 1280.0) - large.weight_bytes(256);
        assert!((kv_bytes / 42.95e9 - 1.0).abs() < 1e-3, "{kv_bytes}");
        // 7.5 · 10^9 weights in products, less those of the logits, and a hundredth for attention.
        let operations = large.prompt_operations(2048);
        assert!((operations / 29.7e12 - 1.0).abs() < 1e-2, "{operations}");
    }

    #[test]
    fn a_window_bounds_what_is_read() {
        let windowed = work("mistral-7b", 0);
        assert_eq!(windowed.kv_bytes(4096.0), windowed.kv_bytes(9000.0));
        assert_eq!(windowed.kv_bytes(2048.0) * 2.0, windowed.kv_bytes(4096.0));
        let (inside, twice) = (windowed.attention_operations(4096), windowed.attention_operations(8192));
        // The second half attends to a whole window each.
        let token = 4.0 * 4096.0 * 32.0;
        assert!((twice - inside - token * 4096.0 * 4096.0).abs() < 1e-6 * twice);
    }
}
