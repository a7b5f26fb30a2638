"""The examples of the READMEs are run as they stand, against a daemon."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import GUESTS, PATIENCE_S, ROOT, Daemon


def blocks(path: Path) -> list[str]:
    """Those of this package: the tests of the HTTP front run those of others."""
    found = re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    return [block for block in found if "from trellis import" in block]


EXAMPLES = [
    pytest.param(block, id=f"{path.relative_to(ROOT)}-{number}")
    for path in (ROOT / "README.md", ROOT / "sdk/python/README.md")
    for number, block in enumerate(blocks(path))
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs_as_it_stands(example: str, shared: Daemon, tmp_path: Path) -> None:
    shutil.copy(GUESTS / "chat.wasm", tmp_path)
    environment = {"TRELLIS_SOCKET": str(shared.socket)}
    ran = subprocess.run(
        [sys.executable, "-c", example],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr
    assert "85" in ran.stdout, ran.stdout


def test_each_readme_has_an_example_of_ten_lines() -> None:
    for path in (ROOT / "README.md", ROOT / "sdk/python/README.md"):
        assert len(blocks(path)[0].splitlines()) <= 10, path
