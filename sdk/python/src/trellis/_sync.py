"""The client of a program without asyncio: `AsyncClient` in a loop of its own, with waits in the place of awaits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Callable, Optional

from ._amounts import FitInfo, GuestInfo, ModelInfo
from ._async import AsyncClient, SocketLike
from ._attached import PATIENCE_S, AsyncResumed
from ._events import Event
from ._guest import AsyncGuest
from ._info import DaemonInfo, LimitInfo, LogLines, ReloadInfo, UpgradeInfo
from ._portal import Portal
from ._program import ProgramLike, StartOptions, program_of
from ._reading import Output
from ._sync_reading import Attached, Guest, Resumed
from ._waits import DEFAULT, TIMEOUT_S, Timeout

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Client:
    """A connection to a daemon, which any number of threads share. It is made by :meth:`connect`.

    It works wherever it is called, in a notebook too: its loop runs in a thread of its own. Requests that wait for an answer do so
    for the client's ``timeout``, in seconds, or for their own; `TimedOutError` says that it is over. A request whose time is over,
    or that Ctrl-C interrupts, is cancelled in the daemon. All can end with `DaemonError`, by its kinds, and `ConnectionLostError`.
    """

    def __init__(self, portal: Portal, inner: AsyncClient) -> None:
        self._portal = portal
        self._inner = inner

    @classmethod
    def connect(cls, socket: Optional[SocketLike] = None, *, timeout: Optional[float] = TIMEOUT_S) -> Client:
        """Connects to a daemon: ``with Client.connect() as client``, or ``client.close()`` in the end.

        That on this socket, or else on that of ``TRELLIS_SOCKET``, or else the user's own, or else the machine's.

        `NotRunningError` names the places where it looked; `ConnectError` a socket that this user may not use; `VersionError` says
        that the daemon speaks no version of the protocol that this client speaks; `HandshakeError` that no daemon answers;
        `TimedOutError` that none did in time.
        """
        portal = Portal()

        async def connect() -> AsyncClient:
            return await AsyncClient.connect(socket, timeout=timeout)

        try:
            return cls(portal, portal.call(connect()))
        except BaseException:
            portal.close(lambda: None)
            raise

    @property
    def socket(self) -> Path:
        """The socket that the daemon listens on."""
        return self._inner.socket

    @property
    def timeout(self) -> Optional[float]:
        """Seconds that are waited for an answer where the call says nothing else; `None` for ever."""
        return self._inner.timeout

    @property
    def daemon_build(self) -> str:
        """Name and version of the daemon's build."""
        return self._inner.daemon_build

    def close(self) -> None:
        """Closes the connection, with which its guests end, those that are detached aside. What waits hears `ClosedError`."""
        self._portal.close(self._inner.close)
        self._portal.join()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Nothing is waited for here: the interpreter may be about to end, and threads with it.
        if hasattr(self, "_inner"):
            self._portal.close(self._inner.close)

    # Guests.

    def start(self, program: ProgramLike, *arguments: str, **options: Unpack[StartOptions]) -> Guest:
        """Starts a guest: a component, its path, or a name as for ``trellis run``, with its arguments.

        A component is uploaded only if the daemon does not hold it; that, and compiling it, come as `Progress`. What the daemon has
        to say against the guest comes as the last item of its reading.

        `OSError`: the component cannot be read. `RequestError`: the arguments do not fit in a frame. `TooOldError`: a model is named,
        and the daemon is too old for that. `ValueError`: an option is out of its range.
        """
        # A slow disk holds up this thread alone.
        found = program_of(program)

        async def start() -> AsyncGuest:
            return self._inner.start(found, *arguments, **options)

        return Guest(self._portal, self._portal.call(start()), self)

    def run(
        self,
        program: ProgramLike,
        *arguments: str,
        timeout: Optional[float] = None,
        **options: Unpack[StartOptions],
    ) -> Output:
        """Runs a guest to its end and collects all that it sends, within so many seconds if that is said, or else `TimedOutError`.

        The guest is stopped where the time is over or Ctrl-C interrupts. What the guest ended with, unless well, is the error.
        """
        found = program_of(program)
        return self._portal.call(self._inner.run(found, *arguments, timeout=timeout, **options))

    def start_detached(
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
        found = program_of(program)

        async def start(hear: Callable[[Event], None]) -> int:
            return await self._inner.start_detached(
                found, *arguments, progress=hear, timeout=timeout, **options
            )

        return self._portal.call_heard(start, progress or (lambda _: None))

    def attach(self, guest_id: int, from_: Optional[int] = None, *, timeout: Timeout = DEFAULT) -> Attached:
        """Reads a detached guest of this user, from the event of this number on, or from the oldest that the daemon has kept.

        `UnknownGuestError`: this user has no such guest. `OutputLostError`: that event is not kept any more; its ``limit`` is the
        first that is. `InvalidArgumentError`: it is still to come.
        """
        return Attached(
            self._portal, self._portal.call(self._inner.attach(guest_id, from_, timeout=timeout)), self
        )

    def resume(self, guest_id: int, from_: Optional[int] = None, *, patience: float = PATIENCE_S) -> Resumed:
        """Reads a detached guest over connections of its own, so that each event comes once however often one is lost.

        They are made to the socket of this client, and tried for ``patience`` seconds; once alone where those are 0.
        """

        async def resume() -> AsyncResumed:
            return self._inner.resume(guest_id, from_, patience=patience)

        return Resumed(self._portal, self._portal.call(resume()), self)

    def ps(self, *, timeout: Timeout = DEFAULT) -> list[GuestInfo]:
        """The running guests of this user, and those of others that it may see."""
        return self._portal.call(self._inner.ps(timeout=timeout))

    def stop(self, guest_id: int, *, timeout: Timeout = DEFAULT) -> None:
        """Stops a guest of this user, whichever connection started it, or of another whose guests it may stop.

        `UnknownGuestError`: there is none of that number.
        """
        self._portal.call(self._inner.stop(guest_id, timeout=timeout))

    # Models.

    def models(self, *, timeout: Timeout = DEFAULT) -> list[ModelInfo]:
        """The loaded models, and those that are loaded on demand."""
        return self._portal.call(self._inner.models(timeout=timeout))

    def load_model(
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

        async def load(hear: Callable[[tuple[int, int]], None]) -> str:
            def told(done: int, total: int) -> None:
                hear((done, total))

            return await self._inner.load_model(model, device, progress=told, timeout=timeout)

        def heard(state: tuple[int, int]) -> None:
            if progress is not None:
                progress(*state)

        return self._portal.call_heard(load, heard)

    def fit_model(self, model: str, device: Optional[str] = None, *, timeout: Timeout = DEFAULT) -> FitInfo:
        """Says whether there is room for a model, as for :meth:`load_model`, and loads nothing."""
        return self._portal.call(self._inner.fit_model(model, device, timeout=timeout))

    def unload_model(
        self, model: str, drain: Optional[float] = None, *, timeout: Optional[float] = None
    ) -> Optional[str]:
        """Unloads a model, and returns the name of the model that is the default then, if there is one, once its memory is free.

        New contexts are refused at once; guests that have some open after ``drain`` seconds (a time of the daemon's own when `None`)
        end with `ModelUnloadedError`. For who has the permission ``load``. Giving up does not take it back.
        """
        return self._portal.call(self._inner.unload_model(model, drain, timeout=timeout))

    # The daemon.

    def info(self, *, timeout: Timeout = DEFAULT) -> DaemonInfo:
        """The daemon as a whole."""
        return self._portal.call(self._inner.info(timeout=timeout))

    def limits(self, *, timeout: Timeout = DEFAULT) -> list[LimitInfo]:
        """Every limit of the daemon, where its number comes from, and how much this user has in use of it."""
        return self._portal.call(self._inner.limits(timeout=timeout))

    def metrics(self, *, timeout: Timeout = DEFAULT) -> str:
        """The daemon's metrics, of all users together, in the text format 0.0.4 of Prometheus."""
        return self._portal.call(self._inner.metrics(timeout=timeout))

    def logs(self, n_newest: Optional[int] = None, *, timeout: Timeout = DEFAULT) -> LogLines:
        """The newest lines of the daemon's log: so many, or all that it keeps. The rest of them begins at ``next``.

        For the user that the daemon runs as, and root. `UnsupportedError`: it keeps no log.
        """
        return self._portal.call(self._inner.logs(n_newest, timeout=timeout))

    def logs_from(self, number: int, waits: bool = False, *, timeout: Optional[float] = None) -> LogLines:
        """The lines of the daemon's log from the one of this number on; with ``waits``, once there is one. As :meth:`logs`."""
        return self._portal.call(self._inner.logs_from(number, waits, timeout=timeout))

    def reload(self, *, timeout: Timeout = DEFAULT) -> ReloadInfo:
        """Has the daemon read its configuration again. For the operator. `InvalidConfigurationError`: nothing has changed."""
        return self._portal.call(self._inner.reload(timeout=timeout))

    def upgrade(self, program: Optional[str] = None, *, timeout: Timeout = DEFAULT) -> UpgradeInfo:
        """Has the daemon put another program in its place: that of this absolute path, or what lies where it was started from.

        It takes on nothing more from then on; connections that are made after this are of the next daemon. For the operator.
        `InvalidArgumentError` or `InvalidConfigurationError`: it would not start, and nothing has changed.
        """
        return self._portal.call(self._inner.upgrade(program, timeout=timeout))

    def shutdown(self, *, timeout: Timeout = DEFAULT) -> None:
        """Stops the daemon. For the operator."""
        self._portal.call(self._inner.shutdown(timeout=timeout))
