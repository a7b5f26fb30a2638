"""On which node a call is best placed: that of its named context, of its beginning, or the least loaded. Needs no Ray."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Callable, Generic, Optional, TypeVar

K = TypeVar("K")
V = TypeVar("V")

#: The header in which a second try through ``ray.serve.llm`` names the nodes to be avoided.
AVOIDING_HEADER = "x-trellis-avoiding"

#: How many names, and beginnings of texts, a router remembers; those that were looked at longest ago go first.
N_KNOWN_MAX = 100_000

#: Characters of a block: of a text, whole blocks are compared from its beginning on. Some tokens, as a KV page has.
BLOCK_CHARS = 64

#: Blocks of a text that are looked at.
N_BLOCKS_MAX = 512

#: Seconds after which a call that was placed and never sent counts no more.
PLACED_S = 10.0


@dataclass(frozen=True)
class Call:
    """What a router sees of a call."""

    #: Ray's own number of it.
    id: str
    #: The named context that it is about.
    context: Optional[str]
    #: What the model reads.
    text: str
    #: Nodes that it is not to go to as long as there are others.
    avoided: frozenset[str]


def call_of(identity: str, arguments: Iterable[Any], session_id: str) -> Call:
    """A call to a replica.

    The context is its argument's own word for it, or else the session that Ray Serve was told (``x-session-id``).
    """
    context, text = session_id or None, ""
    avoided: set[str] = set()
    for argument in arguments:
        named = getattr(argument, "context", None)
        context = named if isinstance(named, str) and named else context
        text = text or _text_of(argument)
        avoided.update(getattr(argument, "avoiding", ()))
        headers = getattr(argument, "headers", None)
        if isinstance(headers, dict):
            avoided.update(filter(None, headers.get(AVOIDING_HEADER, "").split(",")))
    return Call(identity, context, text, frozenset(avoided))


def _text_of(argument: Any) -> str:
    messages = getattr(argument, "messages", None)
    if isinstance(messages, list):
        said = (message if isinstance(message, dict) else vars(message) for message in messages)
        return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in said)
    prompt = getattr(argument, "prompt", None)
    return prompt if isinstance(prompt, str) else ""


class Placement:
    """What one router knows of the nodes. A node keeps what it knows when its replica is started again: its daemon has it."""

    def __init__(self, n_calls_uneven: int, now: Callable[[], float] = time.monotonic) -> None:
        self._n_calls_uneven = n_calls_uneven
        self._now = now
        self._contexts: _Recent[str, str] = _Recent()
        self._blocks: _Recent[int, set[str]] = _Recent()
        # Calls that were placed, and that no queue counts yet: the node, and when.
        self._placed: dict[str, tuple[str, float]] = {}

    def choose(self, call: Call, loads: Mapping[str, int], held: Mapping[str, Collection[str]]) -> list[str]:
        """The nodes for a call, the best first; one alone where it has to be that one.

        ``loads`` has the calls that are under way on each node, ``held`` the contexts that its replica says it has.
        """
        nodes = [node for node in loads if node not in call.avoided] or list(loads)
        self._placed.pop(call.id, None)
        expected = dict(loads)
        for node in self._under_way():
            expected[node] = expected.get(node, 0) + 1
        holder = self._holder(call.context, nodes, held)
        if holder is not None:
            self._placed[call.id] = (holder, self._now())
            return [holder]
        least = min(expected[node] for node in nodes)
        known = {node: n for node, n in self._known(call.text).items() if node in nodes}
        may_more = {node: n for node, n in known.items() if expected[node] - least <= self._n_calls_uneven}
        ranked = sorted(nodes, key=lambda node: (-may_more.get(node, 0), expected[node]))
        self._placed[call.id] = (ranked[0], self._now())
        return ranked

    def sent(self, call: Call, node: str) -> None:
        """The call is in a node's queue."""
        self._placed.pop(call.id, None)
        if call.context is not None:
            self._contexts.put(call.context, node)
        for block in _blocks(call.text):
            self._blocks.put(block, {*(self._blocks.get(block) or ()), node})

    def _holder(
        self, context: Optional[str], nodes: list[str], held: Mapping[str, Collection[str]]
    ) -> Optional[str]:
        if context is None:
            return None
        node = self._contexts.get(context)
        if node in nodes:
            return node
        # Another router sent it there, or this one before it was started again.
        return next((node for node in nodes if context in held.get(node, ())), None)

    def _known(self, text: str) -> dict[str, int]:
        """How many blocks of the text each node knows, of those that know any."""
        known: dict[str, int] = {}
        for number, block in enumerate(_blocks(text), 1):
            nodes = self._blocks.get(block)
            if nodes is None:
                break
            known.update((node, number) for node in nodes if known.get(node, 0) == number - 1)
        return known

    def _under_way(self) -> list[str]:
        oldest = self._now() - PLACED_S
        self._placed = {call: placed for call, placed in self._placed.items() if placed[1] >= oldest}
        return [node for node, _ in self._placed.values()]


def _blocks(text: str) -> list[int]:
    """A number for each beginning of the text that is a whole number of blocks."""
    blocks: list[int] = []
    for end in range(BLOCK_CHARS, min(len(text), BLOCK_CHARS * N_BLOCKS_MAX) + 1, BLOCK_CHARS):
        blocks.append(hash((blocks[-1] if blocks else 0, text[end - BLOCK_CHARS : end])))
    return blocks


class _Recent(Generic[K, V]):
    """A map of what was used last."""

    def __init__(self) -> None:
        self._items: OrderedDict[K, V] = OrderedDict()

    def put(self, key: K, value: V) -> None:
        self._items[key] = value
        self._items.move_to_end(key)
        while len(self._items) > N_KNOWN_MAX:
            self._items.popitem(last=False)

    def get(self, key: K) -> Optional[V]:
        value = self._items.get(key)
        if value is not None:
            self._items.move_to_end(key)
        return value
