"""The client of an asyncio program."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Optional, TypeVar, Union

from ._amounts import FitInfo, GuestInfo, ModelInfo
from ._attached import PATIENCE_S, AsyncAttached, AsyncResumed
from ._errors import ConnectionLostError, TooOldError, UnknownAnswerError
from ._events import Event, Progress, Started
from ._guest import AsyncGuest, Inflow
from ._info import DaemonInfo, LimitInfo, LogLines, ReloadInfo, UpgradeInfo
from ._link import Link
from ._program import (
    Program,
    ProgramLike,
    StartOptions,
    flag,
    in_range,
    milliseconds,
    needed_version,
    optional_text,
    program_of,
    start_call,
    text,
)
from ._protocol import Ended, Happened, Launch, Wire
from ._reading import Output
from ._shape import ShapeError, read
from ._socket import candidates, open_first
from ._waits import DEFAULT, TIMEOUT_S, Timeout, settled, shorter
from ._wire import VERSION_OF_MODELS

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")

#: What names a socket.
SocketLike = Union[str, "os.PathLike[str]"]


class Connecting:
    """A client to be: ``await`` it, or have it closed at the end of an ``async with``."""

    def __init__(self, socket: Optional[SocketLike], timeout: Optional[float]) -> None:
        self._socket = socket
        self._timeout = timeout
        self._client: Optional[AsyncClient] = None

    def __await__(self) -> Generator[Any, None, AsyncClient]:
        return self._connect().__await__()

    async def _connect(self) -> AsyncClient:
        paths = candidates() if self._socket is None else [Path(self._socket)]
        path, opened = await open_first(paths, self._timeout)
        link = Link(opened)
        try:
            await settled(link.greeted, self._timeout, f"the hello of the daemon on {path}")
        except BaseException:
            link.close()
            raise
        return AsyncClient(link, path, self._timeout)

    async def __aenter__(self) -> AsyncClient:
        self._client = await self._connect()
        return self._client

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            self._client.close()


class AsyncClient:
    """A connection to a daemon, for one asyncio loop; any number of tasks share it. It is made by :meth:`connect`.

    Requests that wait for an answer do so for the client's ``timeout``, in seconds, or for their own; `TimedOutError` says that it
    is over. A request whose task is cancelled, or whose time is over, is cancelled in the daemon. All can end with `DaemonError`,
    by its kinds, and `ConnectionLostError`.
    """

    def __init__(self, link: Link, socket: Path, timeout: Optional[float]) -> None:
        self._link = link
        #: The socket that the daemon listens on.
        self.socket = socket
        #: Seconds that are waited for an answer where the call says nothing else; `None` for ever.
        self.timeout = timeout

    @staticmethod
    def connect(socket: Optional[SocketLike] = None, *, timeout: Optional[float] = TIMEOUT_S) -> Connecting:
        """Connects to a daemon: ``async with AsyncClient.connect() as client`` or ``client = await AsyncClient.connect()``.

        That on this socket, or else on that of ``TRELLIS_SOCKET``, or else the user's own, or else the machine's.

        `NotRunningError` names the places where it looked; `ConnectError` a socket that this user may not use; `VersionError` says
        that the daemon speaks no version of the protocol that this client speaks; `HandshakeError` that no daemon answers;
        `TimedOutError` that none did in time.
        """
        return Connecting(socket, timeout)

    @property
    def daemon_build(self) -> str:
        """Name and version of the daemon's build."""
        return self._link.protocol.build

    def close(self) -> None:
        """Closes the connection, with which its guests end, those that are detached aside. What waits hears `ClosedError`."""
        self._link.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_link"):
            self._link.drop_all()

    # Guests.

    def start(self, program: ProgramLike, *arguments: str, **options: Unpack[StartOptions]) -> AsyncGuest:
        """Starts a guest: a component, its path, or a name as for ``trellis run``, with its arguments.

        A component is uploaded only if the daemon does not hold it; that, and compiling it, come as `Progress`. What the daemon has
        to say against the guest comes as the last item of its reading.

        `OSError`: the component cannot be read. `RequestError`: the arguments do not fit in a frame. `TooOldError`: a model is named,
        and the daemon is too old for that. `ValueError`: an option is out of its range.
        """
        call, launch = self._launch("start", program, arguments, options)
        return AsyncGuest(self, launch, call["credit_bytes"])

    async def run(
        self,
        program: ProgramLike,
        *arguments: str,
        timeout: Optional[float] = None,
        **options: Unpack[StartOptions],
    ) -> Output:
        """Runs a guest to its end and collects all that it sends, within so many seconds if that is said, or else `TimedOutError`.

        The guest is stopped where the time is over or the task is cancelled. What the guest ended with, unless well, is the error.
        """
        return await self.start(program, *arguments, **options).collect(timeout)

    async def start_detached(
        self,
        program: ProgramLike,
        *arguments: str,
        progress: Optional[Callable[[Event], None]] = None,
        timeout: Optional[float] = None,
        **options: Unpack[StartOptions],
    ) -> int:
        """Starts a guest that goes on without this connection, and returns its number once it runs.

        ``progress`` hears what has to be done for that. The daemon keeps what the guest sends, up to a limit at which the guest
        waits, until a client of this user has read it (:meth:`attach`). Giving up before the guest runs cancels the start.

        `InvalidArgumentError`, `LimitExceededError` and others: what the daemon has to say against the guest. `ConnectionLostError`:
        a guest that runs then is among those that :meth:`ps` lists.
        """
        call, launch = self._launch("start_detached", program, arguments, options)
        inflow = Inflow(self._link, launch, call["credit_bytes"])
        loop = asyncio.get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        try:
            while True:
                left = None if end is None else max(end - loop.time(), 0.0)
                await inflow.until(inflow.has_news, left, "the guest's start")
                if not inflow.queue:
                    raise (inflow.end.error if inflow.end is not None else None) or UnknownAnswerError()
                event = inflow.take()
                if isinstance(event, Started):
                    # It runs, whatever becomes of the connection.
                    return event.guest_id
                if progress is not None:
                    progress(event)
        finally:
            inflow.drop()

    async def attach(
        self, guest_id: int, from_: Optional[int] = None, *, timeout: Timeout = DEFAULT
    ) -> AsyncAttached:
        """Reads a detached guest of this user, from the event of this number on, or from the oldest that the daemon has kept.

        `UnknownGuestError`: this user has no such guest. `OutputLostError`: that event is not kept any more; its ``limit`` is the
        first that is. `InvalidArgumentError`: it is still to come.
        """
        return await AsyncAttached._open(self, guest_id, from_, None, timeout)

    def resume(
        self, guest_id: int, from_: Optional[int] = None, *, patience: float = PATIENCE_S
    ) -> AsyncResumed:
        """Reads a detached guest over connections of its own, so that each event comes once however often one is lost.

        They are made to the socket of this client, and tried for ``patience`` seconds; once alone where those are 0.
        """
        socket, timeout = self.socket, self.timeout

        async def connect(seconds: Optional[float]) -> AsyncClient:
            client = await AsyncClient.connect(socket, timeout=shorter(timeout, seconds))
            client.timeout = timeout
            return client

        return AsyncResumed(guest_id, from_, connect, patience)

    async def ps(self, *, timeout: Timeout = DEFAULT) -> list[GuestInfo]:
        """The running guests of this user, and those of others that it may see."""
        return await self._list({"type": "guests"}, "guests", GuestInfo, timeout)

    async def stop(self, guest_id: int, *, timeout: Timeout = DEFAULT) -> None:
        """Stops a guest of this user, whichever connection started it, or of another whose guests it may stop.

        `UnknownGuestError`: there is none of that number.
        """
        call = {"type": "stop", "guest_id": in_range("guest_id", guest_id)}
        await self.done(call, self.seconds(timeout), "the guest's end")

    # Models.

    async def models(self, *, timeout: Timeout = DEFAULT) -> list[ModelInfo]:
        """The loaded models, and those that are loaded on demand."""
        return await self._list({"type": "models"}, "models", ModelInfo, timeout)

    async def load_model(
        self,
        model: str,
        device: Optional[str] = None,
        *,
        progress: Optional[Callable[[int, int], None]] = None,
        timeout: Optional[float] = None,
    ) -> str:
        """Loads a model while others go on, and returns the name that guests ask for.

        ``model`` is a bundled name, a folder on the daemon's machine, or ``shape:NAME``; ``device`` is ``cpu`` or ``cuda:1``, if not
        that of the others. ``progress`` hears bytes loaded and bytes in all. For who has the permission ``load``. Giving up takes the
        load back.

        `LoadFailedError`, `ModelDoesNotFitError`, `ModelLoadedError`, `PermissionDeniedError`.
        """
        self.check_version("say what it loaded", VERSION_OF_MODELS)

        def hear(event: Event) -> None:
            if progress is not None and isinstance(event, Progress):
                progress(event.done, event.total)

        call = _with({"type": "load", "model": text("model", model)}, device=optional_text("device", device))
        return _field(await self._ask(call, timeout, f"the load of {model}", hear), "loaded", "model", str)

    async def fit_model(
        self, model: str, device: Optional[str] = None, *, timeout: Timeout = DEFAULT
    ) -> FitInfo:
        """Says whether there is room for a model, as for :meth:`load_model`, and loads nothing."""
        call = _with({"type": "fit", "model": text("model", model)}, device=optional_text("device", device))
        return await self._one(call, "fit", "fit", FitInfo, timeout)

    async def unload_model(
        self, model: str, drain: Optional[float] = None, *, timeout: Optional[float] = None
    ) -> Optional[str]:
        """Unloads a model, and returns the name of the model that is the default then, if there is one, once its memory is free.

        New contexts are refused at once; guests that have some open after ``drain`` seconds (a time of the daemon's own when `None`)
        end with `ModelUnloadedError`. For who has the permission ``load``. Giving up does not take it back.
        """
        self.check_version("say what it unloaded", VERSION_OF_MODELS)
        drain_ms = None if drain is None else milliseconds("drain", drain)
        call = _with({"type": "unload", "model": text("model", model)}, drain_ms=drain_ms)
        value = await self._ask(call, timeout, f"the end of {model}")
        if value.get("type") != "unloaded":
            raise UnknownAnswerError
        return None if value.get("default_model") is None else _field(value, "unloaded", "default_model", str)

    # The daemon.

    async def info(self, *, timeout: Timeout = DEFAULT) -> DaemonInfo:
        """The daemon as a whole."""
        return await self._one({"type": "info"}, "info", "info", DaemonInfo, timeout)

    async def limits(self, *, timeout: Timeout = DEFAULT) -> list[LimitInfo]:
        """Every limit of the daemon, where its number comes from, and how much this user has in use of it."""
        return await self._list({"type": "limits"}, "limits", LimitInfo, timeout)

    async def metrics(self, *, timeout: Timeout = DEFAULT) -> str:
        """The daemon's metrics, of all users together, in the text format 0.0.4 of Prometheus."""
        value = await self._ask({"type": "metrics"}, self.seconds(timeout), "the metrics")
        return _field(value, "metrics", "text", str)

    async def logs(self, n_newest: Optional[int] = None, *, timeout: Timeout = DEFAULT) -> LogLines:
        """The newest lines of the daemon's log: so many, or all that it keeps. The rest of them begins at ``next``.

        For the user that the daemon runs as, and root. `UnsupportedError`: it keeps no log.
        """
        newest = None if n_newest is None else in_range("n_newest", n_newest)
        return await self._one(_with({"type": "logs"}, n_newest=newest), "logs", "logs", LogLines, timeout)

    async def logs_from(
        self, number: int, waits: bool = False, *, timeout: Optional[float] = None
    ) -> LogLines:
        """The lines of the daemon's log from the one of this number on; with ``waits``, once there is one. As :meth:`logs`."""
        call = {"type": "logs", "number": in_range("number", number), "waits": flag("waits", waits)}
        return await self._one(call, "logs", "logs", LogLines, timeout)

    async def reload(self, *, timeout: Timeout = DEFAULT) -> ReloadInfo:
        """Has the daemon read its configuration again. For the operator. `InvalidConfigurationError`: nothing has changed."""
        return await self._one({"type": "reload"}, "reloaded", "info", ReloadInfo, timeout)

    async def upgrade(self, program: Optional[str] = None, *, timeout: Timeout = DEFAULT) -> UpgradeInfo:
        """Has the daemon put another program in its place: that of this absolute path, or what lies where it was started from.

        It takes on nothing more from then on; connections that are made after this are of the next daemon. For the operator.
        `InvalidArgumentError` or `InvalidConfigurationError`: it would not start, and nothing has changed.
        """
        call = _with({"type": "upgrade"}, program=optional_text("program", program))
        return await self._one(call, "upgrading", "info", UpgradeInfo, timeout)

    async def shutdown(self, *, timeout: Timeout = DEFAULT) -> None:
        """Stops the daemon. For the operator."""
        await self.done({"type": "shutdown"}, self.seconds(timeout), "the daemon's answer")

    # What requests are made of.

    def seconds(self, timeout: Timeout) -> Optional[float]:
        """How long a time-out is with this client, in seconds."""
        return self.timeout if timeout is DEFAULT else timeout

    def check_version(self, what: str, needed: int) -> None:
        """`TooOldError` where the daemon would pass over a part of the request."""
        spoken = self._link.protocol.version
        if spoken < needed:
            raise TooOldError(what, self.daemon_build, spoken, needed)

    async def done(self, call: Wire, timeout: Optional[float], what: str) -> None:
        """Asks for what has nothing to tell."""
        if (await self._ask(call, timeout, what)).get("type") != "done":
            raise UnknownAnswerError

    def _launch(
        self, kind: str, what: ProgramLike, arguments: tuple[str, ...], options: StartOptions
    ) -> tuple[Wire, Launch]:
        program: Program = program_of(what)
        self.check_version("run a guest on a model of the client's choice", needed_version(options))
        call = start_call(kind, program, arguments, options)
        if program.name is None:
            return call, Launch(call, component=program.component)
        return call, Launch(call, fallback=program.component)

    async def _ask(
        self,
        call: Wire,
        timeout: Optional[float],
        what: str,
        hear: Optional[Callable[[Event], None]] = None,
    ) -> Wire:
        self._link.check()
        answer: asyncio.Future[Wire] = asyncio.get_running_loop().create_future()

        def recipient(item: Union[Happened, Ended]) -> None:
            if answer.done():
                return
            if isinstance(item, Happened):
                try:
                    if hear is not None:
                        hear(item.event)
                except BaseException as error:
                    # It is for whoever waits, and no business of the connection's.
                    answer.set_exception(error)
            else:
                if item.error is None:
                    answer.set_result(item.value)
                else:
                    answer.set_exception(item.error)

        await self._link.room(timeout)
        key = self._link.protocol.request(call)
        self._link.listen(key, recipient)
        self._link.turn()
        try:
            return await settled(answer, timeout, what)
        finally:
            self._link.forget(key)

    async def _one(self, call: Wire, answer: str, key: str, kind: type[T], timeout: Timeout) -> T:
        value = await self._ask(call, self.seconds(timeout), f"the answer to {call['type']}")
        return _read(kind, _field(value, answer, key, dict))

    async def _list(self, call: Wire, key: str, kind: type[T], timeout: Timeout) -> list[T]:
        value = await self._ask(call, self.seconds(timeout), f"the answer to {call['type']}")
        return [_read(kind, item) for item in _field(value, key, key, list)]


def _with(call: Wire, **optional: Any) -> Wire:
    call.update((name, value) for name, value in optional.items() if value is not None)
    return call


def _field(value: Wire, answer: str, key: str, kind: type[T]) -> T:
    found = value.get(key)
    if value.get("type") != answer or not isinstance(found, kind):
        raise UnknownAnswerError
    return found


def _read(kind: type[T], wire: Any) -> T:
    try:
        return read(kind, wire)
    except ShapeError as error:
        raise ConnectionLostError(f"not an answer of the protocol: {error}", is_retryable=False) from None
