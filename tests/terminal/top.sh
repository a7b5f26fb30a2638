#!/usr/bin/env bash
# tests/terminal/top.sh TRELLIS GUEST [SCREEN]: `trellis top` in a terminal, beside guests that decode.
#
# GUEST is the component of tests/guests/hostile. Needs tmux. Ends with the first promise that is not kept; the screen of 80 x 24
# goes to the file SCREEN.
set -euo pipefail

trellis=$(realpath "$1") guest=$(realpath "$2") screen=${3:-/dev/null}
work=$(mktemp -d) server=trellis-top-$$
export TRELLIS_SOCKET=$work/t.sock XDG_CACHE_HOME=$work/cache XDG_RUNTIME_DIR=$work LC_ALL=C.UTF-8
unset NO_COLOR
daemon='' clients=()

say() { printf '%(%T)T  %s\n' -1 "$*"; }
fail() { say "NOT KEPT: $*"; shows || true; exit 1; }
clean() {
  tmux -L "$server" kill-server 2>/dev/null || true
  [ -z "$daemon" ] || kill -KILL "$daemon" 2>/dev/null || true
  wait 2>/dev/null || true
  rm -rf "$work"
}
trap clean EXIT

shows() { tmux -L "$server" capture-pane -p -t top; }
keys() { tmux -L "$server" send-keys -t top "$@"; }
# until_it SECONDS WHAT COMMAND...
until_it() {
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$end" ] || fail "$what"
    sleep 0.1
  done
}
has() { shows | grep -Eq -- "$1"; }
has_not() { ! has "$1"; }
# The numbers of the guests on the screen, in their order.
listed() { shows | sed -n '/^GUEST/,$p' | grep -Eo '^ *[0-9]+ ' | tr -d ' ' | paste -sd' '; }
lists() { [ "$(listed)" = "$1" ]; }
lists_so_many() { [ "$(listed | wc -w)" = "$1" ]; }
is_alternate() { [ "$(tmux -L "$server" display-message -p -t top '#{alternate_on}')" = "$1" ]; }
is_colored() { tmux -L "$server" capture-pane -ep -t top | grep -Eq $'\e\\[([0-9]+;)*(3[0-8]|9[0-7])[;m]'; }
serve() {
  "$trellis" serve --device cpu --log off 2>"$work/log" &
  daemon=$!
  # That it is killed is nothing to report.
  disown
  until_it 60 "a daemon serves" "$trellis" status
}
decode() {
  "$trellis" run --no-stdin "$guest" endless >/dev/null 2>&1 &
  clients+=($!)
}
begin() {
  keys "clear; '$trellis' top --interval 0.2; echo left with \$?" Enter
  until_it 20 "the screen comes" is_alternate 1
}
# What the shell shows after the screen is gone is what it showed before, and how it was left.
left() {
  until_it 20 "$1: the screen goes" is_alternate 0
  until_it 20 "$1: it is left with $2" has "^left with $2\$"
  has_not '^GUEST' || fail "$1: nothing of the screen is left"
}

status=0
"$trellis" status >/dev/null || status=$?
[ "$status" = 3 ] || fail "status is 3 where no daemon is, and not $status"
serve
for _ in 1 2 3; do decode; done
until_it 60 "three guests run" bash -c "[ \"\$('$trellis' ps --json | grep -o guest_id | wc -l)\" = 3 ]"

say "what is on the screen"
tmux -L "$server" -f /dev/null new-session -d -s top -x 80 -y 24 "env PS1='\$ ' bash --norc --noprofile -i"
begin
until_it 20 "the daemon and its guests" has '^trellis [0-9.]+  up .*  3 guests  '
until_it 20 "a device with its queue" has '^DEVICE  MEMORY +BUSY +ROWS +STEP +QUEUE +TOK/S  MODELS$'
until_it 20 "what the device computes" has '^cpu .* of .*B +[0-9]+% +[0-9.]+ +[0-9.]+ ms +0 +[0-9]+  tiny$'
until_it 20 "three guests" lists_so_many 3
until_it 20 "guests decode" has '^ +[0-9]+  .*@[0-9a-f]{6}  tiny .* [0-9]+% [a-z_]+$'
until_it 20 "the keys" has '^\[t tokens/s\]  p pages   c cpu   i id  s stop  q leave$'
sleep 1
shows >"$screen"

say "keys"
keys i
until_it 20 "guests by number" lists '1 2 3'
keys End s
until_it 20 "a question comes first" has '^stop guest 3\? y stops it, any other key does not$'
keys n
until_it 20 "another key takes it back" has_not '^stop guest'
lists '1 2 3' || fail "nothing was stopped"
keys s
until_it 20 "a question comes again" has '^stop guest 3\?'
keys y
until_it 20 "the guest is told to stop" has '^guest 3 was told to stop$'
until_it 20 "the guest is gone" lists '1 2'

say "sizes"
tmux -L "$server" resize-window -t top -x 40 -y 10
until_it 20 "a small screen has fewer columns" has '^GUEST  PROGRAM .*TOK/S$'
until_it 20 "a small screen has the guests" lists '1 2'
tmux -L "$server" resize-window -t top -x 200 -y 50
until_it 20 "a large screen has all columns" has '^GUEST  .* TOKENS  .*TOK/S  PAGES  CPU  GUESSES  LEFT$'
tmux -L "$server" resize-window -t top -x 80 -y 24

say "a daemon that goes and comes"
kill -KILL "$daemon"
until_it 20 "it says that the daemon is gone" has '^the daemon is gone, and looked for: '
until_it 20 "it says so in red" is_colored
serve
until_it 20 "it finds the next one" has '^trellis .*  0 guests  '
has_not 'the daemon is gone' || fail "what was wrong is not said any more"

say "ways out"
keys q
left q 0
begin
keys Escape
left Escape 0
begin
keys C-c
left Ctrl-C 0
begin
top=$(pgrep -f -P "$(tmux -L "$server" display-message -p -t top '#{pane_pid}')" ' top --interval')
kill -TERM "$top"
left SIGTERM 130
keys "clear; NO_COLOR=1 '$trellis' top --interval 0.2" Enter
until_it 20 "a screen without colours" has '^DEVICE'
kill -KILL "$daemon"
until_it 20 "it says so without colours" has '^the daemon is gone'
! is_colored || fail "NO_COLOR is heeded"
keys q
until_it 20 "the screen goes" is_alternate 0

say "without a terminal"
said=$("$trellis" top 2>&1 </dev/null) && fail "it needs a terminal"
grep -q 'trellis ps --json' <<<"$said" || fail "it names what is for programs: $said"
daemon=''
say "kept"
