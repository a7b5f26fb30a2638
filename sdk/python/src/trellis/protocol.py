"""The protocol without a socket, for loops other than asyncio: see :class:`Protocol`."""

from ._program import Component
from ._protocol import Ended, Greeted, Happened, Launch, Lost, News, Protocol

__all__ = ["Component", "Ended", "Greeted", "Happened", "Launch", "Lost", "News", "Protocol"]
