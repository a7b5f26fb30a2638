"""OpenAI's forms, for a ``ray.serve.llm`` that finds neither vLLM nor SGLang.

They have the names that SGLang has for them, which is where Ray looks second. A request keeps the fields that are not named here, so
that what it asks for is refused and not passed over. Of what is not answered (completions, embeddings and others) there is the form
of the request, which every call fills, and of the answer none.
"""

from __future__ import annotations

from typing import Any, Optional, Union

from pydantic import BaseModel, ConfigDict


class _Request(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: Optional[str] = None


class _Response(BaseModel):
    model_config = ConfigDict(extra="allow")


class ChatCompletionRequest(_Request):
    """A chat that is to be answered."""

    messages: list[dict[str, Any]]
    stream: bool = False
    stream_options: Optional[dict[str, Any]] = None
    temperature: Optional[float] = None
    top_p: Optional[float] = None
    top_k: Optional[int] = None
    seed: Optional[int] = None
    max_tokens: Optional[int] = None
    max_completion_tokens: Optional[int] = None


class Usage(BaseModel):
    """What an answer took."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: Optional[dict[str, int]] = None


class ChatCompletionResponse(_Response):
    """A whole answer."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: Usage


class ChatCompletionStreamResponse(_Response):
    """A piece of an answer."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: Optional[Usage] = None


class CompletionRequest(_Request):
    """A text that is to be continued."""

    prompt: Union[str, list[Any]]
    stream: bool = False


class EmbeddingRequest(_Request):
    """Texts that are to be embedded."""

    input: Union[str, list[Any]]


class ScoringRequest(_Request):
    """Texts that are to be compared."""


class TokenizeRequest(_Request):
    """A text that is to be cut into tokens."""

    prompt: str = ""


class DetokenizeRequest(_Request):
    """Tokens that are to be made a text."""

    tokens: list[int] = []


class CompletionResponse(_Response):
    """Not answered."""


class CompletionStreamResponse(_Response):
    """Not answered."""


class EmbeddingResponse(_Response):
    """Not answered."""


class ScoringResponse(_Response):
    """Not answered."""


class TokenizeResponse(_Response):
    """Not answered."""


class DetokenizeResponse(_Response):
    """Not answered."""
