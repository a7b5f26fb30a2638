"""Reads dataclasses out of maps: fields that a class does not know are skipped, those that are missing have their defaults."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, Callable, TypeVar, Union

T = TypeVar("T")

#: The largest number on the wire.
U64_MAX = 2**64 - 1


class ShapeError(Exception):
    """A field that a class needs is missing, or is of another type."""


def read(kind: type[T], wire: Mapping[str, Any]) -> T:
    """The value of this dataclass that a map holds; `ShapeError` where it holds none."""
    if not isinstance(wire, Mapping):
        raise ShapeError(f"a {kind.__name__} is a map")
    found: dict[str, Any] = {}
    for field, key, convert, is_required in _fields(typing.cast("typing.Hashable", kind)):
        # The fields of a flat one lie among those of the class that has it.
        value = wire if key is None else wire.get(key, dataclasses.MISSING)
        if value is not dataclasses.MISSING:
            found[field] = convert(value)
        elif is_required:
            raise ShapeError(f"a {kind.__name__} has no {key}")
    return kind(**found)


@cache
def _fields(kind: Any) -> list[tuple[str, Any, Callable[[Any], Any], bool]]:
    hints = typing.get_type_hints(kind)
    return [
        (
            field.name,
            None if field.metadata.get("flat") else field.metadata.get("name", field.name),
            _converter(hints[field.name], field.name),
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(kind)
    ]


def _converter(hint: Any, what: str) -> Callable[[Any], Any]:
    """What turns a value of the wire into one of this type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Union:
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        convert = _converter(inner, what)
        return lambda value: None if value is None else convert(value)
    if origin is list:
        convert = _converter(arguments[0], what)
        return lambda value: [convert(item) for item in _of(list, value, what)]
    if origin is dict:
        convert = _converter(arguments[1], what)
        return lambda value: {key: convert(item) for key, item in _of(dict, value, what).items()}
    if origin is tuple:
        converts = [_converter(argument, what) for argument in arguments]

        def pair(value: Any) -> Any:
            if len(_of(list, value, what)) != len(converts):
                raise ShapeError(f"{what} has {len(value)} values, not {len(converts)}")
            return tuple(convert(item) for convert, item in zip(converts, value))

        return pair
    if dataclasses.is_dataclass(hint):
        return lambda value: read(typing.cast("type[Any]", hint), value)
    return lambda value: _of(hint, value, what)


def _of(kind: Any, value: Any, what: str) -> Any:
    """The value, if it is of this type; a `bool` is no number, and a number of the wire is none below 0."""
    if type(value) is not kind or (kind is int and not 0 <= value <= U64_MAX):
        raise ShapeError(f"{what} is {value!r:.40}, no {kind.__name__}")
    return value
