"""Where a cluster's router sends a call. Ray takes no part."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from trellis.ray import Chat, Run, _placement
from trellis.ray._placement import AVOIDING_HEADER, BLOCK_CHARS, Placement, call_of


def call(identity: str, text: str = "", context: Any = None, avoiding: tuple[str, ...] = ()) -> Any:
    return call_of(
        identity, [Chat([{"role": "user", "content": text}], context=context, avoiding=avoiding)], ""
    )


def test_a_follow_up_goes_to_the_node_of_its_context_whatever_its_load() -> None:
    placement = Placement(8)
    placement.sent(call("1", context="Ada"), "a")
    assert placement.choose(call("2", context="Ada"), {"a": 200, "b": 0}, {}) == ["a"]
    # The node is gone: any other, and the context is there from then on.
    assert placement.choose(call("3", context="Ada"), {"b": 0, "c": 1}, {}) == ["b", "c"]
    placement.sent(call("3", context="Ada"), "b")
    assert placement.choose(call("4", context="Ada"), {"a": 0, "b": 9}, {}) == ["b"]


def test_what_another_router_sent_is_known_by_what_replicas_say() -> None:
    assert Placement(8).choose(call("1", context="Ada"), {"a": 0, "b": 5}, {"b": ["Ada"]}) == ["b"]


def test_a_known_beginning_goes_before_load_until_that_is_too_uneven() -> None:
    placement = Placement(8)
    beginning = "x" * 3 * BLOCK_CHARS
    placement.sent(call("1", beginning), "a")
    placement.sent(call("2", "x" * BLOCK_CHARS), "b")
    longer = f"{beginning} and more"
    assert placement.choose(call("3", longer), {"a": 7, "b": 0}, {}) == ["a", "b"]
    assert placement.choose(call("3", longer), {"a": 9, "b": 0}, {}) == ["b", "a"]
    # Of a beginning that is shorter than a block nothing is known.
    assert placement.choose(call("3", "x" * 8), {"a": 1, "b": 0}, {}) == ["b", "a"]


def test_calls_that_come_at_once_are_spread_before_any_of_them_is_under_way() -> None:
    placement = Placement(8)
    chosen = Counter(placement.choose(call(str(n), f"call {n}"), {"a": 0, "b": 0}, {})[0] for n in range(200))
    assert chosen == {"a": 100, "b": 100}
    # One that is placed again, as its node had no room, counts once.
    for _ in range(50):
        placement.choose(call("1", "call 1"), {"a": 0, "b": 0}, {})
    assert placement.choose(call("200"), {"a": 0, "b": 1}, {})[0] == "a"


def test_what_was_placed_and_never_sent_counts_for_a_while_only() -> None:
    seconds = [0.0]
    placement = Placement(8, lambda: seconds[0])
    assert placement.choose(call("1"), {"a": 0, "b": 1}, {})[0] == "a"
    assert placement.choose(call("2"), {"a": 1, "b": 1}, {})[0] == "b"
    seconds[0] = 60.0
    assert placement.choose(call("3"), {"a": 0, "b": 1}, {})[0] == "a"


def test_nodes_that_are_avoided_are_last_resorts() -> None:
    placement = Placement(8)
    placement.sent(call("1", context="Ada"), "a")
    assert placement.choose(call("2", context="Ada", avoiding=("a",)), {"a": 0, "b": 9}, {}) == ["b"]
    assert placement.choose(call("3", avoiding=("a",)), {"a": 0}, {}) == ["a"]


def test_a_call_says_what_it_is_about_and_where_it_is_not_to_go() -> None:
    raw = SimpleNamespace(headers={AVOIDING_HEADER: "b,c"})
    found = call_of("1", [SimpleNamespace(messages=[{"role": "user", "content": "Hi"}]), raw], "Ada")
    assert (found.context, found.text, found.avoided) == ("Ada", "user: Hi", frozenset({"b", "c"}))
    run = call_of("2", [Run("complete", ("Once",), context="Bob", avoiding=("a",))], "Ada")
    assert (run.context, run.text, run.avoided) == ("Bob", "complete\nOnce", frozenset({"a"}))
    assert call_of("3", [], "").context is None


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_placement, "N_KNOWN_MAX", 2)
    placement = Placement(8)
    for name in ("Ada", "Bob", "Cid"):
        placement.sent(call(name, context=name), "b")
    assert placement.choose(call("1", context="Ada"), {"a": 0, "b": 0}, {}) == ["a", "b"]
    assert placement.choose(call("2", context="Cid"), {"a": 0, "b": 0}, {}) == ["b"]
