"""What happens in a request, and the guest's output among it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional, Union

from ._errors import JsonError
from ._shape import ShapeError, read
from ._wire import OUTPUT_OVERHEAD_BYTES


@dataclass(frozen=True)
class Progress:
    """How far the work is that a guest waits for."""

    #: ``upload`` and ``load`` are counted in bytes, ``compile`` in milliseconds.
    stage: str
    #: Units done.
    done: int
    #: Units in all; 0 when that is not known.
    total: int
    #: What it is done to, where that is not plain: the name of a model.
    name: Optional[str] = None


@dataclass(frozen=True)
class Started:
    """The guest runs."""

    #: Its number, as `ps` and `stop` have it.
    guest_id: int


@dataclass(frozen=True)
class AttachedTo:
    """The client is the reader of a detached guest; the guest's events follow."""

    guest_id: int
    #: The number of the event that comes next.
    from_: int
    #: A number that the daemon was given by chance when it started: numbers of guests begin anew with each daemon.
    daemon: int


@dataclass(frozen=True)
class Wanted:
    """The daemon is ready for the bytes of an upload."""


@dataclass(frozen=True)
class Text:
    """Text of the guest."""

    text: str


@dataclass(frozen=True)
class Tokens:
    """Tokens of the guest's model."""

    tokens: list[int]


@dataclass(frozen=True)
class Json:
    """A JSON text of the guest."""

    json: str

    def value(self) -> Any:
        """What the text says. `JsonError`: it is no JSON, lies too deep for Python, or has a number of too many digits."""
        try:
            return json.loads(self.json)
        except (ValueError, RecursionError) as error:
            raise JsonError(str(error)) from None


@dataclass(frozen=True)
class Log:
    """A line of the guest for its log."""

    #: ``debug``, ``info``, ``warn``, ``error``.
    level: str
    line: str


@dataclass(frozen=True)
class Recorded:
    """The next bytes of the guest's recording, if one was asked for; its last ones come right before the end."""

    bytes: bytes


@dataclass(frozen=True)
class Profiled:
    """The next bytes of the guest's profile, if one was asked for; its last ones come right before the end."""

    bytes: bytes


@dataclass(frozen=True)
class UnknownEvent:
    """A kind that this version does not know."""

    type: str


Event = Union[
    Progress, Started, AttachedTo, Wanted, Text, Tokens, Json, Log, Recorded, Profiled, UnknownEvent
]

_BY_TYPE: dict[str, Any] = {
    "progress": Progress,
    "started": Started,
    "wanted": Wanted,
    "text": Text,
    "tokens": Tokens,
    "json": Json,
    "log": Log,
    "recorded": Recorded,
    "profiled": Profiled,
}


def event_of(wire: Mapping[str, Any]) -> Event:
    """The event that a map holds; `ShapeError` where it holds none."""
    kind = wire.get("type") if isinstance(wire, Mapping) else None
    if not isinstance(kind, str):
        raise ShapeError("an event has no type")
    if kind == "text":
        text = wire.get("text")
        if type(text) is not str:
            raise ShapeError(f"text is {text!r:.40}, no str")
        return Text(text)
    if kind == "attached":
        return read(AttachedTo, {**wire, "from_": wire.get("from")})
    known = _BY_TYPE.get(kind)
    if known is None:
        return UnknownEvent(kind)
    event: Event = read(known, wire)
    return event


def credit_bytes(event: Event) -> int:
    """Bytes that an event takes of the client's credit; 0 for what the daemon says itself."""
    if isinstance(event, Text):
        n_bytes = len(event.text) if event.text.isascii() else len(event.text.encode())
    elif isinstance(event, Tokens):
        n_bytes = 4 * len(event.tokens)
    elif isinstance(event, Json):
        n_bytes = len(event.json.encode())
    elif isinstance(event, Log):
        n_bytes = len(event.line.encode())
    elif isinstance(event, (Recorded, Profiled)):
        n_bytes = len(event.bytes)
    else:
        return 0
    return n_bytes + OUTPUT_OVERHEAD_BYTES


def is_numbered(event: Event) -> bool:
    """Whether a client that reads a detached guest counts it: all that the guest sends, unknown kinds included."""
    return not isinstance(event, (Progress, Started, AttachedTo, Wanted))
