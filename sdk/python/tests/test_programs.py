"""What a word means where a guest is to run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import GUESTS, Daemon

from trellis import Client, Program, UnknownProgramError, _program
from trellis._program import program_of, start_call


def test_names_and_paths_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_program, "COMPONENT_FOLDERS", (near, far))
    for path, data in (
        ("near/a.wasm", b"1"),
        ("far/a.wasm", b"2"),
        ("far/b.wasm", b"3"),
        ("c", b"4"),
        ("d.wasm", b"5"),
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(data)
    (tmp_path / "crate").mkdir()
    (tmp_path / "crate/Cargo.toml").touch()

    def found(what: _program.ProgramLike) -> tuple[object, object]:
        program = program_of(what)
        return program.component and program.component.data, program.name

    # A name is first asked of the daemon, and what was found is what runs where that does not know it.
    assert [found(word) for word in "abc"] == [(b"1", "a"), (b"3", "b"), (b"4", "c")]
    assert found("crate") == (None, "crate") and found("none") == (None, "none")
    assert found("d.wasm") == found("./d.wasm") == found(tmp_path / "d.wasm") == (b"5", None)
    assert found(b"bytes") == (b"bytes", None)
    assert program_of("d.wasm").label == "d"
    with pytest.raises(FileNotFoundError):
        program_of("./none")
    with pytest.raises(IsADirectoryError, match=r"trellis build .*crate -o guest\.wasm"):
        program_of("./crate")
    with pytest.raises(TypeError):
        start_call("start", Program(), [], {})


def test_what_the_daemon_has_comes_first_and_else_what_is_installed(
    own: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_program, "COMPONENT_FOLDERS", (tmp_path,))
    with Client.connect(own.socket) as client:
        with pytest.raises(UnknownProgramError):
            client.run("chat", "What is 37 + 48?")
        shutil.copy(GUESTS / "chat.wasm", tmp_path)
        assert client.run("chat", "What is 37 + 48?").text.strip() == "85"
        with pytest.raises(UnknownProgramError):
            client.run(Program.named("chat"))


def test_the_operators_guest_comes_before_the_one_that_is_installed(
    shared: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_program, "COMPONENT_FOLDERS", (tmp_path,))
    (tmp_path / "chat.wasm").write_bytes(b"no component")
    with Client.connect(shared.socket) as client:
        assert client.run("chat", "What is 37 + 48?").text.strip() == "85"
