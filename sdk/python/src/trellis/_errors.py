"""What a call can end with, beside what the daemon itself says (:mod:`trellis._faults`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional


class TrellisError(Exception):
    """The base of all errors of this package."""

    #: Whether the same request may succeed another time, unchanged: the daemon was about to end, had too much to do, or is gone.
    is_retryable: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies, and goes to other processes, with all that it says."""
        return _again, (type(self), self.args, dict(self.__dict__))


def _again(kind: type[TrellisError], arguments: tuple[Any, ...], said: dict[str, Any]) -> TrellisError:
    error = kind.__new__(kind)
    error.args = arguments
    error.__dict__.update(said)
    return error


class NotRunningError(TrellisError):
    """No daemon answers at any of the usual places; ``tried`` has each socket and what was there instead."""

    def __init__(self, tried: Sequence[tuple[str, OSError]]) -> None:
        self.tried = list(tried)
        places = ", ".join(_told(path, error) for path, error in self.tried)
        super().__init__(f"no daemon is running: {places}; start one with `trellis serve`")


class ConnectError(TrellisError):
    """There is a socket that this user cannot use: ``path``."""

    def __init__(self, path: str, error: Exception) -> None:
        self.path = path
        super().__init__(f"cannot connect to {path}: {error}")


class HandshakeError(TrellisError):
    """The peer is no daemon, or its first bytes make no sense."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"cannot talk to the daemon: {reason}")


class VersionError(HandshakeError):
    """There is no version of the protocol that both sides speak; ``ours`` and ``theirs`` are (oldest, newest)."""

    def __init__(self, ours: tuple[int, int], theirs: tuple[int, int], build: str) -> None:
        self.ours = ours
        self.theirs = theirs
        self.build = build
        older = "this client" if theirs[0] > ours[1] else "the daemon"
        super().__init__(
            f"no common protocol version: this client speaks {ours[0]} to {ours[1]}, the daemon ({build}) "
            f"speaks {theirs[0]} to {theirs[1]}; {older} is too old"
        )


class ConnectionLostError(TrellisError):
    """The connection ended before the request did. Retryable unless one of the two sides broke the protocol.

    ``cause`` is what the daemon said as it closed the connection (a :class:`trellis.DaemonError`), if it said anything.
    """

    def __init__(
        self, reason: str, *, is_retryable: bool = True, cause: Optional[TrellisError] = None
    ) -> None:
        self.is_retryable = is_retryable
        self.cause = cause
        super().__init__(f"the connection to the daemon is lost: {reason}")


class ClosedError(TrellisError):
    """The client was closed, here or in the process that this one was forked from."""


class RequestError(TrellisError):
    """The request does not fit in a frame: ``n_bytes`` of it, ``limit`` bytes allowed."""

    def __init__(self, n_bytes: int, limit: int) -> None:
        self.n_bytes = n_bytes
        self.limit = limit
        super().__init__(
            f"the request cannot be sent: a frame of {n_bytes} bytes is over the limit of {limit}"
        )


class UnknownAnswerError(TrellisError):
    """The daemon answered something that this client does not understand: one of the two is too old."""

    def __init__(self) -> None:
        super().__init__("the daemon gave an answer that this client does not know")


class TooOldError(TrellisError):
    """The daemon is of a version that would pass over a part of the request: ``spoken`` is below ``needed``."""

    def __init__(self, what: str, build: str, spoken: int, needed: int) -> None:
        self.build = build
        self.spoken = spoken
        self.needed = needed
        super().__init__(
            f"the daemon ({build}) is too old to {what}: it speaks version {spoken} of the protocol, that needs {needed}"
        )


class GuestEndedError(TrellisError):
    """The guest has ended and takes no more messages."""

    def __init__(self) -> None:
        super().__init__("the guest has ended")


class JsonError(TrellisError, ValueError):
    """A JSON text of a guest that Python cannot read; the text itself is there in :attr:`trellis.Json.json`."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"a JSON text of the guest cannot be read: {reason}")


class TimedOutError(TrellisError, TimeoutError):
    """What was waited for did not come within ``seconds``."""

    def __init__(self, what: str, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(f"{what}: not within {seconds:g} s")


def _told(path: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"there is no {path}"
    if isinstance(error, ConnectionRefusedError):
        return f"nobody listens on {path}"
    return f"{path}: {error}"
