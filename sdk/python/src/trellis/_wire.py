"""The bytes of the protocol, as ``sdk/wire`` describes it: a hello from each side, then frames.

A frame is a ``u32`` length, little endian, and so many bytes of MessagePack.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, Optional

from ._errors import HandshakeError, VersionError
from ._version import __version__

VERSION_MIN = 2
VERSION_MAX = 3
#: From here on a start may name its model, and the answers to a load and an unload say what came of it.
VERSION_OF_MODELS = 3

#: Bytes of the largest frame that this side reads, its length not counted.
FRAME_BYTES_MAX = 1024 * 1024
#: Bytes that each side has to be able to read in one frame.
FRAME_BYTES_MIN = 512 * 1024
#: Bytes of a component in one chunk.
CHUNK_BYTES_MAX = 256 * 1024
#: Credit that the largest single output of a guest takes: a window that is smaller may wait for ever.
OUTPUT_OVERHEAD_BYTES = 64
OUTPUT_CREDIT_BYTES_MAX = 256 * 1024 + OUTPUT_OVERHEAD_BYTES
#: What is read of a detached guest is acknowledged at the latest after so much of it, as credit counts it.
ACKNOWLEDGED_BYTES = 16 * 1024

_MAGIC = b"\x89TRELLIS"
_FIXED = struct.Struct("<8sHHIB")
_LENGTH = struct.Struct("<I")
_LENGTH_BYTES = _LENGTH.size


class Hello(NamedTuple):
    """The first bytes of each side. Their layout never changes, whatever the versions."""

    version_min: int
    version_max: int
    frame_bytes_max: int
    build: str

    def encode(self) -> bytes:
        """The bytes of the hello."""
        build = self.build.encode()[:255]
        return (
            _FIXED.pack(_MAGIC, self.version_min, self.version_max, self.frame_bytes_max, len(build)) + build
        )


OURS = Hello(VERSION_MIN, VERSION_MAX, FRAME_BYTES_MAX, f"trellis-python {__version__}")


class BrokenError(Exception):
    """The peer broke the protocol."""


class Splitter:
    """Cuts bytes, however they come, into the peer's hello and its frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def push(self, data: bytes) -> None:
        """Adds bytes behind those that are there."""
        self._bytes += data

    def __len__(self) -> int:
        return len(self._bytes)

    def hello(self) -> Optional[Hello]:
        """The peer's hello, once it is there; `HandshakeError` where the bytes are the beginning of none."""
        begun = bytes(self._bytes[: len(_MAGIC)])
        if begun != _MAGIC[: len(begun)]:
            raise HandshakeError(f"the peer does not speak the Trellis protocol: it began with {begun!r}")
        if len(self._bytes) < _FIXED.size:
            return None
        _, version_min, version_max, frame_bytes_max, n_build = _FIXED.unpack_from(self._bytes)
        end = _FIXED.size + n_build
        if version_min > version_max:
            raise HandshakeError(f"the peer's oldest version {version_min} is above its newest {version_max}")
        if frame_bytes_max < FRAME_BYTES_MIN:
            raise HandshakeError(
                f"the peer reads frames of at most {frame_bytes_max} bytes, the protocol needs {FRAME_BYTES_MIN}"
            )
        if len(self._bytes) < end:
            return None
        build = bytes(self._bytes[_FIXED.size : end]).decode(errors="replace")
        del self._bytes[:end]
        return Hello(version_min, version_max, frame_bytes_max, build)

    def frames(self) -> list[bytes]:
        """The frames that are whole; `BrokenError` where a length is over the limit."""
        found: list[bytes] = []
        at = 0
        while at + _LENGTH_BYTES <= len(self._bytes):
            (n_bytes,) = _LENGTH.unpack_from(self._bytes, at)
            if n_bytes > FRAME_BYTES_MAX:
                raise BrokenError(f"a frame of {n_bytes} bytes is over the limit of {FRAME_BYTES_MAX}")
            end = at + _LENGTH_BYTES + n_bytes
            if end > len(self._bytes):
                break
            found.append(bytes(self._bytes[at + _LENGTH_BYTES : end]))
            at = end
        del self._bytes[:at]
        return found


def frame(payload: bytes) -> bytes:
    """The bytes of a frame."""
    return _LENGTH.pack(len(payload)) + payload


def negotiate(theirs: Hello) -> int:
    """The newest version that both sides speak; `VersionError` where there is none."""
    version = min(VERSION_MAX, theirs.version_max)
    if version < max(VERSION_MIN, theirs.version_min):
        raise VersionError((VERSION_MIN, VERSION_MAX), (theirs.version_min, theirs.version_max), theirs.build)
    return version
