"""A daemon that is killed in the middle of everything."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from conftest import EXE, PATIENCE_S, Daemon

from trellis import (
    AsyncClient,
    Client,
    ConnectionLostError,
    InvalidArgumentError,
    NotRunningError,
    Program,
    ShuttingDownError,
    Text,
    TrellisError,
    UnknownGuestError,
)


def test_all_that_is_under_way_ends_with_an_error_that_may_be_tried_again(
    own: Daemon, hostile: Program
) -> None:
    async def killed() -> None:
        async with AsyncClient.connect(own.socket) as client:
            reading = client.start(hostile, "endless")
            await reading.started()
            silent = client.start(hostile, "wait-for-messages")
            await silent.started()
            waits = [reading.wait(), silent.wait(), client.logs_from(10**9, waits=True)]
            under_way = [asyncio.ensure_future(wait) for wait in waits]
            await asyncio.sleep(0.05)
            own.kill()
            ends: list[Any] = await asyncio.gather(*under_way, return_exceptions=True)
            ends += await asyncio.gather(client.ps(), silent.send("x"), return_exceptions=True)
            for end in ends[:-1]:
                assert isinstance(end, ConnectionLostError) and end.is_retryable, end
            assert isinstance(ends[-1], TrellisError)
            with pytest.raises(ConnectionLostError):
                client.start(hostile, "echo")
        with pytest.raises(NotRunningError):
            await AsyncClient.connect(own.socket)

    asyncio.run(killed())


def test_a_loop_over_a_guest_ends_with_the_daemon(own: Daemon, hostile: Program) -> None:
    with Client.connect(own.socket) as client:
        killing = threading.Timer(0.2, own.kill)
        killing.start()
        with pytest.raises(ConnectionLostError) as lost:
            for _ in client.start(hostile, "drip"):
                pass
        killing.join()
        assert lost.value.is_retryable


def test_an_upload_that_is_cut_off_is_no_end_of_waiting(own: Daemon) -> None:
    async def cut() -> None:
        async with AsyncClient.connect(own.socket) as client:
            guest = client.start(b"\0asm" + bytes(12 << 20))
            await guest.next()
            own.kill()
            with pytest.raises(ConnectionLostError):
                await guest.wait(60)

    asyncio.run(cut())


def test_reading_goes_on_over_another_connection(own: Daemon, hostile: Program) -> None:
    async def resumed() -> None:
        async with AsyncClient.connect(own.socket) as client:
            guest_id = await client.start_detached(hostile, "echo")
            reading = client.resume(guest_id)
            texts = []
            for number in range(5):
                attached = await reading.attached()
                await reading.send(str(number))
                event = await reading.next()
                assert isinstance(event, Text)
                texts.append(event.text)
                # The connection breaks, as seen from here.
                attached._inflow.link.protocol.receive_eof()
                attached._inflow.link.turn()
            await reading.end_messages()
            assert await reading.next() is None and reading.usage is not None
            assert texts == ["0", "1", "2", "3", "4"] and reading.next_number == 5

    asyncio.run(resumed())


def test_reading_waits_for_the_next_daemon_and_takes_no_other_guest_for_its_own(
    own: Daemon, hostile: Program
) -> None:
    with Client.connect(own.socket) as client:
        guest_id = client.start_detached(hostile, "wait-for-messages")
        reading = client.resume(guest_id, patience=60)
        hasty = client.resume(guest_id, patience=0)
        ended: list[BaseException] = []

        def read() -> None:
            try:
                reading.wait()
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        begun = time.monotonic()
        while not next(guest.is_attached for guest in client.ps() if guest.guest_id == guest_id):
            assert time.monotonic() - begun < PATIENCE_S
            time.sleep(0.005)
        own.kill()
        with pytest.raises(NotRunningError):
            hasty.wait()
        assert thread.is_alive()
        own.start()
        # Numbers begin anew: another guest has this one now.
        with Client.connect(own.socket) as other:
            assert other.start_detached(hostile, "wait-for-messages") == guest_id
        thread.join(60)
        assert [type(error) for error in ended] == [UnknownGuestError]


def test_a_daemon_is_replaced_and_stopped_by_its_operator(own: Daemon, hostile: Program) -> None:
    with Client.connect(own.socket) as client:
        with pytest.raises(InvalidArgumentError):
            client.upgrade("/no/such/program")
        guest = client.start(hostile, "wait-for-messages")
        guest.started()
        next_one = client.upgrade()
        assert next_one.program == str(EXE.resolve()) and next_one.n_at_work >= 1
        with pytest.raises((ShuttingDownError, ConnectionLostError)) as gone:
            guest.wait(60)
        assert gone.value.is_retryable
    # Who comes meanwhile waits for the next one.
    with Client.connect(own.socket) as client:
        assert client.run(hostile, "say", "again").text.startswith("again")
        client.shutdown()
        # What comes while it stops may be refused before the connection ends.
        with pytest.raises((ShuttingDownError, ConnectionLostError)):
            while True:
                client.ps()
