#!/usr/bin/env bash
# Builds the release test programs, the `trellis` binary and the guests, and packs them into a folder that runs on a
# machine with a GPU and without Rust, in a checkout at any path: cuda/gpu/run.sh takes it from there.
#
#   cuda/gpu/pack.sh [FOLDER] [--kernels|--e2e]     default: target/gpu, both
#
# The folder holds one archive. Both programs that are linked with the daemon embed the bundled models; the archive's
# dictionary is large enough to keep them once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=target/gpu
crates=(trellis-cuda trellis-tests)
for argument in "$@"; do
  case $argument in
    --kernels) crates=(trellis-cuda) ;;
    --e2e) crates=(trellis-tests) ;;
    -*) echo "pack.sh: unknown option $argument" >&2; exit 2 ;;
    *) folder=$argument ;;
  esac
done
pack=$(mktemp -d)
trap 'rm -rf "$pack"' EXIT
mkdir -p "$pack/tests" "$pack/guests" "$folder"

for crate in "${crates[@]}"; do
  # The name of a crate's own tests is the crate's; that of a program in tests/ is the program's.
  cargo test --release --locked --no-run --message-format=json -p "$crate" \
    | python3 -c '
import json, sys
for line in sys.stdin:
    try:
        message = json.loads(line)
    except ValueError:
        continue
    if message.get("executable") and message.get("profile", {}).get("test"):
        print(message["target"]["name"], message["executable"])
' | while read -r name executable; do
    strip -o "$pack/tests/$name" "$executable"
  done
done

cargo build --release --locked -p trellis
strip -o "$pack/trellis" target/release/trellis

for workspace in guest-examples tests/guests; do
  (cd "$workspace" && cargo build --release --locked --workspace --target wasm32-wasip2 --target-dir target)
  cp "$workspace"/target/wasm32-wasip2/release/*.wasm "$pack/guests/"
done

du -sh "$pack"/* "$pack"/tests/*
tar -C "$pack" -cf - . | xz --threads=1 --lzma2=preset=6,dict=192MiB >"$folder/pack.tar.xz"
du -sh "$folder/pack.tar.xz"
