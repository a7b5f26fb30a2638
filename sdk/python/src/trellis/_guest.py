"""A guest under way, and what comes for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterable, Iterable
from typing import TYPE_CHECKING, Callable, Optional, Union

from ._amounts import GuestUsage
from ._errors import ConnectionLostError, GuestEndedError, TrellisError
from ._events import Event, Started, credit_bytes
from ._link import Link
from ._program import text
from ._protocol import Ended, Happened, Launch
from ._reading import AsyncReading
from ._waits import DEFAULT, Signal, Timeout
from ._wire import OUTPUT_CREDIT_BYTES_MAX

if TYPE_CHECKING:
    from ._async import AsyncClient


class Inflow:
    """What comes for one guest. The queue is bounded by the credit that was granted."""

    def __init__(self, link: Link, launch: Launch, window_bytes: int) -> None:
        self.link = link
        self.launch = launch
        self.queue: deque[Event] = deque()
        self.changed = Signal()
        self.end: Optional[Ended] = None
        self.guest_id: Optional[int] = None
        self._window_bytes = window_bytes
        # Read and not yet given back as credit.
        self._n_read_bytes = 0
        link.check()
        self.key = link.protocol.launch(launch)
        link.listen(self.key, self._hear)
        link.turn()

    def _hear(self, item: Union[Happened, Ended]) -> None:
        if isinstance(item, Ended):
            self.end = item
        else:
            self.queue.append(item.event)
            if isinstance(item.event, Started):
                self.guest_id = item.event.guest_id
        self.changed.tell()

    def has_news(self) -> bool:
        """Whether there is an event, or the end, to be read."""
        return bool(self.queue) or self.end is not None

    def take(self) -> Event:
        """The first event of the queue."""
        event = self.queue.popleft()
        self.count(credit_bytes(event))
        return event

    def count(self, n_bytes: int) -> None:
        """So much was read: the guest gets credit for it, once it is worth it."""
        self._n_read_bytes += n_bytes
        if self._n_read_bytes >= (self._window_bytes + 1) // 2:
            self._refill()

    async def arrive(self, timeout: Optional[float]) -> None:
        """Waits until there is news."""
        if not self.has_news():
            # The reader has seen everything: the window must have room for the largest output.
            if self._n_read_bytes > 0 and self._window_bytes - self._n_read_bytes < OUTPUT_CREDIT_BYTES_MAX:
                self._refill()
            await self.until(self.has_news, timeout, "the guest's next event")

    async def until(self, holds: Callable[[], bool], timeout: Optional[float], what: str) -> None:
        """Waits until this holds, where it does not already. Errors as `Link.check`: nothing comes in another loop or process."""
        if not holds():
            self.link.check()
            await self.changed.until(holds, timeout, what)

    def _refill(self) -> None:
        """Gives credit back, in pieces so large that it costs nothing for each token."""
        n_bytes, self._n_read_bytes = self._n_read_bytes, 0
        self.link.protocol.grant(self.key, n_bytes)
        self.link.turn()

    def drop(self) -> None:
        """Gives the request up: nothing more comes for it, and what waits for it comes to hear that it is over."""
        if self.link.is_here():
            self._drop()
        else:
            self.drop_soon()

    def drop_soon(self) -> None:
        """As `drop`, from any thread and in the middle of anything: for what the garbage collector finds."""
        self.link.soon(self._drop)

    def _drop(self) -> None:
        self.link.forget(self.key)
        self.queue.clear()
        if self.end is None:
            self.end = Ended(self.key, {}, None, None)
            self.changed.tell()

    async def running(self, timeout: Optional[float]) -> int:
        """The id of the request that runs the guest, once it runs; the error of what a sender hears where it is over."""
        await self.until(
            lambda: self.launch.has_started or self.end is not None, timeout, "the guest's start"
        )
        request_id = self.link.protocol.current_id(self.key)
        if self.end is None and request_id is not None:
            return request_id
        error = None if self.end is None else self.end.error
        # What ended the guest is told if it may be tried again.
        if error is not None and (error.is_retryable or isinstance(error, ConnectionLostError)):
            raise error
        raise GuestEndedError


class AsyncGuest(AsyncReading):
    """A guest under way: what it sends, in the order in which it comes. It is made by `AsyncClient.start`.

    The guest is stopped when an ``async with`` of it or a loop over it is left, when the task that waits in one is cancelled,
    by :meth:`close`, and when nothing refers to this any more.
    """

    def __init__(self, client: AsyncClient, launch: Launch, window_bytes: int) -> None:
        self._is_over = False
        self._usage: Optional[GuestUsage] = None
        self._client = client
        # Bytes of credit that events take which were put ahead of a reader.
        self._n_ahead_bytes = 0
        self._inflow = Inflow(client._link, launch, window_bytes)

    async def next(self, timeout: Optional[float] = None) -> Optional[Event]:
        """The next event; `None` after the guest's end. An error is the last item.

        Giving up, by the time-out in seconds (`TimedOutError`) or by cancelling the task, loses nothing, and the guest goes on.
        """
        inflow = self._inflow
        if self._n_ahead_bytes > 0:
            # Who reads on has read what was put ahead.
            n_bytes, self._n_ahead_bytes = self._n_ahead_bytes, 0
            inflow.count(n_bytes)
        while not self._is_over:
            await inflow.arrive(timeout)
            if self._is_over:
                break
            if inflow.queue:
                return inflow.take()
            # Where several tasks read, another one may have been faster.
            if inflow.end is not None:
                self._is_over = True
                self._usage = inflow.end.usage
                if inflow.end.error is not None:
                    raise inflow.end.error
        return None

    async def fill(self, ahead: deque[Event], timeout: Optional[float] = None) -> None:
        """Puts the next event there, and those that have come already; nothing after the guest's end. Errors are those of `next`.

        Those that have come already take room in the window until more is read.
        """
        event = await self.next(timeout)
        if event is not None:
            ahead.append(event)
            while self._inflow.queue:
                event = self._inflow.queue.popleft()
                self._n_ahead_bytes += credit_bytes(event)
                ahead.append(event)

    async def started(self, timeout: Optional[float] = None) -> int:
        """The guest's number, once it runs; passes over no event. What kept it from running is the error."""
        inflow = self._inflow
        await inflow.until(
            lambda: inflow.guest_id is not None or inflow.end is not None, timeout, "the guest's start"
        )
        if inflow.guest_id is not None:
            return inflow.guest_id
        error: Optional[TrellisError] = None if inflow.end is None else inflow.end.error
        raise error or GuestEndedError()

    @property
    def guest_id(self) -> Optional[int]:
        """The guest's number, as `ps` and `stop` have it; `None` before it runs."""
        return self._inflow.guest_id

    @property
    def usage(self) -> Optional[GuestUsage]:
        """What the guest used; known once all is read."""
        return self._usage

    @property
    def is_over(self) -> bool:
        """Whether the guest has ended and all is read, or it was closed."""
        return self._is_over

    async def send(self, text: str, timeout: Timeout = DEFAULT) -> None:
        """Sends a message to the guest, and waits until the guest runs and its inbox has room.

        The guest has ended (`GuestEndedError`, or what ended it, if that may be tried again), the message is too large
        (`RequestError`, `LimitExceededError`), or the time is over (`TimedOutError`): the message is not sent then.
        """
        await send(self._client, self._inflow, text, timeout)

    async def send_lines(
        self, lines: Union[Iterable[str], AsyncIterable[str]], timeout: Timeout = DEFAULT
    ) -> None:
        """Sends each line, without its end, as a message, and then that there are no more.

        The time-out holds for each; errors are those of :meth:`send`. Nothing is read meanwhile: of a guest that answers with more
        than its window holds, another task reads.
        """
        await send_lines(self._client, self._inflow, lines, timeout)

    async def end_messages(self, timeout: Timeout = DEFAULT) -> None:
        """Tells the guest, once it runs, that no more messages will come. Errors are those of :meth:`send`."""
        await end_messages(self._client, self._inflow, timeout)

    def cancel(self) -> None:
        """Asks the daemon to end the guest. Unlike :meth:`close`, this leaves what it has sent, and its end, to be read."""
        self._inflow.link.protocol.cancel(self._inflow.key)
        self._inflow.link.turn()

    def close(self) -> None:
        """Stops the guest at once, if it has not ended; of what was not read, nothing is kept."""
        if not self._is_over:
            self._is_over = True
            self._inflow.drop()

    def _let_go(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._inflow.drop_soon()

    def __del__(self) -> None:
        # Where the start failed there is nothing to be stopped.
        if hasattr(self, "_inflow"):
            self._let_go()


async def send(client: AsyncClient, inflow: Inflow, message: str, timeout: Timeout) -> None:
    """Puts a message into the inbox of a guest that is read here."""
    text("a message", message)
    seconds = client.seconds(timeout)
    begun = time.monotonic()
    to = await inflow.running(seconds)
    left = None if seconds is None else max(seconds - (time.monotonic() - begun), 0.0)
    await client.done({"type": "message", "to": to, "text": message}, left, "room in the guest's inbox")


def message_of(line: str) -> str:
    """The message that a line is: what stands before its end."""
    return text("a line", line).rstrip("\r\n")


async def send_lines(
    client: AsyncClient, inflow: Inflow, lines: Union[Iterable[str], AsyncIterable[str]], timeout: Timeout
) -> None:
    """Puts lines into the inbox of a guest that is read here, and ends its messages."""
    if isinstance(lines, AsyncIterable):
        async for line in lines:
            await send(client, inflow, message_of(line), timeout)
    else:
        for line in lines:
            await send(client, inflow, message_of(line), timeout)
    await end_messages(client, inflow, timeout)


async def end_messages(client: AsyncClient, inflow: Inflow, timeout: Timeout) -> None:
    """Ends the messages of a guest that is read here."""
    await inflow.running(client.seconds(timeout))
    inflow.link.protocol.end_messages(inflow.key)
    inflow.link.turn()
