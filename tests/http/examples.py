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

from openai import LengthFinishReasonError
from pydantic import ValidationError

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


#: How often an example is tried that says nothing of a seed, and wants all of an answer that may be longer than the context.
N_TRIES = 8


def run_whole(path: Path, **given: object) -> Ran:
    """Runs the example until its answer was not cut short by the 1,024 tokens of the model's context."""
    for n_left in reversed(range(N_TRIES)):
        try:
            return run(path, **given)
        except (LengthFinishReasonError, ValidationError):
            if n_left == 0:
                raise
    raise AssertionError("unreachable")


def run(path: Path, **given: object) -> Ran:
    """Runs the example; `given` are names that its text uses and a text before it makes."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        names = runpy.run_path(str(path), init_globals=given, run_name="__main__")
    return Ran(printed.getvalue(), names)
