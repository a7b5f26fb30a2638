"""The methods that ``ray.serve.llm`` calls on its ``server_cls``, with the forms of whichever engine package it has found."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Optional

from .._errors import TrellisError
from ._openai import BadRequestError, chat_of, finish_reason, usage_of
from ._work import Chat, Said

#: What OpenAI's clients show of an endpoint that no guest serves.
_NOT_IMPLEMENTED = 501


class LlmMethods:
    """Answers in OpenAI's form; the class that has this answers chats.

    Every method yields what `ray.serve.llm` expects: pieces in the form of a stream, or one whole answer, or an error in its form.
    """

    _llm_config: Any = None

    def say(self, chat: Chat) -> AsyncGenerator[Said, None]:
        """The answer to a chat, piece by piece."""
        raise NotImplementedError

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """A chat completion. The session that `x-session-id` names is the name under which the node keeps the conversation."""
        forms = _forms()
        try:
            chat = chat_of(request, _session(raw_request_info))
        except BadRequestError as error:
            yield _error(forms, str(error), 400, "invalid_request_error")
            return
        answer = _Answer(request.model)
        texts: list[str] = []
        try:
            async with aclosing(self.say(chat)) as pieces:
                async for piece in pieces:
                    if not request.stream:
                        texts.append(piece.text)
                    if request.stream and (piece.text or piece.answered is not None):
                        yield answer.chunk(forms, piece)
                    if piece.answered is None:
                        continue
                    if not request.stream:
                        yield answer.whole(forms, "".join(texts), piece)
                    elif _wants_usage(request):
                        yield answer.usage(forms, piece)
        except TrellisError as error:
            # What may be tried on another node is for the ingress, which knows what its client has had.
            if error.is_retryable:
                raise
            yield _error(forms, str(error), 400, type(error).__name__)

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Not implemented: 501."""
        yield _missing("completions")

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Not implemented: 501."""
        yield _missing("embeddings")

    async def transcriptions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Not implemented: 501."""
        yield _missing("transcriptions")

    async def score(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Not implemented: 501."""
        yield _missing("score")

    async def tokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Not implemented: 501."""
        yield _missing("tokenize")

    async def detokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Not implemented: 501."""
        yield _missing("detokenize")

    async def llm_config(self) -> Any:
        """The configuration that it was deployed with; `None` outside of ``ray.serve.llm``."""
        return self._llm_config


class _Answer:
    """One answer under way: all its pieces have one id."""

    def __init__(self, model: Optional[str]) -> None:
        self._said = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model or ""}
        self._has_begun = False

    def chunk(self, forms: Any, piece: Said) -> Any:
        """A piece of a stream."""
        delta: dict[str, str] = {"content": piece.text} if piece.text else {}
        if not self._has_begun:
            delta["role"] = "assistant"
            self._has_begun = True
        reason = None if piece.answered is None else finish_reason(piece.answered)
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return forms.ChatCompletionStreamResponse.model_validate({**self._said, "choices": [choice]})

    def usage(self, forms: Any, piece: Said) -> Any:
        """The last piece of a stream that was to say what it took."""
        said = {**self._said, "choices": [], "usage": usage_of(piece.answered)}
        return forms.ChatCompletionStreamResponse.model_validate(said)

    def whole(self, forms: Any, text: str, piece: Said) -> Any:
        """The whole answer."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": None if piece.answered is None else finish_reason(piece.answered),
        }
        said = {**self._said, "choices": [choice], "usage": usage_of(piece.answered)}
        return forms.ChatCompletionResponse.model_validate(said)


def _forms() -> Any:
    from ._stand_in import forms

    return forms()


def _error(forms: Any, message: str, code: int, kind: str) -> Any:
    return forms.ErrorResponse.model_validate({"error": {"message": message, "type": kind, "code": code}})


def _missing(what: str) -> Any:
    return _error(
        _forms(),
        f"Trellis has no {what} here yet: chat completions alone",
        _NOT_IMPLEMENTED,
        "not_implemented",
    )


def _session(raw_request_info: Any) -> Optional[str]:
    """The session of the call, as Ray Serve names it."""
    if raw_request_info is None:
        return None
    from ray.serve._private.http_util import session_id_from_headers

    return session_id_from_headers(raw_request_info.headers) or None


def _wants_usage(request: Any) -> bool:
    options = getattr(request, "stream_options", None)
    wanted = (
        options.get("include_usage")
        if isinstance(options, dict)
        else getattr(options, "include_usage", False)
    )
    return bool(wanted)
