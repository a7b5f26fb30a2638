"""Trellis on the nodes of a Ray cluster: a Ray Serve deployment with one replica a node, next to that node's daemon.

It needs ``trellis-client[ray]``, and Python 3.10 or newer. :mod:`trellis.ray.llm` has what ``ray.serve.llm`` needs beside it.
"""

from ._cluster import Cluster, deployment
from ._lost import NodeLostError
from ._router import TrellisRouter
from ._server import TrellisServer
from ._work import Answered, Chat, Run, Said

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
