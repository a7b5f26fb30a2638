"""What ``ray.serve.llm`` needs for chats by Trellis: import it before ``ray.serve.llm`` itself.

.. code-block:: python

    from trellis.ray.llm import LLMConfig, TrellisServer, build_openai_app

    config = LLMConfig(model_loading_config={"model_id": "tiny"}, server_cls=TrellisServer)
    serve.run(build_openai_app({"llm_configs": [config]}))

Neither vLLM nor SGLang is needed (:mod:`trellis.ray._stand_in`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Optional

from ._stand_in import forms as _import_forms

_forms = _import_forms()

from ray.serve.llm import LLMConfig  # noqa: E402
from ray.serve.llm import build_openai_app as _build_openai_app  # noqa: E402
from ray.serve.llm.ingress import OpenAiIngress  # noqa: E402
from starlette.requests import Request  # noqa: E402

from ._again import Resuming, SaidBefore, Terms, tried  # noqa: E402
from ._cluster import N_TRIES, drawn_seed, loss_of  # noqa: E402
from ._lost import NodeLostError  # noqa: E402
from ._placement import AVOIDING_HEADER  # noqa: E402
from ._server import TrellisServer as _TrellisServer  # noqa: E402
from ._work import Answered, Said  # noqa: E402

__all__ = ["LLMConfig", "TrellisIngress", "TrellisServer", "build_openai_app"]


class TrellisServer(_TrellisServer):
    """`trellis.ray.TrellisServer`, by whose place a replica of ``ray.serve.llm`` comes to have the forms before its configuration."""


class TrellisIngress(OpenAiIngress):
    """Ray's OpenAI endpoints, where a chat whose node is lost is answered by another one.

    An answer of which a part was sent goes on where the next node says the same characters first. Where it does not, or no node
    answers, the client hears of it: by status 503 before the first piece, by an error in the stream after it, both of the type
    ``NodeLostError``. A chat without a seed is given one, so that the second try draws what the first did.
    """

    async def _get_response(
        self, *, body: Any, call_method: str, raw_request: Optional[Any] = None
    ) -> AsyncGenerator[Any, None]:
        is_chat = call_method == "chat"
        if is_chat and body.seed is None:
            body.seed = drawn_seed() >> 1

        def once(avoiding: tuple[str, ...]) -> AsyncIterator[Any]:
            request = raw_request if not avoiding else _avoiding(raw_request, avoiding)
            answer: AsyncIterator[Any] = super(TrellisIngress, self)._get_response(
                body=body, call_method=call_method, raw_request=request
            )
            return answer

        is_stream = is_chat and bool(body.stream)
        has_begun = False
        try:
            terms = Terms(N_TRIES, is_repeatable=True)
            async with aclosing(tried(once, terms, loss_of, ChunksBefore if is_stream else None)) as pieces:
                async for piece in pieces:
                    has_begun = True
                    yield piece
        except NodeLostError as error:
            said = {"message": str(error), "type": type(error).__name__, "code": 503}
            told = _forms.ErrorResponse.model_validate({"error": said})
            yield f"data: {told.model_dump_json()}\n\n" if has_begun else told


class ChunksBefore(Resuming[Any]):
    """As `SaidBefore`, for the pieces of a stream in OpenAI's form, which keep the id of the first."""

    def __init__(self) -> None:
        self._said = SaidBefore()
        self._id: Optional[str] = None

    def begin(self) -> None:
        """Another attempt begins."""
        self._said.begin()

    def pass_on(self, item: Any) -> Any:
        """What is new in a piece."""
        if not isinstance(item, _forms.ChatCompletionStreamResponse):
            return item
        has_begun = self._id is not None
        for choice in item.choices:
            delta = _get(choice, "delta")
            is_last = _get(choice, "finish_reason") is not None
            said = self._said.pass_on(Said(_get(delta, "content") or "", _LAST if is_last else None))
            if said is None:
                return None
            _set(delta, "content", said.text)
            if has_begun:
                _set(delta, "role", None)
        self._id = self._id or item.id
        item.id = self._id
        return item


def build_openai_app(arguments: dict[str, Any]) -> Any:
    """As ``ray.serve.llm.build_openai_app``, with `TrellisIngress` where no other ingress is named."""
    return _build_openai_app({"ingress_cls_config": {"ingress_cls": TrellisIngress}, **arguments})


#: Stands for how an answer ended, where only that it did is looked at.
_LAST = Answered("", 0, 0, 0, is_kept=False)


def _avoiding(raw_request: Any, nodes: tuple[str, ...]) -> Any:
    """The same request, which says to the router where it is not to go."""
    told = (AVOIDING_HEADER.encode(), ",".join(nodes).encode())
    if raw_request is None:
        return Request(
            {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": [told]}
        )
    return Request({**raw_request.scope, "headers": [*raw_request.scope["headers"], told]})


def _get(of: Any, name: str) -> Any:
    """A field of a form, which are classes with some engines and maps with others."""
    return of.get(name) if isinstance(of, dict) else getattr(of, name, None)


def _set(of: Any, name: str, value: Any) -> None:
    if isinstance(of, dict):
        of.pop(name, None)
        if value is not None:
            of[name] = value
    else:
        setattr(of, name, value)
