"""Examples that the authors of the `openai` and `anthropic` packages have written, run as they stand.

They find the address and the token where every program does that uses these packages, in the environment. What is replaced in their
text is the name of a model that its makers host, and nothing else: the daemon has `tiny`.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

#: Names of hosted models, and what takes their place.
MODELS = {
    '"gpt-5.5"': '"tiny"',
    '"gpt-4o-2024-08-06"': '"tiny"',
    '"gpt-3.5-turbo-instruct"': '"tiny"',
    '"VAR_chat_model_id"': '"tiny"',
    '"text-embedding-ada-002"': '"tiny"',
    '"claude-opus-4-6"': '"tiny"',
    '"claude-sonnet-5"': '"tiny"',
    '"claude-sonnet-4-5-20250929"': '"tiny"',
}


class Ran(NamedTuple):
    """What became of an example."""

    printed: str
    #: Its variables, by name.
    names: Mapping[str, Any]


def run(path: Path, **given: object) -> Ran:
    """Runs the example; `given` are names that its text uses and a text before it makes."""
    text = path.read_text()
    for hosted, ours in MODELS.items():
        text = text.replace(hosted, ours)
    names: dict[str, Any] = {"__name__": "__main__", **given}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, str(path), "exec"), names)
    return Ran(printed.getvalue(), names)
