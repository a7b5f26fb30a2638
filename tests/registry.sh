#!/usr/bin/env bash
# tests/registry.sh TRELLIS COMPONENT: guests pushed to and pulled from Debian's `docker-registry`, a process on this machine. TRELLIS is
# the program, COMPONENT a guest that answers "What is 37 + 48?", such as the example `chat`. Needs no root: where `docker-registry` is not
# installed its package is unpacked. Ends with the first promise that is not kept.
set -euo pipefail

trellis=$(realpath "$1") component=$(realpath "$2")
work=$(mktemp -d) registry=''
say() { printf '%(%T)T  %s\n' -1 "$*"; }
fail() { say "NOT KEPT: $*"; tail -n 5 "$work/log" 2>/dev/null || true; exit 1; }
end() { [ -z "$registry" ] || { kill "$registry" 2>/dev/null && wait "$registry" || true; }; registry=''; }
clean() { end; rm -rf "$work"; }
trap clean EXIT

server=$(command -v docker-registry || true)
if [ -z "$server" ]; then
  say "unpacking docker-registry"
  (cd "$work" && apt-get download -qq docker-registry 2>/dev/null && dpkg -x docker-registry_*.deb unpacked)
  server=$work/unpacked/usr/bin/docker-registry
fi
export XDG_CACHE_HOME=$work/cache XDG_RUNTIME_DIR=$work DOCKER_CONFIG=$work/docker MEMORY_PRESSURE_WATCH=/dev/null
mkdir "$work/docker"
port=$((20000 + RANDOM % 20000))
cat >"$work/config.yml" <<YML
version: 0.1
log: { level: warn }
storage: { filesystem: { rootdirectory: $work/store } }
http: { addr: "127.0.0.1:$port" }
YML
start() {
  "$server" serve "$work/config.yml" >"$work/log" 2>&1 &
  registry=$!
  for _ in $(seq 100); do
    (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null && return
    kill -0 "$registry" 2>/dev/null || fail "the registry starts"
    sleep 0.1
  done
  fail "the registry listens"
}
start
name=localhost:$port/tools/guest

say "push"
pinned=$("$trellis" push "$component" "$name:1.0" | cut -d ' ' -f 1)
[ "${pinned%@*}" = "$name" ] || fail "the reference has a digest: $pinned"
[ "$("$trellis" push "$component" "$name:again" | cut -d ' ' -f 1)" = "$pinned" ] || fail "pushed twice it has one digest"

say "pull"
"$trellis" pull "$name:1.0" -o "$work/out.wasm" >"$work/said" 2>"$work/notes"
cmp "$component" "$work/out.wasm" || fail "it comes back as it went"
grep -qF "$name:1.0 is $pinned" "$work/notes" || fail "the tag says its digest: $(cat "$work/notes")"
"$trellis" pull "$name:none" 2>"$work/said" && fail "what is not there is refused" || [ $? = 2 ] || fail "with status 2"
grep -q 'is not there' "$work/said" || fail "it says so: $(cat "$work/said")"

say "run"
[ "$("$trellis" run --local --model tiny "$pinned" "What is 37 + 48?" 2>/dev/null </dev/null)" = 85 ] || fail "it runs"

say "a changed layer on the registry's disk"
rm -r "$work/cache/trellis/oci"
layer=sha256:$(sha256sum "$component" | cut -d ' ' -f 1)
data=$work/store/docker/registry/v2/blobs/sha256/${layer:7:2}/${layer:7}/data
cp "$data" "$work/whole"
end
printf '\377' | dd of="$data" bs=1 seek=1000 conv=notrunc status=none
start
"$trellis" pull "$pinned" >"$work/said" 2>&1 && fail "it is refused" || [ $? = 2 ] || fail "with status 2: $(cat "$work/said")"
changed=sha256:$(sha256sum "$data" | cut -d ' ' -f 1)
grep -qF "$layer" "$work/said" && grep -qF "$changed" "$work/said" || fail "both digests are said: $(cat "$work/said")"
[ -z "$(find "$work/cache" -type f -path '*oci*' 2>/dev/null)" ] || fail "nothing of it is kept"
cat "$work/said"
cp "$work/whole" "$data"
"$trellis" pull "$pinned" >/dev/null || fail "it comes once it is whole again"

say "without the registry"
end
[ "$("$trellis" run --local --model tiny "$pinned" "What is 37 + 48?" 2>/dev/null </dev/null)" = 85 ] || fail "it is kept"
"$trellis" pull "$name:1.0" >"$work/said" 2>&1 && fail "a tag needs its registry" || [ $? = 75 ] || fail "with status 75: $(cat "$work/said")"
say "all kept"
