"""A client belongs to one loop and one process, and what the garbage collector finds disturbs neither."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable

import pytest
from conftest import PATIENCE_S, Daemon

from trellis import AsyncClient, AsyncGuest, Client, ClosedError, Program, Text

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")


@contextmanager
def forked(work: Callable[[], bool]) -> Iterator[None]:
    """A process that was forked from this one does this, says whether it went well, and stays until this is left."""
    (says, told), (stays, leaves) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        is_well = False
        try:
            os.close(leaves)
            is_well = work()
        finally:
            os.write(told, b"+" if is_well else b"-")
            os.read(stays, 1)
            os._exit(0)
    try:
        assert os.read(says, 1) == b"+"
        yield
    finally:
        os.close(leaves)
        os.waitpid(child, 0)
        for end in (says, told, stays):
            os.close(end)


def is_refused(call: Callable[[], Any]) -> bool:
    try:
        made = call()
        if asyncio.iscoroutine(made):
            made.send(None)
    except ClosedError:
        return True
    return False


def test_a_client_is_of_no_use_in_another_loop(shared: Daemon, hostile: Program) -> None:
    async def connected() -> tuple[AsyncClient, AsyncGuest]:
        client = await AsyncClient.connect(shared.socket)
        guest = client.start(hostile, "wait-for-messages")
        await guest.started()
        return client, guest

    async def elsewhere(client: AsyncClient, guest: AsyncGuest) -> None:
        with pytest.raises(RuntimeError, match="another one"):
            # What has come already is there to be read.
            while await guest.next() is not None:
                pass
        with pytest.raises(RuntimeError, match="another one"):
            await guest.send("x")
        with pytest.raises(RuntimeError, match="another one"):
            client.start(hostile, "echo")
        for call in (
            client.ps(),
            client.run(hostile, "echo"),
            client.start_detached(hostile, "echo"),
            client.attach(1),
        ):
            with pytest.raises(RuntimeError, match="another one"):
                await call

    client, guest = asyncio.run(connected())
    asyncio.run(asyncio.wait_for(elsewhere(client, guest), PATIENCE_S))
    client._link.drop_all()
    # The loop that watched it has ended: it is closed all the same.
    assert client._link._socket.fileno() < 0


@needs_fork
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_ends_no_guest_of_its_parent(shared: Daemon, hostile: Program) -> None:
    async def parent() -> None:
        async with AsyncClient.connect(shared.socket) as client:
            guest = client.start(hostile, "echo")
            await guest.started()
            others = [client.start(hostile, "echo") for _ in range(2)]
            for other in others:
                await other.started()

            def child() -> bool:
                calls = (client.ps, lambda: client.start(hostile, "echo"), lambda: client.attach(1))
                refused = [is_refused(call) for call in calls]
                others[0].cancel()
                others[0].close()
                others.pop()
                guest.close()
                gc.collect()
                client.close()
                return all(refused)

            with forked(child):
                for open_one in (guest, *others):
                    await open_one.send("still there")
                    while (event := await open_one.next(timeout=30)) != Text("still there"):
                        assert event is not None

    asyncio.run(asyncio.wait_for(parent(), PATIENCE_S))


@needs_fork
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_closing_stops_the_guests_though_a_forked_process_has_the_socket(
    shared: Daemon, hostile: Program
) -> None:
    with Client.connect(shared.socket) as watching:
        client = Client.connect(shared.socket)
        guest = client.start(hostile, "wait-for-messages")
        guest_id = guest.started()
        with forked(lambda: True):
            client.close()
            begun = time.monotonic()
            while guest_id in [guest.guest_id for guest in watching.ps()]:
                assert time.monotonic() - begun < PATIENCE_S
                time.sleep(0.005)


class Collecting:
    """A socket in the middle of whose writes the garbage collector runs."""

    def __init__(self, opened: Any) -> None:
        self._opened = opened

    def send(self, data: Any) -> int:
        n_sent: int = self._opened.send(data)
        gc.collect()
        return n_sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)


def test_what_is_collected_in_the_middle_of_a_write_sends_nothing_twice(
    shared: Daemon, hostile: Program
) -> None:
    async def collected() -> None:
        async with AsyncClient.connect(shared.socket) as client:
            kept: list[Any] = [client.start(hostile, "drip"), client.start(hostile, "drip").texts()]
            await kept[1].__anext__()
            guest_ids = {await kept[0].started()} | {kept[1]._reading.guest_id}
            # Nothing but the collector finds it.
            kept.append(kept)
            gc.disable()
            try:
                del kept
                link: Any = client._link
                link._socket = Collecting(link._socket)
                while guest_ids & {guest.guest_id for guest in await client.ps()}:
                    await asyncio.sleep(0.005)
            finally:
                gc.enable()

    asyncio.run(asyncio.wait_for(collected(), PATIENCE_S))
