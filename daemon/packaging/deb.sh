#!/usr/bin/env bash
# daemon/packaging/deb.sh [OPTION...]: the Debian package of this checkout, in the target folder, and one with its debug symbols.
#
# Options go to `cargo deb`. Needs Rust and cargo-deb (`cargo install cargo-deb`). With TRELLIS_EXE, the program in that file is
# packed, and none is built.
set -euo pipefail
cd "$(dirname "$0")/../.."

target=$(cargo metadata --format-version 1 --no-deps | sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')
exe=$target/release/trellis made=$target/release/packaging
if [ -n "${TRELLIS_EXE:-}" ]; then
  mkdir -p "$target/release"
  [ "$TRELLIS_EXE" -ef "$exe" ] || cp "$TRELLIS_EXE" "$exe"
else
  cargo build --release --locked -p trellis
fi

rm -rf "$made"
mkdir -p "$made/man" "$made/completions" "$made/guests"
rustup target add wasm32-wasip2
cargo build --release --locked --manifest-path guest-examples/Cargo.toml --target wasm32-wasip2 \
  --target-dir guest-examples/target -p chat -p conversation -p http-chat
cp guest-examples/target/wasm32-wasip2/release/{chat,conversation}.wasm "$made/guests"
cp guest-examples/target/wasm32-wasip2/release/http_chat.wasm "$made/guests/http-chat.wasm"
"$exe" config example >"$made/trellis.toml"
"$exe" man "$made/man"
gzip --best --no-name "$made"/man/*.1
"$exe" completions bash >"$made/completions/trellis"
"$exe" completions zsh >"$made/completions/_trellis"
"$exe" completions fish >"$made/completions/trellis.fish"
cargo deb --locked --package trellis --no-build --dbgsym "$@"

# Debug symbols are in the other package.
if [ "${1:-}" = --output ]; then
  package=$2
else
  package=$(ls -t "$target"/debian/trellis_*.deb | head -n 1)
fi
packed=$(mktemp)
trap 'rm -f "$packed"' EXIT
dpkg-deb --fsys-tarfile "$package" | tar -xO ./usr/bin/trellis >"$packed"
n_bytes=$(stat -c %s "$packed")
if [ "$n_bytes" -ge 80000000 ] || readelf --sections --wide "$packed" | grep -qE '\.(symtab|debug_info)'; then
  echo "the program in $package is to be stripped and under 80 MB, and has $n_bytes bytes" >&2
  exit 1
fi
