#!/usr/bin/env bash
# Builds the release test binaries and the `trellis` binary, and packs them into a folder that runs on a machine
# with a GPU and without Rust: cuda/gpu/run.sh takes it from there.
#
#   cuda/gpu/pack.sh [FOLDER]     default: target/gpu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=${1:-target/gpu}
rm -rf "$folder"
mkdir -p "$folder/tests"

cargo test --release --no-run --message-format=json -p trellis-cuda \
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
  strip -o "$folder/tests/$name" "$executable"
done
cargo build --release -p trellis
strip -o "$folder/trellis" target/release/trellis
du -sh "$folder"
