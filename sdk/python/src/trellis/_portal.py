"""A loop in a thread of its own, in which the asyncio client works for programs without one, or beside one that runs already."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Callable, TypeVar, Union

from ._errors import ClosedError
from ._link import FORKED

T = TypeVar("T")
S = TypeVar("S")

_CLOSED = "the client is closed"


class Portal:
    """Runs coroutines for other threads, which wait for them."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._is_closed = False
        # The thread knows the loop alone, so that it keeps nothing from being collected.
        self._thread = threading.Thread(target=_run, args=(self._loop,), name="trellis", daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end. Whatever interrupts the wait, Ctrl-C for one, cancels it."""
        future = self._submit(coroutine)
        try:
            return self._result(future)
        except BaseException:
            future.cancel()
            raise

    def call_heard(
        self, work: Callable[[Callable[[S], None]], Coroutine[Any, Any, T]], hear: Callable[[S], None]
    ) -> T:
        """Runs what tells how far it is, and has that heard in the thread that waits; what the hearer raises cancels it."""
        told: queue.SimpleQueue[Union[list[S], None]] = queue.SimpleQueue()
        future = self._submit(work(lambda state: told.put([state])))
        future.add_done_callback(lambda _: told.put(None))
        try:
            while True:
                states = told.get()
                if states is None:
                    return self._result(future)
                hear(states[0])
        except BaseException:
            future.cancel()
            raise

    def _result(self, future: Future[T]) -> T:
        try:
            return future.result()
        except CancelledError:
            # What is no request of the client's own connection is cancelled when the loop ends.
            if self._is_closed:
                raise ClosedError(_CLOSED) from None
            raise

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            if os.getpid() != self._pid:
                raise ClosedError(FORKED)
            if threading.current_thread() is self._thread:
                raise RuntimeError("a call would wait for the very thread that it is made in")
            with self._lock:
                # What is submitted under the lock comes before the loop is told to stop.
                if self._is_closed:
                    raise ClosedError(_CLOSED)
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except BaseException:
            coroutine.close()
            raise

    def soon(self, call: Callable[[], None]) -> None:
        """Has the loop do this soon, and waits for nothing; nothing where the loop has ended."""
        if os.getpid() == self._pid:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(call)

    def close(self, last: Callable[[], None]) -> None:
        """Has the loop do this last, and end; the thread may go on a moment longer."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(last)
                self._loop.call_soon_threadsafe(self._loop.stop)

    def join(self) -> None:
        """Waits for the end of the thread, once it was told to end."""
        if os.getpid() == self._pid and threading.current_thread() is not self._thread:
            self._thread.join()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(_finish())
    finally:
        loop.close()


async def _finish() -> None:
    # Whoever waits hears from its own request that the client is closed; what is left then is cancelled.
    for _ in range(3):
        await asyncio.sleep(0)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
