#!/usr/bin/env bash
# Runs what cuda/gpu/pack.sh packed, on a machine with a GPU. A missing GPU is a failure.
#
#   cuda/gpu/run.sh [FOLDER] [--sanitize] [FILTER]
#
# With --sanitize the tests run under compute-sanitizer, memcheck and racecheck.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=target/gpu
[ -d "${1:-}" ] && { folder=$1; shift; }
tools=("")
[ "${1:-}" = --sanitize ] && {
  tools=("compute-sanitizer --error-exitcode 9 --tool memcheck" "compute-sanitizer --error-exitcode 9 --tool racecheck")
  shift
}
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
export TRELLIS_REQUIRE_CUDA=1
failed=0
for tool in "${tools[@]}"; do
  for test in "$folder"/tests/*; do
    echo "== ${tool:+$tool }$test"
    $tool "$test" --test-threads=1 "$@" || failed=1
  done
done
exit $failed
