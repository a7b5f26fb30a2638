"""Reading guests that go on without their connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Callable, Optional, Union

from ._amounts import GuestUsage
from ._errors import ConnectionLostError, NotRunningError, TimedOutError, TrellisError, UnknownAnswerError
from ._events import AttachedTo, Event, credit_bytes, is_numbered
from ._faults import TakenOverError
from ._guest import Inflow, end_messages, send, send_lines
from ._protocol import Launch
from ._reading import AsyncReading
from ._waits import DEFAULT, Timeout
from ._wire import ACKNOWLEDGED_BYTES

if TYPE_CHECKING:
    from ._async import AsyncClient

# How long the last acknowledgement may take to be sent, with what stands before it.
_ACKNOWLEDGE_S = 1.0

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
            await inflow.changed.until(inflow.has_news, client.seconds(timeout), "the guest to be read")
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
        self._is_over = True
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
    for the guest.
    """

    def __init__(
        self,
        guest_id: int,
        from_: Optional[int],
        connect: Callable[[], Awaitable[AsyncClient]],
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
        self._lost_at: Optional[float] = None
        self._pause = _PAUSE_S

    async def next(self, timeout: Optional[float] = None) -> Optional[Event]:
        """The next event, over another connection where the one before is lost; `None` after the guest's end.

        An error is the last item: the guest's end, what `attach` refuses, or the last reason why there is no connection. Giving up,
        by the time-out in seconds (`TimedOutError`) or by cancelling the task, loses nothing.
        """
        loop = asyncio.get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        while not self._is_over:
            attached = await self.attached(None if end is None else max(end - loop.time(), 0.0))
            try:
                event = await attached.next(None if end is None else max(end - loop.time(), 0.0))
            except TimedOutError:
                raise TimedOutError("the guest's next event", timeout or 0.0) from None
            except TrellisError as error:
                self._leave()
                is_lost = isinstance(error, ConnectionLostError) and error.is_retryable
                if not is_lost or self._patience <= 0:
                    self._is_over = True
                    raise
            else:
                self._from = attached.next_number
                if event is None:
                    self._usage = attached.usage
                    self.close()
                return event
        return None

    async def attached(self, timeout: Optional[float] = None) -> AsyncAttached:
        """The reading over the connection that there is, once there is one; for sending messages to the guest.

        The errors are those of `attach`, or the last reason why there is no connection.
        """
        loop = asyncio.get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        if self._attached is not None and self._attached.is_lost and self._patience > 0:
            # What came and was not read comes again.
            self._leave()
        while self._attached is None:
            try:
                await self._attach_once(None if end is None else max(end - loop.time(), 0.0))
            except (TrellisError, OSError) as error:
                self._leave()
                now = loop.time()
                self._lost_at = now if self._lost_at is None else self._lost_at
                may_come = isinstance(error, NotRunningError) or getattr(error, "is_retryable", False)
                if not may_come or now - self._lost_at + self._pause > self._patience:
                    if not isinstance(error, TimedOutError):
                        self._is_over = True
                    raise
                if end is not None and now + self._pause > end:
                    raise TimedOutError("a connection to the daemon", timeout or 0.0) from error
                await asyncio.sleep(self._pause)
                self._pause = min(2 * self._pause, _PAUSE_MAX_S)
            except BaseException:
                self._leave()
                raise
        return self._attached

    async def send(self, text: str, timeout: Timeout = DEFAULT) -> None:
        """Sends a message to the guest, as `AsyncGuest.send`, over the connection that there is. One that is lost may take it along."""
        await (await self.attached(_seconds(timeout))).send(text, timeout)

    async def end_messages(self, timeout: Timeout = DEFAULT) -> None:
        """Tells the guest that no more messages will come, likewise."""
        await (await self.attached(_seconds(timeout))).end_messages(timeout)

    async def _attach_once(self, timeout: Optional[float]) -> None:
        self._client = await self._connect()
        self._attached = await AsyncAttached._open(
            self._client, self.guest_id, self._from, self._daemon, DEFAULT if timeout is None else timeout
        )
        self._from, self._daemon = self._attached.next_number, self._attached.daemon
        self._lost_at, self._pause = None, _PAUSE_S

    def _leave(self) -> None:
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
        self._is_over = True
        self._leave()


def _seconds(timeout: Timeout) -> Optional[float]:
    """How long a connection is waited for: as long as the patience lasts, where nothing is said."""
    return None if timeout is DEFAULT else timeout
