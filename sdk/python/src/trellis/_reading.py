"""Reading what a guest sends: one event at a time, all of it, or a loop that ends the reading when it is left."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any, Callable, Generic, Optional, TypeVar

from ._amounts import GuestUsage
from ._errors import TimedOutError
from ._events import Event, Json, Log, Profiled, Recorded, Text, Tokens

T = TypeVar("T")


@dataclass
class Output:
    """All that a guest has sent."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    #: Its JSON texts.
    jsons: list[Json] = field(default_factory=list)
    log: list[Log] = field(default_factory=list)
    #: Its recording, if one was asked for.
    recorded: bytes = b""
    #: Its profile, if one was asked for.
    profiled: bytes = b""
    #: What it used.
    usage: Optional[GuestUsage] = None

    @property
    def json(self) -> list[Any]:
        """The values of its JSON texts, read at each access. `JsonError`: one of them says what Python cannot read."""
        return [text.value() for text in self.jsons]


class Collector:
    """Puts events together."""

    def __init__(self) -> None:
        self._output = Output()
        self._texts: list[str] = []
        self._recorded: list[bytes] = []
        self._profiled: list[bytes] = []

    def add(self, event: Event) -> None:
        """Adds what an event has."""
        if isinstance(event, Text):
            self._texts.append(event.text)
        elif isinstance(event, Tokens):
            self._output.tokens.extend(event.tokens)
        elif isinstance(event, Json):
            self._output.jsons.append(event)
        elif isinstance(event, Log):
            self._output.log.append(event)
        elif isinstance(event, Recorded):
            self._recorded.append(event.bytes)
        elif isinstance(event, Profiled):
            self._profiled.append(event.bytes)

    def output(self, usage: Optional[GuestUsage]) -> Output:
        """All of it, with what the guest used."""
        self._output.text = "".join(self._texts)
        self._output.recorded = b"".join(self._recorded)
        self._output.profiled = b"".join(self._profiled)
        self._output.usage = usage
        return self._output


def text_of(event: Event) -> Optional[str]:
    """The text of an event that has one."""
    return event.text if isinstance(event, Text) else None


def tokens_of(event: Event) -> Optional[list[int]]:
    """The tokens of an event that has some."""
    return event.tokens if isinstance(event, Tokens) else None


def json_of(event: Event) -> Optional[Json]:
    """The event itself, where it is a JSON text."""
    return event if isinstance(event, Json) else None


def itself(event: Event) -> Optional[Event]:
    """Any event."""
    return event


class AsyncReading(abc.ABC):
    """What a guest sends, for ``async for``.

    Leaving such a loop before its end, by ``break``, an error or a cancelled task, ends the reading as :meth:`close` does;
    :meth:`next` reads one event and leaves the rest to be read.
    """

    @abc.abstractmethod
    async def next(self, timeout: Optional[float] = None) -> Optional[Event]:
        """The next event; `None` after the guest's end. An error is the last item.

        Giving up, by the time-out in seconds (`TimedOutError`) or by cancelling the task, loses nothing.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the reading at once; of what was not read, nothing is kept."""

    def _let_go(self) -> None:
        """As `close`, for the garbage collector: what has to be sent for it is sent in the loop's next turn."""
        self.close()

    @property
    @abc.abstractmethod
    def usage(self) -> Optional[GuestUsage]:
        """What the guest used; known once all is read."""

    @property
    @abc.abstractmethod
    def is_over(self) -> bool:
        """Whether the last item was read, or the reading closed."""

    def events(self, timeout: Optional[float] = None) -> AsyncIterator[Event]:
        """All events that are still to come, each within so many seconds of the one before, or else `TimedOutError`."""
        return AsyncItems(self, itself, timeout)

    def texts(self, timeout: Optional[float] = None) -> AsyncIterator[str]:
        """The texts among the events, as they come; the time-out is as for :meth:`events`."""
        return AsyncItems(self, text_of, timeout)

    def tokens(self, timeout: Optional[float] = None) -> AsyncIterator[list[int]]:
        """The tokens among the events, likewise."""
        return AsyncItems(self, tokens_of, timeout)

    def jsons(self, timeout: Optional[float] = None) -> AsyncIterator[Json]:
        """The JSON texts among the events, likewise."""
        return AsyncItems(self, json_of, timeout)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self.events()

    async def text(self, timeout: Optional[float] = None) -> str:
        """All text that is still to come, once the guest has ended; within so many seconds, or else `TimedOutError`.

        Where the guest does not end well, or the time is over, the text is lost and the reading ends.
        """
        return (await self.collect(timeout)).text

    async def wait(self, timeout: Optional[float] = None) -> None:
        """Waits for the end and passes over what comes before it; the time-out is as for :meth:`text`."""
        await self._drain(lambda _: None, timeout)

    async def collect(self, timeout: Optional[float] = None) -> Output:
        """All that is still to come, once the guest has ended; the time-out is as for :meth:`text`."""
        return await self._collect((), timeout)

    async def _collect(self, ahead: Iterable[Event], timeout: Optional[float]) -> Output:
        """As `collect`, with what was read before."""
        collector = Collector()
        for event in ahead:
            collector.add(event)
        await self._drain(collector.add, timeout)
        return collector.output(self.usage)

    async def _drain(self, take: Callable[[Event], None], timeout: Optional[float]) -> None:
        loop = asyncio.get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        try:
            while True:
                event = await self.next(None if end is None else max(end - loop.time(), 0.0))
                if event is None:
                    return
                take(event)
        except TimedOutError:
            if timeout is None:
                # It is another wait that was bounded: that for a connection.
                raise
            raise TimedOutError("the guest's end", timeout) from None
        finally:
            self.close()

    async def __aenter__(self: R) -> R:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


R = TypeVar("R", bound=AsyncReading)


class AsyncItems(Generic[T]):
    """A loop over what a reading gives. When it is left, the loop lets go of this, and the reading ends."""

    def __init__(
        self, reading: AsyncReading, pick: Callable[[Event], Optional[T]], timeout: Optional[float]
    ) -> None:
        self._reading = reading
        self._pick = pick
        self._timeout = timeout
        # One that was made and never used ends nothing.
        self._has_begun = False

    def __aiter__(self) -> AsyncItems[T]:
        return self

    async def __anext__(self) -> T:
        self._has_begun = True
        try:
            while True:
                event = await self._reading.next(self._timeout)
                if event is None:
                    raise StopAsyncIteration
                item = self._pick(event)
                if item is not None:
                    return item
        except BaseException:
            self._reading.close()
            raise

    async def aclose(self) -> None:
        """Ends the reading."""
        self._reading.close()

    def __del__(self) -> None:
        if self._has_begun:
            self._reading._let_go()
