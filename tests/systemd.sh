#!/usr/bin/env bash
# tests/systemd.sh TRELLIS GUEST: the service on a machine of its own that systemd runs, from its installation to the last file.
#
# TRELLIS is a release build, GUEST the component of tests/guests/hostile. Needs root, `debootstrap` and `systemd-nspawn`; the
# machine's files are made once, in ${TRELLIS_MACHINE:-/var/tmp/trellis-machine}. Ends with the first promise that is not kept.
set -euo pipefail

trellis=$(realpath "$1") guest=$(realpath "$2")
base=${TRELLIS_MACHINE:-/var/tmp/trellis-machine}
work=$(mktemp -d) root=$work/root log=$work/console
nspawn='' machine=''

say() { printf '%(%T)T  %s\n' -1 "$*"; }
fail() { say "NOT KEPT: $*"; in_machine journalctl --no-pager -n 40 -u trellis || true; exit 1; }
clean() {
  [ -z "$nspawn" ] || kill -KILL -- "-$nspawn" 2>/dev/null || true
  sleep 1
  rm -rf "$work" || { sleep 3; rm -rf "$work"; }
}
trap clean EXIT

in_machine() { nsenter --target "$machine" --mount --uts --ipc --net --pid --cgroup -- "$@"; }
client() { in_machine /opt/trellis "$@"; }
stream() { client run --no-stdin /opt/guest.wasm tokens "$1" '<|begin_of_text|>Once upon a time'; }
# until SECONDS WHAT COMMAND...
until_it() {
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$end" ] || fail "$what"
    sleep 0.2
  done
}
# What Prometheus would be told, over the socket that systemd has.
scrape() {
  in_machine timeout 60 bash -c 'exec 3<>/dev/tcp/127.0.0.1/9464
    printf "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:9464\r\n\r\n" >&3; cat <&3'
}
property() { in_machine systemctl show trellis.service --value --property "$1"; }

if [ ! -d "$base/etc" ]; then
  say "making a machine in $base"
  debootstrap --variant=minbase --include=systemd,systemd-sysv,dbus,procps bookworm "$base" >"$log"
fi
cp --archive --reflink=auto "$base" "$root"
cp "$trellis" "$root/opt/trellis"
cp "$guest" "$root/opt/guest.wasm"
before=$(cd "$root" && find . -path ./proc -prune -o -iname '*trellis*' -print | sort)
setsid systemd-nspawn --quiet --directory "$root" --boot --register=no --keep-unit --private-network --link-journal=no \
  </dev/null >"$log" 2>&1 &
nspawn=$!
for _ in $(seq 100); do
  machine=$(pgrep -P "$nspawn" | head -n 1 || true)
  [ -z "$machine" ] || ! in_machine systemctl is-system-running --wait >/dev/null 2>&1 || break
  sleep 0.2
done
[ -n "$machine" ] || fail "the machine does not start: $(tail -n 5 "$log")"

say "install"
client service install || fail "it installs"
[ "$(property ActiveState)" = active ] || fail "the service runs once it is installed"
client service status
client info >/dev/null || fail "the daemon answers once it is ready"
stream 8 >/dev/null || fail "a guest runs"
in_machine pgrep -f guest-worker >/dev/null || fail "it runs in a process of its user's, which nobody has asked for"
client info | grep '^isolation *process' || fail "it is said where guests run"
client config show isolation --config /etc/trellis/trellis.toml | grep 'process *socket' || fail "it is said why"
exposure=$(in_machine systemd-analyze security --no-pager trellis.service | grep -o 'exposure level.*: [0-9.]*' | grep -o '[0-9.]*$')
say "exposure $exposure of 10, by systemd-analyze security"
[ "$(printf '%s\n2.0\n' "$exposure" | sort -g | head -n 1)" = "$exposure" ] || fail "hardened to 2.0 or better"

say "reload"
config=$root/etc/trellis/trellis.toml
cp "$config" "$work/trellis.toml"
in_machine useradd --create-home --groups trellis ada
of_ada() { in_machine runuser -u ada -- /opt/trellis run --no-stdin /opt/guest.wasm tokens 4 '<|begin_of_text|>Once upon a time'; }
of_ada >/dev/null || fail "a member of the group runs guests"
pid=$(property MainPID)
printf '%s\n' '[permissions]' 'run = []' >"$config"
in_machine systemctl reload trellis.service || fail "it reads its configuration again"
if of_ada >/dev/null 2>"$work/refused"; then fail "a permission that was taken away is gone"; fi
grep -q 'lacks the permission "run"' "$work/refused" || fail "it is said which permission is lacking: $(cat "$work/refused")"
stream 4 >/dev/null || fail "root may do everything"
printf '%s\n' '[permissions]' 'run = 7' >"$config"
if in_machine systemctl reload trellis.service 2>/dev/null; then fail "of a wrong file systemd hears"; fi
[ "$(property ActiveState)" = active ] || fail "a wrong file ends nothing"
if of_ada >/dev/null 2>&1; then fail "a wrong file changes nothing"; fi
cp "$work/trellis.toml" "$config"
in_machine systemctl reload trellis.service || fail "it reads its configuration once more"
of_ada >/dev/null || fail "a permission that was given again is there"
[ "$(property MainPID)" = "$pid" ] || fail "the daemon that reads its configuration again goes on"
in_machine userdel --remove ada 2>/dev/null || fail "nothing of a user is left running"

say "metrics over a socket of systemd's"
in_machine test -s /etc/systemd/system/trellis-metrics.socket || fail "its unit is installed"
! in_machine systemctl is-enabled --quiet trellis-metrics.socket || fail "nobody listens for scrapes at first"
in_machine systemctl daemon-reload
in_machine systemctl stop trellis.service
in_machine systemctl start trellis-metrics.socket || fail "systemd listens for scrapes"
# A scrape starts the daemon, which has no network of its own.
scrape >"$work/scraped" || fail "a scrape is answered"
grep -q '^trellis_uptime_seconds [0-9]' "$work/scraped" || fail "the answer has metrics: $(head -n 20 "$work/scraped")"
[ "$(property ActiveState)" = active ] || fail "a scrape starts the daemon"
client info >/dev/null || fail "the daemon answers beside it"
in_machine systemctl stop trellis-metrics.socket
in_machine systemctl daemon-reload
in_machine systemctl restart trellis.service

say "upgrade under load"
for i in $(seq 8); do
  ( n=0
    while [ ! -e "$work/loaded" ]; do
      if stream 24 >"$work/out.$i" 2>"$work/err.$i"; then n=$((n + 1)); else cp "$work/err.$i" "$work/failed.$i"; fi
    done
    echo "$n" >"$work/done.$i" ) &
done
sleep 3
pid=$(property MainPID)
for _ in 1 2 3; do client service install >/dev/null; sleep 2; done
[ "$(property MainPID)" != "$pid" ] || fail "an upgrade starts the new program"
touch "$work/loaded"
for i in $(seq 8); do until_it 60 "clients end" test -e "$work/done.$i"; done
if compgen -G "$work/failed.*" >/dev/null; then fail "a request failed: $(cat "$work"/failed.*)"; fi
say "$(cat "$work"/done.* | paste -sd+ | bc 2>/dev/null || cat "$work"/done.* | tr '\n' ' ') guests, none failed, over three upgrades"

say "SIGTERM under 64 streams"
for i in $(seq 64); do client run --no-stdin /opt/guest.wasm endless >/dev/null 2>"$work/ended.$i" & done
until_it 60 "64 guests run" bash -c "[ \$(nsenter -t $machine -m -u -i -n -p -C -- /opt/trellis ps --json | grep -o '\"guest_id\"' | wc -l) -ge 64 ]"
begun=$(date +%s%N)
in_machine systemctl stop trellis.service trellis.socket
took=$((($(date +%s%N) - begun) / 1000000))
sleep 3
typed=$(grep -l 'the daemon is going down' "$work"/ended.* | wc -l)
say "$typed of 64 clients were told why, after $took ms"
[ "$typed" = 64 ] || fail "every stream ends with a reason: $(cat "$work/ended.1")"
# The ten seconds of the drain, and one for all that comes after.
[ "$took" -lt 11000 ] || fail "inside the deadline: $took ms"
in_machine systemctl start trellis.socket trellis.service

say "a model that the service's user cannot read"
in_machine mkdir -m 700 -p /srv/closed
printf '%s\n' 'models = ["/srv/closed"]' >"$root/etc/trellis/trellis.toml"
if client service install 2>"$work/closed"; then fail "what the service could not read is refused"; fi
grep -q 'trellis may not read' "$work/closed" || fail "it is said who may not read what: $(cat "$work/closed")"
[ "$(property ActiveState)" = active ] || fail "what runs goes on"
in_machine rmdir /srv/closed

say "guests in threads, for users who are trusted"
printf '%s\n' 'isolation = "thread"' >"$root/etc/trellis/trellis.toml"
in_machine systemctl restart trellis.service
stream 8 >/dev/null || fail "a guest runs in a thread of the daemon"
! in_machine pgrep -f guest-worker >/dev/null || fail "there is no process of guests"
client info | grep '^isolation *thread' || fail "it is said that guests run in threads"
printf '%s\n' 'isolation = "process"' >"$root/etc/trellis/trellis.toml"
in_machine systemctl restart trellis.service
stream 8 >/dev/null || fail "a guest runs in a process of its own, within the unit's bounds"
in_machine pgrep -f guest-worker >/dev/null || fail "there is such a process"

say "a process that stands still"
in_machine mkdir -p /run/systemd/system/trellis.service.d
printf '[Service]\nWatchdogSec=2\n' | in_machine tee /run/systemd/system/trellis.service.d/soon.conf >/dev/null
in_machine systemctl daemon-reload
in_machine systemctl restart trellis.service
pid=$(property MainPID)
in_machine kill -STOP "$pid"
until_it 30 "the watchdog has it started again" bash -c \
  "p=\$(nsenter -t $machine -m -u -i -n -p -C -- systemctl show trellis.service --value -p MainPID); [ \$p != $pid ] && [ \$p != 0 ]"
until_it 30 "it serves again" client info
say "started again $(property NRestarts) times"

say "uninstall"
client service uninstall --purge
after=$(cd "$root" && in_machine find / -xdev -path /proc -prune -o -iname '*trellis*' -print | sed 's|^|.|' | sort)
left=$(comm -13 <(echo "$before") <(echo "$after") | grep -v '^./run/systemd\|^./tmp\|^./sys' || true)
[ -z "$left" ] || fail "nothing is left: $left"
! in_machine getent passwd trellis >/dev/null || fail "the user is gone"
say "all kept"
