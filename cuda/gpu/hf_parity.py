#!/usr/bin/env python3
"""Small random models of every architecture: what Hugging Face transformers computes, against what Trellis does.

    hf_parity.py [TEST_PROGRAM]     default: target/gpu/pack/tests/e2e

Makes a model folder and a golden file for each architecture, in float32 on the processor, then runs the test that
compares them (tests/tests/e2e/parity.rs) on the device that TRELLIS_TEST_DEVICE names.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 4096
N_GREEDY = 40
N_TOP = 10
PROMPT_LENGTHS = (1, 5, 16, 33, 90, 200)

# Weights of this scale give distributions as sharp as a trained model's; the usual 0.02 gives flat ones, which
# hide mistakes.
INITIALIZER_RANGE = 0.12

SHAPE = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    intermediate_size=640,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    initializer_range=INITIALIZER_RANGE,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=None,
    attn_implementation="eager",
)

MODELS = {
    "llama3-rope": dict(
        model_type="llama",
        head_dim=64,
        tie_word_embeddings=False,
        rope_theta=500000.0,
        rope_scaling=dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=256,
        ),
    ),
    # A head length that is not hidden_size / num_attention_heads, and biases everywhere.
    "llama-biases": dict(
        model_type="llama", head_dim=48, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    # A window shorter than the prompts.
    "mistral-window": dict(model_type="mistral", head_dim=32, sliding_window=24, tie_word_embeddings=False),
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=True, use_sliding_window=False),
    "qwen3": dict(model_type="qwen3", head_dim=128, tie_word_embeddings=True, use_sliding_window=False),
    # One query head for each key head, and many for one.
    "llama-mha": dict(model_type="llama", num_key_value_heads=8, tie_word_embeddings=True),
    "llama-mqa": dict(model_type="llama", num_key_value_heads=1, head_dim=64, tie_word_embeddings=True),
}


def make_model(settings: dict, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    settings = {**SHAPE, **settings}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    # Norm weights of 1 and biases of 0 would hide that they are left out.
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.copy_((1.0 if "norm" in name else 0.0) + 0.2 * torch.randn_like(weight))
    return model


@torch.no_grad()
def make_case(model: torch.nn.Module, n_prompt: int, generator: torch.Generator) -> dict:
    prompt = torch.randint(20, VOCAB_SIZE, (n_prompt,), generator=generator).tolist()
    logprobs = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    top = logprobs.topk(N_TOP, dim=-1)
    greedy: list[int] = []
    while len(greedy) < N_GREEDY and (not greedy or greedy[-1] != model.config.eos_token_id):
        # Without a cache: every token from the whole text.
        greedy.append(int(model(torch.tensor([prompt + greedy])).logits[0, -1].argmax()))
    return {
        "prompt": f"{n_prompt} random tokens",
        "prompt_ids": prompt,
        "top10_ids": top.indices.tolist(),
        "top10_logprobs": top.values.tolist(),
        "greedy_ids": greedy,
    }


def main() -> int:
    root = Path(__file__).resolve().parents[2]
    program = Path(sys.argv[1] if len(sys.argv) > 1 else root / "target/gpu/pack/tests/e2e").resolve()
    with tempfile.TemporaryDirectory() as folder:
        for seed, (name, settings) in enumerate(MODELS.items()):
            model = make_model(dict(settings), seed)
            model.save_pretrained(Path(folder) / name)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(root / "daemon/models/tiny" / file, Path(folder) / name)
            generator = torch.Generator().manual_seed(seed)
            cases = [make_case(model, n_prompt, generator) for n_prompt in PROMPT_LENGTHS]
            golden = json.dumps({"model": name, "cases": cases})
            (Path(folder) / f"{name}.json").write_text(golden)
            spread = max(case["top10_logprobs"][-1][0] for case in cases)
            print(f"{name}: most probable token of a case at {spread:.2f} nat", flush=True)
        test = "parity::architectures_are_what_hugging_face_computes"
        command = [str(program), "--ignored", "--exact", test, "--nocapture"]
        return subprocess.run(command, cwd=root, env={**os.environ, "TRELLIS_TEST_PARITY": folder}).returncode


if __name__ == "__main__":
    sys.exit(main())
