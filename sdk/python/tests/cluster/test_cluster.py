"""Two nodes with a daemon each: where calls go, what `openai` is answered, and what becomes of 200 sessions when one node is killed.

``tests/ray.sh`` runs this with an environment of its own; where Ray is missing it is skipped.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any, Optional

import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed: tests/ray.sh installs it and runs this")

from nodes import RESOURCE, Nodes, cluster
from ray import serve

from trellis import GuestFailedError, Text
from trellis.ray import Answered, Chat, Cluster, NodeLostError, Run, deployment

#: What a machine that does other things may take for all of it, in seconds.
PATIENCE_S = 300

N_SESSIONS = 200


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with cluster() as started:
        yield started


@pytest.fixture(scope="module")
def calls(nodes: Nodes) -> Cluster:
    app = deployment(ray_actor_options={"resources": RESOURCE})
    return Cluster(serve.run(app, name="trellis", route_prefix="/trellis"))


def within(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, PATIENCE_S))


async def answered(calls: Cluster, chat: Chat) -> tuple[str, Answered]:
    text, end = "", None
    async with aclosing(calls.say(chat)) as pieces:
        async for piece in pieces:
            text, end = text + piece.text, piece.answered
    assert end is not None
    return text, end


async def conversation(
    calls: Cluster, name: Optional[str], subject: str, n_turns: int
) -> list[tuple[str, Answered]]:
    messages: list[dict[str, str]] = []
    turns = []
    for number in range(n_turns):
        messages.append({"role": "user", "content": f"{subject}: question {number}"})
        text, end = await answered(calls, Chat(list(messages), context=name, max_tokens=40))
        turns.append((text, end))
        messages.append({"role": "assistant", "content": text})
    return turns


def test_there_is_a_replica_on_each_node_and_it_asks_for_no_device(nodes: Nodes, calls: Cluster) -> None:
    async def spread() -> Counter[str]:
        talks = (conversation(calls, None, f"{n}, a subject of its own", 1) for n in range(40))
        return Counter(turns[0][1].node for turns in await asyncio.gather(*talks))

    assert set(within(spread())) == set(nodes.daemons)
    options = serve.status().applications["trellis"].deployments["trellis"]
    assert options.replica_states == {"RUNNING": 2}


def test_follow_ups_reach_the_node_that_holds_the_conversation(calls: Cluster) -> None:
    async def talks() -> list[list[tuple[str, Answered]]]:
        return await asyncio.gather(
            *(conversation(calls, f"held {n}", f"{n} things to talk about", 4) for n in range(20))
        )

    held = within(talks())
    for turns in held:
        assert len({end.node for _, end in turns}) == 1, turns
        for (_, before), (_, end) in zip(turns, turns[1:]):
            assert end.is_kept and end.n_cached_tokens >= before.n_prompt_tokens
    assert len({turns[0][1].node for turns in held}) == 2


def test_guests_run_and_end_with_their_own_errors(calls: Cluster) -> None:
    async def runs() -> None:
        output = await calls.run(Run("hostile", ("echo",), messages_to_guest=("Hello, ", "Ada")))
        assert output.text == "Hello, Ada" and output.usage is not None
        again = await calls.run(
            Run("complete", ("--max-tokens", "8", "Once upon a time"), options={"seed": 7})
        )
        events = calls.stream(Run("complete", ("--max-tokens", "8", "Once upon a time"), options={"seed": 7}))
        async with aclosing(events):
            streamed = [event.text async for event in events if isinstance(event, Text)]
        assert "".join(streamed) == again.text != ""
        with pytest.raises(GuestFailedError):
            await calls.run(Run("complete", ("--no-such-option",)))

    within(runs())


async def told(calls: Cluster, number: int) -> tuple[str, Any]:
    """A session of its kind, and how it ended: all of it, or the error that says why not."""
    try:
        if number % 4 == 3:
            text = ""
            events = calls.stream(Run("complete", ("--max-tokens", "60", f"Once upon {number} times")))
            async with aclosing(events):
                async for event in events:
                    text += event.text if isinstance(event, Text) else ""
            return "run", text
        name = None if number % 4 == 2 else f"session {number}"
        return "chat", await conversation(calls, name, f"{number} sessions", 3)
    except NodeLostError as error:
        return "lost", error


def test_every_session_finishes_or_says_why_when_a_node_is_killed(nodes: Nodes, calls: Cluster) -> None:
    async def all_sessions() -> tuple[list[tuple[str, Any]], list[tuple[str, Answered]]]:
        sessions = [asyncio.ensure_future(told(calls, number)) for number in range(N_SESSIONS)]
        while sum(session.done() for session in sessions) < N_SESSIONS // 10:
            await asyncio.sleep(0.05)
        dying = next(iter(nodes.daemons))
        begun = time.monotonic()
        await asyncio.to_thread(nodes.kill, dying)
        n_left = sum(not session.done() for session in sessions)
        assert n_left > N_SESSIONS // 4, f"{n_left} sessions were under way"
        ends = await asyncio.gather(*sessions)
        print(
            f"\n{n_left} of {N_SESSIONS} were under way when a node was killed; {time.monotonic() - begun:.1f} s later:"
        )
        return ends, await conversation(calls, None, "2 sessions", 3)

    ends, again = within(all_sessions())
    kinds = Counter(kind for kind, _ in ends)
    print(dict(kinds), Counter(end.node[:8] for kind, turns in ends if kind == "chat" for _, end in turns))
    for kind, end in ends:
        if kind == "lost":
            print(end)
            assert end.is_retryable and end.kept and end.n_delivered > 0
    # A chat can always be gone on with; a run that had delivered nothing too.
    assert kinds["chat"] == N_SESSIONS * 3 // 4
    assert kinds["run"] + kinds["lost"] == N_SESSIONS // 4 and kinds["run"] > 0
    # Whoever was answered by two nodes was told what one would have said.
    assert [text for text, _ in ends[2][1]] == [text for text, _ in again]
    last = list(nodes.daemons)[1]
    moved = [turns for kind, turns in ends if kind == "chat" and turns[0][1].node != last]
    assert moved and all(turns[-1][1].node in nodes.daemons for turns in moved)
