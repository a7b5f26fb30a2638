"""A daemon for tests.

TRELLIS_EXE names the program; without it that of a debug build of this checkout is taken. TRELLIS_GUESTS names a folder of
components; without it that in which the tests of the workspace build theirs. Compiled guests are kept in TRELLIS_TEST_CACHE, or else
beside the program, where those tests keep theirs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).parents[3]
EXE = Path(os.environ.get("TRELLIS_EXE") or ROOT / "target/debug/trellis-under-test")
GUESTS = Path(os.environ.get("TRELLIS_GUESTS") or ROOT / "guest-examples/target/wasm32-wasip2/release")
#: The example of the Rust client, which `cargo test` builds as well.
ROUND_TRIP = EXE.with_name("examples") / "round_trip"

#: Long enough for anything that ends at all, on a slow machine that does other things too.
PATIENCE_S = 60.0


def _settings(guests_dir: Optional[Path]) -> str:
    cache = os.environ.get("TRELLIS_TEST_CACHE") or EXE.with_name("tests-cache")
    registered = "" if guests_dir is None else f'guests_dir = "{guests_dir}"\n'
    return f"""\
models = ["tiny"]
device = "cpu"
isolation = "thread"
saved_contexts = "memory"
cache_dir = "{cache}"
{registered}
[limits]
compile_ms = 600_000
n_guests = 1_200
n_guests_per_user = 1_200

[sessions]
n_requests = 1_200
drain_ms = 0
"""


class Daemon:
    """`trellis serve` with a socket of its own."""

    def __init__(self, guests_dir: Optional[Path] = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="trellis-py")
        self.folder = Path(self._folder.name)
        self.socket = self.folder / "t.sock"
        self.config = self.folder / "trellis.toml"
        self.config.write_text(_settings(guests_dir))
        self._process: Optional[subprocess.Popen[bytes]] = None
        self.start()

    def start(self) -> None:
        """Starts it, for another time as well, and waits until it listens."""
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("TRELLIS_", "XDG_"))
        }
        # A busy machine is to change nothing.
        environment.update(MEMORY_PRESSURE_WATCH="/dev/null")
        command = [str(EXE), "serve", "--socket", str(self.socket), "--config", str(self.config)]
        log = self.folder / "log"
        with log.open("ab") as file:
            self._process = subprocess.Popen(command, env=environment, stderr=file, stdin=subprocess.DEVNULL)
        begun = time.monotonic()
        while " listening on " not in log.read_text():
            assert self._process.poll() is None, log.read_text()
            assert time.monotonic() - begun < PATIENCE_S, log.read_text()
            time.sleep(0.01)

    def kill(self) -> None:
        """Ends it without a word."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        (self.folder / "log").write_text("")

    def close(self) -> None:
        """Ends it, and takes its folder away."""
        self.kill()
        self._folder.cleanup()
