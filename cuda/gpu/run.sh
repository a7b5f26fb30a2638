#!/usr/bin/env bash
# Runs what cuda/gpu/pack.sh packed, on a machine with a GPU, in a checkout. A missing GPU is a failure.
#
#   cuda/gpu/run.sh [FOLDER] [--kernels|--e2e|--parity|--none] [--sanitize] [ARGUMENTS OF THE TEST PROGRAM]
#
#   --kernels    the tests of the kernels and of what is under the backend
#   --e2e        the tests end to end on CUDA, then those that measure, one at a time
#   --parity     architectures against Hugging Face transformers, which has to be installed
#   --none       unpacks only
#   --sanitize   the kernels under compute-sanitizer, memcheck and racecheck
#
# Without a choice: kernels and end to end; with arguments, such as a filter, the kernels.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=target/gpu
[ -d "${1:-}" ] && { folder=$1; shift; }
kernels= e2e= parity= none=
tools=("")
while [ $# -gt 0 ]; do
  case $1 in
    --kernels) kernels=1 ;;
    --e2e) e2e=1 ;;
    --parity) parity=1 ;;
    --none) none=1 ;;
    --sanitize)
      kernels=1
      tools=("compute-sanitizer --error-exitcode 9 --tool memcheck" "compute-sanitizer --error-exitcode 9 --tool racecheck")
      ;;
    *) break ;;
  esac
  shift
done
if [ -z "$kernels$e2e$parity$none" ]; then
  kernels=1
  [ $# -gt 0 ] || e2e=1
fi

pack=$(cd "$folder" && pwd)/pack || exit 1
if [ ! -e "$pack/done" ] || [ "$folder/pack.tar.xz" -nt "$pack/done" ]; then
  rm -rf "$pack" && mkdir -p "$pack" || exit 1
  if command -v xz >/dev/null; then
    tar -C "$pack" -xJf "$folder/pack.tar.xz" || exit 1
  else
    python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1], "r:xz").extractall(sys.argv[2], filter="tar")' \
      "$folder/pack.tar.xz" "$pack" || exit 1
  fi
  touch "$pack/done"
fi
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
export TRELLIS_REQUIRE_CUDA=1 TRELLIS_TEST_DEVICE=cuda TRELLIS_TEST_PACK=$pack
failed=0 ran= tool=
run() {
  echo "== $*"
  ran=1
  "$@" || { failed=1; echo "== failed: $*"; }
}

# Runs a test program, under a tool if there is one, unless its arguments choose no test of it.
run_tests() {
  local listed
  listed=$("$@" --list) || { failed=1; echo "== failed: $* --list"; return; }
  [[ $listed != *": test"* ]] || run $tool "$@"
}

if [ -n "$kernels" ]; then
  # A tool is a command with its options.
  for tool in "${tools[@]}"; do
    for test in "$pack"/tests/*; do
      [ -f "$test" ] && [ "${test##*/}" != e2e ] && run_tests "$test" --test-threads=1 "$@"
    done
  done
  tool=
fi
if [ -n "$e2e" ] && [ $# -gt 0 ]; then
  run_tests "$pack/tests/e2e" --test-threads=1 --nocapture "$@"
elif [ -n "$e2e" ]; then
  # The command line and the house are tested where Rust is; the command builds guests.
  measuring=(card:: dtypes:: forks:: soak:: swaps::)
  skipped=(--skip cli:: --skip tidy::)
  run_tests "$pack/tests/e2e" "${skipped[@]}" "${measuring[@]/#/--skip=}"
  # Bytes free on the device and times are those of one test at a time.
  for module in "${measuring[@]}"; do
    run_tests "$pack/tests/e2e" "$module" --test-threads=1 --nocapture
  done
fi
if [ -n "$parity" ]; then
  run python3 cuda/gpu/hf_parity.py "$pack/tests/e2e"
fi
if [ -z "$ran$none" ] && [ $failed -eq 0 ]; then
  echo "run.sh: nothing ran: the pack has no test of those asked for" >&2
  exit 1
fi
exit $failed
