"""What a guest sends that the guests of the tests do not."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S
from played import Server, ended, event

from trellis import AsyncClient, Event, Json, JsonError, Program, Text, TrellisError

NAMED = Program.named("played")


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    # A short one: the path of a socket has little room.
    yield Path(os.path.relpath(tmp_path / "t.sock"))


TOO_DEEP = "[" * 100_000 + "]" * 100_000
TOO_LONG = "7" * 5_000


@pytest.mark.parametrize("text", [TOO_DEEP, TOO_LONG, "no json"], ids=["deep", "long", "none"])
def test_json_that_python_cannot_read_leaves_the_rest_to_be_read(path: Path, text: str) -> None:
    def answers(_: int, message: dict[str, Any]) -> Iterable[dict[str, Any]]:
        if message["type"] == "request":
            yield event(message["id"], "started", guest_id=1)
            yield event(message["id"], "json", json="[1]")
            yield event(message["id"], "json", json=text)
            yield event(message["id"], "text", text="the rest")
            yield ended(message["id"])

    async def collected() -> None:
        async with Server(path, answers), AsyncClient.connect(path) as client:
            assert await client.start(NAMED).text() == "the rest"
            output = await client.run(NAMED)
            assert output.text == "the rest" and output.jsons == [Json("[1]"), Json(text)]
            with pytest.raises(JsonError) as unread:
                print(output.json)
            assert isinstance(unread.value, TrellisError) and isinstance(unread.value, ValueError)
            assert output.jsons[0].value() == [1]
            seen = [item async for item in client.start(NAMED).jsons()]
            assert seen == output.jsons

    asyncio.run(asyncio.wait_for(collected(), PATIENCE_S))


def test_what_was_put_ahead_of_a_reader_takes_room_in_the_window_until_more_is_read(path: Path) -> None:
    granted: list[int] = []

    def answers(_: int, message: dict[str, Any]) -> Iterable[dict[str, Any]]:
        if message["type"] == "request":
            yield event(message["id"], "started", guest_id=1)
            for _ in range(3):
                yield event(message["id"], "text", text="x" * 80_000)
        elif message["type"] == "credit":
            granted.append(message["n_bytes"])
            yield ended(message["id"])

    async def ahead() -> None:
        async with Server(path, answers), AsyncClient.connect(path) as client:
            guest = client.start(NAMED, window_bytes=1)
            await guest.started()
            while len(guest._inflow.queue) < 4:
                await asyncio.sleep(0.001)
            events: deque[Event] = deque()
            await guest.fill(events)
            assert len(events) == 4 and isinstance(events[-1], Text)
            # Long enough for what is sent at once to be there.
            await guest._inflow.link.written(PATIENCE_S)
            await asyncio.sleep(0.02)
            assert granted == []
            await guest.fill(events)
            assert granted == [3 * (80_000 + 64)] and guest.is_over

    asyncio.run(asyncio.wait_for(ahead(), PATIENCE_S))
