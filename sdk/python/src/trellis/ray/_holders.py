"""Which node a named conversation was sent to. Needs no Ray."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Optional, Protocol, TypeVar

#: How many names a router remembers; those that were asked for longest ago go first.
N_NAMES_MAX = 100_000

#: The header in which a second try through ``ray.serve.llm`` names the nodes to be avoided.
AVOIDING_HEADER = "x-trellis-avoiding"


class OnNode(Protocol):
    """What runs on a node: a replica, as Ray describes it."""

    @property
    def node_id(self) -> str:
        """The Ray id of the node."""


R = TypeVar("R", bound=OnNode)


class Holders:
    """The nodes of named contexts. A node keeps its name when its replica is started again, as its daemon keeps its contexts."""

    def __init__(self, n_names_max: int = N_NAMES_MAX) -> None:
        self._n_names_max = n_names_max
        self._nodes: OrderedDict[str, str] = OrderedDict()

    def hold(self, context: str, node: str) -> None:
        """The context is on this node from now on."""
        self._nodes[context] = node
        self._nodes.move_to_end(context)
        while len(self._nodes) > self._n_names_max:
            self._nodes.popitem(last=False)

    def node_of(self, context: str) -> Optional[str]:
        """The node that it is on, if that is known."""
        node = self._nodes.get(context)
        if node is not None:
            self._nodes.move_to_end(context)
        return node


def context_of(arguments: Iterable[Any], session_id: str) -> Optional[str]:
    """The context that a call is about: its own word for it, or else the session that Ray Serve was told (`x-session-id`)."""
    for argument in arguments:
        found = getattr(argument, "context", None)
        if isinstance(found, str) and found:
            return found
    return session_id or None


def avoided_by(arguments: Iterable[Any]) -> frozenset[str]:
    """The nodes that a call is not to go to."""
    avoided: set[str] = set()
    for argument in arguments:
        avoided.update(getattr(argument, "avoiding", ()))
        headers = getattr(argument, "headers", None)
        if isinstance(headers, dict):
            avoided.update(filter(None, headers.get(AVOIDING_HEADER, "").split(",")))
    return frozenset(avoided)


def without(replicas: list[R], avoided: frozenset[str]) -> list[R]:
    """Those that are on other nodes; all of them where there are none."""
    return [replica for replica in replicas if replica.node_id not in avoided] or replicas
