#!/usr/bin/env python3
"""Writes a model folder of a published shape with random bf16 weights, to measure loading with.

    cuda/gpu/make_model.py llama-3.1-8b /dev/shm/llama-3.1-8b

Needs PyTorch. The tokenizer is that of the bundled model; ids past its end decode to nothing.
"""

import json
import math
import pathlib
import shutil
import struct
import sys

import torch

SHAPES = {
    "llama-3.2-1b": dict(hidden=2048, inner=8192, layers=16, heads=32, kv_heads=8, head_dim=64, tied=True, factor=32.0),
    "llama-3.1-8b": dict(hidden=4096, inner=14336, layers=32, heads=32, kv_heads=8, head_dim=128, tied=False, factor=8.0),
}
VOCAB = 128256


def tensors(shape):
    """Names and shapes, as Hugging Face has them."""
    hidden, inner = shape["hidden"], shape["inner"]
    q, kv = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    yield "model.embed_tokens.weight", (VOCAB, hidden)
    for layer in range(shape["layers"]):
        name = f"model.layers.{layer}."
        yield name + "input_layernorm.weight", (hidden,)
        yield name + "post_attention_layernorm.weight", (hidden,)
        yield name + "self_attn.q_proj.weight", (q, hidden)
        yield name + "self_attn.k_proj.weight", (kv, hidden)
        yield name + "self_attn.v_proj.weight", (kv, hidden)
        yield name + "self_attn.o_proj.weight", (hidden, q)
        yield name + "mlp.gate_proj.weight", (inner, hidden)
        yield name + "mlp.up_proj.weight", (inner, hidden)
        yield name + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not shape["tied"]:
        yield "lm_head.weight", (VOCAB, hidden)


def main():
    name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    shape = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["inner"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["head_dim"],
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": shape["tied"],
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": shape["factor"],
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    bundled = pathlib.Path(__file__).resolve().parents[2] / "daemon/models/tiny"
    for file in ["tokenizer.json", "tokenizer_config.json"]:
        shutil.copy(bundled / file, folder / file)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(1)
    header, offset = {}, 0
    for tensor, dims in tensors(shape):
        n_bytes = 2 * math.prod(dims)
        header[tensor] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [offset, offset + n_bytes]}
        offset += n_bytes
    encoded = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for tensor, dims in tensors(shape):
            if len(dims) == 1:
                values = torch.ones(dims, dtype=torch.bfloat16)
            else:
                values = torch.randn(dims, generator=generator, device=device, dtype=torch.bfloat16) * 0.02
            file.write(values.view(torch.int16).cpu().numpy().tobytes())
    print(f"{folder}: {offset / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
