"""Lets ``ray.serve.llm`` be imported without vLLM and SGLang, whose forms of requests it builds on.

Where neither is installed, the forms of :mod:`trellis.ray._forms` stand under SGLang's name for as long as Ray imports them, and no
longer: nothing else sees them. It has to happen in each process that has to do with ``ray.serve.llm``; the classes of
:mod:`trellis.ray.llm`, by which Ray's processes come to it, see to that.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

_NAMES = ("sglang", "sglang.srt", "sglang.srt.entrypoints", "sglang.srt.entrypoints.openai")
_FORMS = "ray.llm._internal.serve.core.configs.openai_api_models"


def forms() -> Any:
    """The forms of ``ray.serve.llm``: vLLM's, or else SGLang's, or else ours. `ImportError`: Ray lacks something else."""
    if _FORMS in sys.modules or any(
        importlib.util.find_spec(name) is not None for name in ("vllm", "sglang")
    ):
        return importlib.import_module(_FORMS)
    from . import _forms

    lent = {name: ModuleType(name) for name in _NAMES}
    lent[f"{_NAMES[-1]}.protocol"] = _forms
    sys.modules.update(lent)
    try:
        return importlib.import_module(_FORMS)
    finally:
        for name in lent:
            del sys.modules[name]
