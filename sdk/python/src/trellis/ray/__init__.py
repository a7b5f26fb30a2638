"""Trellis on the nodes of a Ray cluster: a Ray Serve deployment with one replica a node, next to that node's daemon.

It needs ``trellis-client[ray]``, and Python 3.10 or newer; Ray itself is imported with the first of the names that have to do with
it. :mod:`trellis.ray.llm` has what ``ray.serve.llm`` needs beside it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._lost import NodeLostError
from ._work import Answered, Chat, Run, Said

if TYPE_CHECKING:
    from ._cluster import Cluster, deployment
    from ._router import TrellisRouter
    from ._server import TrellisServer

__all__ = [
    "Answered",
    "Chat",
    "Cluster",
    "NodeLostError",
    "Run",
    "Said",
    "TrellisRouter",
    "TrellisServer",
    "deployment",
]

_HOMES = {
    "Cluster": "._cluster",
    "TrellisRouter": "._router",
    "TrellisServer": "._server",
    "deployment": "._cluster",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home, __name__), name)
