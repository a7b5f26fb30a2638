"""Guests of a program without asyncio: what `_guest` and `_attached` have, with waits in the place of awaits."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Callable, Generic, Optional, TypeVar

from ._amounts import GuestUsage
from ._attached import AsyncAttached, AsyncResumed
from ._errors import TimedOutError
from ._events import Event, Json
from ._guest import AsyncGuest, message_of
from ._portal import Portal
from ._reading import AsyncReading, Output, itself, json_of, text_of, tokens_of
from ._waits import DEFAULT, Timeout

T = TypeVar("T")
A = TypeVar("A", bound=AsyncReading)


class Reading(Generic[A]):
    """What a guest sends, for ``for``.

    Leaving such a loop before its end, by ``break`` or an error, ends the reading as :meth:`close` does; :meth:`next` reads one
    event and leaves the rest to be read.
    """

    def __init__(self, portal: Portal, inner: A, client: object) -> None:
        self._portal = portal
        self._inner = inner
        # The connection stays open for as long as somebody may read.
        self._client = client
        # Read, and not yet given.
        self._ahead: deque[Event] = deque()
        self._is_closed = False
        # One thread at a time waits for the next event; a signal's handler may read in the thread that waits.
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def _turn(self, timeout: Optional[float]) -> Iterator[Optional[float]]:
        """The turn of this thread to read, with the seconds that are left then."""
        begun = time.monotonic()
        seconds = -1 if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX)
        if not self._lock.acquire(timeout=seconds):
            raise TimedOutError("the turn to read the guest", timeout or 0.0)
        try:
            yield None if timeout is None else max(timeout - (time.monotonic() - begun), 0.0)
        finally:
            self._lock.release()

    def next(self, timeout: Optional[float] = None) -> Optional[Event]:
        """The next event; `None` after the guest's end. An error is the last item.

        Giving up, by the time-out in seconds (`TimedOutError`) or by Ctrl-C, loses nothing. Where several threads read, each gets
        what the others do not.
        """
        with self._turn(timeout) as left:
            while True:
                # Whoever closes this, in another thread, empties it.
                with contextlib.suppress(IndexError):
                    return self._ahead.popleft()
                if self._is_closed:
                    return None
                self._portal.call(self._fill(left))
                if not self._ahead and self._inner.is_over:
                    return None

    async def _fill(self, timeout: Optional[float]) -> None:
        # Put there by the loop itself, so that an event that comes as the wait is interrupted is there for the next one.
        event = await self._inner.next(timeout)
        if event is not None:
            self._ahead.append(event)

    def events(self, timeout: Optional[float] = None) -> Iterator[Event]:
        """All events that are still to come, each within so many seconds of the one before, or else `TimedOutError`."""
        return Items(self, itself, timeout)

    def texts(self, timeout: Optional[float] = None) -> Iterator[str]:
        """The texts among the events, as they come; the time-out is as for :meth:`events`."""
        return Items(self, text_of, timeout)

    def tokens(self, timeout: Optional[float] = None) -> Iterator[list[int]]:
        """The tokens among the events, likewise."""
        return Items(self, tokens_of, timeout)

    def jsons(self, timeout: Optional[float] = None) -> Iterator[Json]:
        """The JSON texts among the events, likewise."""
        return Items(self, json_of, timeout)

    def __iter__(self) -> Iterator[Event]:
        return self.events()

    def text(self, timeout: Optional[float] = None) -> str:
        """All text that is still to come, once the guest has ended; within so many seconds, or else `TimedOutError`.

        Where the guest does not end well, or the time is over, the text is lost and the reading ends.
        """
        return self.collect(timeout).text

    def wait(self, timeout: Optional[float] = None) -> None:
        """Waits for the end and passes over what comes before it; the time-out is as for :meth:`text`."""
        with self._turn(timeout) as left:
            self._ahead.clear()
            self._portal.call(self._inner.wait(left))

    def collect(self, timeout: Optional[float] = None) -> Output:
        """All that is still to come, once the guest has ended; the time-out is as for :meth:`text`."""
        with self._turn(timeout) as left:
            ahead = list(self._ahead)
            self._ahead.clear()
            return self._portal.call(self._inner._collect(ahead, left))

    @property
    def usage(self) -> Optional[GuestUsage]:
        """What the guest used; known once all is read."""
        return self._inner.usage

    @property
    def is_over(self) -> bool:
        """Whether the last item was read, or the reading closed."""
        return self._is_closed or (self._inner.is_over and not self._ahead)

    def close(self) -> None:
        """Ends the reading at once; of what was not read, nothing is kept."""
        self._is_closed = True
        self._ahead.clear()
        if not self._inner.is_over:
            self._portal.soon(self._inner.close)

    def __enter__(self: R) -> R:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


R = TypeVar("R", bound="Reading[Any]")


class Items(Generic[T]):
    """A loop over what a reading gives. When it is left, the loop lets go of this, and the reading ends."""

    def __init__(
        self, reading: Reading[A], pick: Callable[[Event], Optional[T]], timeout: Optional[float]
    ) -> None:
        self._next = reading.next
        self._close = reading.close
        self._pick = pick
        self._timeout = timeout
        # One that was made and never used ends nothing.
        self._has_begun = False

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        self._has_begun = True
        try:
            while True:
                event = self._next(self._timeout)
                if event is None:
                    raise StopIteration
                item = self._pick(event)
                if item is not None:
                    return item
        except BaseException:
            self._close()
            raise

    def __del__(self) -> None:
        if self._has_begun:
            self._close()


class Guest(Reading[AsyncGuest]):
    """A guest under way: what it sends, in the order in which it comes. It is made by `Client.start`.

    The guest is stopped when a ``with`` of it or a loop over it is left, by :meth:`close`, and when nothing refers to this any more.
    """

    async def _fill(self, timeout: Optional[float]) -> None:
        # What has come already costs no further way between the threads.
        await self._inner.fill(self._ahead, timeout)

    def started(self, timeout: Optional[float] = None) -> int:
        """The guest's number, once it runs; passes over no event. What kept it from running is the error."""
        return self._portal.call(self._inner.started(timeout))

    @property
    def guest_id(self) -> Optional[int]:
        """The guest's number, as `ps` and `stop` have it; `None` before it runs."""
        return self._inner.guest_id

    def send(self, text: str, timeout: Timeout = DEFAULT) -> None:
        """Sends a message to the guest, and waits until the guest runs and its inbox has room.

        The guest has ended (`GuestEndedError`, or what ended it, if that may be tried again), the message is too large
        (`RequestError`, `LimitExceededError`), or the time is over (`TimedOutError`): the message is not sent then.
        """
        self._portal.call(self._inner.send(text, timeout))

    def send_lines(self, lines: Iterable[str], timeout: Timeout = DEFAULT) -> None:
        """Sends each line, without its end, as a message, and then that there are no more.

        The lines may come from anywhere, such as a file or ``sys.stdin``. The time-out holds for each; errors are those of
        :meth:`send`. Nothing is read meanwhile: of a guest that answers with more than its window holds, another thread reads.
        """
        for line in lines:
            self.send(message_of(line), timeout)
        self.end_messages(timeout)

    def end_messages(self, timeout: Timeout = DEFAULT) -> None:
        """Tells the guest, once it runs, that no more messages will come. Errors are those of :meth:`send`."""
        self._portal.call(self._inner.end_messages(timeout))

    def cancel(self) -> None:
        """Asks the daemon to end the guest. Unlike :meth:`close`, this leaves what it has sent, and its end, to be read."""
        self._portal.soon(self._inner.cancel)


class Attached(Reading[AsyncAttached]):
    """The reading of a detached guest, made by `Client.attach`. To end it leaves the guest alone.

    It ends when the guest does, or with `TakenOverError` once another client of the user attaches. What was returned before is taken
    care of: the daemon comes to hear that it need not keep it.
    """

    @property
    def guest_id(self) -> int:
        """The guest's number."""
        return self._inner.guest_id

    @property
    def daemon(self) -> int:
        """A number that the daemon was given by chance when it started."""
        return self._inner.daemon

    @property
    def next_number(self) -> int:
        """The number of the event that comes next: where another `attach` would go on."""
        return self._inner.next_number

    def acknowledge(self) -> None:
        """Tells the daemon that it need not keep what has been read so far; `next` does so by itself now and then."""
        self._portal.soon(self._inner.acknowledge)

    def send(self, text: str, timeout: Timeout = DEFAULT) -> None:
        """Sends a message to the guest, as `Guest.send`."""
        self._portal.call(self._inner.send(text, timeout))

    def send_lines(self, lines: Iterable[str], timeout: Timeout = DEFAULT) -> None:
        """Sends lines to the guest, as `Guest.send_lines`."""
        for line in lines:
            self.send(message_of(line), timeout)
        self.end_messages(timeout)

    def end_messages(self, timeout: Timeout = DEFAULT) -> None:
        """Tells the guest that no more messages will come."""
        self._portal.call(self._inner.end_messages(timeout))


class Resumed(Reading[AsyncResumed]):
    """The reading of a detached guest that connects again when its connection is lost, and goes on where it was.

    It is made by `Client.resume`. Each event comes once.
    """

    @property
    def guest_id(self) -> int:
        """The guest's number."""
        return self._inner.guest_id

    @property
    def next_number(self) -> Optional[int]:
        """The number of the event that comes next; none before the first connection where none was asked for."""
        return self._inner.next_number

    def send(self, text: str, timeout: Timeout = DEFAULT) -> None:
        """Sends a message to the guest, as `Guest.send`, over the connection that there is. One that is lost may take it along."""
        self._portal.call(self._inner.send(text, timeout))

    def end_messages(self, timeout: Timeout = DEFAULT) -> None:
        """Tells the guest that no more messages will come, likewise."""
        self._portal.call(self._inner.end_messages(timeout))
