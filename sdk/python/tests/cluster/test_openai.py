"""`build_openai_app` with `TrellisServer`, as the `openai` package finds it. Neither vLLM nor SGLang is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="tests/ray.sh installs it")
pytest.importorskip("httpx", reason="tests/ray.sh installs it")
pytest.importorskip("pyarrow", reason="tests/ray.sh installs it")
pytest.importorskip("openai", reason="tests/ray.sh installs it")

import openai
from nodes import RESOURCE, cluster
from ray import serve

from trellis.ray import NodeLostError
from trellis.ray.llm import ChunksBefore, LLMConfig, TrellisServer, _forms, build_openai_app

QUESTION: Any = {"role": "user", "content": "What is 37 + 48?"}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with cluster() as nodes:
        config = LLMConfig(
            model_loading_config={"model_id": "tiny"},
            engine_kwargs={"timeout": 60.0},
            deployment_config={"ray_actor_options": {"resources": RESOURCE}},
            server_cls=TrellisServer,
        )
        serve.run(build_openai_app({"llm_configs": [config]}), name="openai", route_prefix="/")
        address = f"http://127.0.0.1:{nodes.port}/v1"
        yield openai.OpenAI(base_url=address, api_key="none", timeout=120, max_retries=0)


def test_no_other_engine_is_there() -> None:
    assert importlib.util.find_spec("vllm") is None and importlib.util.find_spec("sglang") is None


def test_chats_are_answered_whole_and_in_pieces(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    whole = client.chat.completions.create(model="tiny", messages=[QUESTION], temperature=0, max_tokens=16)
    assert whole.choices[0].message.content == "85" and whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None and whole.usage.completion_tokens > 0 and whole.usage.prompt_tokens > 10
    stream = client.chat.completions.create(
        model="tiny",
        messages=[QUESTION],
        temperature=0,
        max_completion_tokens=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == "8" and len({chunk.id for chunk in chunks}) == 1
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 1


def test_a_seed_gives_the_same_again(client: openai.OpenAI) -> None:
    def drawn(seed: int) -> Any:
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Tell me"}],
            temperature=1,
            seed=seed,
            max_tokens=20,
        )
        return answer.choices[0].message.content

    assert drawn(5) == drawn(5)
    assert len({drawn(seed) for seed in range(4)}) > 1


def test_a_session_goes_on_where_its_context_is(client: openai.OpenAI) -> None:
    for number in range(6):
        ask = {"role": "user", "content": f"{number} is what this one begins with"}
        messages: list[Any] = [ask]
        n_before = 0
        for _ in range(3):
            answer = client.chat.completions.create(
                model="tiny",
                messages=messages,
                temperature=0,
                max_tokens=24,
                extra_headers={"x-session-id": f"openai {number}"},
            )
            usage = answer.usage
            assert usage is not None and usage.prompt_tokens_details is not None
            assert (usage.prompt_tokens_details.cached_tokens or 0) >= n_before
            n_before = usage.prompt_tokens
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}, ask]


def test_what_is_not_there_is_an_error_and_not_passed_over(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="'n' is not supported"):
        client.chat.completions.create(model="tiny", messages=[QUESTION], n=2)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="huge", messages=[QUESTION])
    with pytest.raises(openai.InternalServerError, match="no embeddings") as raised:
        client.embeddings.create(model="tiny", input="Hello")
    assert raised.value.status_code == 501


def test_a_stream_that_is_gone_on_with_keeps_its_id_and_its_one_beginning() -> None:
    def chunk(identity: str, delta: dict[str, str], reason: Any = None) -> Any:
        choices = [{"index": 0, "delta": delta, "finish_reason": reason}]
        return _forms.ChatCompletionStreamResponse(id=identity, created=1, model="tiny", choices=choices)

    before = ChunksBefore()
    before.begin()
    assert before.pass_on(chunk("a", {"role": "assistant", "content": "8"})).id == "a"
    before.begin()
    assert before.pass_on(chunk("b", {"role": "assistant", "content": "8"})) is None
    gone_on = before.pass_on(chunk("b", {"content": "5"}))
    assert gone_on.id == "a" and gone_on.choices[0]["delta"] == {"content": "5"}
    assert before.pass_on(chunk("b", {}, "stop")).choices[0]["finish_reason"] == "stop"
    before.begin()
    with pytest.raises(NodeLostError):
        before.pass_on(chunk("c", {"content": "9"}))
