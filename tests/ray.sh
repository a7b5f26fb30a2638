#!/usr/bin/env bash
# tests/ray.sh TRELLIS GUESTS: trellis.ray on a Ray cluster of two nodes on this machine, each with a daemon of its own.
#
# TRELLIS is a build of the daemon with its bundled models, GUESTS a folder with the components hostile, complete and conversation.
# Ray and what else is needed is installed once, from PyPI, in ${TRELLIS_RAY:-/var/tmp/trellis-ray}: some 700 MB. Takes two minutes
# on a machine that does nothing else.
set -euo pipefail

trellis=$(realpath "$1") guests=$(realpath "$2")
client=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../sdk/python")
venv=${TRELLIS_RAY:-/var/tmp/trellis-ray}

[ -x "$venv/bin/pip" ] || python3 -m venv "$venv"
# uv resolves in seconds what pip takes minutes for.
"$venv/bin/pip" install --quiet --disable-pip-version-check uv==0.13.9
UV_PYTHON="$venv/bin/python" SSL_CERT_FILE=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt} "$venv/bin/uv" pip install --quiet \
  --reinstall-package trellis-client "$client[ray-llm,fast,test]" openai==3.57.0 ray==2.60.0

cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
# One file after the other: each has a cluster of its own.
for test in test_cluster test_openai; do
  TRELLIS_EXE=$trellis TRELLIS_GUESTS=$guests TRELLIS_TEST_CACHE=$cache \
    "$venv/bin/python" -m pytest "$client/tests/cluster/$test.py" -p no:cacheprovider -v -s -W ignore
done
