#!/usr/bin/env bash
# tests/gpu-saved.sh TRELLIS GUEST: a saved context of 8,000 tokens of the shape of Llama 3.2 1B, reopened on a GPU after a restart of its
# daemon, with no token computed again and what is drawn after it the same.
#
# GUEST is the component of tests/guests/hostile. Needs python3, 3 GB of disk and a GPU of 6 GB. Without a GPU it says so, looks at a small
# shape on the processor instead, and ends with 77, unless a promise is not kept there either. Ends with the first that is not kept.
set -euo pipefail

trellis=$(realpath "$1") guest=$(realpath "$2")
here=$(cd "$(dirname "$0")" && pwd)
n_tokens=8000
work=$(mktemp -d "${TMPDIR:-/tmp}/trellis-saved.XXXXXX")
daemon=''
say() { printf '%(%T)T  %s\n' -1 "$*"; }
fail() { say "NOT KEPT: $*"; tail -n 20 "$work/log" 2>/dev/null || true; exit 1; }
end() { [ -z "$daemon" ] || { kill "$daemon" 2>/dev/null && wait "$daemon" || true; }; daemon=''; }
clean() { end; rm -rf "$work"; }
trap clean EXIT
export XDG_CACHE_HOME=$work/cache XDG_STATE_HOME=$work/state XDG_RUNTIME_DIR=$work MEMORY_PRESSURE_WATCH=/dev/null

# What the daemon itself finds.
doctor=$("$trellis" doctor --json) || true
missing=$(python3 -c 'import json, sys
about = json.loads(sys.argv[1])
gpu = next(check for check in about["checks"] if check["name"] == "gpu")
print("" if gpu["said"] != "no GPU is used" else "; ".join(f["said"] for f in about["findings"] if f["code"] in
      [of["code"] for of in gpu["findings"]]) or gpu["said"])' "$doctor") || fail "doctor says whether there is a GPU: $doctor"
if [ -z "$missing" ]; then
  device=cuda dtype=bf16 shape='the shape of Llama 3.2 1B' sizes='16 2048 8192 32 8'
else
  say "NO GPU HERE ($missing): a small shape on the processor is looked at in its place"
  device=cpu dtype=f32 shape='a small shape' sizes='2 256 512 4 2'
fi

# A folder of random weights: layers, width, width inside, heads, heads of keys and values. The tokenizer is that of `tiny`.
python3 - "$work/model" "$here/../daemon/models/tiny" $sizes <<'PY'
import json, os, shutil, struct, sys
folder, tiny = sys.argv[1:3]
n_layers, hidden, inside, n_heads, n_kv_heads = map(int, sys.argv[3:])
head, vocabulary = 64, 128_256
os.makedirs(folder)
for name in ["tokenizer.json", "tokenizer_config.json"]:
    shutil.copy(os.path.join(tiny, name), folder)
scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}
config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": "bfloat16",
          "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inside, "num_hidden_layers": n_layers,
          "num_attention_heads": n_heads, "num_key_value_heads": n_kv_heads, "head_dim": head, "rms_norm_eps": 1e-05,
          "max_position_embeddings": 131_072, "rope_theta": 500_000.0, "rope_scaling": scaling, "tie_word_embeddings": True,
          "attention_bias": False, "mlp_bias": False, "bos_token_id": 0, "eos_token_id": [1, 6]}
with open(os.path.join(folder, "config.json"), "w") as file:
    json.dump(config, file)

shapes = {"model.embed_tokens.weight": [vocabulary, hidden], "model.norm.weight": [hidden]}
for layer in range(n_layers):
    of = f"model.layers.{layer}."
    shapes |= {of + "input_layernorm.weight": [hidden], of + "post_attention_layernorm.weight": [hidden],
               of + "self_attn.q_proj.weight": [n_heads * head, hidden],
               of + "self_attn.k_proj.weight": [n_kv_heads * head, hidden],
               of + "self_attn.v_proj.weight": [n_kv_heads * head, hidden],
               of + "self_attn.o_proj.weight": [hidden, n_heads * head],
               of + "mlp.gate_proj.weight": [inside, hidden], of + "mlp.up_proj.weight": [inside, hidden],
               of + "mlp.down_proj.weight": [hidden, inside]}
header, at = {}, 0
for name, shape in shapes.items():
    n_bytes = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
    header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + n_bytes]}
    at += n_bytes
head_bytes = json.dumps(header).encode()
head_bytes += b" " * (-len(head_bytes) % 8)
# Of either sign, between 1/128 and 1/32.
signs = bytes(0x3C | (byte & 1) << 7 for byte in range(256))
def weights(n):
    values = bytearray(2 * n)
    values[0::2], values[1::2] = os.urandom(n), os.urandom(n).translate(signs)
    return values
with open(os.path.join(folder, "model.safetensors"), "wb") as file:
    file.write(struct.pack("<Q", len(head_bytes)) + head_bytes)
    for name, shape in shapes.items():
        if len(shape) == 1:
            file.write(b"\x80\x3f" * shape[0])
            continue
        left = shape[0] * shape[1]
        while left:
            n = min(left, 1 << 24)
            file.write(weights(n))
            left -= n
PY
say "$shape: $(du -m "$work/model/model.safetensors" | cut -f 1) MB of random weights"

printf '%s\n' "models = [\"$work/model\"]" "device = \"$device\"" "dtype = \"$dtype\"" 'saved_contexts = "disk"' \
  "state_dir = \"$work/state\"" '[limits]' 'deadline_ms = 1200000' >"$work/trellis.toml"
start() {
  "$trellis" serve --config "$work/trellis.toml" --socket "$work/t.sock" 2>>"$work/log" &
  daemon=$!
  for _ in $(seq 600); do
    "$trellis" status --socket "$work/t.sock" >/dev/null 2>&1 && return
    kill -0 "$daemon" 2>/dev/null || fail "it starts"
    sleep 0.5
  done
  fail "it becomes ready"
}
# What the guest says is told, in a line of JSON each.
keeper() { "$trellis" run --json --seed 1 --socket "$work/t.sock" "$guest" keep >"$1" 2>"$work/said" || fail "a guest runs: $(cat "$work/said")"; }
# of FILE EXPRESSION: of its tokens and its usage.
of() {
  python3 - "$1" "$2" <<'PY'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
tokens = [token for line in lines if line["type"] == "tokens" for token in line["tokens"]]
words = [line["text"] for line in lines if line["type"] == "text"]
usage = lines[-1]["usage"]
print(eval(sys.argv[2]))
PY
}

say "saved"
start
text='<|begin_of_text|>'
# Six tokens.
for _ in $(seq $(((n_tokens + 5) / 6))); do text+=' there was a bird'; done
printf 'save story %s\nopen story\n' "$text" | keeper "$work/before"
[ "$(of "$work/before" 'words')" = "['saved', 'opened']" ] || fail "it is saved: $(of "$work/before" 'words')"
n_saved=$(of "$work/before" 'len(tokens) - 4')
[ "$n_saved" -ge "$n_tokens" ] || fail "it has $n_tokens tokens, and not $n_saved"

say "restarted"
end
start
printf 'open story\n' | keeper "$work/after"
[ "$(of "$work/after" 'words')" = "['opened']" ] || fail "it is there: $(of "$work/after" 'words')"
n_reopened=$(of "$work/after" 'usage["n_tokens_reopened"]') n_computed=$(of "$work/after" 'usage["n_tokens"]')
say "$n_reopened of $n_saved tokens reopened, $(of "$work/after" 'usage["reopened_bytes"] // 1000000') MB in" \
  "$(of "$work/after" 'usage["reopened_us"] // 1000') ms; $n_computed computed to draw 4"
# The logits of the last token that is saved are computed by every guest, and the last that is drawn is not appended.
[ $((n_reopened + 1)) -ge "$n_saved" ] || fail "no token is computed again"
[ "$n_computed" -le 4 ] || fail "no token is computed again"
[ "$(of "$work/after" tokens)" = "$(of "$work/before" tokens)" ] || fail "what is drawn after it is the same"
if [ -n "$missing" ]; then
  say "kept with $shape on the processor; 8,000 tokens of Llama 3.2 1B were NOT looked at: $missing"
  exit 77
fi
say "all kept"
