"""Responses, and what follows them."""

from __future__ import annotations

import openai as package
import pytest
from openai import OpenAI


def test_a_response_says_a_sum(openai: OpenAI) -> None:
    response = openai.responses.create(model="tiny", input="What is 37 + 48?", temperature=0)
    assert response.output_text.strip() == "85" and response.status == "completed"
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_what_follows_a_response_computes_none_of_it_again(openai: OpenAI) -> None:
    first = openai.responses.create(model="tiny", input="What is 37 + 48?", temperature=0)
    second = openai.responses.create(
        model="tiny", input="What is the capital of France?", previous_response_id=first.id, temperature=0
    )
    assert "Paris" in second.output_text and second.previous_response_id == first.id
    assert first.usage is not None and second.usage is not None
    # All tokens before the new question come from the saved context, but for the last, which is not yet computed where it ends.
    assert second.usage.input_tokens > first.usage.total_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1


def test_two_may_follow_the_same(openai: OpenAI) -> None:
    first = openai.responses.create(model="tiny", input="What is the capital of France?", temperature=0)
    answers = [
        openai.responses.create(model="tiny", input=question, previous_response_id=first.id, temperature=0)
        for question in ("What is 20 + 31?", "What is 37 + 48?", "What is 20 + 31?")
    ]
    assert [answer.output_text.strip() for answer in answers] == ["51", "85", "51"]
    assert len({answer.id for answer in answers}) == 3


def test_what_follows_nothing_is_refused(openai: OpenAI) -> None:
    with pytest.raises(package.APIStatusError) as caught:
        openai.responses.create(model="tiny", input="And then?", previous_response_id="resp_none")
    assert caught.value.status_code in (400, 404) and "resp_none" in caught.value.message


def test_events_of_a_stream_are_in_order_and_join(openai: OpenAI) -> None:
    whole = openai.responses.create(
        model="tiny", input="Tell me a short story.", temperature=0, max_output_tokens=32
    )
    events = list(
        openai.responses.create(
            model="tiny", input="Tell me a short story.", temperature=0, max_output_tokens=32, stream=True
        )
    )
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == whole.output_text and len(pieces) > 3
    last = events[-1]
    assert last.type == "response.incomplete" and last.response.output_text == whole.output_text
