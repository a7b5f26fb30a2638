"""Documented examples of the `openai` package run unchanged: the environment has the address."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from openai.types import CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ParsedChatCompletion
from openai.types.responses import Response

from examples import Ran, run_whole

pytestmark = pytest.mark.usefixtures("environment")

DOCUMENTED = Path(__file__).with_name("documented")


def ran(name: str) -> Ran:
    return run_whole(DOCUMENTED / f"{name}.py")


def test_responses_of_the_readme() -> None:
    printed, names = ran("readme_responses")
    response: Response = names["response"]
    assert response.status in ("completed", "incomplete") and response.output_text
    assert printed == response.output_text + "\n"
    usage = response.usage
    assert usage is not None and usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_chat_completions_of_the_readme() -> None:
    printed, names = ran("readme_chat")
    completion: ChatCompletion = names["completion"]
    assert printed == f"{completion.choices[0].message.content}\n" and completion.model == "tiny"
    usage = completion.usage
    assert usage is not None and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_the_asynchronous_client_of_the_readme() -> None:
    assert ran("readme_async").printed.strip()


def test_demo() -> None:
    printed, names = ran("demo")
    _, standard, _, streamed, _, raw = printed.split("-----")[1:]
    assert standard.strip() and streamed.strip()
    identity, answer = raw.lstrip("\n").split("\n", 1)
    assert identity == names["response"].request_id and answer.strip()


def test_async_demo() -> None:
    assert ran("async_demo").printed.strip()


def test_completions_as_a_stream() -> None:
    printed = ran("completions").printed
    # What is printed are JSON objects one after the other; greedy, so that both clients are told the same.
    decoder, objects, rest = json.JSONDecoder(), [], printed.replace("got response data: ", "").strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        objects.append(value)
        rest = rest[end:].lstrip()
    texts = [
        "".join(one["choices"][0]["text"] for one in objects if one["id"] == identity)
        for identity in ids(objects)
    ]
    assert len(texts) == 2 and texts[0] == texts[1] != ""


def ids(objects: list[dict[str, str]]) -> list[str]:
    return list(dict.fromkeys(one["id"] for one in objects))


def test_a_schema_as_a_stream() -> None:
    printed, names = ran("parsing_stream")
    completion: ParsedChatCompletion[object] = names["stream"].get_final_completion()
    parsed = completion.choices[0].message.parsed
    assert isinstance(parsed, names["MathResponse"])
    assert f"answer: {parsed.final_answer}" in printed


def test_a_tool_as_a_stream() -> None:
    printed, names = ran("parsing_tools_stream")
    message = names["stream"].get_final_completion().choices[0].message
    calls = message.tool_calls or []
    assert message.content or calls
    for call in calls:
        assert isinstance(call.function.parsed_arguments, names["GetWeather"])
        assert call.function.arguments in printed


def test_responses_with_a_schema() -> None:
    printed, names = ran("responses_structured_outputs")
    (output,) = names["rsp"].output
    assert isinstance(output.content[0].parsed, names["MathResponse"])
    assert printed.count("answer: ") == 2


def test_logprobs_of_the_reference() -> None:
    completion: ChatCompletion = ran("reference_logprobs").names["completion"]
    (choice,) = completion.choices
    assert choice.logprobs is not None and choice.logprobs.content
    for token in choice.logprobs.content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 2
        assert 0 >= token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
    spelled = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content)
    assert spelled.decode(errors="replace").strip() == (choice.message.content or "").strip()


def test_functions_of_the_reference() -> None:
    completion: ChatCompletion = ran("reference_functions").names["completion"]
    (choice,) = completion.choices
    calls = choice.message.tool_calls or []
    assert (choice.finish_reason == "tool_calls") == bool(calls)
    assert choice.message.content or calls


def test_embeddings_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    from openai.resources import Embeddings

    made: list[CreateEmbeddingResponse] = []
    create = Embeddings.create

    def noted(*args: object, **named: object) -> CreateEmbeddingResponse:
        made.append(create(*args, **named))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(Embeddings, "create", noted)
    ran("reference_embeddings")
    (response,) = made
    (embedding,) = response.data
    assert response.usage.total_tokens == response.usage.prompt_tokens > 5
    assert sum(value * value for value in embedding.embedding) == pytest.approx(1, abs=1e-3)


def test_models_of_the_reference() -> None:
    names = ran("reference_models").names
    assert "tiny" in [model.id for model in names["client"].models.list()]
    model: Model = ran("reference_model").names["client"].models.retrieve("tiny")
    assert (model.id, model.object) == ("tiny", "model")


def test_nested_parameters_of_the_readme() -> None:
    response: Response = ran("readme_nested_params").names["response"]
    assert response.status == "incomplete" or isinstance(json.loads(response.output_text), dict)


def test_retries_of_the_readme() -> None:
    assert ran("readme_retries").names["client"].max_retries == 0
