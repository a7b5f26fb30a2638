"""Many guests at once, and how long one takes."""

from __future__ import annotations

import asyncio
import socket
import time

from conftest import Daemon
from played import CODEC, framed, hello

from trellis import AsyncClient, Client, Program
from trellis._program import start_call
from trellis._wire import Splitter

N_GUESTS = 1_000


def test_a_thousand_guests_of_one_process_are_all_right(shared: Daemon, hostile: Program) -> None:
    async def all_at_once() -> None:
        async with AsyncClient.connect(shared.socket) as client:
            have_started = 0
            all_run = asyncio.Event()

            async def one(number: int) -> str:
                nonlocal have_started
                async with client.start(hostile, "echo", label="one of many") as guest:
                    await guest.started()
                    have_started += 1
                    if have_started == N_GUESTS:
                        all_run.set()
                    await all_run.wait()
                    await guest.send(f"guest {number}, ")
                    await guest.send(str(number * number))
                    await guest.end_messages()
                    return await guest.text()

            running = asyncio.gather(*(one(number) for number in range(N_GUESTS)))
            await all_run.wait()
            # They run beside each other, and not one after the other.
            mine = [guest for guest in await client.ps() if guest.program.startswith("one of many")]
            assert len(mine) == N_GUESTS
            texts = await running
            assert texts == [f"guest {number}, {number * number}" for number in range(N_GUESTS)]

    asyncio.run(all_at_once())


def test_a_hundred_streams_draw_what_each_draws_alone(shared: Daemon, hostile: Program) -> None:
    async def all_at_once() -> None:
        async with AsyncClient.connect(shared.socket) as client:

            async def one(seed: int) -> list[int]:
                return (await client.run(hostile, "tokens", "8", "<|begin_of_text|>Once", seed=seed)).tokens

            alone = [await one(seed) for seed in range(4)]
            together = await asyncio.gather(*(one(seed % 4) for seed in range(100)))
            assert together == [alone[seed % 4] for seed in range(100)]

    asyncio.run(all_at_once())


def bare(opened: socket.socket, request_id: int, program: Program) -> None:
    """The round trip of a guest over a socket, by nothing but what has to be sent and read."""
    assert program.component is not None
    call = start_call("start", program, ["say"], {})
    opened.sendall(framed({"type": "request", "id": request_id, "call": call}))
    frames = Splitter()
    while True:
        frames.push(opened.recv(65_536))
        for payload in frames.frames():
            if CODEC.decode(payload)["type"] == "end":
                return


def test_a_round_trip_is_within_a_millisecond_of_the_bare_socket(shared: Daemon, hostile: Program) -> None:
    async def measured() -> tuple[list[float], list[float], list[float]]:
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        opened.connect(str(shared.socket))
        opened.sendall(hello())
        with opened, Client.connect(shared.socket) as sync:
            frames = Splitter()
            while frames.hello() is None:
                frames.push(opened.recv(1_000))
            async with AsyncClient.connect(shared.socket) as client:
                await client.run(hostile, "say")
                times: tuple[list[float], list[float], list[float]] = ([], [], [])
                # By turns, so that what else the machine does is the same for all.
                for number in range(150):
                    begun = time.perf_counter()
                    bare(opened, number + 1, hostile)
                    times[0].append(time.perf_counter() - begun)
                    begun = time.perf_counter()
                    await client.run(hostile, "say")
                    times[1].append(time.perf_counter() - begun)
                    begun = time.perf_counter()
                    sync.run(hostile, "say")
                    times[2].append(time.perf_counter() - begun)
                return times

    # No client is faster than the socket, the Rust client included. What else the machine does makes times longer and none shorter:
    # the faster ones say what a client costs.
    least, asynchronous, synchronous = (sorted(times)[15] for times in asyncio.run(measured()))
    print(f"bare {least * 1e6:.0f} us, asyncio {asynchronous * 1e6:.0f} us, sync {synchronous * 1e6:.0f} us")
    assert asynchronous - least < 0.001 and synchronous - least < 0.001, (least, asynchronous, synchronous)
