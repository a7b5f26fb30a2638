use trellis_engine::model::{Architecture, ModelConfig, RopeConfig, RopeScaling};

use super::*;

const LIMITS: DeviceLimits = DeviceLimits {
    read_bytes_per_s: 1e12,
    copy_bytes_per_s: 1e12,
    product_flops: 1e14,
    host_to_device_bytes_per_s: 1e10,
};

#[test]
fn the_floor_is_the_longer_of_bytes_and_operations() {
    let speed = |n_bytes, n_operations| OpSpeed {
        op: "",
        kernel: "",
        step: OpStep::Prompt { n_tokens: 1 },
        n_a_step: 1,
        seconds: 1.0,
        n_bytes,
        n_operations,
    };
    let bytes = speed(2_000_000, 100_000_000);
    assert_eq!(bytes.floor_seconds(&LIMITS), 2e-6);
    assert!(bytes.is_bound_by_bytes(&LIMITS));
    let operations = speed(2_000_000, 300_000_000);
    assert_eq!(operations.floor_seconds(&LIMITS), 3e-6);
    assert!(!operations.is_bound_by_bytes(&LIMITS));
}

/// Small, but with every part: few and many rows, groups of heads, norms of heads.
#[test]
fn every_kernel_is_measured() {
    if crate::testing::gpu().is_none() {
        return;
    }
    let card = Card::open(0, None).expect("a card");
    let config = ModelConfig {
        architecture: Architecture::Qwen3,
        vocab_size: 4096,
        hidden_size: 256,
        intermediate_size: 512,
        n_layers: 2,
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 64,
        n_positions: 1024,
        rms_norm_eps: 1e-5,
        rope: RopeConfig { theta: 10_000.0, scaling: RopeScaling::Default },
        tied_embeddings: true,
        qkv_bias: false,
        attention_output_bias: false,
        mlp_bias: false,
        qk_norm: true,
        windows: vec![None; 2],
    };
    let steps = [
        OpStep::Decode { n_rows: 1, context_len: 100 },
        OpStep::Decode { n_rows: 40, context_len: 33 },
        OpStep::Prompt { n_tokens: 300 },
        OpStep::Chunk { n_tokens: 70, context_len: 900 },
        OpStep::Uneven { n_short: 5, short_len: 20, long_len: 1000 },
        OpStep::Few { n_rows: 3, n_row_tokens: 9, context_len: 200 },
    ];
    let speeds = ops(&card, &config, Dtype::Bf16, &steps, &|_| {}).expect("speeds");
    for step in &steps[3..] {
        let ops: Vec<_> = speeds.iter().filter(|speed| speed.step == *step).map(|speed| speed.op).collect();
        assert_eq!(ops, ["attention"], "{step}");
    }
    for &step in &steps[..3] {
        let of_step = |op: &str| speeds.iter().any(|speed| speed.step == step && speed.op == op);
        for op in ["embedding", "qkv", "rotation, KV", "attention", "attention output", "gate, up", "down"] {
            assert!(of_step(op), "{op} in {step:?}");
        }
        let is_decode = matches!(step, OpStep::Decode { .. });
        assert_eq!(of_step("logits") && of_step("greedy") && of_step("top-k and top-p"), is_decode);
        assert_eq!(of_step("norm"), step.n_tokens() > 16, "{step:?}");
    }
    for speed in &speeds {
        assert!(speed.seconds > 0.0 && speed.seconds < 1.0, "{speed:?}");
        assert!(speed.n_bytes > 0, "{speed:?}");
    }
}
