"""Chat completions and completions: what is said, by which tokens, and what they count."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

import golden
from fronts import Front
from trellis import Client

SUM: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is 37 + 48?"}]
STORY: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me a short story."}]


def dot(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other))


def said(completion: ChatCompletion) -> str:
    return completion.choices[0].message.content or ""


def test_a_sum_and_what_it_counts(openai: OpenAI) -> None:
    completion = openai.chat.completions.create(model="tiny", messages=SUM, temperature=0)
    assert said(completion).strip() == "85"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.object == "chat.completion" and completion.model == "tiny"
    usage = completion.usage
    # The prompt is of 17 tokens, as the golden file has them; the answer is of two digits and maybe the end of the turn.
    assert usage is not None and usage.prompt_tokens == 17 and usage.completion_tokens in (2, 3)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_conversation_goes_on(openai: OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": "Answer briefly."},
        *SUM,
        {"role": "assistant", "content": "85"},
        {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]},
    ]
    completion = openai.chat.completions.create(model="tiny", messages=messages, temperature=0)
    assert "Paris" in said(completion)


def test_what_is_said_is_what_a_guest_says_without_http(openai: OpenAI, trellis: Client) -> None:
    completion = openai.chat.completions.create(
        model="tiny", messages=STORY, temperature=0, max_completion_tokens=48
    )
    told = trellis.run("chat", "--max-tokens", "48", "Tell me a short story.").text
    assert said(completion).strip() == told.strip() and completion.choices[0].finish_reason == "length"


def test_a_seed_repeats_and_another_differs(openai: OpenAI) -> None:
    def told(seed: int) -> str:
        answer = openai.chat.completions.create(
            model="tiny", messages=STORY, temperature=1, seed=seed, max_tokens=32
        )
        return said(answer)

    first = told(7)
    assert told(7) == first and any(told(seed) != first for seed in (8, 9, 10))


@pytest.mark.parametrize("temperature", [0, 1])
def test_pieces_of_a_stream_join_to_the_text(openai: OpenAI, temperature: float) -> None:
    whole = openai.chat.completions.create(
        model="tiny", messages=STORY, temperature=temperature, seed=11, max_tokens=40
    )
    stream = openai.chat.completions.create(
        model="tiny",
        messages=STORY,
        temperature=temperature,
        seed=11,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces, reasons, usages = [], [], []
    for chunk in stream:
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert "".join(pieces) == said(whole) and sum(map(bool, pieces)) > 3
    assert reasons == [whole.choices[0].finish_reason] and usages == [whole.usage]


def test_logprobs_are_those_of_another_implementation(openai: OpenAI) -> None:
    completion = openai.chat.completions.create(
        model="tiny", messages=SUM, temperature=0, logprobs=True, top_logprobs=10
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    first = logprobs.content[0]
    expected = golden.top10(golden.chat("What is 37 + 48?"))
    assert [top.logprob for top in first.top_logprobs] == pytest.approx(expected, abs=golden.TOLERANCE)
    assert first.logprob == first.top_logprobs[0].logprob and first.token == first.top_logprobs[0].token
    assert all(token.logprob <= 0 for token in logprobs.content)
    assert "".join(token.token for token in logprobs.content) == said(completion)


def test_completions_continue_a_text(openai: OpenAI) -> None:
    completion = openai.completions.create(
        model="tiny", prompt="Ownership is a set of rules", max_tokens=1, temperature=0, logprobs=5
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None and logprobs.top_logprobs and logprobs.token_logprobs
    expected = golden.top10("<|begin_of_text|>Ownership is a set of rules")[:5]
    tops = sorted(logprobs.top_logprobs[0].values(), reverse=True)
    assert tops[:5] == pytest.approx(expected, abs=golden.TOLERANCE)
    assert logprobs.token_logprobs[0] == pytest.approx(expected[0], abs=golden.TOLERANCE)
    assert completion.usage is not None and completion.usage.completion_tokens == 1


def test_several_prompts_and_choices_stand_in_order(openai: OpenAI) -> None:
    completion = openai.completions.create(
        model="tiny", prompt=["Once upon a time", "The `Vec` type"], n=2, max_tokens=8, seed=3, temperature=1
    )
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in completion.choices]
    assert all(texts) and len(set(texts)) > 2


def test_choices_of_a_chat_are_drawn_apart(openai: OpenAI) -> None:
    completion = openai.chat.completions.create(
        model="tiny", messages=STORY, n=4, temperature=1.2, seed=5, max_tokens=24
    )
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in completion.choices}) > 1


def test_a_stop_ends_the_text_before_it(openai: OpenAI) -> None:
    whole = said(openai.chat.completions.create(model="tiny", messages=STORY, temperature=0, max_tokens=48))
    stop = whole.split()[4]
    completion = openai.chat.completions.create(
        model="tiny", messages=STORY, temperature=0, max_tokens=48, stop=[stop, "never said"]
    )
    assert said(completion) == whole[: whole.index(stop)] and completion.choices[0].finish_reason == "stop"


def test_a_penalty_and_a_bias_change_what_is_drawn(openai: OpenAI) -> None:
    def words(penalty: float) -> Counter[str]:
        completion = openai.chat.completions.create(
            model="tiny", messages=STORY, temperature=0, max_tokens=96, frequency_penalty=penalty
        )
        return Counter(said(completion).split())

    def novelty(penalty: float) -> float:
        counts = words(penalty)
        return len(counts) / counts.total()

    assert novelty(2.0) > novelty(0.0)


def test_many_at_once_are_all_right(front: Front) -> None:
    async def ask(client: AsyncOpenAI, left: int) -> None:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"What is {left} + 31?"}]
        completion = await client.chat.completions.create(model="tiny", messages=messages, temperature=0)
        assert said(completion).strip() == str(left + 31)

    async def main() -> None:
        async with AsyncOpenAI(base_url=f"{front.url}/v1", api_key=front.token) as client:
            await asyncio.gather(*(ask(client, left) for left in range(20, 36)))

    asyncio.run(main())


def test_an_embedding_is_of_length_1_and_near_its_like(openai: OpenAI) -> None:
    texts = ["What is 37 + 48?", "What is 37 + 49?", "Ownership is a set of rules"]
    response = openai.embeddings.create(model="tiny", input=texts)
    assert [data.index for data in response.data] == [0, 1, 2]
    sums, other_sums, rules = (data.embedding for data in response.data)
    assert math.hypot(*sums) == pytest.approx(1, abs=1e-3)
    assert dot(sums, other_sums) > dot(sums, rules)
    # base64, which the package asks for unless told otherwise, and plain numbers are the same.
    plain = openai.embeddings.create(model="tiny", input=texts[0], encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(sums, abs=1e-3)
