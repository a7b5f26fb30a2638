"""The example of the README is run as it stands but for its port."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from daemons import ROOT
from examples import run
from fronts import Front


def test_the_example_answers(front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (example,) = [block for block in blocks if "from openai import" in block]
    assert example.count("http://127.0.0.1:8080") == 1
    (tmp_path / "example.py").write_text(example.replace("http://127.0.0.1:8080", front.url))
    token = tmp_path / ".local/state/trellis/http-token"
    token.parent.mkdir(parents=True)
    token.write_text(front.token)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "85" in run(tmp_path / "example.py").printed
