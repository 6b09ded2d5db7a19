"""Answers with a form: JSON by schema, and calls of tools, from a real model through the openai client."""
import datetime
import json
import typing

import openai
import pydantic
import pytest

MODEL = "any"
TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20},
                                                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
                   "required": ["city", "unit"], "additionalProperties": False}}},
    {"type": "function", "function": {
        "name": "get_time", "description": "The time of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"],
                                               "additionalProperties": False}}}]
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]


def ask(client, **more):
    return client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=200, **more)


@pytest.mark.parametrize("seed", range(4))
def test_json_object(client, seed):
    r = ask(client, seed=seed, response_format={"type": "json_object"})
    if r.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(r.choices[0].message.content), dict)
    else:
        assert r.choices[0].message.content.lstrip().startswith("{")


class Pet(pydantic.BaseModel):
    name: typing.Annotated[str, pydantic.Field(max_length=12)]
    kind: typing.Literal["cat", "dog", "fish"]
    legs: typing.Annotated[int, pydantic.Field(ge=0, le=4)]
    born: datetime.date
    parent: typing.Optional["Pet"]


@pytest.mark.parametrize("seed", range(4))
def test_a_schema_is_kept_whatever_is_drawn(client, seed):
    """temperature 2 with a small model draws nearly anything; what comes out must be a Pet all the same."""
    r = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "A pet?"}], seed=seed, temperature=2, max_tokens=400,
        response_format={"type": "json_schema", "json_schema": {"name": "pet", "strict": True, "schema": Pet.model_json_schema()}})
    if r.choices[0].finish_reason == "stop":
        pet = Pet.model_validate_json(r.choices[0].message.content)
        assert pet.legs <= 4
    else:
        assert r.choices[0].message.content.startswith("{")


def test_openai_parse_gives_an_object(client):
    class Answer(pydantic.BaseModel):
        yes: bool
        color: typing.Literal["red", "blue"]
    r = client.chat.completions.parse(model=MODEL, messages=ASK, temperature=0, max_tokens=60, response_format=Answer)
    assert r.choices[0].message.parsed.color in ("red", "blue")
    assert r.choices[0].finish_reason == "stop"


def test_a_streamed_schema_is_the_same(client):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 10, "maximum": 99}}, "required": ["n"], "additionalProperties": False}
    text = "".join(c.choices[0].delta.content or "" for c in ask(
        client, stream=True, temperature=0, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}))
    assert 10 <= json.loads(text)["n"] <= 99


def test_a_schema_that_cannot_be_enforced_is_refused_with_its_place(client):
    with pytest.raises(openai.BadRequestError) as e:
        ask(client, response_format={"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"type": "object", "properties": {"a": {"not": {}}}}}})
    assert "schema.properties.a.not" in e.value.message and e.value.param == "response_format.json_schema.schema"


def test_logprobs_beside_a_grammar_are_the_models(client):
    r = ask(client, temperature=0, logprobs=True, top_logprobs=1, response_format={"type": "json_object"})
    first = r.choices[0].logprobs.content[0]
    assert first.token.lstrip().startswith("{")
    assert first.top_logprobs[0].logprob >= first.logprob


@pytest.mark.quirk(5)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("seed", range(2))
def test_a_call_that_must_come_comes(client, choice, seed):
    r = ask(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, seed=seed)
    message = r.choices[0].message
    assert r.choices[0].finish_reason == "tool_calls" and message.content is None
    assert len(message.tool_calls) == 1
    call = message.tool_calls[0].function
    arguments = json.loads(call.arguments)
    assert call.name in ("get_weather", "get_time")
    if call.name == "get_weather":
        assert set(arguments) == {"city", "unit"} and arguments["unit"] in ("celsius", "fahrenheit")
    if choice != "required":
        assert call.name == "get_weather"
    # The conversation goes on with its result.
    r = client.chat.completions.create(model=MODEL, max_tokens=10, tools=TOOLS, messages=[
        *ASK, message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18 degrees"}])
    assert r.choices[0].finish_reason in ("length", "stop", "tool_calls")


@pytest.mark.quirk(5)
def test_a_streamed_call_is_the_same_as_a_whole_one(client):
    more = dict(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, temperature=0)
    whole = ask(client, **more).choices[0].message.tool_calls[0].function
    name, arguments, reasons = None, "", []
    for chunk in ask(client, stream=True, **more):
        choice = chunk.choices[0]
        reasons.append(choice.finish_reason)
        for delta in choice.delta.tool_calls or []:
            assert delta.index == 0
            name = name or delta.function.name
            arguments += delta.function.arguments or ""
    assert (name, arguments) == (whole.name, whole.arguments)
    assert reasons[-1] == "tool_calls" and not any(reasons[:-1])


def test_the_openai_stream_helper_puts_a_call_together(client):
    with client.chat.completions.stream(model=MODEL, messages=ASK, max_tokens=200, tools=TOOLS, temperature=0,
                                        tool_choice={"type": "function", "function": {"name": "get_weather"}}) as stream:
        final = stream.get_final_completion()
    assert json.loads(final.choices[0].message.tool_calls[0].function.arguments)["unit"] in ("celsius", "fahrenheit")
