#!/usr/bin/env bash
# From weights in the page cache to the first token: the first start compiles kernels and times products, those after
# it find all of it. Runs what cuda/gpu/pack.sh packed; needs PyTorch for the weights.
#
#   cuda/gpu/load.sh [FOLDER]     default: target/gpu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=${1:-target/gpu}
cuda/gpu/run.sh "$folder" --none
folder=$folder/pack
model=/dev/shm/llama-3.1-8b
[ -f "$model/model.safetensors" ] || python3 cuda/gpu/make_model.py llama-3.1-8b "$model"
cat "$model/model.safetensors" >/dev/null
export XDG_CACHE_HOME=$(mktemp -d)
trap 'rm -rf "$XDG_CACHE_HOME"' EXIT
# Compiled kernels and timings. A guest's own file is touched whenever it is used.
mkdir -m 700 "$XDG_CACHE_HOME/trellis" "$XDG_CACHE_HOME/trellis/cuda"
state() { find "$XDG_CACHE_HOME/trellis/cuda" -type f -printf '%p %T@\n' | sort | sha256sum; }
for start in first second third; do
  before=$(state)
  begun=$(date +%s%N)
  "$folder/trellis" run --no-stdin --device cuda --model "$model" "$folder/guests/complete.wasm" --max-tokens 1 "Once" >/dev/null
  ended=$(date +%s%N)
  echo "$start start: $(((ended - begun) / 1000000)) ms from the command to the end after one token; $(
    [ "$before" = "$(state)" ] && echo "nothing was compiled or timed" || echo "the cache has changed"
  )"
done
