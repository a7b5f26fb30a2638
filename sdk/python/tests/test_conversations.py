"""Chats as a cluster's replicas have them, against one daemon; Ray takes no part."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Daemon

from trellis import AsyncClient, GuestFailedError
from trellis.ray import Answered, Chat, Said
from trellis.ray._chat import answer
from trellis.ray._openai import BadRequestError, chat_of, finish_reason, usage_of

QUESTION = {"role": "user", "content": "What is 37 + 48?"}


def answered(daemon: Daemon, chat: Chat) -> tuple[str, Answered]:
    async def ask() -> list[Said]:
        async with AsyncClient.connect(daemon.socket) as client:
            return [piece async for piece in answer(client, chat, "here")]

    pieces = asyncio.run(ask())
    assert pieces[-1].answered is not None and all(piece.answered is None for piece in pieces[:-1])
    return "".join(piece.text for piece in pieces), pieces[-1].answered


def test_a_conversation_goes_on_from_what_was_saved_of_it(shared: Daemon) -> None:
    first, end = answered(shared, Chat([QUESTION], context="goes on", max_tokens=8))
    assert first == "85" and end.is_kept and end.node == "here" and end.n_tokens > 0
    messages = [
        QUESTION,
        {"role": "assistant", "content": first},
        {"role": "user", "content": "What is 2 + 3?"},
    ]
    _, next_end = answered(shared, Chat(messages, context="goes on", max_tokens=8))
    # All of the first turn, its answer included, is there.
    assert next_end.n_cached_tokens >= end.n_prompt_tokens + end.n_tokens - 1
    assert next_end.n_prompt_tokens > next_end.n_cached_tokens


def test_without_a_name_nothing_is_kept(shared: Daemon) -> None:
    text, end = answered(shared, Chat([QUESTION], max_tokens=1))
    assert (text, end.ending, end.is_kept, end.n_tokens) == ("8", "full", False, 1)


def test_what_the_guest_cannot_answer_is_its_error(shared: Daemon) -> None:
    with pytest.raises(GuestFailedError, match="conversation"):
        answered(shared, Chat([QUESTION], temperature=-1.0))


def request(**fields: Any) -> Any:
    given: dict[str, Any] = {
        "messages": [QUESTION],
        "temperature": None,
        "top_p": None,
        "seed": None,
        "max_tokens": None,
    }
    return SimpleNamespace(**{**given, **fields})


def test_a_request_in_openais_form_is_a_chat() -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "37 + 48?"}]
    asked = request(
        messages=[{"role": "developer", "content": "Briefly."}, {"role": "user", "content": parts}],
        seed=-1,
        top_p=1.0,
        max_completion_tokens=5,
    )
    assert chat_of(asked, "Ada") == Chat(
        [{"role": "system", "content": "Briefly."}, QUESTION],
        context="Ada",
        temperature=1.0,
        seed=2**64 - 1,
        max_tokens=5,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"n": 2},
        {"stop": ["."]},
        {"logprobs": True},
        {"response_format": {"type": "json_object"}},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "assistant", "content": None}]},
    ],
)
def test_what_would_have_to_be_passed_over_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError):
        chat_of(request(**fields), None)


def test_an_answers_end_is_told_in_openais_words() -> None:
    end = Answered("full", 10, 4, 3, is_kept=True)
    assert finish_reason(end) == "length"
    assert usage_of(end) == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
