"""The protocol without a socket: calls become bytes, bytes become news. It does no I/O, reads no clock and waits for nothing.

Whoever has a socket hands what comes to :meth:`Protocol.receive_data`, sends what :meth:`Protocol.data_to_send` gives for as long as
there is any, and hears from :meth:`Protocol.news` what has come of it. A request is known by its key, which stays the same where a
guest is asked for once more, after its component was uploaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from copy import copy
from typing import Any, NamedTuple, Optional, Union

from ._amounts import GuestUsage
from ._codec import Codec, CodecError, best
from ._errors import (
    ConnectionLostError,
    HandshakeError,
    RequestError,
    TrellisError,
    UnknownAnswerError,
)
from ._events import Event, Progress, Started, Wanted, event_of
from ._faults import CancelledError, DaemonError, UnknownComponentError, UnknownProgramError, daemon_error
from ._program import Component
from ._shape import ShapeError, read
from ._wire import CHUNK_BYTES_MAX, FRAME_BYTES_MAX, OURS, BrokenError, Splitter, frame, negotiate

Wire = dict[str, Any]


class Greeted(NamedTuple):
    """The daemon has said who it is, and a version that both sides speak."""

    version: int
    build: str


class Happened(NamedTuple):
    """Something happened in a request."""

    key: int
    event: Event


class Ended(NamedTuple):
    """A request is over, with an answer or with an error; nothing more comes for it."""

    key: int
    value: Wire
    error: Optional[TrellisError]
    usage: Optional[GuestUsage]


class Lost(NamedTuple):
    """The connection is of no use any more. All requests that were open have ended with this before."""

    error: TrellisError


News = Union[Greeted, Happened, Ended, Lost]


class Launch:
    """A guest's start, or a detached guest's reading: what is asked for, and what is tried where the daemon does not know it."""

    def __init__(
        self, call: Wire, component: Optional[Component] = None, fallback: Optional[Component] = None
    ) -> None:
        self.call = call
        #: Uploaded where the daemon does not hold it.
        self.component = component
        #: Run where the daemon has no program of that name.
        self.fallback = fallback
        self.is_cancelled = False
        self.has_started = False

    def falls_back(self) -> bool:
        """Goes over to the component that is run where the name is not known, if there is one."""
        if self.fallback is None:
            return False
        self.component, self.fallback = self.fallback, None
        self.call = {**self.call, "program": self.component.wire()}
        return True


class _Open(NamedTuple):
    """What an id on the wire belongs to."""

    key: int
    launch: Optional[Launch]
    upload: Optional[Component]


class _Upload(NamedTuple):
    """Bytes that the daemon is ready for."""

    id: int
    component: Component
    n_sent: int


class Protocol:
    """One connection's side of the protocol."""

    def __init__(self, codec: Optional[Codec] = None) -> None:
        self._codec = codec or best()
        self._in = Splitter()
        self._out = deque([OURS.encode()])
        self._n_out = len(self._out[0])
        self._uploads: deque[_Upload] = deque()
        self._news: list[News] = []
        self._next_id = 1
        self._open: dict[int, _Open] = {}
        # The id under which a request is known to the daemon now.
        self._ids: dict[int, int] = {}
        self._frame_bytes_max = FRAME_BYTES_MAX
        #: The version that is spoken; 0 before the daemon's hello.
        self.version = 0
        #: Name and version of the daemon's build.
        self.build = ""
        #: Why the connection is of no use any more.
        self.lost: Optional[TrellisError] = None

    # What is asked for.

    def request(self, call: Wire) -> int:
        """Asks for something that has one answer; the request's key. `RequestError` where it does not fit in a frame."""
        return self._ask(call, None, None, None)

    def launch(self, launch: Launch) -> int:
        """Asks for something that a guest's events come of; the request's key. Errors as :meth:`request`."""
        return self._ask(launch.call, None, launch, None)

    def current_id(self, key: int) -> Optional[int]:
        """The id by which the daemon knows a request; none once it is over."""
        return self._ids.get(key)

    def is_open(self, key: int) -> bool:
        """Whether a request is not over."""
        return key in self._ids

    def cancel(self, key: int) -> None:
        """Asks the daemon to end a request; its end is still heard."""
        request_id = self._ids.get(key)
        if request_id is not None:
            launch = self._open[request_id].launch
            if launch is not None:
                launch.is_cancelled = True
            self._stop_upload(request_id)
            self._send({"type": "cancel", "id": request_id})

    def forget(self, key: int) -> None:
        """Asks the daemon to end a request of which nothing more is to be heard."""
        request_id = self._ids.pop(key, None)
        if request_id is not None:
            del self._open[request_id]
            self._stop_upload(request_id)
            self._send({"type": "cancel", "id": request_id})

    def grant(self, key: int, n_bytes: int) -> None:
        """Lets a guest send so many bytes more, as credit counts them."""
        if key in self._ids:
            self._send({"type": "credit", "id": self._ids[key], "n_bytes": n_bytes})

    def end_messages(self, key: int) -> None:
        """Tells a guest that no more messages will come."""
        if key in self._ids:
            self._send({"type": "end_messages", "id": self._ids[key]})

    def acknowledge(self, guest_id: int, until: int) -> None:
        """Tells the daemon that it need not keep what a detached guest sent before the event of this number."""
        self._send({"type": "acknowledge", "guest_id": guest_id, "until": until})

    # What goes out.

    @property
    def n_bytes_to_send(self) -> int:
        """Bytes that wait to be sent, those of uploads aside, which are cut as there is room for them."""
        return self._n_out

    def data_to_send(self) -> bytes:
        """The next bytes for the daemon; none when there is nothing to be sent."""
        if not self._out and self._uploads and self.lost is None:
            self._cut_chunk()
        if not self._out:
            return b""
        data = b"".join(self._out) if len(self._out) > 1 else self._out[0]
        self._out.clear()
        self._n_out = 0
        return data

    def _cut_chunk(self) -> None:
        upload_id, component, n_sent = self._uploads.popleft()
        chunk = component.data[n_sent : n_sent + CHUNK_BYTES_MAX]
        self._send({"type": "chunk", "id": upload_id, "bytes": chunk})
        n_sent += len(chunk)
        self._happened_to_upload(self._open[upload_id].key, n_sent, component)
        if n_sent < len(component.data):
            # Behind the others, so that a large one holds up none.
            self._uploads.append(_Upload(upload_id, component, n_sent))

    # What comes in.

    def receive_data(self, data: bytes) -> None:
        """Takes in what the daemon sent, cut anywhere."""
        if self.lost is not None:
            return
        self._in.push(data)
        try:
            if self.version == 0:
                hello = self._in.hello()
                if hello is None:
                    return
                self.version = negotiate(hello)
                self.build = hello.build
                self._frame_bytes_max = min(FRAME_BYTES_MAX, hello.frame_bytes_max)
                self._news.append(Greeted(self.version, self.build))
            for payload in self._in.frames():
                self._message(self._codec.decode(payload))
                if self.lost is not None:
                    return
        except HandshakeError as error:
            self.lose(error)
        except (BrokenError, CodecError, ShapeError) as error:
            self.lose(ConnectionLostError(f"not a message of the protocol: {error}", is_retryable=False))

    def receive_eof(self, error: Optional[OSError] = None) -> None:
        """The connection has ended, or failed with this error."""
        if error is not None:
            self.lose(ConnectionLostError(str(error)))
        elif len(self._in):
            self.lose(ConnectionLostError(f"it ended after {len(self._in)} bytes of a message"))
        else:
            self.lose(ConnectionLostError("the daemon closed it"))

    def lose(self, error: TrellisError) -> None:
        """Ends all requests with this error; nothing is sent or heard from here on."""
        if self.lost is not None:
            return
        self.lost = error
        keys = [self._open[request_id].key for request_id in sorted(self._open)]
        self._open.clear()
        self._ids.clear()
        self._uploads.clear()
        self._out.clear()
        self._n_out = 0
        # A copy for each, as each is raised and gets a traceback of its own.
        self._news.extend(Ended(key, {}, copy(error), None) for key in keys)
        self._news.append(Lost(error))

    def news(self) -> list[News]:
        """What has happened since this was asked last."""
        news, self._news = self._news, []
        return news

    # How it is done.

    def _send(self, message: Wire) -> None:
        payload = self._codec.encode(message)
        if len(payload) > self._frame_bytes_max:
            raise RequestError(len(payload), self._frame_bytes_max)
        if self.lost is None:
            self._out.append(frame(payload))
            self._n_out += len(self._out[-1])

    def _ask(
        self, call: Wire, key: Optional[int], launch: Optional[Launch], upload: Optional[Component]
    ) -> int:
        if self.lost is not None:
            raise copy(self.lost)
        request_id = self._next_id
        # An id is used up even if the request does not fit in a frame: nothing else may ever be taken for it.
        self._next_id += 1
        self._send({"type": "request", "id": request_id, "call": call})
        key = request_id if key is None else key
        self._open[request_id] = _Open(key, launch, upload)
        self._ids[key] = request_id
        return key

    def _stop_upload(self, request_id: int) -> None:
        self._uploads = deque(upload for upload in self._uploads if upload.id != request_id)

    def _message(self, message: Any) -> None:
        kind = message.get("type") if isinstance(message, dict) else None
        if not isinstance(kind, str):
            raise ShapeError("a message has no type")
        if kind == "event":
            self._event(_id(message), event_of(_map(message, "event")))
        elif kind == "end":
            self._end(_id(message), message)
        elif kind == "fault":
            fault = _error(_map(message, "error"))
            self.lose(ConnectionLostError(fault.message, is_retryable=fault.is_retryable, cause=fault))

    def _event(self, request_id: int, event: Event) -> None:
        opened = self._open.get(request_id)
        if opened is None:
            return
        key, launch, upload = opened
        if upload is not None:
            if isinstance(event, Wanted):
                self._uploads.append(_Upload(request_id, upload, 0))
            return
        if launch is not None and isinstance(event, Started):
            launch.has_started = True
        self._news.append(Happened(key, event))

    def _end(self, request_id: int, message: Wire) -> None:
        outcome = _map(message, "outcome")
        usage = message.get("usage")
        told = None if usage is None else read(GuestUsage, usage)
        error: Optional[TrellisError] = None
        value: Wire = {}
        if outcome.get("type") == "ok":
            value = _map(outcome, "value")
        elif outcome.get("type") == "error":
            error = _error(_map(outcome, "error"))
        else:
            error = UnknownAnswerError()
        opened = self._open.pop(request_id, None)
        if opened is None:
            return
        self._stop_upload(request_id)
        key, launch, upload = opened
        del self._ids[key]
        if launch is None or not self._goes_on(key, launch, upload, error):
            self._news.append(Ended(key, value, error, told))

    def _goes_on(
        self, key: int, launch: Launch, upload: Optional[Component], error: Optional[TrellisError]
    ) -> bool:
        """Whether something is left to do for a guest whose request has ended: to upload its component, or to ask once more."""
        if upload is not None:
            if error is not None:
                return False
        elif isinstance(error, UnknownComponentError) and launch.component is not None:
            upload, launch.component = launch.component, None
            if launch.is_cancelled:
                self._news.append(Ended(key, {}, _cancelled(), None))
                return True
            call: Wire = {"type": "upload", "hash": upload.hash, "n_bytes": len(upload.data)}
            self._happened_to_upload(key, 0, upload)
            self._ask(call, key, launch, upload)
            return True
        elif not (isinstance(error, UnknownProgramError) and launch.falls_back()):
            return False
        if launch.is_cancelled:
            self._news.append(Ended(key, {}, _cancelled(), None))
        else:
            self._ask(launch.call, key, launch, None)
        return True

    def _happened_to_upload(self, key: int, n_sent: int, component: Component) -> None:
        self._news.append(Happened(key, Progress("upload", n_sent, len(component.data))))


def _cancelled() -> DaemonError:
    return CancelledError("cancelled before the guest started")


def _id(message: Wire) -> int:
    request_id = message.get("id")
    if type(request_id) is not int:
        raise ShapeError("a message has no id")
    return request_id


def _map(message: Mapping[str, Any], key: str) -> Wire:
    value = message.get(key)
    if not isinstance(value, dict):
        raise ShapeError(f"{key} is no map")
    return value


def _error(wire: Wire) -> DaemonError:
    code, message, limit = wire.get("code"), wire.get("message", ""), wire.get("limit")
    name, value = wire.get("name"), wire.get("value")
    texts_fit = isinstance(code, str) and isinstance(message, str)
    if not (texts_fit and all(text is None or isinstance(text, str) for text in (name, value))):
        raise ShapeError("an error has no code, or texts that are none")
    if limit is not None and type(limit) is not int:
        raise ShapeError("the limit of an error is no number")
    return daemon_error(str(code), message, name, value, limit)
