"""Every call of the asyncio client against a daemon, by both ways to write MessagePack."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import time
from collections.abc import AsyncIterator, Coroutine
from itertools import product
from typing import Any, Callable, TypeVar, cast

import pytest
from conftest import GUESTS, PATIENCE_S, Daemon

from trellis import (
    AsyncClient,
    CancelledError,
    ClosedError,
    DeadlineExceededError,
    GuestEndedError,
    GuestFailedError,
    GuestTrappedError,
    InvalidArgumentError,
    Json,
    LimitExceededError,
    OutputLostError,
    Program,
    Progress,
    RequestError,
    Started,
    StoppedError,
    TakenOverError,
    Text,
    TimedOutError,
    Tokens,
    TrellisError,
    UnknownGuestError,
    UnknownProgramError,
)

pytestmark = pytest.mark.usefixtures("codec")

F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, None]])


def in_a_loop(test: F) -> Callable[..., None]:
    """Runs a test in a loop of its own."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), PATIENCE_S))

    return run


async def until(holds: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    """Waits until something holds; the test as a whole has a time-out."""
    while not await holds():
        # What is waited for happens in the daemon.
        await asyncio.sleep(0.005)


async def is_listed(client: AsyncClient, guest_id: int) -> bool:
    return guest_id in [guest.guest_id for guest in await client.ps()]


@in_a_loop
async def test_a_guest_runs_and_tells_what_it_used(shared: Daemon, hostile: Program) -> None:
    async with AsyncClient.connect(shared.socket) as client:
        assert client.daemon_build.startswith("trellis ")
        async with client.start(
            hostile, "tokens", "5", "<|begin_of_text|>Once", seed=7, label="five"
        ) as guest:
            events = [event async for event in guest]
        assert [type(event) for event in events if not isinstance(event, Progress)] == [
            Started,
            *[Tokens] * 5,
        ]
        assert guest.usage is not None and guest.usage.n_tokens >= 5
        assert guest.guest_id == next(event.guest_id for event in events if isinstance(event, Started))
        assert await guest.next() is None
        again = await client.run(hostile, "tokens", "5", "<|begin_of_text|>Once", seed=7)
        other = await client.run(hostile, "tokens", "5", "<|begin_of_text|>Once", seed=8)
        assert again.tokens == [
            token for event in events if isinstance(event, Tokens) for token in event.tokens
        ]
        assert other.tokens != again.tokens and again.usage is not None


@in_a_loop
async def test_programs_are_named_by_bytes_paths_and_words(shared: Daemon) -> None:
    async with AsyncClient.connect(shared.socket) as client:
        path = GUESTS / "chat.wasm"
        named: list[Any] = [
            "chat",
            str(path),
            path,
            path.read_bytes(),
            Program.named("chat"),
            Program.file(path),
        ]
        texts = [await client.start(program, "What is 37 + 48?", seed=7).text() for program in named]
        assert {text.strip() for text in texts} == {"85"}
        with pytest.raises(UnknownProgramError):
            await client.run("no-such-guest")
        with pytest.raises(FileNotFoundError):
            client.start("./no-such.wasm")


@in_a_loop
async def test_messages_go_in_and_out(shared: Daemon, hostile: Program) -> None:
    async with AsyncClient.connect(shared.socket) as client:
        async with client.start(hostile, "echo") as guest:
            for text in ("one", "two", "zwölf"):
                await guest.send(text)
                assert await next_text(guest) == text
            await guest.end_messages()
            assert await guest.next() is None
            with pytest.raises(GuestEndedError):
                await guest.send("late")

        async def lines() -> AsyncIterator[str]:
            for line in ("a\n", "b\r\n", "c"):
                yield line

        for inbox in (["a\n", "b\r\n", "c"], lines()):
            guest = client.start(hostile, "echo")
            await guest.send_lines(inbox)
            assert await guest.text() == "abc"


async def next_text(guest: Any) -> str:
    while True:
        event = await guest.next()
        assert event is not None
        if isinstance(event, Text):
            return event.text


@in_a_loop
async def test_large_messages_go_both_ways(shared: Daemon, hostile: Program) -> None:
    async with AsyncClient.connect(shared.socket) as client:
        large = "é" * 131_072
        async with client.start(hostile, "echo", window_bytes=1) as guest:
            # More than the guest's inbox and window hold together: each side waits for the other.
            sending = asyncio.ensure_future(guest.send_lines([large] * 12))
            assert await guest.text() == large * 12
            await sending
        async with client.start(hostile, "echo") as guest:
            with pytest.raises(LimitExceededError) as refused:
                await guest.send("x" * 300_000)
            assert refused.value.limit == 262_144
            with pytest.raises(RequestError):
                await guest.send("x" * 2_000_000)
            await guest.send("still there")
            assert await next_text(guest) == "still there"
        with pytest.raises(TrellisError):
            await client.run(hostile, "x" * 400_000)
        with pytest.raises(RequestError):
            client.start(hostile, "x" * 2_000_000)


@in_a_loop
async def test_a_full_inbox_is_waited_for_as_long_as_was_said(shared: Daemon, hostile: Program) -> None:
    async with AsyncClient.connect(shared.socket) as client, client.start(hostile, "loop") as guest:
        await guest.started()
        with pytest.raises(TimedOutError, match="room in the guest's inbox"):
            while True:
                await guest.send("x" * 100_000, timeout=0.2)


@in_a_loop
async def test_values_come_as_json(shared: Daemon, hostile: Program) -> None:
    async with AsyncClient.connect(shared.socket) as client, client.start(hostile, "limits") as guest:
        async for item in guest.jsons(timeout=60):
            assert isinstance(item, Json)
            names = [name for name, _, _ in item.value()]
            assert "n_contexts" in names
            break
        else:
            pytest.fail("there is one")
        assert guest.is_over


@in_a_loop
async def test_how_a_guest_ends_is_an_error_of_its_kind(shared: Daemon, hostile: Program) -> None:
    async with AsyncClient.connect(shared.socket) as client:
        with pytest.raises(GuestFailedError, match="the guest is not content") as failed:
            await client.run(hostile, "error")
        assert failed.value.code == "guest_failed" and not failed.value.is_retryable
        with pytest.raises(DeadlineExceededError):
            await client.run(hostile, "sleep", deadline=0.05)
        guest = client.start(hostile, "drip", model="tiny")
        guest_id = await guest.started()
        await client.stop(guest_id)
        with pytest.raises(StoppedError):
            await guest.wait()
        with pytest.raises(UnknownGuestError):
            await client.stop(guest_id)
        guest = client.start(hostile, "drip")
        await guest.started()
        guest.cancel()
        with pytest.raises(CancelledError):
            await guest.wait()
        assert guest.usage is not None
        with pytest.raises(GuestTrappedError):
            await client.run(hostile, "abort")


@in_a_loop
async def test_options_out_of_range_are_named(shared: Daemon, hostile: Program) -> None:
    async with AsyncClient.connect(shared.socket) as client:
        for options in ({"seed": -1}, {"seed": 2**64}, {"deadline": -1.0}, {"deadline": float("nan")}):
            with pytest.raises(ValueError, match=next(iter(options))):
                client.start(hostile, **options)
        wrong: list[dict[str, Any]] = [{"seed": 1.5}, {"priority": 1}, {"window_bytes": "x"}]
        wrong += [{"label": 7}, {"model": 7}, {"is_recorded": "yes"}, {"is_profiled": 1}]
        for option in wrong:
            with pytest.raises(TypeError, match=next(iter(option))):
                client.start(hostile, **option)
        with pytest.raises(TypeError, match="arguments"):
            client.start(hostile, 7)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="name"):
            client.start(Program.named(7))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="n_newest"):
            await client.logs(-1)
        untyped: Any = client
        guest = client.start(hostile, "echo")
        wrong_calls = {
            "n_newest": untyped.logs("x"),
            "waits": untyped.logs_from(0, "yes"),
            "model": untyped.load_model(7),
            "device": untyped.fit_model("tiny", 7),
            "model is": untyped.unload_model(7),
            "program": untyped.upgrade(7),
            "a message": cast(Any, guest).send(7),
            "a line": cast(Any, guest).send_lines([7]),
        }
        for name, call in wrong_calls.items():
            with pytest.raises(TypeError, match=name):
                await call
        # The connection is none the worse for it.
        await guest.send("still there")
        assert await next_text(guest) == "still there"


@in_a_loop
async def test_leaving_a_loop_stops_the_guest(shared: Daemon, hostile: Program) -> None:
    async with AsyncClient.connect(shared.socket) as client:

        async def broken_out_of(way: str) -> int:
            guest = client.start(hostile, "drip")
            # An iteration that is never begun ends nothing.
            items: Any = {"events": guest, "texts": guest.texts(), "none": None}[way]
            assert not guest.is_over
            if items is None:
                async with guest:
                    await guest.started()
            else:
                async for _ in items:
                    if guest.guest_id is not None:
                        break
                del items
            assert guest.guest_id is not None and guest.is_over
            return guest.guest_id

        async def failing() -> int:
            guest = client.start(hostile, "drip")
            with pytest.raises(ZeroDivisionError):
                async for _ in guest.texts():
                    raise ZeroDivisionError
            assert guest.guest_id is not None
            return guest.guest_id

        async def forgotten() -> int:
            guest = client.start(hostile, "drip")
            guest_id = await guest.started()
            del guest
            gc.collect()
            return guest_id

        for leave in (
            broken_out_of("events"),
            broken_out_of("texts"),
            broken_out_of("none"),
            failing(),
            forgotten(),
        ):
            guest_id = await leave

            async def is_gone(guest_id: int = guest_id) -> bool:
                return not await is_listed(client, guest_id)

            await until(is_gone)


@in_a_loop
async def test_a_cancelled_task_stops_its_guest_within_50_ms(shared: Daemon, hostile: Program) -> None:
    async with AsyncClient.connect(shared.socket) as client:
        seen: dict[tuple[str, str], list[float]] = {}

        async def looping(ids: list[int], mode: str) -> None:
            guest = client.start(hostile, mode)
            ids.append(await guest.started())
            async for _ in guest:
                pass

        async def reading(ids: list[int], mode: str) -> None:
            guest = client.start(hostile, mode)
            ids.append(await guest.started())
            await guest.text()

        async def within(ids: list[int], mode: str) -> None:
            async with client.start(hostile, mode) as guest:
                ids.append(await guest.started())
                await asyncio.sleep(PATIENCE_S)

        for work, mode in product((looping, reading, within), ("drip", "wait-for-messages", "endless")):
            times = seen.setdefault((work.__name__, mode), [])
            # What else the machine does makes times longer and none shorter: the fastest of several counts.
            while len(times) < 20 and min(times, default=1.0) >= 0.05:
                ids: list[int] = []
                task = asyncio.ensure_future(work(ids, mode))
                while not ids:
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0.005)
                assert await is_listed(client, ids[0])
                begun = time.monotonic()
                task.cancel()
                while await is_listed(client, ids[0]):
                    pass
                times.append(time.monotonic() - begun)
                with pytest.raises(asyncio.CancelledError):
                    await task
        assert len(seen) == 9 and max(min(times) for times in seen.values()) < 0.05, seen


@in_a_loop
async def test_giving_up_one_event_loses_nothing(shared: Daemon, hostile: Program) -> None:
    async with AsyncClient.connect(shared.socket) as client, client.start(hostile, "echo") as guest:
        await guest.started()
        while isinstance(await guest.next(), Progress):
            pass
        with pytest.raises(TimedOutError):
            await guest.next(timeout=0.02)
        waiting = asyncio.ensure_future(guest.next())
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await guest.send("kept")
        assert await guest.next(timeout=60) == Text("kept")
        with pytest.raises(TimedOutError):
            async for _ in guest.texts(timeout=0.02):
                pass
        assert guest.is_over


@in_a_loop
async def test_tasks_share_the_events_of_a_guest(shared: Daemon, hostile: Program) -> None:
    async with AsyncClient.connect(shared.socket) as client:
        guest = client.start(hostile, "tokens", "40", "<|begin_of_text|>Once", seed=7)

        async def read() -> list[int]:
            tokens: list[int] = []
            while (event := await guest.next()) is not None:
                if isinstance(event, Tokens):
                    tokens += event.tokens
            return tokens

        parts = await asyncio.gather(*(read() for _ in range(3)))
        alone = await client.run(hostile, "tokens", "40", "<|begin_of_text|>Once", seed=7)
        assert sorted(token for part in parts for token in part) == sorted(alone.tokens)
        # Each waits no longer than the guest, and the last one knows what it used.
        assert guest.usage is not None


@in_a_loop
async def test_a_client_that_is_closed_says_so(shared: Daemon, hostile: Program) -> None:
    client = await AsyncClient.connect(shared.socket)
    guest = client.start(hostile, "wait-for-messages")
    guest_id = await guest.started()
    waiting = [
        asyncio.ensure_future(guest.wait()),
        asyncio.ensure_future(client.logs_from(10**9, waits=True)),
    ]
    await asyncio.sleep(0.05)
    client.close()
    client.close()
    for ended in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(ended, ClosedError)
    with pytest.raises(ClosedError):
        await client.ps()
    with pytest.raises(ClosedError):
        client.start(hostile)
    async with AsyncClient.connect(shared.socket) as other:

        async def is_gone() -> bool:
            return not await is_listed(other, guest_id)

        await until(is_gone)


@in_a_loop
async def test_the_daemon_describes_itself(shared: Daemon, hostile: Program) -> None:
    async with AsyncClient.connect(shared.socket) as client:
        info = await client.info()
        assert info.state == "ready" and "tiny" in info.models and "chat" in info.programs and info.pid > 0
        assert info.class_ is not None and info.class_.name == "default"
        limits = {limit.name: limit for limit in await client.limits()}
        assert limits["limits.n_guests"].value == 1_200 and limits["limits.n_guests"].source == "file"
        assert "# TYPE" in await client.metrics()
        lines = await client.logs(1)
        assert len(lines.lines) <= 1 and lines.next <= lines.end
        assert (await client.logs_from(0)).end >= lines.end
        changes = await client.reload()
        assert changes.changed == []
        async with client.start(hostile, "wait-for-messages", label="who waits") as guest:
            guest_id = await guest.started()
            listed = {guest.guest_id: guest for guest in await client.ps()}[guest_id]
            assert listed.program.startswith("who waits") and listed.limits is not None


@in_a_loop
async def test_models_come_and_go(shared: Daemon, hostile: Program) -> None:
    async with AsyncClient.connect(shared.socket) as client:
        told: list[tuple[int, int]] = []
        fit = await client.fit_model("draft")
        assert fit.fits and not fit.is_loaded and fit.needed_bytes > 0
        name = await client.load_model("draft", progress=lambda done, total: told.append((done, total)))
        assert name == "draft" and told and told[-1][0] == told[-1][1]
        assert sorted(model.name for model in await client.models()) == ["draft", "tiny"]
        seen = await client.start(hostile, "visitor", "draft", model="draft").next()
        assert seen is not None
        assert await client.unload_model("draft", drain=0) == "tiny"
        assert [model.name for model in await client.models()] == ["tiny"]
        with pytest.raises(InvalidArgumentError):
            await client.load_model("/no/such/folder")

        def fail(*_: Any) -> None:
            raise ZeroDivisionError

        # What a hearer does wrong ends what it heard of, and nothing else.
        guest = client.start(hostile, "echo")
        with pytest.raises(ZeroDivisionError):
            await client.load_model("draft", progress=fail)
        await guest.send("still there")
        assert await next_text(guest) == "still there"
        with contextlib.suppress(TrellisError):
            await client.unload_model("draft", drain=0)


@in_a_loop
async def test_what_is_recorded_and_profiled_comes_along(shared: Daemon, hostile: Program) -> None:
    async with AsyncClient.connect(shared.socket) as client:
        output = await client.run(hostile, "say", "hello", is_recorded=True, is_profiled=True)
        assert output.text.startswith("hello") and output.recorded and output.profiled


@in_a_loop
async def test_a_detached_guest_is_read_by_whoever_comes(shared: Daemon, hostile: Program) -> None:
    async with AsyncClient.connect(shared.socket) as client:
        told: list[Any] = []
        guest_id = await client.start_detached(hostile, "echo", label="alone", progress=told.append)
        listed = {guest.guest_id: guest for guest in await client.ps()}[guest_id]
        assert listed.is_detached
        first = await client.attach(guest_id)
        await first.send("one")
        assert await first.next() == Text("one") and first.next_number == 1
        async with AsyncClient.connect(shared.socket) as other:
            second = await other.attach(guest_id, 0)
            assert await second.next() == Text("one") and second.daemon == first.daemon
            with pytest.raises(TakenOverError):
                await first.next()
            await second.send("two")
            assert await second.next() == Text("two")
            second.acknowledge()
        with pytest.raises(InvalidArgumentError):
            await client.attach(guest_id, 99)
        third = await client.attach(guest_id, 2)
        await third.send_lines(["three"])
        assert await third.text() == "three" and third.usage is not None

        async def is_forgotten() -> bool:
            try:
                (await client.attach(guest_id)).close()
            except UnknownGuestError:
                return True
            return False

        # Its end is acknowledged.
        await until(is_forgotten)
        with pytest.raises(UnknownGuestError):
            await client.attach(10**9)
        long = await client.start_detached(hostile, "drip")
        reading = await client.attach(long)
        n_bytes = 0
        while n_bytes < 500_000:
            event = await reading.next()
            assert isinstance(event, Text)
            n_bytes += 64 + len(event.text)
        reading.close()
        with pytest.raises(OutputLostError) as lost:
            await client.attach(long, 0)
        assert lost.value.limit is not None and lost.value.limit > 0
        await client.stop(long)


@in_a_loop
async def test_a_start_that_is_refused_says_why(shared: Daemon, hostile: Program) -> None:
    async with AsyncClient.connect(shared.socket) as client:
        with pytest.raises(UnknownProgramError):
            await client.start_detached("no-such-guest")
        with pytest.raises(UnknownProgramError):
            await client.start("no-such-guest").started()
        with pytest.raises(TrellisError) as refused:
            await client.run(b"no component")
        assert getattr(refused.value, "code", "") in ("invalid_component", "compile_failed")
