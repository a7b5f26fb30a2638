"""What the client says of the protocol is what the sources of `sdk/wire` say, and both clients say the same."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from typing import Any

import pytest
from conftest import ROOT

import trellis
from trellis import _amounts, _faults, _info, _wire
from trellis._reading import AsyncReading
from trellis._shape import ShapeError, read
from trellis._sync_reading import Reading

WIRE = ROOT / "sdk/wire/src"


def source(name: str) -> str:
    return (WIRE / name).read_text()


def test_every_code_has_its_class() -> None:
    codes = re.findall(r'^        (\w+) = "(\w+)",$', source("fault.rs"), re.MULTILINE)
    assert len(codes) > 30
    for variant, code in codes:
        kind = _faults.BY_CODE[code]
        assert (
            kind.__name__ == f"{variant}Error"
            and kind.code == code
            and getattr(trellis, kind.__name__) is kind
        )
    assert len(_faults.BY_CODE) == len(codes)
    retryable = re.findall(r"Self::(\w+)", source("fault.rs").split("fn is_retryable")[1].split("}")[0])
    ours = {kind.__name__ for kind in _faults.BY_CODE.values() if kind.is_retryable}
    assert ours == {f"{variant}Error" for variant in retryable}
    schema = json.loads((ROOT / "sdk/error.schema.json").read_text())
    told = schema["$defs"]["error"]["properties"]["code"]["examples"]
    assert set(_faults.BY_CODE) <= set(told)
    unknown = _faults.daemon_error("of_another_version", "so", None, None, None)
    assert type(unknown) is trellis.DaemonError and unknown.code == "of_another_version"


@pytest.mark.parametrize("module", [_amounts, _info])
def test_what_the_daemon_describes_has_the_fields_of_the_wire(module: Any) -> None:
    text = source("info.rs") + source("limit.rs") + source("logs.rs")
    kinds: list[Any] = [kind for kind in vars(module).values() if dataclasses.is_dataclass(kind)]
    for kind in kinds:
        if kind.__module__ != module.__name__:
            continue
        name = kind.__name__
        body = re.search(rf"^pub struct {name} \{{\n(.*?)^\}}", text, re.MULTILINE | re.DOTALL)
        assert body is not None, name
        theirs = re.findall(r"^    pub (\w+): (.*),$", body[1], re.MULTILINE)
        ours = dataclasses.fields(kind)
        assert [field.metadata.get("name", field.name) for field in ours] == [field for field, _ in theirs], (
            name
        )
        for field, (_, rust) in zip(ours, theirs):
            assert ("Optional" in str(field.type)) == rust.startswith("Option<"), f"{name}.{field.name}"
            assert ("int" in str(field.type)) == bool(re.search(r"u\d\d", rust)), f"{name}.{field.name}"
        assert read(kind, {}) == kind()


def test_numbers_are_those_of_the_wire() -> None:
    text = source("lib.rs")
    names = ["VERSION_MIN", "VERSION_MAX", "VERSION_OF_MODELS", "FRAME_BYTES_MAX", "FRAME_BYTES_MIN"]
    names += ["CHUNK_BYTES_MAX", "OUTPUT_OVERHEAD_BYTES", "ACKNOWLEDGED_BYTES", "OUTPUT_BYTES_MAX"]
    for name in names:
        found = re.search(rf"pub const {name}: \w+ = ([\d* ]+);", text)
        assert found is not None, name
        value = 1
        for factor in found[1].split("*"):
            value *= int(factor)
        if name == "OUTPUT_BYTES_MAX":
            assert value + _wire.OUTPUT_OVERHEAD_BYTES == _wire.OUTPUT_CREDIT_BYTES_MAX
        else:
            assert getattr(_wire, name) == value, name
    cargo = (ROOT / "Cargo.toml").read_text()
    assert f'\nversion = "{trellis.__version__}"\n' in cargo


def public(kind: type[Any]) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(kind) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("sync", "asynchronous"),
    [
        (trellis.Client, trellis.AsyncClient),
        (trellis.Guest, trellis.AsyncGuest),
        (trellis.Attached, trellis.AsyncAttached),
        (Reading, AsyncReading),
    ],
)
def test_both_clients_say_the_same(sync: type[Any], asynchronous: type[Any]) -> None:
    # What requests are made of is no business of users, nor how events cross threads in one go.
    own = {"done", "seconds", "check_version", "fill", "is_lost"}
    ours, theirs = public(sync), public(asynchronous)
    for name in set(theirs) - own:
        if not inspect.isfunction(theirs[name]):
            continue
        assert name in ours, name
        one, other = inspect.signature(ours[name]), inspect.signature(theirs[name])
        if name == "connect":
            assert list(one.parameters) == list(other.parameters)
            continue
        parameters = [list(signature.parameters.values()) for signature in (one, other)]
        assert [(p.name, p.default, p.kind) for p in parameters[0]] == [
            (p.name, p.default, p.kind) for p in parameters[1]
        ], name
        assert ours[name].__doc__ and theirs[name].__doc__, name


def test_every_wait_has_a_time_out() -> None:
    for kind in (trellis.Client, trellis.AsyncClient, trellis.Guest, trellis.AsyncGuest, trellis.Attached):
        for name, member in public(kind).items():
            is_at_once = name in (
                "start",
                "resume",
                "cancel",
                "close",
                "acknowledge",
                "done",
                "seconds",
                "check_version",
            )
            if inspect.isfunction(member) and not is_at_once:
                assert "timeout" in inspect.signature(member).parameters, f"{kind.__name__}.{name}"


def test_what_has_another_shape_is_refused() -> None:
    assert (
        read(trellis.ModelInfo, {"name": "x", "n_steps": 4, "n_rows_failed": 2}).computed.causes.n_rows_failed
        == 2
    )
    assert read(trellis.ModelInfo, {"loading_bytes": [1, 2]}).loading_bytes == (1, 2)
    assert read(trellis.DaemonInfo, {"class": {"limits": {"n": 1}}}).class_ == trellis.ClassInfo(
        limits={"n": 1}
    )
    wrong: list[dict[str, Any]] = [
        {"name": 1},
        {"n_vocab": True},
        {"n_vocab": -1},
        {"n_vocab": 2**64},
        {"n_vocab": 1.0},
        {"aliases": "x"},
        {"aliases": [1]},
        {"loading_bytes": [1]},
        {"failure": 7},
    ]
    for wire in wrong:
        with pytest.raises(ShapeError):
            read(trellis.ModelInfo, wire)
