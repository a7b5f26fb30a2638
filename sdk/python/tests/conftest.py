"""A daemon for the tests, and guests to run in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from daemons import EXE, GUESTS, PATIENCE_S, ROOT, ROUND_TRIP, Daemon

from trellis import Program, _codec, _protocol

__all__ = ["EXE", "GUESTS", "PATIENCE_S", "ROOT", "ROUND_TRIP", "Daemon"]


@pytest.fixture(scope="session")
def shared() -> Iterator[Daemon]:
    """A daemon that no test ends, with the examples under their names."""
    assert EXE.is_file(), f"{EXE} is missing: TRELLIS_EXE names a daemon to be tested against"
    daemon = Daemon(GUESTS)
    yield daemon
    daemon.close()


@pytest.fixture
def own() -> Iterator[Daemon]:
    """A daemon that the test may end, which knows no program by name."""
    daemon = Daemon()
    yield daemon
    daemon.close()


@pytest.fixture(scope="session")
def hostile() -> Program:
    """The guest that does what its first argument says."""
    return Program.file(GUESTS / "hostile.wasm")


@pytest.fixture(params=["msgspec", "msgpack"])
def codec(request: Any, monkeypatch: pytest.MonkeyPatch) -> _codec.Codec:
    """Each of the ways to write and read MessagePack, for all clients of the test."""
    pytest.importorskip(request.param)
    chosen = {"msgspec": _codec.by_msgspec, "msgpack": _codec.by_msgpack}[request.param]()
    monkeypatch.setattr(_protocol, "best", lambda: chosen)
    return chosen
