#!/usr/bin/env bash
# tests/idle.sh TRELLIS: a daemon with `tiny` on the processor that nobody asks anything. TRELLIS is a release build, its debug
# symbols apart or not. It is ready within 60 ms, under 80 MB are resident, and nothing wakes up. Ends with the first promise that is
# not kept.
#
# On a machine that does other things the time to be ready is the best of twenty starts.
set -euo pipefail

trellis=$(realpath "$1")
seconds=10
work=$(mktemp -d)
daemon=''
say() { printf '%(%T)T  %s\n' -1 "$*"; }
fail() { say "NOT KEPT: $*"; exit 1; }
end() { [ -z "$daemon" ] || { kill "$daemon" 2>/dev/null && wait "$daemon" || true; }; daemon=''; }
clean() { end; rm -rf "$work"; }
trap clean EXIT

export XDG_CACHE_HOME=$work/cache XDG_STATE_HOME=$work/state XDG_RUNTIME_DIR=$work
# Memory pressure of the whole machine is none of what is looked at here.
export MEMORY_PRESSURE_WATCH=/dev/null
start() {
  rm -f "$work/ready"
  "$trellis" serve --json --model tiny --device cpu --socket "$work/t.sock" >"$work/ready" 2>"$work/log" &
  daemon=$!
  for _ in $(seq 300); do
    grep -qs '"ready":true' "$work/ready" && return
    kill -0 "$daemon" 2>/dev/null || fail "it starts: $(cat "$work/log")"
    sleep 0.1
  done
  fail "it becomes ready"
}
# Times at which any of its threads waited for something, since it began.
switches() { cat /proc/"$daemon"/task/*/status | awk '/^voluntary_ctxt_switches/ { n += $2 } END { print n }'; }

best=''
for _ in $(seq 20); do
  end
  start
  took=$(sed -n 's/.*"took_ms":\([0-9]*\).*/\1/p' "$work/ready")
  [ -n "$best" ] && [ "$best" -le "$took" ] || best=$took
done
say "ready in $best ms"
[ "$best" -le 60 ] || fail "it is ready within 60 ms"

# What a start leaves to be done is done by then.
sleep 5
before=$(switches)
sleep "$seconds"
woken=$(($(switches) - before))
say "$woken wake-ups in $seconds s, of all $(find "/proc/$daemon/task" -mindepth 1 -maxdepth 1 | wc -l) threads"
# The allocator looks now and then whether it has memory to give back.
[ $((woken * 2)) -le "$seconds" ] || fail "nothing wakes up"
resident=$(awk '/^VmRSS/ { print $2 * 1024 }' "/proc/$daemon/status")
say "$resident bytes are resident"
[ "$resident" -lt 80000000 ] || fail "under 80 MB are resident"
say "all kept"
