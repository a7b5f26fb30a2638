"""A coding agent's first ten requests, in OpenAI's form as it sends them and in Anthropic's, are answered in form."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from daemons import ROOT
from fronts import Front

CONVERSATION: dict[str, Any] = json.loads(Path(__file__).with_name("conversation.json").read_text())
MESSAGES: list[dict[str, Any]] = CONVERSATION["messages"]
BASH: dict[str, Any] = CONVERSATION["tools"][0]["function"]
#: How many messages each request has: all up to before an answer.
REQUESTS = [idx for idx, message in enumerate(MESSAGES) if message["role"] == "assistant"] + [len(MESSAGES)]
#: The answers are there to be looked at, not to be read.
N_TOKENS = 48


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A front whose model is the bundled one with room for an agent's prompts; what it says there is not sensible."""
    folder = tmp_path_factory.mktemp("models") / "coder"
    shutil.copytree(ROOT / "daemon/models/tiny", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8_192}))
    front = Front(is_on_loopback=True, models=[str(folder)])
    yield front
    front.close()


def as_anthropic(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The same request for an agent that speaks to Anthropic's API: results of tools are the user's."""
    system, *rest = messages
    turns = []
    for message in rest:
        if message["role"] == "tool":
            result = {
                "type": "tool_result",
                "tool_use_id": message["tool_call_id"],
                "content": message["content"],
            }
            turns.append({"role": "user", "content": [result]})
        elif message["role"] == "assistant":
            blocks: list[dict[str, Any]] = [{"type": "text", "text": message["content"]}]
            for call in message["tool_calls"]:
                function = call["function"]
                use = {"type": "tool_use", "id": call["id"], "name": function["name"]}
                blocks.append({**use, "input": json.loads(function["arguments"])})
            turns.append({"role": "assistant", "content": blocks})
        else:
            turns.append({"role": "user", "content": message["content"]})
    tool = {"name": BASH["name"], "description": BASH["description"], "input_schema": BASH["parameters"]}
    return {"system": system["content"], "messages": turns, "tools": [tool]}


def events(answer: httpx2.Response) -> list[str]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("n_messages", REQUESTS)
def test_a_request_in_openais_form(coder: Front, n_messages: int) -> None:
    body = {
        **CONVERSATION,
        "model": "coder",
        "messages": MESSAGES[:n_messages],
        "max_tokens": N_TOKENS,
        "seed": 1,
    }
    headers = {"Authorization": f"Bearer {coder.token}"}
    answer = httpx2.post(f"{coder.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    completion = ChatCompletion.model_validate_json(answer.text, strict=True)
    (choice,) = completion.choices
    calls = choice.message.tool_calls or []
    assert choice.message.content or calls
    for call in calls:
        assert call.type == "function" and call.function.name == "bash"
        if choice.finish_reason == "tool_calls":
            jsonschema.validate(json.loads(call.function.arguments), BASH["parameters"])
    assert completion.usage is not None and completion.usage.completion_tokens <= N_TOKENS
    streamed = httpx2.post(
        f"{coder.url}/v1/chat/completions", json={**body, "stream": True}, headers=headers, timeout=60
    )
    *chunks, done = events(streamed)
    deltas = [
        ChatCompletionChunk.model_validate_json(chunk, strict=True).choices[0].delta for chunk in chunks
    ]
    assert done == "[DONE]"
    assert "".join(delta.content or "" for delta in deltas) == (choice.message.content or "")


@pytest.mark.parametrize("n_messages", REQUESTS)
def test_a_request_in_anthropics_form(coder: Front, n_messages: int) -> None:
    body = {"model": "coder", "max_tokens": N_TOKENS, "temperature": 0, **as_anthropic(MESSAGES[:n_messages])}
    headers = {"x-api-key": coder.token, "anthropic-version": "2023-06-01"}
    answer = httpx2.post(f"{coder.url}/v1/messages", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    message = Message.model_validate_json(answer.text, strict=True)
    assert message.content and message.usage.output_tokens <= N_TOKENS
    for block in message.content:
        if block.type == "tool_use" and message.stop_reason == "tool_use":
            assert block.name == "bash"
            jsonschema.validate(block.input, BASH["parameters"])
    streamed = httpx2.post(
        f"{coder.url}/v1/messages", json={**body, "stream": True}, headers=headers, timeout=60
    )
    adapter: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
    parsed = [
        adapter.validate_json(event, strict=True) for event in events(streamed) if '"ping"' not in event
    ]
    assert parsed[0].type == "message_start" and parsed[-1].type == "message_stop"
    pieces = [event.delta for event in parsed if event.type == "content_block_delta"]
    text = "".join(piece.text for piece in pieces if piece.type == "text_delta")
    assert text == "".join(block.text for block in message.content if block.type == "text")


def test_there_are_ten() -> None:
    assert len(REQUESTS) == 10
