"""The connection that all requests of one client share: a socket in an asyncio loop around the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections import deque
from typing import Callable, Optional, Union

from ._errors import ClosedError, TrellisError
from ._protocol import Ended, Greeted, Happened, Lost, News, Protocol
from ._waits import Signal

#: Bytes that are read at once: so few that what a flood of small events takes holds up no other task of the loop for long.
_READ_BYTES = 64 * 1024
#: Bytes that may wait to be written before requests wait as well.
_ROOM_BYTES = 512 * 1024

#: What is said to a process that has a client of another.
FORKED = "the client belongs to the process that this one was forked from"

#: What hears of a request: what happens, and its end.
Recipient = Callable[[Union[Happened, Ended]], None]


class Link:
    """Reads and writes until the connection ends. All of it happens in one loop; `soon` and `drop_all` may be called from anywhere.

    A process that was forked from this one has the same socket: there, nothing is written to it, and it is closed for that process
    alone.
    """

    def __init__(self, opened: socket.socket) -> None:
        self._socket = opened
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._pid = os.getpid()
        self._protocol = Protocol()
        self._recipients: dict[int, Recipient] = {}
        self._unsent = memoryview(b"")
        self._is_watching_for_room = False
        self._cannot_write = False
        self._is_telling = False
        self._untold: deque[News] = deque()
        #: Told whenever bytes were written and when the connection ends.
        self._written = Signal()
        self._n_written = 0
        self._n_taken = 0
        #: Settled with the daemon's hello, or with what kept it from coming.
        self.greeted: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(opened, self._on_readable)
        self.turn()

    @property
    def protocol(self) -> Protocol:
        """The protocol's state; after each call that may send, `turn` sends."""
        return self._protocol

    def is_here(self) -> bool:
        """Whether this is the thread of the loop."""
        return self._is_own() and threading.get_ident() == self._thread

    def check(self) -> None:
        """`ClosedError` in a process that was forked from the client's; `RuntimeError` outside of the client's loop."""
        if not self._is_own():
            raise ClosedError(FORKED)
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                "the client belongs to the loop in which it has connected, and this is another one"
            )

    def _is_own(self) -> bool:
        return os.getpid() == self._pid

    def listen(self, key: int, recipient: Recipient) -> None:
        """Has this hear of a request, which was made in this very turn of the loop."""
        self._recipients[key] = recipient

    def forget(self, key: int) -> None:
        """Ends a request of which nothing more is heard; nothing where it is over."""
        self._recipients.pop(key, None)
        if self._is_own() and self._protocol.is_open(key):
            self._protocol.forget(key)
            self.turn()

    def soon(self, call: Callable[[], None]) -> None:
        """Has the loop do this soon, from any thread; nothing where the loop has ended.

        For what the garbage collector finds: it runs in the middle of anything, of a write for one.
        """
        if self._is_own():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(call)

    def drop_all(self) -> None:
        """As `close`, from any thread: for a client that the garbage collector finds."""
        if self._is_own() and self._protocol.lost is None:
            try:
                self._loop.call_soon_threadsafe(self.close)
            except RuntimeError:
                # The loop has ended and watches the socket no more.
                self._socket.close()

    async def room(self, timeout: Optional[float]) -> None:
        """Waits until little enough waits to be written. Errors as :meth:`check`."""
        self.check()
        await self._written.until(self._has_room, timeout, "the daemon takes no more bytes")

    async def written(self, timeout: float) -> None:
        """Waits until all that was sent so far is written, or the connection is lost."""
        end = self._n_taken + self._protocol.n_bytes_to_send
        what = "the daemon takes no more bytes"
        await self._written.until(
            lambda: self._n_written >= end or self._protocol.lost is not None, timeout, what
        )

    def close(self) -> None:
        """Closes the connection; requests that are open end with `ClosedError`."""
        if not self._is_own():
            self._socket.close()
            return
        self._protocol.lose(ClosedError("the client is closed"))
        self.turn()

    def turn(self) -> None:
        """Writes what there is to be written, and tells what has happened."""
        if not self._is_own():
            return
        self._write()
        if self._is_telling:
            return
        self._is_telling = True
        try:
            while True:
                self._untold.extend(self._protocol.news())
                if not self._untold:
                    break
                # One by one, so that what interrupts this, Ctrl-C for one, leaves the others to be told.
                self._tell(self._untold.popleft())
        finally:
            self._is_telling = False

    def _has_room(self) -> bool:
        n_unsent = len(self._unsent) + self._protocol.n_bytes_to_send
        return n_unsent < _ROOM_BYTES or self._protocol.lost is not None

    def _tell(self, item: News) -> None:
        if isinstance(item, Happened):
            recipient = self._recipients.get(item.key)
            if recipient is not None:
                recipient(item)
        elif isinstance(item, Ended):
            recipient = self._recipients.pop(item.key, None)
            if recipient is not None:
                recipient(item)
        elif isinstance(item, Greeted):
            if not self.greeted.done():
                self.greeted.set_result(None)
        elif isinstance(item, Lost):
            self._end(item.error)

    def _end(self, error: TrellisError) -> None:
        if not self.greeted.done():
            self.greeted.set_exception(error)
            # Whoever connects may have given up.
            self.greeted.exception()
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            # A process that was forked from this one keeps the connection open, unless it is shut down.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
        self._unsent = memoryview(b"")
        self._written.tell()

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._protocol.receive_eof(error)
        else:
            if data:
                self._protocol.receive_data(data)
            else:
                self._protocol.receive_eof()
        self.turn()

    def _on_writable(self) -> None:
        self._loop.remove_writer(self._socket)
        self._is_watching_for_room = False
        self.turn()

    def _write(self) -> None:
        if self._is_watching_for_room or self._cannot_write or self._protocol.lost is not None:
            return
        has_written = False
        while True:
            if not self._unsent:
                self._unsent = memoryview(self._protocol.data_to_send())
                self._n_taken += len(self._unsent)
                if not self._unsent:
                    break
            try:
                n_written = self._socket.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._socket, self._on_writable)
                self._is_watching_for_room = True
                break
            except OSError:
                # The daemon may have said why before it closed, which is worth more: it is read, and then the end.
                self._cannot_write = True
                break
            self._n_written += n_written
            self._unsent = self._unsent[n_written:]
            has_written = True
        if has_written:
            self._written.tell()
