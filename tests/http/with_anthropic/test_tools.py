"""Tools, thinking, and what is refused."""

from __future__ import annotations

import json

import anthropic as package
import httpx2
import jsonschema
import pytest
from anthropic import Anthropic
from anthropic.types import ContentBlock, MessageParam, ToolParam

from fronts import Front

CALCULATE: list[MessageParam] = [{"role": "user", "content": "Use the calculator tool to work out 12 * 7."}]
#: The package has no argument for it.
GREEDY = {"temperature": 0}
SUM: list[MessageParam] = [{"role": "user", "content": "What is 37 + 48?"}]
CALCULATOR: ToolParam = {
    "name": "calculator",
    "description": "Works out an expression.",
    "input_schema": {
        "type": "object",
        "properties": {"expression": {"type": "string", "pattern": "^[0-9]{1,3} [-+*] [0-9]{1,3}$"}},
        "required": ["expression"],
        "additionalProperties": False,
    },
}


def test_a_tool_that_is_named_is_called_and_its_result_goes_back(anthropic: Anthropic) -> None:
    message = anthropic.messages.create(
        model="tiny",
        max_tokens=128,
        messages=CALCULATE,
        extra_body=GREEDY,
        tools=[CALCULATOR],
        tool_choice={"type": "tool", "name": "calculator"},
    )
    assert message.stop_reason == "tool_use"
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert call.name == "calculator" and call.id
    jsonschema.validate(call.input, dict(CALCULATOR["input_schema"]))
    answer = anthropic.messages.create(
        model="tiny",
        max_tokens=64,
        messages=[
            *CALCULATE,
            {"role": "assistant", "content": message.content},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": call.id,
                        "content": [{"type": "text", "text": "84"}],
                    }
                ],
            },
        ],
        extra_body=GREEDY,
        tools=[CALCULATOR],
        tool_choice={"type": "none"},
    )
    (block,) = answer.content
    assert block.type == "text" and "84" in block.text


def test_the_input_of_a_call_comes_in_pieces(anthropic: Anthropic) -> None:
    with anthropic.messages.stream(
        model="tiny",
        max_tokens=128,
        messages=CALCULATE,
        extra_body=GREEDY,
        tools=[CALCULATOR],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    ) as stream:
        events = list(stream)
        message = stream.get_final_message()
    pieces = [event.partial_json for event in events if event.type == "input_json"]
    (call,) = message.content
    assert call.type == "tool_use"
    assert json.loads("".join(pieces)) == call.input
    jsonschema.validate(call.input, dict(CALCULATOR["input_schema"]))


def test_thinking_stops_at_its_budget_and_counts_for_nothing_later(anthropic: Anthropic) -> None:
    message = anthropic.messages.create(
        model="tiny",
        max_tokens=96,
        messages=SUM,
        thinking={"type": "enabled", "budget_tokens": 32},
        extra_body=GREEDY,
    )
    thinking = message.content[0]
    assert thinking.type == "thinking" and thinking.signature
    assert 0 < message.usage.output_tokens <= 96
    texts = [block for block in message.content if block.type == "text"]

    def count(content: list[ContentBlock]) -> int:
        turns: list[MessageParam] = [*SUM, {"role": "assistant", "content": content}, *SUM]
        return anthropic.messages.count_tokens(model="tiny", messages=turns).input_tokens

    assert count(message.content) == count([*texts])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2),
        ("max_tokens", 0),
        ("top_k", -1),
        ("mcp_servers", []),
        ("thinking", {"type": "perhaps"}),
    ],
)
def test_what_is_wrong_is_named(anthropic: Anthropic, field: str, value: object) -> None:
    with pytest.raises(package.BadRequestError) as caught:
        anthropic.messages.create(model="tiny", max_tokens=8, messages=SUM, extra_body={field: value})
    body = caught.value.body
    assert isinstance(body, dict) and body["type"] == "error" and body["request_id"]
    assert body["error"]["type"] == "invalid_request_error" and field in body["error"]["message"]


def test_a_model_that_is_not_there(anthropic: Anthropic) -> None:
    with pytest.raises(package.NotFoundError) as caught:
        anthropic.messages.create(model="claude-none", max_tokens=8, messages=SUM)
    assert "claude-none" in str(caught.value.body)


def test_a_token_that_is_wrong_or_missing(front: Front) -> None:
    with (
        Anthropic(base_url=front.url, api_key="wrong", max_retries=0) as client,
        pytest.raises(package.AuthenticationError),
    ):
        client.messages.create(model="tiny", max_tokens=8, messages=SUM)
    answer = httpx2.post(f"{front.url}/v1/messages", json={})
    assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"


def test_a_version_is_asked_for(front: Front) -> None:
    answer = httpx2.post(
        f"{front.url}/v1/messages",
        headers={"x-api-key": front.token},
        json={"model": "tiny", "max_tokens": 8, "messages": SUM},
    )
    assert answer.status_code == 400 and "anthropic-version" in answer.json()["error"]["message"]
