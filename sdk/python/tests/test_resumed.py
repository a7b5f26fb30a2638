"""Detached guests that are read over connections which are lost, time and again."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S, Daemon
from played import Server, ended, event, failed

from trellis import (
    AsyncClient,
    Client,
    ClosedError,
    GuestEndedError,
    Program,
    Text,
    TimedOutError,
    UnknownGuestError,
)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    # A short one: the path of a socket has little room.
    yield Path(os.path.relpath(tmp_path / "t.sock"))


def attached(message: dict[str, Any]) -> dict[str, Any]:
    """The daemon's answer to who attaches to its only guest."""
    return event(message["id"], "attached", guest_id=1, daemon=1, **{"from": message["call"].get("from", 0)})


def is_attach(message: dict[str, Any]) -> bool:
    return bool(message["type"] == "request" and message["call"]["type"] == "attach")


def test_one_task_reads_while_another_sends(shared: Daemon, hostile: Program) -> None:
    async def both() -> None:
        async with AsyncClient.connect(shared.socket) as client:
            reading = client.resume(await client.start_detached(hostile, "echo"))
            texts: list[str] = []

            async def read() -> None:
                async for text in reading.texts():
                    texts.append(text)

            # Neither has a connection yet.
            task = asyncio.ensure_future(read())
            for number in range(20):
                await reading.send(f"{number} ")
                # It breaks, as seen from here: by turns the sender and the reader are the first to find out.
                link = (await reading.attached())._inflow.link
                link.protocol.receive_eof()
                if number % 2 == 0:
                    link.turn()
                else:
                    asyncio.get_running_loop().call_soon(link.turn)
            await reading.end_messages()
            await task
            assert "".join(texts) == "".join(f"{number} " for number in range(20))
            assert reading.is_over and reading.usage is not None

    asyncio.run(asyncio.wait_for(both(), PATIENCE_S))


def test_what_a_sender_finds_out_is_no_good_end_for_the_reader(path: Path) -> None:
    def answers(number: int, message: dict[str, Any]) -> Iterable[dict[str, Any]]:
        if is_attach(message):
            yield attached(message) if number == 1 else failed(message["id"], "unknown_guest")

    async def found_out() -> None:
        async with Server(path, answers), AsyncClient.connect(path) as client:
            reading = client.resume(1)
            link = (await reading.attached())._inflow.link
            reader = asyncio.ensure_future(reading.next())
            await asyncio.sleep(0)
            link.protocol.receive_eof()
            # The sender is the first to look.
            sender = asyncio.ensure_future(reading.send("x"))
            link.turn()
            for task in (sender, reader):
                with pytest.raises(UnknownGuestError):
                    await task
            assert reading.is_over and await reading.next() is None

    asyncio.run(asyncio.wait_for(found_out(), PATIENCE_S))


def test_one_that_is_closed_connects_no_more(shared: Daemon, hostile: Program) -> None:
    async def closed() -> None:
        async with AsyncClient.connect(shared.socket) as client:
            guest_id = await client.start_detached(hostile, "echo")
            reading = client.resume(guest_id)
            waiting = asyncio.ensure_future(reading.next())
            await reading.attached()
            reading.close()
            assert await waiting is None
            for call in (reading.send("x"), reading.end_messages(), reading.attached()):
                with pytest.raises(GuestEndedError):
                    await call
            assert await reading.next() is None
            await client.stop(guest_id)

    asyncio.run(asyncio.wait_for(closed(), PATIENCE_S))


def test_a_daemon_that_says_nothing_is_waited_for_as_long_as_was_said(path: Path) -> None:
    def answers(number: int, message: dict[str, Any]) -> Iterable[dict[str, Any]]:
        if is_attach(message) and number == 4:
            yield attached(message)
            yield event(message["id"], "text", text="at last")
            yield ended(message["id"])

    async def silent() -> None:
        async with Server(path, answers) as server, AsyncClient.connect(path) as client:
            server.silent.update(range(1, 4))
            begun = time.monotonic()
            reading = client.resume(1, patience=50)
            # The caller's time is over: nothing is lost by that.
            with pytest.raises(TimedOutError):
                await reading.next(timeout=0.05)
            hasty = client.resume(1, patience=0.05)
            with pytest.raises(TimedOutError):
                await hasty.next()
            assert hasty.is_over and not reading.is_over
            assert time.monotonic() - begun < 30 < client.timeout  # type: ignore[operator]
            # That of one connection is over: the next one answers.
            client.timeout = 0.5
            patient = client.resume(1, patience=50)
            assert await patient.text() == "at last"

    asyncio.run(asyncio.wait_for(silent(), PATIENCE_S))


def test_a_client_that_is_closed_says_so_to_who_reads_over_others(shared: Daemon, hostile: Program) -> None:
    client = Client.connect(shared.socket)
    guest_id = client.start_detached(hostile, "echo")
    reading = client.resume(guest_id)
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            reading.wait()
        except BaseException as error:
            ended.append(error)

    reading.send("x")
    assert reading.next() == Text("x")
    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.05)
    client.close()
    waiting.join(PATIENCE_S)
    assert [type(error) for error in ended] == [ClosedError]
    with Client.connect(shared.socket) as other:
        other.stop(guest_id)
