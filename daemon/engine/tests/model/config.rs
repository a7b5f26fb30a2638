use serde_json::{Value, json};
use trellis_engine::model::{Architecture, ModelConfig, ModelError, RopeConfig, RopeScaling};

/// A small valid config, changed by `changes`; a null in `changes` stays a null, `"-"` removes the field.
fn config_of(changes: Value) -> Result<ModelConfig, ModelError> {
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48,
        "max_position_embeddings": 128, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 100,
    });
    for (field, value) in changes.as_object().unwrap() {
        if value == "-" {
            config.as_object_mut().unwrap().remove(field);
        } else {
            config[field] = value.clone();
        }
    }
    ModelConfig::from_json("config.json", config.to_string().as_bytes())
}

#[test]
fn defaults_are_those_of_transformers() {
    let config = config_of(json!({})).unwrap();
    assert_eq!((config.n_kv_heads, config.head_dim), (4, 8));
    assert_eq!(config.rms_norm_eps, 1e-6);
    assert_eq!(config.rope, RopeConfig { theta: 10_000.0, scaling: RopeScaling::Default });
    assert!(!config.tied_embeddings && !config.qkv_bias && !config.attention_output_bias && !config.mlp_bias);
    assert!(!config.qk_norm);
    assert_eq!(config.windows, [None; 4]);
}

#[test]
fn biases_and_norms_of_each_architecture() {
    let flags = |name: &str| {
        let changes =
            json!({"architectures": [name], "attention_bias": true, "mlp_bias": true, "head_dim": 16});
        let config = config_of(changes).unwrap();
        (config.architecture, config.qkv_bias, config.attention_output_bias, config.mlp_bias, config.qk_norm)
    };
    assert_eq!(flags("LlamaForCausalLM"), (Architecture::Llama, true, true, true, false));
    assert_eq!(flags("MistralForCausalLM"), (Architecture::Mistral, false, false, false, false));
    assert_eq!(flags("Qwen2ForCausalLM"), (Architecture::Qwen2, true, false, false, false));
    assert_eq!(flags("Qwen3ForCausalLM"), (Architecture::Qwen3, true, true, false, true));
}

#[test]
fn sliding_windows() {
    let windows = |changes: Value| config_of(changes).map(|config| config.windows);
    let mistral = |changes: Value| {
        let mut changes = changes;
        changes["architectures"] = json!(["MistralForCausalLM"]);
        windows(changes).unwrap()
    };
    assert_eq!(mistral(json!({"sliding_window": 16})), [Some(16); 4]);
    assert_eq!(mistral(json!({"sliding_window": null})), [None; 4]);
    assert_eq!(mistral(json!({})), [Some(4096); 4]);

    for name in ["Qwen2ForCausalLM", "Qwen3ForCausalLM"] {
        let qwen = |changes: Value| {
            let mut changes = changes;
            changes["architectures"] = json!([name]);
            windows(changes)
        };
        assert_eq!(qwen(json!({"sliding_window": 16})).unwrap(), [None; 4]);
        assert_eq!(
            qwen(json!({"sliding_window": 16, "use_sliding_window": true, "max_window_layers": 3})).unwrap(),
            [None, None, None, Some(16)]
        );
        let (full, sliding) = ("full_attention", "sliding_attention");
        let types = json!([sliding, full, sliding, full]);
        assert_eq!(
            qwen(json!({"sliding_window": 16, "use_sliding_window": true, "layer_types": types})).unwrap(),
            [Some(16), None, Some(16), None]
        );
        assert!(qwen(json!({"layer_types": types})).is_err(), "a sliding layer without a window");
        assert!(qwen(json!({"layer_types": [full]})).is_err(), "fewer types than layers");
    }
}

#[test]
fn both_forms_of_rope_settings() {
    let rope = |changes: Value| config_of(changes).unwrap().rope;
    let of = |theta: f64, scaling: RopeScaling| RopeConfig { theta, scaling };
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_n_positions: 64,
    };
    let llama3_fields = |key: &str| {
        json!({key: "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64})
    };

    // Older: a base and, apart from it, a scaling under either key.
    assert_eq!(rope(json!({"rope_theta": 5e5})), of(5e5, RopeScaling::Default));
    assert_eq!(rope(json!({"rope_theta": 5e5, "rope_scaling": null})), of(5e5, RopeScaling::Default));
    let linear = json!({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}});
    assert_eq!(rope(linear), of(5e5, RopeScaling::Linear { factor: 4.0 }));
    let dynamic = json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2}});
    assert_eq!(rope(dynamic), of(1e4, RopeScaling::Dynamic { factor: 2.0 }));
    for key in ["type", "rope_type"] {
        let changes = json!({"rope_theta": 5e5, "rope_scaling": llama3_fields(key)});
        assert_eq!(rope(changes), of(5e5, llama3.clone()));
    }

    // Newer: all in one object.
    let mut newer = llama3_fields("rope_type");
    newer["rope_theta"] = json!(5e5);
    assert_eq!(rope(json!({"rope_parameters": newer})), of(5e5, llama3));
    assert_eq!(rope(json!({"rope_parameters": {"rope_theta": 1e6}})), of(1e6, RopeScaling::Default));
}

#[test]
fn every_bad_field_is_named() {
    let cases = [
        ("architectures", json!({"architectures": "-"})),
        ("architectures", json!({"architectures": []})),
        ("architectures", json!({"architectures": ["GPT2LMHeadModel"]})),
        ("hidden_act", json!({"hidden_act": "gelu"})),
        ("hidden_size", json!({"hidden_size": 0})),
        ("hidden_size", json!({"hidden_size": "32"})),
        ("hidden_size", json!({"hidden_size": 32.5})),
        ("hidden_size", json!({"hidden_size": -32})),
        ("hidden_size", json!({"hidden_size": u64::MAX})),
        ("vocab_size", json!({"vocab_size": "-"})),
        ("vocab_size", json!({"vocab_size": 1u64 << 40})),
        ("num_hidden_layers", json!({"num_hidden_layers": 0})),
        ("num_attention_heads", json!({"num_attention_heads": 0})),
        ("num_key_value_heads", json!({"num_key_value_heads": 3})),
        ("num_key_value_heads", json!({"num_key_value_heads": 8})),
        ("intermediate_size", json!({"intermediate_size": null})),
        ("max_position_embeddings", json!({"max_position_embeddings": 0})),
        ("head_dim", json!({"head_dim": 7})),
        ("head_dim", json!({"head_dim": 1 << 20})),
        ("head_dim", json!({"hidden_size": 30})),
        ("head_dim", json!({"hidden_size": 36})),
        ("rms_norm_eps", json!({"rms_norm_eps": 0.0})),
        ("rms_norm_eps", json!({"rms_norm_eps": "NaN"})),
        ("tie_word_embeddings", json!({"tie_word_embeddings": 1})),
        ("attention_bias", json!({"attention_bias": "yes"})),
        ("rope_theta", json!({"rope_theta": 0.0})),
        ("rope_theta", json!({"rope_theta": -1e4})),
        ("rope_scaling", json!({"rope_scaling": "linear"})),
        ("rope_scaling.type", json!({"rope_scaling": {"type": "yarn", "factor": 4.0}})),
        ("rope_scaling.rope_type", json!({"rope_scaling": {"rope_type": "longrope"}})),
        ("rope_scaling.type", json!({"rope_scaling": {"factor": 4.0}})),
        ("rope_scaling.factor", json!({"rope_scaling": {"type": "linear"}})),
        ("rope_scaling.factor", json!({"rope_scaling": {"type": "linear", "factor": 0.0}})),
        ("rope_scaling.low_freq_factor", json!({"rope_scaling": {"type": "llama3", "factor": 8.0}})),
        ("rope_parameters.partial_rotary_factor", json!({"rope_parameters": {"partial_rotary_factor": 0.5}})),
        (
            "rope_parameters.high_freq_factor",
            json!({"rope_parameters": {"rope_type": "llama3", "factor": 8.0,
            "low_freq_factor": 4.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}),
        ),
        ("sliding_window", json!({"architectures": ["MistralForCausalLM"], "sliding_window": 0})),
    ];
    for (expected, changes) in cases {
        match config_of(changes.clone()) {
            Err(ModelError::Field { file, field, found, expected: allowed }) => {
                assert_eq!((file.as_str(), field.as_str()), ("config.json", expected), "{changes}");
                assert!(!found.is_empty() && !allowed.is_empty());
            }
            other => panic!("{changes}: {other:?}"),
        }
    }
}

#[test]
fn what_is_no_json_object_is_a_syntax_error() {
    let nested = "[".repeat(100_000);
    for bytes in [&b""[..], b"{", b"[]", b"null", b"\xff\xfe", br#"{"rope_theta": NaN}"#, nested.as_bytes()] {
        let result = ModelConfig::from_json("config.json", bytes);
        assert!(matches!(result, Err(ModelError::Syntax { .. })), "{result:?}");
    }
}
