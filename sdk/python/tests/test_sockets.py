"""Where a daemon is looked for, and what is said where none answers."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from played import hello

from trellis import (
    AsyncClient,
    Client,
    ConnectError,
    ConnectionLostError,
    HandshakeError,
    NotRunningError,
    TimedOutError,
    TooOldError,
    VersionError,
)
from trellis._socket import SYSTEM_SOCKET, candidates, user_socket


class Listener:
    """A socket whose connections are given these bytes, and then closed or kept."""

    def __init__(self, path: Path, says: bytes, closes: bool) -> None:
        self.path = path
        self._says = says
        self._closes = closes
        self._kept: list[socket.socket] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen(1)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                opened, _ = self._socket.accept()
            except OSError:
                return
            opened.sendall(self._says)
            if self._closes:
                opened.close()
            else:
                self._kept.append(opened)

    def close(self) -> None:
        # Closing alone does not wake who accepts.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        for opened in self._kept:
            opened.close()


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    # A short one: the path of a socket has little room.
    yield Path(os.path.relpath(tmp_path / "t.sock"))


def test_the_environment_names_the_socket_or_else_the_user_or_else_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRELLIS_SOCKET", "/a/b.sock")
    assert candidates() == [Path("/a/b.sock")]
    monkeypatch.setenv("TRELLIS_SOCKET", "")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/xdg")
    assert candidates() == [Path("/xdg/trellis/trellis.sock"), SYSTEM_SOCKET]
    in_login = tmp_path / "trellis/trellis.sock"
    assert (
        user_socket(None, tmp_path)
        == user_socket("relative", tmp_path)
        == user_socket("", tmp_path)
        == in_login
    )
    assert user_socket(None, tmp_path / "nowhere") is None


def test_where_nobody_listens_is_said_by_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path = tmp_path / "t.sock"
    stale.bind(str(path))
    stale.close()
    with pytest.raises(NotRunningError, match=f"nobody listens on {path}"):
        Client.connect(path)
    monkeypatch.setenv("TRELLIS_SOCKET", str(tmp_path / "none.sock"))
    with pytest.raises(
        NotRunningError, match=r"there is no .*none\.sock; start one with `trellis serve`"
    ) as error:
        Client.connect()
    assert not error.value.is_retryable


def test_a_socket_that_this_user_may_not_use_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConnectError, match=str(tmp_path)):
        # A path that no socket can have, for root as for anybody.
        Client.connect(tmp_path / ("x" * 300))


def test_a_daemon_of_another_version_is_a_clear_error(path: Path) -> None:
    listener = Listener(path, hello(7, 8, "trellis 7.0.0"), closes=True)
    with pytest.raises(
        VersionError, match=r"speaks 2 to 3, the daemon \(trellis 7.0.0\) speaks 7 to 8; this client is"
    ):
        Client.connect(path)
    listener.close()


def test_a_daemon_that_is_too_old_is_not_asked_for_what_it_would_pass_over(path: Path) -> None:
    listener = Listener(path, hello(2, 2, "trellis 0.0.1"), closes=False)
    with Client.connect(path) as client:
        assert client.daemon_build == "trellis 0.0.1"
        for ask in (
            lambda: client.start(b"", model="tiny"),
            lambda: client.load_model("tiny"),
            lambda: client.unload_model("tiny"),
        ):
            with pytest.raises(TooOldError, match="speaks version 2 of the protocol, that needs 3"):
                ask()
    listener.close()


def test_who_is_no_daemon_is_told_from_one_that_has_gone(path: Path) -> None:
    listener = Listener(path, b"HTTP/1.1 400 Bad Request\r\n", closes=True)
    with pytest.raises(HandshakeError, match="does not speak the Trellis protocol"):
        Client.connect(path)
    listener.close()
    path.unlink()
    listener = Listener(path, hello()[:9], closes=True)
    with pytest.raises(ConnectionLostError) as lost:
        Client.connect(path)
    assert lost.value.is_retryable
    listener.close()


def test_who_says_nothing_is_waited_for_as_long_as_was_said(path: Path) -> None:
    listener = Listener(path, b"", closes=False)
    with pytest.raises(TimedOutError, match="the hello of the daemon"):
        Client.connect(path, timeout=0.05)
    listener.close()


def test_every_answer_is_waited_for_as_long_as_was_said(path: Path) -> None:
    listener = Listener(path, hello(), closes=False)

    async def silent() -> None:
        async with AsyncClient.connect(path, timeout=0.05) as client:
            for ask in (client.ps(), client.info(timeout=0.02), client.load_model("x", timeout=0.02)):
                with pytest.raises(TimedOutError):
                    await ask
            guest = client.start(b"")
            for wait in (guest.started(0.02), guest.next(0.02), guest.send("x"), guest.end_messages(0.02)):
                with pytest.raises(TimedOutError):
                    await wait
            assert not guest.is_over
            with pytest.raises(TimeoutError):
                await guest.text(0.02)
            assert guest.is_over

    asyncio.run(silent())
    listener.close()


def test_a_line_that_is_full_is_stood_in(path: Path) -> None:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    listening.listen(1)
    others = []
    while True:
        other = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        other.setblocking(False)
        others.append(other)
        try:
            other.connect(str(path))
        except BlockingIOError:
            break

    async def stand() -> None:
        with pytest.raises(TimedOutError, match="a place at"):
            await AsyncClient.connect(path, timeout=0.05)
        connecting = asyncio.ensure_future(AsyncClient.connect(path)._connect())
        await asyncio.sleep(0.05)
        assert not connecting.done()
        accepted = []
        for _ in range(len(others)):
            opened, _ = listening.accept()
            opened.sendall(hello())
            accepted.append(opened)
            await asyncio.sleep(0.06)
        client = await asyncio.wait_for(connecting, 60)
        client.close()
        for opened in accepted:
            opened.close()

    asyncio.run(stand())
    for opened in (*others, listening):
        opened.close()
