"""Chats as the guest `conversation` has them. It is all that stands for an OpenAI front of the daemon's own."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any, Optional

from .._async import AsyncClient
from .._errors import GuestEndedError
from .._events import Json, Text
from .._faults import GuestFailedError
from .._guest import AsyncGuest
from .._program import StartOptions
from ._work import Answered, Chat, Said

#: The program that answers, as the daemons have it registered.
PROGRAM = "conversation"

#: A request to the guest, whose kind is its only key.
Request = dict[str, Any]


async def answer(client: AsyncClient, chat: Chat, node: str = "") -> AsyncGenerator[Said, None]:
    """The answer, piece by piece; the last piece says how it ended, once the conversation is saved.

    `GuestFailedError`: the guest cannot answer. Others as of `AsyncClient.start`.
    """
    options: StartOptions = {"label": "ray chat"}
    if chat.model is not None:
        options["model"] = chat.model
    if chat.seed is not None:
        options["seed"] = chat.seed
    requests: list[Request] = [] if chat.context is None else [{"open": chat.context}]
    requests += [{"message": message} for message in chat.messages]
    requests.append({"answer": chat.settings()})
    async with client.start(PROGRAM, **options) as guest:
        asked: deque[str] = deque()
        numbers: Optional[dict[str, Any]] = None
        is_kept = False
        unsent = deque(requests)
        await _ask(guest, asked, unsent)
        async for event in guest:
            if isinstance(event, Text):
                yield Said(event.text)
            reply = event.value() if isinstance(event, Json) else {}
            numbers = reply.get("answered", numbers)
            if "done" not in reply and "failed" not in reply:
                continue
            kind = asked.popleft()
            if kind not in ("open", "save") and "failed" in reply:
                raise GuestFailedError(f"{PROGRAM}: {reply['failed']}")
            is_kept = kind == "save" and "done" in reply
            if kind == "answer" and chat.context is not None:
                unsent.append({"save": chat.context})
            await _ask(guest, asked, unsent)
    if numbers is None:
        raise GuestFailedError(f"{PROGRAM} ended without an answer")
    counts = {name: int(numbers.get(name, 0)) for name in ("n_prompt_tokens", "n_cached_tokens", "n_tokens")}
    yield Said("", Answered(str(numbers.get("ending")), **counts, is_kept=is_kept, node=node))


async def _ask(guest: AsyncGuest, asked: deque[str], unsent: deque[Request]) -> None:
    """Sends the next request, once the one before has its reply: a message in the middle of an answer would stop it."""
    if asked:
        return
    try:
        if unsent:
            request = unsent.popleft()
            asked.append(next(iter(request)))
            await guest.send(json.dumps(request))
        else:
            await guest.end_messages()
    except GuestEndedError:
        # What ended it is the last that is read.
        return
