"""`build_openai_app` with `TrellisServer`, as the `openai` package finds it. Neither vLLM nor SGLang is installed."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="tests/ray.sh installs it")
pytest.importorskip("httpx", reason="tests/ray.sh installs it")
pytest.importorskip("pyarrow", reason="tests/ray.sh installs it")
pytest.importorskip("openai", reason="tests/ray.sh installs it")

import openai
from conftest import GUESTS, ROOT
from nodes import RESOURCE, Nodes, cluster
from ray import serve

from trellis.ray import NodeLostError
from trellis.ray.llm import ChunksBefore, LLMConfig, TrellisServer, _forms, build_openai_app

QUESTION: Any = {"role": "user", "content": "What is 37 + 48?"}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with cluster() as started:
        yield started


@pytest.fixture(scope="module")
def client(nodes: Nodes) -> openai.OpenAI:
    config = LLMConfig(
        model_loading_config={"model_id": "tiny"},
        engine_kwargs={"timeout": 60.0},
        deployment_config={"ray_actor_options": {"resources": RESOURCE}},
        server_cls=TrellisServer,
    )
    serve.run(build_openai_app({"llm_configs": [config]}), name="openai", route_prefix="/")
    address = f"http://127.0.0.1:{nodes.port}/v1"
    return openai.OpenAI(base_url=address, api_key="none", timeout=120, max_retries=0)


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


def test_streams_go_on_when_the_daemon_of_their_node_is_killed(nodes: Nodes, client: openai.OpenAI) -> None:
    def told(number: int) -> str:
        stream = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"{number}: tell me all that you know"}],
            temperature=1,
            seed=number,
            max_tokens=60,
            stream=True,
        )
        return "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)

    whole = [told(number) for number in range(4)]
    with ThreadPoolExecutor(24) as pool:
        streams = [pool.submit(told, number % 4) for number in range(24)]
        # Some are under way on each node.
        wait(streams, timeout=30, return_when=FIRST_COMPLETED)
        n_left = sum(not stream.done() for stream in streams)
        next(iter(nodes.daemons.values())).kill()
        texts = [stream.result() for stream in streams]
    print(f"{n_left} streams were under way when a daemon was killed")
    assert texts == [whole[number % 4] for number in range(24)]
    # Its replica is alive and is not ready; a call that meets it goes on to the other.
    assert [told(number) for number in range(4)] == whole


def test_the_readmes_example_runs_as_it_stands(nodes: Nodes, client: openai.OpenAI, tmp_path: Path) -> None:
    serve.delete("openai")
    for daemon in nodes.daemons.values():
        daemon.kill()
        daemon.start()
    shutil.copy(GUESTS / "best_of_n.wasm", tmp_path / "best-of-n.wasm")
    readme = (ROOT / "sdk/python/README.md").read_text()
    example = re.findall(r"^```py\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)[0]
    ran = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=180
    )
    assert ran.returncode == 0, ran.stderr
    # The chat's answer and the guest's, and the node.
    assert ran.stdout.count("85") >= 2 and any(node in ran.stdout for node in nodes.daemons), ran.stdout
