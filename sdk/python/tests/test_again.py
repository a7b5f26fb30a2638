"""Work whose node is lost: what is done again, and what is said where it is not. Neither Ray nor a daemon takes part."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from typing import Any, Optional

import pytest

from trellis import GuestFailedError
from trellis.ray import NodeLostError, Said
from trellis.ray import _again as again
from trellis.ray._again import SaidBefore, Terms, tried
from trellis.ray._work import Answered

END = Answered("complete", 1, 0, 1, is_kept=False)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "PAUSE_S", 0.0)


class Attempts:
    """Attempts as they are written down: items, and an error at the end of some."""

    def __init__(self, *attempts: list[Any]) -> None:
        self._attempts = list(attempts)
        self.avoided: list[tuple[str, ...]] = []

    async def __call__(self, avoiding: tuple[str, ...]) -> AsyncIterator[Any]:
        self.avoided.append(avoiding)
        for item in self._attempts.pop(0):
            if isinstance(item, Exception):
                raise item
            yield item


def loss_of(error: Exception) -> Optional[NodeLostError]:
    return error if isinstance(error, NodeLostError) else None


def lost(node: str) -> NodeLostError:
    return NodeLostError(f"node {node} is lost", node=node)


def taken(attempts: Any, terms: Terms, resumed: Any = None) -> list[Any]:
    async def take() -> list[Any]:
        return [item async for item in tried(attempts, terms, loss_of, resumed)]

    return asyncio.run(take())


def test_what_gave_nothing_is_done_again_and_on_another_node() -> None:
    attempts = Attempts([lost("a")], [lost("b")], [1, 2])
    assert taken(attempts, Terms(3, is_repeatable=True)) == [1, 2]
    assert attempts.avoided == [(), ("a",), ("a", "b")]


def test_what_gave_something_is_not_done_again_and_says_so() -> None:
    attempts = Attempts([1, lost("a")])
    with pytest.raises(NodeLostError, match="1 pieces had been delivered") as raised:
        taken(attempts, Terms(3, is_repeatable=True))
    assert (raised.value.n_delivered, raised.value.node, raised.value.is_retryable) == (1, "a", True)


def test_what_may_have_saved_a_context_is_not_done_again_and_says_so() -> None:
    with pytest.raises(NodeLostError, match="it may have saved 'Ada'") as raised:
        taken(Attempts([lost("a")]), Terms(3, is_repeatable=False, context="Ada"))
    assert raised.value.context == "Ada"


def test_the_last_try_is_the_last() -> None:
    attempts = Attempts([lost("a")], [lost("b")])
    with pytest.raises(NodeLostError, match="last of 2 tries"):
        taken(attempts, Terms(2, is_repeatable=True))
    assert len(attempts.avoided) == 2


def test_what_a_guest_ends_with_is_not_tried_again() -> None:
    attempts = Attempts([GuestFailedError("why")], [1])
    with pytest.raises(GuestFailedError, match="why"):
        taken(attempts, Terms(3, is_repeatable=True))
    assert len(attempts.avoided) == 1


def texts(items: list[Any]) -> list[str]:
    return [item.text for item in items]


def test_an_answer_goes_on_where_the_next_node_says_the_same_in_other_pieces() -> None:
    attempts = Attempts(
        [Said("ab"), Said("cd"), lost("a")],
        [Said("abc"), lost("b")],
        [Said("a"), Said("bcdef"), Said("", END)],
    )
    found = taken(attempts, Terms(3, is_repeatable=True), SaidBefore)
    assert texts(found) == ["ab", "cd", "ef", ""]
    assert found[-1].answered == END


@pytest.mark.parametrize("second", [[Said("abX")], [Said("ab"), Said("", END)]])
def test_an_answer_that_differs_ends_with_what_was_delivered(second: list[Said]) -> None:
    attempts = Attempts([Said("abc"), lost("a")], second)
    with pytest.raises(NodeLostError, match="does not say the same; the 3 characters"):
        taken(attempts, Terms(3, is_repeatable=True), SaidBefore)


def test_a_lost_node_travels_with_all_that_is_said_of_it() -> None:
    error = NodeLostError("it is gone", kept="nothing", node="a", context="Ada", n_delivered=3)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.kept, copy.node, copy.context, copy.n_delivered, copy.is_retryable) == (
        "it is gone; nothing",
        "nothing",
        "a",
        "Ada",
        3,
        True,
    )
