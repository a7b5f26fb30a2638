"""Examples that the authors of the `openai` and `anthropic` packages have written, run as they stand.

They find the address and the token where every program does that uses these packages, in the environment; the names of the models
that they ask for are names of `tiny`, which an operator may give it.
"""

from __future__ import annotations

import contextlib
import io
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

#: Models that the examples ask for.
HOSTED = [
    "gpt-5.5",
    "gpt-4o-2024-08-06",
    "gpt-3.5-turbo-instruct",
    "VAR_chat_model_id",
    "text-embedding-ada-002",
    "claude-opus-4-6",
    "claude-sonnet-5",
    "claude-sonnet-4-5-20250929",
]


class Ran(NamedTuple):
    """What became of an example."""

    printed: str
    #: Its variables, by name.
    names: Mapping[str, Any]


def run(path: Path, **given: object) -> Ran:
    """Runs the example; `given` are names that its text uses and a text before it makes."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        names = runpy.run_path(str(path), init_globals=given, run_name="__main__")
    return Ran(printed.getvalue(), names)
