"""Reading guests that go on without their connection."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterable, Awaitable, Iterable
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Callable, Optional, Union

from ._amounts import GuestUsage
from ._errors import (
    ConnectionLostError,
    GuestEndedError,
    NotRunningError,
    TimedOutError,
    TrellisError,
    UnknownAnswerError,
)
from ._events import AttachedTo, Event, credit_bytes, is_numbered
from ._faults import TakenOverError
from ._guest import Inflow, end_messages, send, send_lines
from ._protocol import Launch
from ._reading import AsyncReading
from ._waits import DEFAULT, Signal, Timeout, shorter
from ._wire import ACKNOWLEDGED_BYTES

if TYPE_CHECKING:
    from ._async import AsyncClient

# How long the last acknowledgement may take to be sent, with what stands before it.
_ACKNOWLEDGE_S = 1.0

# A try to connect may take so long at least, so that there is one however late the reader comes for it.
_TRY_S = 1.0

# What is waited for, as a time-out says it.
_WHAT = "a connection to the daemon"

# The first pause before another connection is tried, and the longest; each is twice the one before.
_PAUSE_S, _PAUSE_MAX_S = 0.02, 2.0

#: Seconds for which connections are tried, where nothing else is said.
PATIENCE_S = 60.0


class AsyncAttached(AsyncReading):
    """The reading of a detached guest, made by `AsyncClient.attach`. To end it leaves the guest alone.

    It ends when the guest does, or with `TakenOverError` once another client of the user attaches.
    """

    def __init__(self, client: AsyncClient, inflow: Inflow, attached: AttachedTo) -> None:
        self._client = client
        self._inflow = inflow
        self._next = attached.from_
        self._is_over = False
        #: Whether the guest's end was read; a reading that was closed is over without it.
        self._has_ended = False
        self._usage: Optional[GuestUsage] = None
        self._n_read_bytes = 0
        #: The guest's number.
        self.guest_id = attached.guest_id
        #: A number that the daemon was given by chance when it started.
        self.daemon = attached.daemon

    @classmethod
    async def _open(
        cls, client: AsyncClient, guest_id: int, from_: Optional[int], daemon: Optional[int], timeout: Timeout
    ) -> AsyncAttached:
        from ._program import in_range, window_bytes

        window = window_bytes({})
        call = {"type": "attach", "guest_id": in_range("guest_id", guest_id), "credit_bytes": window}
        call.update(
            (name, in_range(name, value))
            for name, value in (("from", from_), ("daemon", daemon))
            if value is not None
        )
        launch = Launch(call)
        inflow = Inflow(client._link, launch, window)
        try:
            await inflow.until(inflow.has_news, client.seconds(timeout), "the guest to be read")
            if inflow.queue and isinstance(attached := inflow.take(), AttachedTo):
                launch.has_started = True
                return cls(client, inflow, attached)
            raise (inflow.end.error if inflow.end is not None else None) or UnknownAnswerError()
        except BaseException:
            inflow.drop()
            raise

    async def next(self, timeout: Optional[float] = None) -> Optional[Event]:
        """The next event; `None` after the guest's end. An error is the last item.

        What was returned before is taken care of: the daemon comes to hear that it need not keep it. Giving up, by the time-out in
        seconds (`TimedOutError`) or by cancelling the task, loses nothing.
        """
        if self._is_over:
            return None
        if self._n_read_bytes >= ACKNOWLEDGED_BYTES:
            self.acknowledge()
        inflow = self._inflow
        while not inflow.queue and inflow.end is None:
            await inflow.arrive(timeout)
        if self._is_over:
            return None
        if inflow.queue:
            event = inflow.take()
            if is_numbered(event):
                self._next += 1
                self._n_read_bytes += credit_bytes(event)
            return event
        end = inflow.end
        error: Optional[TrellisError] = None if end is None else end.error
        # What is left is the other reader's to acknowledge.
        if not isinstance(error, (ConnectionLostError, TakenOverError)):
            # The guest's end is one more; the daemon passes over it where only the reading has ended.
            self._acknowledge(self._next + 1)
            # A program may end with its guest, and the daemon is to hear before that it need not keep the end.
            with suppress(TimedOutError):
                await self._inflow.link.written(_ACKNOWLEDGE_S)
        self._is_over = self._has_ended = True
        self._usage = None if end is None else end.usage
        if error is not None:
            raise error
        return None

    def acknowledge(self) -> None:
        """Tells the daemon that it need not keep what has been read so far; `next` does so by itself now and then."""
        self._n_read_bytes = 0
        self._acknowledge(self._next)

    def _acknowledge(self, until: int) -> None:
        self._inflow.link.protocol.acknowledge(self.guest_id, until)
        self._inflow.link.turn()

    @property
    def next_number(self) -> int:
        """The number of the event that comes next: where another `attach` would go on."""
        return self._next

    @property
    def usage(self) -> Optional[GuestUsage]:
        """What the guest used; known once all is read."""
        return self._usage

    @property
    def is_over(self) -> bool:
        """Whether the guest has ended and all is read, or the reading was closed."""
        return self._is_over

    @property
    def is_lost(self) -> bool:
        """Whether the connection is of no use any more; what came before may still be read."""
        return self._inflow.link.protocol.lost is not None

    async def send(self, text: str, timeout: Timeout = DEFAULT) -> None:
        """Sends a message to the guest, as `AsyncGuest.send`."""
        await send(self._client, self._inflow, text, timeout)

    async def send_lines(
        self, lines: Union[Iterable[str], AsyncIterable[str]], timeout: Timeout = DEFAULT
    ) -> None:
        """Sends lines to the guest, as `AsyncGuest.send_lines`."""
        await send_lines(self._client, self._inflow, lines, timeout)

    async def end_messages(self, timeout: Timeout = DEFAULT) -> None:
        """Tells the guest that no more messages will come."""
        await end_messages(self._client, self._inflow, timeout)

    def close(self) -> None:
        """Ends the reading at once and leaves the guest alone; what was not acknowledged, the daemon keeps."""
        if not self._is_over:
            self._is_over = True
            self._inflow.drop()

    def _let_go(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._inflow.drop_soon()

    def __del__(self) -> None:
        self._let_go()


class AsyncResumed(AsyncReading):
    """The reading of a detached guest that connects again when its connection is lost, and goes on where it was.

    Each event comes once. Numbers of guests begin anew with each daemon, and those of another daemon than the first are not taken
    for the guest. One task may read while others send: they share one connection.
    """

    def __init__(
        self,
        guest_id: int,
        from_: Optional[int],
        connect: Callable[[Optional[float]], Awaitable[AsyncClient]],
        patience: float = PATIENCE_S,
    ) -> None:
        self.guest_id = guest_id
        self._from = from_
        self._connect = connect
        self._patience = patience
        self._daemon: Optional[int] = None
        self._client: Optional[AsyncClient] = None
        self._attached: Optional[AsyncAttached] = None
        self._usage: Optional[GuestUsage] = None
        self._is_over = False
        # What a sender has met as the last item, for the reader to hear of as well.
        self._error: Optional[Exception] = None
        # Since when a connection is tried.
        self._since: Optional[float] = None
        self._pause = _PAUSE_S
        # One task at a time attaches: of two, each would take the guest from the other.
        self._is_attaching = False
        self._changed = Signal()

    async def next(self, timeout: Optional[float] = None) -> Optional[Event]:
        """The next event, over another connection where the one before is lost; `None` after the guest's end.

        An error is the last item: the guest's end, what `attach` refuses, or the last reason why there is no connection. Giving up,
        by the time-out in seconds (`TimedOutError`) or by cancelling the task, loses nothing.
        """
        loop = asyncio.get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        while not self._is_over:
            try:
                attached = await self.attached(None if end is None else max(end - loop.time(), 0.0))
            except GuestEndedError:
                # It is over meanwhile, which is looked at again.
                continue
            except (TrellisError, OSError):
                # Told here, it is not told once more.
                self._error = None
                raise
            try:
                event = await attached.next(None if end is None else max(end - loop.time(), 0.0))
            except TimedOutError:
                raise TimedOutError("the guest's next event", timeout or 0.0) from None
            except TrellisError as error:
                is_lost = isinstance(error, ConnectionLostError) and error.is_retryable
                if not is_lost or self._patience <= 0:
                    self._is_over = True
                    self._disconnect()
                    raise
                self._leave(attached)
                continue
            if event is not None:
                self._from = attached.next_number
                return event
            if attached._has_ended:
                self._from = attached.next_number
                self._usage = attached.usage
                self.close()
            # One that has not ended was left by a sender who found its connection lost.
        told, self._error = self._error, None
        if told is not None:
            raise copy(told)
        return None

    async def attached(self, timeout: Optional[float] = None) -> AsyncAttached:
        """The reading over the connection that there is, once there is one; for sending messages to the guest.

        The errors are those of `attach`, or the last reason why there is no connection; `GuestEndedError` once the reading is over.
        """
        loop = asyncio.get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        await self._changed.until(lambda: not self._is_attaching, timeout, _WHAT)
        self._is_attaching = True
        try:
            if self._attached is not None and self._attached.is_lost and self._patience > 0:
                # What came and was not read comes again.
                self._leave(self._attached)
            while self._attached is None:
                if self._is_over:
                    raise GuestEndedError
                await self._try(end, timeout or 0.0)
            return self._attached
        finally:
            self._is_attaching = False
            self._changed.tell()

    async def _try(self, end: Optional[float], timeout: float) -> None:
        """Attaches, or waits for the next try; raises where there is none."""
        loop = asyncio.get_running_loop()
        self._since = loop.time() if self._since is None else self._since
        until = self._since + self._patience
        try:
            await self._attach(end, max(until, loop.time() + _TRY_S) if self._patience > 0 else None)
        except (TrellisError, OSError) as error:
            self._disconnect()
            if self._is_over:
                return
            now = loop.time()
            is_late = isinstance(error, TimedOutError)
            if end is not None and is_late and now >= end:
                raise TimedOutError(_WHAT, timeout) from error
            may_come = is_late or isinstance(error, NotRunningError) or getattr(error, "is_retryable", False)
            if not may_come or self._patience <= 0 or now + self._pause > until:
                self._is_over, self._error = True, error
                raise
            if end is not None and now + self._pause > end:
                raise TimedOutError(_WHAT, timeout) from error
            # Whoever closes this waits for no pause.
            with suppress(TimedOutError):
                await self._changed.until(lambda: self._is_over, self._pause, _WHAT)
            self._pause = min(2 * self._pause, _PAUSE_MAX_S)
        except BaseException:
            self._disconnect()
            raise

    async def _attach(self, *ends: Optional[float]) -> None:
        """Tries it once, until one of these times of the loop."""
        loop = asyncio.get_running_loop()
        end = functools.reduce(shorter, ends)
        self._client = await self._connect(None if end is None else max(end - loop.time(), 0.0))
        if self._is_over:
            raise GuestEndedError
        seconds = shorter(self._client.timeout, None if end is None else max(end - loop.time(), 0.0))
        attached = await AsyncAttached._open(self._client, self.guest_id, self._from, self._daemon, seconds)
        if self._is_over:
            attached.close()
            raise GuestEndedError
        self._attached = attached
        self._from, self._daemon = attached.next_number, attached.daemon
        self._since, self._pause = None, _PAUSE_S

    async def send(self, text: str, timeout: Timeout = DEFAULT) -> None:
        """Sends a message to the guest, as `AsyncGuest.send`, over the connection that there is. One that is lost may take it along."""
        await (await self.attached(_seconds(timeout))).send(text, timeout)

    async def end_messages(self, timeout: Timeout = DEFAULT) -> None:
        """Tells the guest that no more messages will come, likewise."""
        await (await self.attached(_seconds(timeout))).end_messages(timeout)

    def _leave(self, attached: AsyncAttached) -> None:
        """Ends this reading and its connection, unless another task has done so."""
        if self._attached is attached:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._attached is not None:
            self._from = self._attached.next_number
            self._attached.close()
        if self._client is not None:
            self._client.close()
        self._attached = self._client = None

    @property
    def next_number(self) -> Optional[int]:
        """The number of the event that comes next; none before the first connection where none was asked for."""
        return self._from

    @property
    def usage(self) -> Optional[GuestUsage]:
        """What the guest used; known once all is read."""
        return self._usage

    @property
    def is_over(self) -> bool:
        """Whether the last item was read, or the reading closed."""
        return self._is_over

    def close(self) -> None:
        """Ends the reading and its connection, and leaves the guest alone."""
        self._is_over, self._error = True, None
        self._disconnect()
        self._changed.tell()

    def _let_go(self) -> None:
        self._is_over, self._error = True, None
        if self._attached is not None:
            self._attached._let_go()
        if self._client is not None:
            self._client._link.drop_all()


def _seconds(timeout: Timeout) -> Optional[float]:
    """How long a connection is waited for: as long as the patience lasts, where nothing is said."""
    return None if timeout is DEFAULT else timeout
