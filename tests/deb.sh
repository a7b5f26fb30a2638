#!/usr/bin/env bash
# tests/deb.sh PACKAGE: the Debian package on a machine of its own that systemd runs, from its installation to the last file.
#
# PACKAGE is what daemon/packaging/deb.sh has made. Needs root, `debootstrap` and `systemd-nspawn`; the machine's files are those of
# tests/systemd.sh. Ends with the first promise that is not kept.
set -euo pipefail

package=$(realpath "$1")
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
scrape() {
  in_machine timeout 60 bash -c 'exec 3<>/dev/tcp/127.0.0.1/9464
    printf "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:9464\r\n\r\n" >&3; cat <&3' >"$work/scraped" && grep -q '^trellis_uptime_seconds [0-9]' "$work/scraped"
}
trellis_files() { in_machine find / -xdev \( -path /proc -o -path /opt -o -path /tmp -o -path /sys \) -prune -o -iname '*trellis*' -print; }

if [ ! -d "$base/etc" ]; then
  say "making a machine in $base"
  debootstrap --variant=minbase --include=systemd,systemd-sysv,dbus,procps bookworm "$base" >"$log"
fi
cp --archive --reflink=auto "$base" "$root"
cp "$package" "$root/opt/trellis.deb"
setsid systemd-nspawn --quiet --directory "$root" --boot --register=no --keep-unit --private-network --link-journal=no \
  </dev/null >"$log" 2>&1 &
nspawn=$!
for _ in $(seq 100); do
  machine=$(pgrep -P "$nspawn" | head -n 1 || true)
  [ -z "$machine" ] || ! in_machine systemctl is-system-running --wait >/dev/null 2>&1 || break
  sleep 0.2
done
[ -n "$machine" ] || fail "the machine does not start: $(tail -n 5 "$log")"
before=$(trellis_files | sort)

say "install"
in_machine dpkg -i /opt/trellis.deb >"$log" 2>&1 || fail "it installs: $(cat "$log")"
in_machine systemctl is-active --quiet trellis.socket trellis.service || fail "the service runs once it is installed"
in_machine trellis info >/dev/null || fail "the daemon answers once it is ready"
in_machine trellis info | grep '^isolation *process' || fail "guests of each user have a process"
in_machine env XDG_CACHE_HOME=/tmp/cache trellis doctor --config /etc/trellis/trellis.toml || fail "nothing is wrong with it"
for file in share/man/man1/trellis.1.gz share/bash-completion/completions/trellis share/zsh/vendor-completions/_trellis \
  share/fish/vendor_completions.d/trellis.fish lib/tmpfiles.d/trellis.conf; do
  in_machine test -s "/usr/$file" || fail "$file is there"
done

[ "$(in_machine stat -c %s /usr/bin/trellis)" -lt 80000000 ] || fail "the program is under 80 MB"
in_machine test -s /usr/share/trellis/error.schema.json || fail "the schema of errors is there"

for folder in run/trellis:755 var/cache/trellis:700 var/lib/trellis:700; do
  [ "$(in_machine stat -c %U:%a "/${folder%:*}")" = "trellis:${folder#*:}" ] || fail "/${folder%:*} is the daemon's"
done

say "metrics over a socket of systemd's"
! in_machine systemctl is-enabled --quiet trellis-metrics.socket || fail "nobody listens for scrapes at first"
# As the guide says.
in_machine systemctl enable --quiet trellis-metrics.socket || fail "its unit is there"
in_machine systemctl stop trellis.service
in_machine systemctl start trellis-metrics.socket trellis.service || fail "the daemon takes the socket"
scrape || fail "a scrape is answered"

say "upgrade"
pid=$(in_machine systemctl show --value --property MainPID trellis.service)
echo '# changed' >>"$root/etc/trellis/trellis.toml"
in_machine dpkg -i --force-confold /opt/trellis.deb >"$log" 2>&1 || fail "it upgrades: $(cat "$log")"
[ "$(in_machine systemctl show --value --property MainPID trellis.service)" != "$pid" ] || fail "the new program is started"
in_machine trellis info >/dev/null || fail "the daemon answers"
scrape || fail "a scrape is answered by the new program"
grep -q '# changed' "$root/etc/trellis/trellis.toml" || fail "what the operator has changed stays"

say "remove and purge"
in_machine dpkg -r trellis >"$log" 2>&1 || fail "it is removed: $(cat "$log")"
! in_machine systemctl is-active --quiet trellis.service || fail "the service is stopped"
! in_machine systemctl is-active --quiet trellis-metrics.socket || fail "nobody listens for scrapes any more"
in_machine test -e /etc/trellis/trellis.toml || fail "the configuration stays until it is purged"
in_machine dpkg -P trellis >"$log" 2>&1 || fail "it is purged: $(cat "$log")"
! in_machine getent passwd trellis >/dev/null || fail "the user is gone"
left=$(comm -13 <(echo "$before") <(trellis_files | sort))
[ -z "$left" ] || fail "nothing is left: $left"
say "all kept"
