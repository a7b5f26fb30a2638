"""JSON schemas of answers and of tools: what comes back validates."""

from __future__ import annotations

import json

import jsonschema
import pydantic
import pytest
from openai import OpenAI, pydantic_function_tool
from openai.types.chat import (
    ChatCompletionMessageParam,
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionToolUnionParam,
)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "job": {"enum": ["pilot", "baker", "nurse"]},
    },
    "required": ["name", "age", "job"],
    "additionalProperties": False,
}
ADA: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "Give me JSON: Ada, a pilot from Oslo, is 36."}
]
CALCULATE: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "Use the calculator tool to work out 12 * 7."}
]


class Calculator(pydantic.BaseModel):
    """Works out an expression."""

    left: int = pydantic.Field(ge=0, le=999)
    operator: str = pydantic.Field(pattern="^[-+*]$")
    right: int = pydantic.Field(ge=0, le=999)


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: str = pydantic.Field(pattern="^[A-Z][a-z]{2,12}$")


def test_an_answer_is_of_the_schema_and_says_what_was_asked(openai: OpenAI) -> None:
    completion = openai.chat.completions.create(
        model="tiny",
        messages=ADA,
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": PERSON, "strict": True},
        },
    )
    person = json.loads(completion.choices[0].message.content or "")
    jsonschema.validate(person, PERSON)
    assert completion.choices[0].finish_reason == "stop"
    assert person == {"name": "Ada", "age": 36, "job": "pilot"}


@pytest.mark.parametrize("seed", range(4))
def test_what_is_drawn_is_of_the_schema_too(openai: OpenAI, seed: int) -> None:
    completion = openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Tell me a short story."}],
        temperature=1.5,
        seed=seed,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
    )
    jsonschema.validate(json.loads(completion.choices[0].message.content or ""), PERSON)


def test_an_answer_is_an_object(openai: OpenAI) -> None:
    completion = openai.chat.completions.create(
        model="tiny", messages=ADA, temperature=0, response_format={"type": "json_object"}
    )
    assert json.loads(completion.choices[0].message.content or "")["name"] == "Ada"


def test_a_tool_that_is_named_is_called(openai: OpenAI) -> None:
    chosen: ChatCompletionNamedToolChoiceParam = {"type": "function", "function": {"name": "Calculator"}}
    completion = openai.chat.completions.parse(
        model="tiny",
        messages=CALCULATE,
        temperature=0,
        tools=[pydantic_function_tool(Weather), pydantic_function_tool(Calculator)],
        tool_choice=chosen,
    )
    (call,) = completion.choices[0].message.tool_calls or []
    assert call.function.name == "Calculator" and isinstance(call.function.parsed_arguments, Calculator)
    schema = pydantic_function_tool(Calculator)["function"]["parameters"]
    jsonschema.validate(json.loads(call.function.arguments), schema)


TOOLS: dict[str, type[pydantic.BaseModel]] = {"Weather": Weather, "Calculator": Calculator}


def test_some_tool_is_called_where_one_is_required(openai: OpenAI) -> None:
    tools: list[ChatCompletionToolUnionParam] = [
        pydantic_function_tool(Weather),
        pydantic_function_tool(Calculator),
    ]
    completion = openai.chat.completions.create(
        model="tiny", messages=CALCULATE, temperature=0, tools=tools, tool_choice="required"
    )
    (choice,) = completion.choices
    calls = choice.message.tool_calls or []
    assert calls and choice.finish_reason == "tool_calls"
    for call in calls:
        assert call.type == "function"
        TOOLS[call.function.name].model_validate_json(call.function.arguments)
    assert len({call.id for call in calls}) == len(calls)


def test_a_call_comes_in_pieces_and_its_result_goes_back(openai: OpenAI) -> None:
    with openai.chat.completions.stream(
        model="tiny",
        messages=CALCULATE,
        temperature=0,
        tools=[pydantic_function_tool(Calculator)],
        tool_choice="required",
    ) as stream:
        pieces = [
            event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"
        ]
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls or []
    assert "".join(pieces) == call.function.arguments
    answer = openai.chat.completions.create(
        model="tiny",
        messages=[
            *CALCULATE,
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.function.name, "arguments": call.function.arguments},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": call.id, "content": "84"},
        ],
        temperature=0,
        tools=[pydantic_function_tool(Calculator)],
        tool_choice="none",
    )
    assert "84" in (answer.choices[0].message.content or "") and not answer.choices[0].message.tool_calls
