"""A daemon that is played by hand, for what a real one does seldom."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Callable

from trellis import _codec, _wire

CODEC = _codec.best()


def hello(version_min: int = 2, version_max: int = 3, build: str = "played") -> bytes:
    """The first bytes of a daemon."""
    return _wire.Hello(version_min, version_max, _wire.FRAME_BYTES_MAX, build).encode()


def framed(*messages: Any) -> bytes:
    """The bytes of messages, one behind the other."""
    return b"".join(_wire.frame(CODEC.encode(message)) for message in messages)


def event(request_id: int, kind: str, **fields: Any) -> dict[str, Any]:
    """Something that happened in a request."""
    return {"type": "event", "id": request_id, "event": {"type": kind, **fields}}


def ended(request_id: int, value: str = "done", **fields: Any) -> dict[str, Any]:
    """The good end of a request."""
    outcome = {"type": "ok", "value": {"type": value, **fields}}
    return {"type": "end", "id": request_id, "outcome": outcome}


def failed(request_id: int, code: str, message: str = "no", **fields: Any) -> dict[str, Any]:
    """The bad end of a request."""
    error = {"code": code, "message": message, **fields}
    return {"type": "end", "id": request_id, "outcome": {"type": "error", "error": error}}


class Reader:
    """What a client has sent."""

    def __init__(self) -> None:
        self._bytes = _wire.Splitter()
        self._has_hello = False

    def messages(self, data: bytes) -> list[Any]:
        """The messages that are whole by now and were not before."""
        self._bytes.push(data)
        if not self._has_hello:
            if self._bytes.hello() is None:
                return []
            self._has_hello = True
        return [CODEC.decode(payload) for payload in self._bytes.frames()]


class Played:
    """A daemon that holds no component before it was uploaded, and whose guests run until they are cancelled."""

    def __init__(self) -> None:
        self._reader = Reader()
        #: What was asked for and has not ended.
        self.open: set[int] = set()
        self.held: dict[bytes, bytes] = {}
        self._uploads: dict[int, tuple[bytes, int, bytes]] = {}

    def receive(self, data: bytes) -> list[dict[str, Any]]:
        """The answers to what a client sends."""
        return [answer for message in self._reader.messages(data) for answer in self._answers(message)]

    def _end(self, message: dict[str, Any]) -> dict[str, Any]:
        self.open.discard(message["id"])
        return message

    def _answers(self, message: dict[str, Any]) -> Iterable[dict[str, Any]]:
        request_id = message["id"]
        if message["type"] == "request":
            self.open.add(request_id)
            call = message["call"]
            if call["type"] == "start" and call["program"]["type"] == "named":
                yield self._end(failed(request_id, "unknown_program"))
            elif call["type"] == "start" and call["program"]["hash"] not in self.held:
                yield self._end(failed(request_id, "unknown_component"))
            elif call["type"] == "start":
                yield event(request_id, "started", guest_id=request_id)
            elif call["type"] == "upload":
                self._uploads[request_id] = (call["hash"], call["n_bytes"], b"")
                yield event(request_id, "wanted")
        elif message["type"] == "chunk" and request_id in self._uploads:
            name, n_bytes, held = self._uploads[request_id]
            held += message["bytes"]
            self._uploads[request_id] = (name, n_bytes, held)
            if len(held) == n_bytes:
                self.held[name] = held
                del self._uploads[request_id]
                yield self._end(ended(request_id))
        elif message["type"] == "cancel" and request_id in self.open:
            self._uploads.pop(request_id, None)
            yield self._end(failed(request_id, "cancelled"))


class Server:
    """A daemon on a socket in the loop of a test: what comes over a connection, counted from 0, is answered by what this returns."""

    def __init__(
        self, path: Path, answers: Callable[[int, dict[str, Any]], Iterable[dict[str, Any]]]
    ) -> None:
        self._path = path
        self._answers = answers
        self._writers: list[asyncio.StreamWriter] = []
        #: Connections that are not even greeted.
        self.silent: set[int] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self._writers)
        self._writers.append(writer)
        if number not in self.silent:
            writer.write(hello())
        messages = Reader()
        while data := await reader.read(65_536):
            for message in messages.messages(data):
                writer.write(framed(*self._answers(number, message)))

    def cut(self) -> None:
        """Closes all connections."""
        for writer in self._writers:
            writer.close()

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_unix_server(self._serve, str(self._path))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        # Each is served to its end before the loop ends.
        await asyncio.sleep(0.01)
