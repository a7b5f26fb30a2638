"""What another implementation computed for the bundled model: greedy tokens, and log-probabilities after each prompt."""

from __future__ import annotations

import json
from typing import Any

from daemons import ROOT

#: How far the engine's log-probabilities may be from those of transformers in float32.
TOLERANCE = 1e-3


def _case(prompt: str) -> dict[str, Any]:
    cases: list[dict[str, Any]] = json.loads((ROOT / "tests/golden/tiny.json").read_text())["cases"]
    (case,) = [case for case in cases if case["prompt"] == prompt]
    return case


def top10(prompt: str) -> list[float]:
    """The ten highest log-probabilities of the token after the prompt, highest first."""
    logprobs: list[float] = _case(prompt)["top10_logprobs"][-1]
    return logprobs


def prompt_tokens(prompt: str) -> list[int]:
    """What the prompt is made of."""
    tokens: list[int] = _case(prompt)["prompt_ids"]
    return tokens


def chat(question: str) -> str:
    """A question as the bundled model's template puts it."""
    return f"<|begin_of_text|><|user|>\n{question}<|end|>\n<|assistant|>\n"
