#!/usr/bin/env python3
"""Times of PyTorch on the same work, for `trellis bench --peers FILE`: decoding with a compiled model over a static KV
cache, as gpt-fast does it, and prompts through transformers.

    cuda/gpu/peers.py --out peers.jsonl                     every row, as long as --seconds lasts
    cuda/gpu/peers.py --out peers.jsonl llama-3.1-8b-b1-decode ...    only these

Weights are random, bf16. Batches of 1 and 32 have a cache of 512 positions, batches of 256 one of 1,280: those
stand for contexts of 128 and of 1,216 (`--context`). Needs a CUDA
machine with torch, and transformers for prompts. Each row is its best time over what can do it here.
"""
import argparse
import gc
import importlib.util
import json
import statistics
import time

import torch
import torch._dynamo
import torch.nn as nn
import torch.nn.functional as F

VOCAB = 128256
SHAPES = {
    "llama-3.2-1b": dict(hidden=2048, layers=16, heads=32, kv_heads=8, inner=8192, head_dim=64, tied=True),
    "llama-3.1-8b": dict(hidden=4096, layers=32, heads=32, kv_heads=8, inner=14336, head_dim=128, tied=False),
}
ROWS = [
    f"{shape}-{size}" for shape, size in [
        ("llama-3.2-1b", "b1-decode"), ("llama-3.1-8b", "b1-decode"),
        ("llama-3.1-8b", "p2048-prefill"), ("llama-3.1-8b", "p8192-prefill"),
        ("llama-3.2-1b", "p2048-prefill"), ("llama-3.2-1b", "p8192-prefill"),
        ("llama-3.1-8b", "b32-decode"), ("llama-3.2-1b", "b32-decode"),
        ("llama-3.1-8b", "b256-decode"), ("llama-3.2-1b", "b256-decode"),
    ]
]


class Decoder(nn.Module):
    """A decoder of the Llama family over a static cache."""

    def __init__(self, shape, n_positions, n_rows):
        super().__init__()
        self.shape, self.n_positions = shape, n_positions
        h, d = shape["hidden"], shape["head_dim"]
        heads, kv_heads, inner = shape["heads"], shape["kv_heads"], shape["inner"]
        random = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16)
        # Parameters stay where they are: a captured graph would copy other tensors for each step.
        weight = lambda *size: nn.Parameter(random(*size) * 0.02, requires_grad=False)
        weights = lambda *size: nn.ParameterList(weight(*size) for _ in layers)
        layers = range(shape["layers"])
        self.embedding = weight(VOCAB, h)
        self.head = self.embedding if shape["tied"] else weight(VOCAB, h)
        self.qkv = weights((heads + 2 * kv_heads) * d, h)
        self.output = weights(h, heads * d)
        self.gate_up = weights(2 * inner, h)
        self.down = weights(h, inner)
        self.norms = nn.ParameterList(weight(h) for _ in range(2 * shape["layers"] + 1))
        cache = lambda: random(n_rows, kv_heads, n_positions, d)
        self.keys, self.values = [cache() for _ in layers], [cache() for _ in layers]
        for tensor in self.keys + self.values:
            torch._dynamo.mark_static_address(tensor)
        frequencies = 500000 ** -(torch.arange(0, d, 2, device="cuda").float() / d)
        angles = torch.outer(torch.arange(n_positions, device="cuda").float(), frequencies)
        self.cos, self.sin = angles.cos(), angles.sin()

    def norm(self, x, weight):
        x = x.float()
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16() * weight

    def rotate(self, x, position):
        a, b = x.float().chunk(2, -1)
        cos, sin = self.cos[position][None, :, None], self.sin[position][None, :, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).bfloat16()

    def forward(self, tokens, position):
        """The most probable token after each row's token; tokens: [rows, 1], position: [1]."""
        s = self.shape
        heads, kv_heads, d = s["heads"], s["kv_heads"], s["head_dim"]
        n_rows = tokens.shape[0]
        x = self.embedding[tokens]
        mask = (torch.arange(self.n_positions, device="cuda")[None] <= position[:, None])[None, None]
        for i in range(s["layers"]):
            qkv = F.linear(self.norm(x, self.norms[2 * i]), self.qkv[i])
            q, k, v = qkv.split([heads * d, kv_heads * d, kv_heads * d], -1)
            q = self.rotate(q.view(n_rows, 1, heads, d), position).transpose(1, 2)
            k = self.rotate(k.view(n_rows, 1, kv_heads, d), position).transpose(1, 2)
            self.keys[i][:, :, position] = k
            self.values[i][:, :, position] = v.view(n_rows, 1, kv_heads, d).transpose(1, 2)
            a = F.scaled_dot_product_attention(q, self.keys[i], self.values[i], attn_mask=mask, enable_gqa=True)
            x = x + F.linear(a.transpose(1, 2).reshape(n_rows, 1, heads * d), self.output[i])
            gate, up = F.linear(self.norm(x, self.norms[2 * i + 1]), self.gate_up[i]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, self.down[i])
        logits = F.linear(self.norm(x[:, -1], self.norms[-1]), self.head)
        return logits.argmax(-1, keepdim=True)


def context_len(n_rows):
    """Tokens of each context before it is decoded, for a comparison."""
    return 1216 if n_rows >= 256 else 128


def decode_ms(name, n_rows):
    import torch._inductor.config as inductor

    inductor.coordinate_descent_tuning = True
    n_positions = 1280 if n_rows >= 256 else 512
    decoder = Decoder(SHAPES[name], n_positions, n_rows)
    step = torch.compile(lambda tokens, position: decoder(tokens, position), mode="reduce-overhead", fullgraph=True)
    tokens = torch.randint(0, VOCAB, (n_rows, 1), device="cuda")
    position = torch.tensor([128], device="cuda")
    rounds = []
    for n_steps in (5, 30, 30, 30):  # the first compiles and captures
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(n_steps):
            tokens = step(tokens, position).clone()
            position = position + 1
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - started) / n_steps * 1e3)
    del decoder, step
    return {"torch.compile, static cache": statistics.median(rounds[1:])}


def prefill_ms(name, n_prompt):
    from transformers import LlamaConfig, LlamaForCausalLM

    s = SHAPES[name]
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=s["hidden"], intermediate_size=s["inner"], num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"], num_key_value_heads=s["kv_heads"], head_dim=s["head_dim"],
        tie_word_embeddings=s["tied"], max_position_embeddings=8192, rope_theta=500000.0,
    )
    ways = ["sdpa"] + (["flash_attention_2"] if importlib.util.find_spec("flash_attn") else [])
    times = {}
    for way in ways:
        config._attn_implementation = way
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(usual)
        samples = []
        for _ in range(7):
            prompt = torch.randint(0, VOCAB, (1, n_prompt), device="cuda")
            torch.cuda.synchronize()
            started = time.perf_counter()
            model(prompt, logits_to_keep=1).logits.argmax().item()
            samples.append((time.perf_counter() - started) * 1e3)
        times[f"transformers, {way}"] = statistics.median(samples[2:])
        del model
    return times


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="file for the lines")
    parser.add_argument("--seconds", type=float, default=240, help="no row begins after so long (default: 240)")
    parser.add_argument("rows", nargs="*", default=ROWS, help=f"of {', '.join(ROWS)}")
    arguments = parser.parse_args()
    unknown = [row for row in arguments.rows if row not in ROWS]
    if unknown:
        parser.error(f"no such row: {', '.join(unknown)}")
    started = time.monotonic()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with open(arguments.out, "w", encoding="utf-8") as out:
        for row in arguments.rows:
            if time.monotonic() - started > arguments.seconds:
                print(f"{row}: left out, the time is over", flush=True)
                continue
            name, size, _ = row.rsplit("-", 2)
            began = time.monotonic()
            measure = decode_ms if size[0] == "b" else prefill_ms
            times = measure(name, int(size[1:]))
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
            by, ms = min(times.items(), key=lambda item: item[1])
            line = {"what": row, "ms": round(ms, 4), "by": by}
            if size[0] == "b":
                line["context"] = context_len(int(size[1:]))
            out.write(json.dumps(line) + "\n")
            out.flush()
            print(f"{row}: {ms:.3f} ms, {by} ({time.monotonic() - began:.0f} s to measure)", flush=True)


if __name__ == "__main__":
    main()
