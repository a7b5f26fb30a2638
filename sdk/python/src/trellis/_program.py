"""What a guest runs: a component, or a program that the daemon has under a name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, TypedDict, Union

from blake3 import blake3

from ._shape import U64_MAX
from ._wire import OUTPUT_CREDIT_BYTES_MAX, VERSION_OF_MODELS

#: Where a component is looked for that is given by name alone and that the daemon does not have: the components of packages are in
#: the last.
COMPONENT_FOLDERS = (Path("guest-examples"), Path("/usr/lib/trellis/guests"))

#: The smallest window in which every single output of a guest has room, in bytes.
WINDOW_BYTES_MIN = OUTPUT_CREDIT_BYTES_MAX


class Component:
    """A component's bytes and their hash."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        #: BLAKE3, 32 bytes.
        self.hash: bytes = blake3(data).digest()

    def wire(self) -> dict[str, Any]:
        """How a start names it."""
        return {"type": "component", "hash": self.hash}


@dataclass(frozen=True)
class Program:
    """What a guest runs; made once, it can be started any number of times, and its bytes are hashed once."""

    #: A component; its bytes travel only if the daemon does not hold them yet.
    component: Optional[Component] = field(default=None, repr=False)
    #: A program that the daemon has registered.
    name: Optional[str] = None
    #: What people call it, where the options do not say.
    label: Optional[str] = None

    @classmethod
    def wasm(cls, data: Union[bytes, bytearray, memoryview], label: Optional[str] = None) -> Program:
        """The component with these bytes."""
        return cls(Component(bytes(data)), None, label)

    @classmethod
    def file(cls, path: Union[str, os.PathLike[str]]) -> Program:
        """The component in this file; `OSError` where it cannot be read."""
        path = Path(path)
        if (path / "Cargo.toml").is_file():
            raise IsADirectoryError(
                f"{path} is a crate: `trellis build {path} -o guest.wasm` makes a component of it"
            )
        return cls.wasm(path.read_bytes(), path.stem)

    @classmethod
    def named(cls, name: str) -> Program:
        """The program that the daemon has registered under this name (``guests_dir`` of its configuration), and no other."""
        return cls(None, name, name)

    @classmethod
    def find(cls, word: str) -> Program:
        """What a word names, as for ``trellis run`` but that nothing is built.

        A word with a separator or that ends in ``.wasm`` is a file. Any other is a program that the daemon has registered, or else
        a file of that name here, or else a component ``NAME.wasm`` in ``guest-examples`` here or of a package.
        """
        if os.sep in word or word.endswith(".wasm"):
            return cls.file(word)
        for path in (Path(word), *(folder / f"{word}.wasm" for folder in COMPONENT_FOLDERS)):
            if path.is_file():
                return cls(Component(path.read_bytes()), word, word)
        return cls.named(word)


#: What may stand for a program: one, a component's bytes, its path, or a word as for :meth:`Program.find`.
ProgramLike = Union[Program, bytes, str, os.PathLike[str]]


def program_of(what: ProgramLike) -> Program:
    """The program that this stands for."""
    if isinstance(what, Program):
        return what
    if isinstance(what, (bytes, bytearray, memoryview)):
        return Program.wasm(what)
    return Program.find(what) if isinstance(what, str) else Program.file(what)


class StartOptions(TypedDict, total=False):
    """With what a guest runs, beside its arguments."""

    #: The name of the model that it gets when it names none; the daemon's default otherwise.
    model: Optional[str]
    #: The seed that it sees, from 0 to 2^64 - 1; the daemon picks one otherwise.
    seed: Optional[int]
    #: Seconds that it may run; the daemon's own limit holds as well.
    deadline: Optional[float]
    #: Bytes of output that may be under way before this client has read them: how far the guest runs ahead of a slow reader. Raised
    #: to what the largest single output takes.
    window_bytes: int
    #: What people call the program: `ps` shows it beside the hash of a component. At most 64 bytes of it are shown.
    label: Optional[str]
    #: Whether its calls are to be recorded; the recording comes as `Recorded`.
    is_recorded: bool
    #: Whether its time is to be accounted for; the profile comes as `Profiled`.
    is_profiled: bool


def start_call(
    kind: str, program: Program, arguments: Sequence[str], options: StartOptions
) -> dict[str, Any]:
    """The call that starts a guest. `ValueError` and `TypeError` name an option that is out of its range."""
    unknown = set(options) - set(StartOptions.__annotations__)
    if unknown:
        raise TypeError(f"there is no option {sorted(unknown)[0]!r} of a start")
    if not all(isinstance(argument, str) for argument in arguments):
        raise TypeError("the arguments of a guest are texts")
    if program.name is not None:
        named: dict[str, Any] = {"type": "named", "name": text("the name of a program", program.name)}
    elif program.component is not None:
        named = program.component.wire()
    else:
        raise TypeError("a program is a component or has a name")
    call: dict[str, Any] = {
        "type": kind,
        "program": named,
        "arguments": list(arguments),
        "credit_bytes": window_bytes(options),
    }
    label = optional_text("label", options.get("label"))
    if program.component is not None and not label:
        label = optional_text("label", program.label)
    seed, deadline = options.get("seed"), options.get("deadline")
    optional = {
        "model": optional_text("model", options.get("model")),
        "seed": None if seed is None else in_range("seed", seed),
        "deadline_ms": None if deadline is None else milliseconds("deadline", deadline),
        "label": label or None,
        "is_recorded": flag("is_recorded", options.get("is_recorded", False)) or None,
        "is_profiled": flag("is_profiled", options.get("is_profiled", False)) or None,
    }
    call.update((name, value) for name, value in optional.items() if value is not None)
    return call


def window_bytes(options: StartOptions) -> int:
    """The window of a start; twice the smallest, so that credit can be given back in large pieces, where none is asked for."""
    asked = in_range("window_bytes", options.get("window_bytes", 2 * WINDOW_BYTES_MIN))
    return max(asked, WINDOW_BYTES_MIN)


def needed_version(options: StartOptions) -> int:
    """The version of the protocol that a daemon has to speak so as not to pass over an option."""
    return VERSION_OF_MODELS if options.get("model") is not None else 0


def in_range(name: str, value: int) -> int:
    """The number, if the wire has room for it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, no int")
    if not 0 <= value <= U64_MAX:
        raise ValueError(f"{name}: {value} is not between 0 and {U64_MAX}")
    return value


def text(name: str, value: str) -> str:
    """The text, if it is one."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, no str")
    return value


def optional_text(name: str, value: Optional[str]) -> Optional[str]:
    """As `text`, where there is one."""
    return None if value is None else text(name, value)


def flag(name: str, value: bool) -> bool:
    """The truth value, if it is one."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, no bool")
    return value


def milliseconds(name: str, seconds: float) -> int:
    """Seconds as the wire has them."""
    if not seconds >= 0:
        raise ValueError(f"{name}: {seconds} is no time")
    return min(int(min(seconds, 1e15) * 1000), U64_MAX)
