"""Messages: what is said, by which blocks, and what it counts."""

from __future__ import annotations

from anthropic import Anthropic
from anthropic.types import Message, MessageParam
from openai import OpenAI

import golden
from trellis import Client

#: The package has no argument for it.
GREEDY = {"temperature": 0}
SUM: list[MessageParam] = [{"role": "user", "content": "What is 37 + 48?"}]
STORY: list[MessageParam] = [{"role": "user", "content": "Tell me a short story."}]


def said(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def n_prompt_tokens(message: Message) -> int:
    """All of the prompt: those that were there already are counted apart."""
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_a_sum_and_what_it_counts(anthropic: Anthropic, openai: OpenAI) -> None:
    message = anthropic.messages.create(model="tiny", max_tokens=64, messages=SUM, extra_body=GREEDY)
    assert said(message).strip() == "85" and message.stop_reason == "end_turn" and message.model == "tiny"
    completion = openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "What is 37 + 48?"}], extra_body=GREEDY
    )
    assert completion.choices[0].message.content == said(message) and completion.usage is not None
    assert n_prompt_tokens(message) == completion.usage.prompt_tokens == 17
    assert message.usage.output_tokens == completion.usage.completion_tokens


def test_what_is_said_is_what_a_guest_says_without_http(anthropic: Anthropic, trellis: Client) -> None:
    message = anthropic.messages.create(model="tiny", max_tokens=48, messages=STORY, extra_body=GREEDY)
    told = trellis.run("chat", "--max-tokens", "48", "Tell me a short story.").text
    assert said(message).strip() == told.strip()
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 48


def test_a_system_prompt_is_what_the_template_puts_first(anthropic: Anthropic, trellis: Client) -> None:
    system = "You are a storyteller."
    message = anthropic.messages.create(
        model="tiny", max_tokens=32, messages=STORY, system=system, extra_body=GREEDY
    )
    told = trellis.run("chat", "--system", system, "--max-tokens", "32", "Tell me a short story.").text
    assert said(message).strip() == told.strip()
    blocks = anthropic.messages.create(
        model="tiny",
        max_tokens=32,
        messages=STORY,
        system=[{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}],
        extra_body=GREEDY,
    )
    assert said(blocks) == said(message)


def test_a_conversation_goes_on(anthropic: Anthropic) -> None:
    first = anthropic.messages.create(model="tiny", max_tokens=64, messages=SUM, extra_body=GREEDY)
    message = anthropic.messages.create(
        model="tiny",
        max_tokens=64,
        messages=[
            *SUM,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]},
        ],
        extra_body=GREEDY,
    )
    assert "Paris" in said(message)


def test_pieces_of_a_stream_join_to_the_text(anthropic: Anthropic) -> None:
    whole = anthropic.messages.create(model="tiny", max_tokens=40, messages=STORY, extra_body=GREEDY)
    with anthropic.messages.stream(model="tiny", max_tokens=40, messages=STORY, extra_body=GREEDY) as stream:
        pieces = list(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(pieces) == said(whole) == said(message) and len(pieces) > 3
    assert message.stop_reason == whole.stop_reason
    assert message.usage.output_tokens == whole.usage.output_tokens


def test_a_stop_sequence_ends_the_text_before_it_and_is_named(anthropic: Anthropic) -> None:
    whole = said(anthropic.messages.create(model="tiny", max_tokens=48, messages=STORY, extra_body=GREEDY))
    stop = whole.split()[4]
    message = anthropic.messages.create(
        model="tiny", max_tokens=48, messages=STORY, extra_body=GREEDY, stop_sequences=["never said", stop]
    )
    assert said(message) == whole[: whole.index(stop)]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_the_most_probable_token_alone_is_the_greedy_one(anthropic: Anthropic) -> None:
    greedy = anthropic.messages.create(model="tiny", max_tokens=24, messages=STORY, extra_body=GREEDY)
    for narrowed in ({"top_k": 1}, {"top_p": 0.000_1}):
        message = anthropic.messages.create(
            model="tiny", max_tokens=24, messages=STORY, extra_body={"temperature": 1, **narrowed}
        )
        assert said(message) == said(greedy)


def test_tokens_are_counted_with_what_stands_around_them(anthropic: Anthropic) -> None:
    def count(**more: object) -> int:
        return anthropic.messages.count_tokens(model="tiny", messages=SUM, **more).input_tokens  # type: ignore[arg-type]

    tool = {
        "name": "calculator",
        "description": "Works out an expression.",
        "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}},
    }
    # As many as the golden file has for the same prompt.
    assert count() == 17 == len(golden.prompt_tokens(golden.chat("What is 37 + 48?")))
    assert count(system="Answer briefly.") > 17 and count(tools=[tool]) > 17
