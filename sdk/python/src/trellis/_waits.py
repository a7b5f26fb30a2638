"""Waiting, and for how long."""

from __future__ import annotations

import asyncio
import enum
from typing import Any, Callable, Final, Optional, TypeVar, Union

from ._errors import TimedOutError

T = TypeVar("T")


class _Default(enum.Enum):
    DEFAULT = "default"

    def __repr__(self) -> str:
        return "DEFAULT"


#: As long as the client was told to wait for answers.
DEFAULT: Final = _Default.DEFAULT

#: Seconds; `None` for as long as it takes; `DEFAULT` for what the client was told.
Timeout = Union[float, None, _Default]

#: Seconds that a client waits for an answer where it is not told otherwise.
TIMEOUT_S = 60.0


def shorter(one: Optional[float], other: Optional[float]) -> Optional[float]:
    """The shorter one of two times, in seconds; `None` is for ever."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


async def settled(future: asyncio.Future[T], timeout: Union[float, None], what: str) -> T:
    """What a future comes to; `TimedOutError` where it does not within so many seconds. The future is of no use then."""
    if timeout is None or future.done():
        return await future
    handle = asyncio.get_running_loop().call_later(max(timeout, 0.0), _expire, future, what, timeout)
    try:
        return await future
    finally:
        handle.cancel()


def _expire(future: asyncio.Future[Any], what: str, timeout: float) -> None:
    if not future.done():
        future.set_exception(TimedOutError(what, timeout))


class Signal:
    """Wakes all that wait for a change. It belongs to one loop."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def tell(self) -> None:
        """Something has changed."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def until(self, holds: Callable[[], bool], timeout: Union[float, None], what: str) -> None:
        """Waits until this holds, and looks after each change; `TimedOutError` where it does not in time."""
        loop = asyncio.get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        while not holds():
            future: asyncio.Future[None] = loop.create_future()
            self._waiting.append(future)
            left = None if end is None else end - loop.time()
            try:
                await settled(future, left, what)
            except TimedOutError:
                raise TimedOutError(what, timeout or 0.0) from None
            finally:
                # Who looks again and again leaves nothing behind.
                if future in self._waiting:
                    self._waiting.remove(future)
