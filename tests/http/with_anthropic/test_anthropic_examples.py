"""Documented examples of the `anthropic` package run unchanged: the environment has the address."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from anthropic import Anthropic
from anthropic.types import Message, MessageTokensCount

from examples import Ran, run_whole

pytestmark = pytest.mark.usefixtures("environment")

DOCUMENTED = Path(__file__).with_name("documented")
#: A greedy draw would end as the model likes; a random one may go on until the context is full.
ENDS = ("end_turn", "max_tokens", "model_context_window_exceeded")


def ran(name: str, **given: object) -> Ran:
    return run_whole(DOCUMENTED / f"{name}.py", **given)


def n_prompt_tokens(message: Message) -> int:
    """All of the prompt: those that were there already are counted apart."""
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def is_whole(message: Message) -> bool:
    return message.type == "message" and message.role == "assistant" and message.usage.output_tokens > 0


def test_messages_of_the_readme() -> None:
    printed, names = ran("readme_messages")
    message: Message = names["message"]
    assert is_whole(message) and message.stop_reason in ENDS
    (block,) = message.content
    assert block.type == "text" and block.text and repr(block.text) in printed


def test_messages() -> None:
    names = ran("messages").names
    first, second = names["response"], names["response2"]
    assert is_whole(first) and is_whole(second) and first.id != second.id
    assert n_prompt_tokens(second) > n_prompt_tokens(first)


def test_messages_as_a_stream() -> None:
    printed = ran("messages_stream").printed
    streamed, accumulated = printed.split("accumulated message:")
    text, _ = streamed.split("\n\ncontent block finished accumulating:")
    message = Message.model_validate(json.loads(accumulated))
    (block,) = message.content
    assert block.type == "text" and block.text == text and is_whole(message)


def test_the_asynchronous_client_of_the_readme() -> None:
    assert "TextBlock(" in ran("readme_async").printed


def test_events_of_a_stream_of_the_readme() -> None:
    kinds = ran("readme_streaming").printed.split()
    while "ping" in kinds:
        kinds.remove("ping")
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_structured_outputs() -> None:
    printed, names = ran("structured_outputs")
    order = names["parsed_message"].parsed_output
    assert isinstance(order, names["Order"]) and printed == f"{order}\n"


def test_structured_outputs_as_a_stream() -> None:
    printed, names = ran("structured_outputs_streaming")
    order = names["final_message"].parsed_output
    assert isinstance(order, names["Order"]) and f"Final parsed order: {order}" in printed


def thought_and_text(message: Message) -> tuple[str, str]:
    """What was thought, and said; a model that has thought may have nothing to say."""
    thinking, *texts = message.content
    assert thinking.type == "thinking" and thinking.signature and len(texts) <= 1
    return thinking.thinking, "".join(text.text for text in texts if text.type == "text")


def test_thinking() -> None:
    printed, names = ran("thinking")
    thought, text = thought_and_text(names["response"])
    assert printed == f"Thinking: {thought}\n" + (f"Text: {text}\n" if text else "")


def test_thinking_as_a_stream() -> None:
    printed, names = ran("thinking_stream")
    thought, text = thought_and_text(names["stream"].get_final_message())
    assert printed == f"Thinking:\n---------\n{thought}" + (f"\n\nText:\n-----\n{text}" if text else "")


def test_a_tool_as_a_stream() -> None:
    printed = ran("tools_stream").printed
    snapshots = [line for line in printed.splitlines() if line.startswith("snapshot: ")]
    assert printed.count("delta: ") == len(snapshots)


def test_the_tool_runner() -> None:
    runs = ran("tools_runner").printed
    assert "BetaMessage" in runs and "usage=" in runs


def test_token_counting_of_the_readme(anthropic: Anthropic) -> None:
    count: MessageTokensCount = ran("readme_count_tokens", client=anthropic).names["count"]
    message = anthropic.messages.create(
        model="tiny", max_tokens=1, messages=[{"role": "user", "content": "Hello, world"}]
    )
    assert count.input_tokens == n_prompt_tokens(message) > 5


def test_raw_responses_of_the_readme() -> None:
    names = ran("readme_raw_response").names
    assert is_whole(names["message"]) and names["response"].headers["request-id"]


def test_errors_of_the_readme(front: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ran("readme_errors").printed == ""
    monkeypatch.setenv("ANTHROPIC_API_KEY", "wrong")
    printed = ran("readme_errors").printed
    assert printed.startswith("Another non-200-range status code was received\n401\n")
