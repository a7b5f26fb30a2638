"""OpenAI's form of a chat, as what the guest `conversation` can do; needs no Ray. To be forwarded to the daemon once that has a front."""

from __future__ import annotations

from typing import Any, Optional

from ._work import Answered, Chat

#: Fields with a meaning that the guest has none of, and the values with which they ask for nothing.
_UNKNOWN: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "functions": (None, []),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "n": (None, 1),
    "stop": (None, []),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "min_p": (None, 0, 0.0),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
}


class BadRequestError(ValueError):
    """A request that the guest cannot answer as it was meant."""


def chat_of(request: Any, context: Optional[str]) -> Chat:
    """The chat of a request. `BadRequestError` names a field that would have to be passed over."""
    for name, nothing in _UNKNOWN.items():
        value: Any = getattr(request, name, None)
        value = value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value
        if value not in nothing:
            raise BadRequestError(f"{name!r} is not supported here")
    most = getattr(request, "max_completion_tokens", None)
    temperature = request.temperature
    top_k = getattr(request, "top_k", None)
    return Chat(
        [_message(message) for message in request.messages],
        context=context,
        temperature=1.0 if temperature is None else temperature,
        # 1 and what is below 1 are how requests say that they do not want these.
        top_p=None if request.top_p in (None, 1, 1.0) else request.top_p,
        top_k=None if top_k is None or top_k < 1 else top_k,
        seed=_seed(request.seed),
        max_tokens=most if most is not None else request.max_tokens,
    )


def _message(message: Any) -> dict[str, str]:
    said = message if isinstance(message, dict) else message.model_dump()
    role, content = said.get("role"), said.get("content")
    if isinstance(content, list):
        content = "".join(_part(part) for part in content)
    if not isinstance(role, str) or not isinstance(content, str) or said.get("tool_calls"):
        raise BadRequestError("a message has a role and a text, and calls no tools")
    return {"role": "system" if role == "developer" else role, "content": content}


def _part(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise BadRequestError("the parts of a message are texts")


def _seed(seed: Optional[int]) -> Optional[int]:
    """OpenAI's seeds are signed."""
    return None if seed is None else seed % 2**64


def finish_reason(answered: Answered) -> str:
    """Why an answer ended, in OpenAI's words."""
    return "length" if answered.ending == "full" else "stop"


def usage_of(answered: Optional[Answered]) -> dict[str, Any]:
    """What an answer took, in OpenAI's words."""
    if answered is None:
        return {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return {
        "prompt_tokens": answered.n_prompt_tokens,
        "completion_tokens": answered.n_tokens,
        "total_tokens": answered.n_prompt_tokens + answered.n_tokens,
        "prompt_tokens_details": {"cached_tokens": answered.n_cached_tokens},
    }
