"""A daemon with the HTTP front, on loopback or on a Unix socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence

from daemons import GUESTS, Daemon
from examples import HOSTED


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Front(Daemon):
    """`trellis serve` with `[http]`."""

    def __init__(self, is_on_loopback: bool, models: Sequence[str] = ("tiny",)) -> None:
        self._is_on_loopback = is_on_loopback
        self._models = models
        super().__init__(GUESTS)

    def start(self) -> None:
        """As a daemon's, after its front has been configured."""
        self.http_socket = self.folder / "http.sock"
        self.port = _free_port()
        where = f"127.0.0.1:{self.port}" if self._is_on_loopback else str(self.http_socket)
        first = f'models = {json.dumps(self._models)}\nstate_dir = "{self.folder / "state"}"'
        settings = self.config.read_text().replace('models = ["tiny"]', first)
        if "tiny" in self._models:
            # The names by which documented examples ask for a model.
            settings += f'\n[catalog.tiny]\npath = "tiny"\nis_pinned = true\naliases = {json.dumps(HOSTED)}\n'
        self.config.write_text(f'{settings}\n[http]\nlisten = "{where}"\n')
        super().start()

    @property
    def url(self) -> str:
        """Where the front is, without the path of an API."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def token(self) -> str:
        """What lets the daemon's own user in on loopback."""
        return (self.folder / "state/http-token").read_text().strip()
