"""MessagePack: by msgspec where it is installed, by msgpack otherwise. Both take and refuse the same."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

#: Arrays and maps that may lie inside each other in one frame.
DEPTH_MAX = 32


class CodecError(Exception):
    """The bytes are not one value of what the protocol uses of MessagePack."""


class Codec(NamedTuple):
    """A way to write and read MessagePack."""

    name: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


def _plain(value: Any, depth: int = 0) -> Any:
    """Refuses what the protocol has no use for: extension types, keys that are no text, values that lie too deep."""
    kind = type(value)
    if kind is dict:
        if depth == DEPTH_MAX:
            raise CodecError(f"values nested deeper than the limit of {DEPTH_MAX}")
        for key, item in value.items():
            if type(key) is not str:
                raise CodecError(f"a key of a map is a {type(key).__name__}")
            if type(item) in _CONTAINERS:
                _plain(item, depth + 1)
            elif type(item) not in _SCALARS:
                raise CodecError(f"a value is a {type(item).__name__}")
    elif kind is list:
        if depth == DEPTH_MAX:
            raise CodecError(f"values nested deeper than the limit of {DEPTH_MAX}")
        for item in value:
            if type(item) in _CONTAINERS:
                _plain(item, depth + 1)
            elif type(item) not in _SCALARS:
                raise CodecError(f"a value is a {type(item).__name__}")
    elif kind not in _SCALARS:
        raise CodecError(f"the value is a {kind.__name__}")
    return value


_CONTAINERS = frozenset([dict, list])
_SCALARS = frozenset([str, int, bool, float, bytes, type(None)])


def by_msgspec() -> Codec:
    """Through msgspec; `ImportError` where it is not installed."""
    import msgspec

    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder()

    def decode(data: bytes) -> Any:
        try:
            return _plain(decoder.decode(data))
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
            raise CodecError(str(error)) from None

    return Codec("msgspec", encoder.encode, decode)


def by_msgpack() -> Codec:
    """Through msgpack."""
    import msgpack

    def encode(value: Any) -> bytes:
        return bytes(msgpack.Packer().pack(value))

    def decode(data: bytes) -> Any:
        try:
            return _plain(msgpack.unpackb(data, strict_map_key=False))
        except (msgpack.UnpackException, ValueError, TypeError, RecursionError) as error:
            raise CodecError(str(error) or type(error).__name__) from None

    return Codec("msgpack", encode, decode)


def best() -> Codec:
    """The faster one of those that there are."""
    try:
        return by_msgspec()
    except ImportError:
        return by_msgpack()
