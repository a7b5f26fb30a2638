"""What is refused, as the package's classes, and who is let in."""

from __future__ import annotations

import time

import httpx2
import openai as package
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from fronts import Front
from trellis import Client

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is 37 + 48?"}]


def test_a_model_that_is_not_there(openai: OpenAI) -> None:
    with pytest.raises(package.NotFoundError) as caught:
        openai.chat.completions.create(model="gpt-none", messages=HELLO)
    assert caught.value.code == "model_not_found" and "gpt-none" in caught.value.message
    assert caught.value.request_id


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("max_tokens", 0), ("top_logprobs", 99), ("n", 0), ("nonsense", 1)],
)
def test_what_is_wrong_is_named(openai: OpenAI, field: str, value: object) -> None:
    with pytest.raises(package.BadRequestError) as caught:
        openai.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, extra_body={field: value})
    assert caught.value.param == field and caught.value.type == "invalid_request_error"


def test_a_role_and_an_image_are_refused(openai: OpenAI) -> None:
    for messages in (
        [{"role": "oracle", "content": "?"}],
        [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}],
            }
        ],
    ):
        with pytest.raises(package.BadRequestError) as caught:
            openai.chat.completions.create(model="tiny", messages=messages)  # type: ignore[arg-type]
        assert "messages" in (caught.value.param or "")


def test_a_token_that_is_wrong_or_missing(front: Front) -> None:
    with (
        OpenAI(base_url=f"{front.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(package.AuthenticationError),
    ):
        client.models.list()
    assert httpx2.get(f"{front.url}/v1/models").status_code == 401


def test_a_path_that_is_not_there(openai: OpenAI) -> None:
    with pytest.raises(package.NotFoundError):
        openai.fine_tuning.jobs.create(model="tiny", training_file="file-abc123")


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(openai: OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "word " * 2_000}]
    with pytest.raises(package.BadRequestError) as caught:
        openai.chat.completions.create(model="tiny", messages=messages)
    assert "1024" in caught.value.message.replace(",", "")


def test_who_goes_away_stops_the_guest(openai: OpenAI, trellis: Client) -> None:
    stream = openai.completions.create(model="tiny", prompt="Once", stream=True, max_tokens=1_000, n=8)
    next(iter(stream))
    assert trellis.ps()
    stream.close()
    begun = time.monotonic()
    while trellis.ps():
        assert time.monotonic() - begun < 5, trellis.ps()
        time.sleep(0.01)


def test_a_request_that_takes_too_long_is_given_up(openai: OpenAI, trellis: Client) -> None:
    with pytest.raises(package.APITimeoutError):
        openai.with_options(timeout=0.05).completions.create(
            model="tiny", prompt="Once", max_tokens=1_000, n=8
        )
    begun = time.monotonic()
    while trellis.ps():
        assert time.monotonic() - begun < 5, trellis.ps()
        time.sleep(0.01)


def test_a_unix_socket_needs_no_token(socket_front: Front) -> None:
    transport = httpx2.HTTPTransport(uds=str(socket_front.http_socket))
    with (
        httpx2.Client(transport=transport) as http_client,
        OpenAI(base_url="http://localhost/v1", api_key="unused", http_client=http_client) as client,
    ):
        assert "tiny" in [model.id for model in client.models.list()]
        completion = client.chat.completions.create(model="tiny", messages=HELLO, temperature=0)
        assert (completion.choices[0].message.content or "").strip() == "85"


def test_raw_responses_have_their_headers(openai: OpenAI) -> None:
    raw = openai.chat.completions.with_raw_response.create(model="tiny", messages=HELLO, temperature=0)
    assert raw.headers["content-type"] == "application/json" and raw.request_id
    assert (raw.parse().choices[0].message.content or "").strip() == "85"
    with openai.chat.completions.with_streaming_response.create(
        model="tiny", messages=HELLO, temperature=0, stream=True
    ) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in streamed.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and len(lines) > 2
