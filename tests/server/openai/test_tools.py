"""Function tools over HTTP: in the prompt, forced, streamed, sent back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.server.completions import SHAPES
from tests.server.daemon_process import MODEL, Daemon
from tests.server.weather_tools import CLOCK, PARAMETERS, STRICT, USER, WEATHER, check_call


@pytest.fixture
def client(tool_daemon: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tool_daemon.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **more: Any) -> Any:
    fields = {"model": MODEL, "messages": [USER], "max_tokens": 200, "temperature": 1, "tools": [WEATHER, CLOCK]}
    return client.chat.completions.create(**{**fields, **more})


def test_other_tools_are_left_out(client: openai.OpenAI) -> None:
    """The model sees functions only; the rest is reported."""
    others: Any = [{"type": "web_search"}, {"type": "custom", "custom": {"name": "x"}}, {"type": "a\nb"}]
    asked: Any = {"model": MODEL, "messages": [USER], "max_tokens": 2, "seed": 1}
    plain, more = (
        client.chat.completions.with_raw_response.create(**asked, tools=tools)
        for tools in ([WEATHER], [*others, WEATHER])
    )
    assert more.parse().usage.prompt_tokens == plain.parse().usage.prompt_tokens
    assert more.headers["x-polydraft-ignored-fields"] == "tools.a\\nb, tools.custom, tools.web_search"
    assert "x-polydraft-ignored-fields" not in plain.headers


@pytest.mark.slow
def test_a_tool_without_a_type_is_a_function(client: openai.OpenAI) -> None:
    tool: Any = {"function": WEATHER["function"]}
    for choice in ("required", "any"):  # the latter is Mistral's name
        (call,) = ask(client, tools=[tool], tool_choice=choice, parallel_tool_calls=False).choices[0].message.tool_calls
        assert call.function.name == "weather"


@pytest.mark.slow
def test_a_forced_call_has_no_invented_names(client: openai.OpenAI) -> None:
    """A schema that does not say whether there may be others has the properties that it names."""
    schema = {name: PARAMETERS[name] for name in PARAMETERS if name != "additionalProperties"}
    functions = [{"name": "weather", "parameters": schema}, {"name": "clock"}, {"name": "clock", "parameters": {}}]
    for function in functions:
        tool: Any = {"type": "function", "function": function}
        answer = ask(client, tools=[tool], tool_choice="required", parallel_tool_calls=False, n=4, seed=2)
        for choice in answer.choices:
            assert choice.finish_reason == "tool_calls"
            check_call(choice.message.tool_calls[0].function.name, choice.message.tool_calls[0].function.arguments)


@pytest.mark.sole("forced calls of a daemon")
@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES)
def test_a_forced_call_follows_its_schema_on_every_branch(client: openai.OpenAI, shape: str) -> None:
    """Several choices at temperature 1 by a random model; named: that function, once."""
    answer = ask(client, tool_choice="required", n=4, seed=3, max_tokens=600, extra_body={"speculation": SHAPES[shape]})
    for choice in answer.choices:
        assert choice.message.tool_calls
        for call in choice.message.tool_calls[: None if choice.finish_reason == "tool_calls" else -1]:
            assert re.fullmatch("[a-zA-Z0-9]{9}", call.id), "Mistral's templates take no other id back"
            check_call(call.function.name, call.function.arguments)
    named = {"type": "function", "function": {"name": "weather"}}
    answer = ask(client, tool_choice=named, n=4, seed=5, extra_body={"speculation": SHAPES[shape]})
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        check_call(call.function.name, call.function.arguments)


OPINION = {
    "type": "object",
    "properties": {f"{letter}pinion": {"enum": ["good", "bad"]} for letter in "abcdefghijklmopqrst"},
    "additionalProperties": False,
}
"""With many beginnings, so that a random model writes one of them now and then."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_an_answer_is_calls_or_what_the_schema_says(client: openai.OpenAI, kind: str) -> None:
    """Agents with an output type send both; an answer that must call has calls only."""
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "opinion", "schema": OPINION}}
    if kind == "json_object":
        response_format = {"type": "json_object", "schema": OPINION}
    tools = [CLOCK, {"type": "function", "function": {"name": "city", "parameters": PARAMETERS, "strict": True}}]
    asked: dict[str, Any] = {"tools": tools, "response_format": response_format, "max_tokens": 600, "n": 16, "seed": 4}
    kinds = set()
    for choice in ask(client, **asked).choices:
        kinds.add(choice.finish_reason)
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), OPINION)
            assert not choice.message.tool_calls
        elif choice.finish_reason == "tool_calls":
            assert choice.message.content is None
            assert {call.function.name for call in choice.message.tool_calls} <= {"clock", "city"}
    assert {"stop", "tool_calls"} <= kinds
    for choice in ask(client, **asked, tool_choice="required").choices:
        assert choice.message.content is None
        assert choice.message.tool_calls
    (named,) = ask(client, **{**asked, "n": 1}, tool_choice="none").choices
    jsonschema.validate(json.loads(named.message.content), OPINION)


NESTED = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/Place"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["place", "next"],
    "additionalProperties": False,
    "$defs": {"Place": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_references_within_the_schema_of_a_function_are_followed(client: openai.OpenAI, strict: bool) -> None:
    """`#` is the function's own schema: what nested models of pydantic or zod look like."""
    function = {"name": "route", "parameters": NESTED, "strict": strict}
    answer = ask(client, tools=[{"type": "function", "function": function}, CLOCK], tool_choice="required", n=8, seed=2)
    seen = 0
    for choice in answer.choices:
        for call in choice.message.tool_calls[: None if choice.finish_reason == "tool_calls" else -1]:
            if call.function.name == "route":
                jsonschema.validate(json.loads(call.function.arguments), NESTED)
                seen += 1
    assert seen
    if strict:
        assert ask(client, tools=[{"type": "function", "function": function}], max_tokens=5).choices


def test_arguments_are_an_object_whatever_their_schema_leaves_open(client: openai.OpenAI) -> None:
    """A format that only annotates is no reason to refuse a function."""
    parameters = {"properties": {"path": {"type": "string", "format": "path", "maxLength": 4}}, "required": ["path"]}
    function = {"name": "open", "parameters": {**parameters, "additionalProperties": False}}
    answer = ask(client, tools=[{"type": "function", "function": function}], tool_choice="required", n=4, seed=3)
    for choice in answer.choices:
        for call in choice.message.tool_calls[: None if choice.finish_reason == "tool_calls" else -1]:
            assert json.loads(call.function.arguments).keys() == {"path"}


def test_a_turn_that_was_cut_within_its_thoughts_may_be_sent_back(client: openai.OpenAI) -> None:
    thought: Any = {"role": "assistant", "content": None, "reasoning_content": "Hm."}
    assert ask(client, messages=[USER, thought, USER], max_tokens=2).choices
    with pytest.raises(openai.BadRequestError, match="content, reasoning or tool_calls"):
        ask(client, messages=[USER, {"role": "assistant", "content": None}, USER], max_tokens=2)


def test_one_call_at_most(client: openai.OpenAI) -> None:
    answer = ask(client, tool_choice="required", parallel_tool_calls=False, n=8, seed=1)
    assert [len(choice.message.tool_calls) for choice in answer.choices] == [1] * 8
    assert {choice.finish_reason for choice in answer.choices} == {"tool_calls"}


@pytest.mark.slow
def test_a_stream_has_the_same_calls_in_pieces(client: openai.OpenAI) -> None:
    whole = ask(client, tool_choice="required", seed=11).choices[0]
    calls: list[dict[str, str]] = []
    reasons, num_pieces = [], 0
    for chunk in ask(client, tool_choice="required", seed=11, stream=True):
        (choice,) = chunk.choices
        reasons.append(choice.finish_reason)
        for piece in choice.delta.tool_calls or []:
            num_pieces += 1
            if piece.id is not None:
                assert piece.index == len(calls)
                calls.append({"name": piece.function.name, "arguments": ""})
            calls[piece.index]["arguments"] += piece.function.arguments
    assert calls == [
        {"name": call.function.name, "arguments": call.function.arguments} for call in whole.message.tool_calls
    ]
    assert num_pieces > len(calls), "no arguments came by themselves"
    assert reasons[-1] == whole.finish_reason


def test_a_conversation_goes_on_after_a_call(client: openai.OpenAI) -> None:
    """The prompt contains the call and its result; the official client's objects are accepted."""
    message = ask(client, tool_choice="required", parallel_tool_calls=False, seed=2).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18 C"}
    answer = ask(client, messages=[USER, message, result], tool_choice="none", max_tokens=5)
    longer = ask(client, messages=[USER, message, {**result, "content": "18 C " * 9}], tool_choice="none", max_tokens=5)
    assert answer.choices[0].message.tool_calls is None
    assert longer.usage.prompt_tokens > answer.usage.prompt_tokens + 8
    told = ask(client, messages=[USER], max_tokens=5).usage.prompt_tokens
    untold = ask(client, messages=[USER], tool_choice="none", max_tokens=5).usage.prompt_tokens
    assert told > untold + 20, "tools are not in the prompt"


@pytest.mark.slow
def test_strict_tools_bind_a_free_answer(
    client: openai.OpenAI, tool_daemon: Daemon, request: pytest.FixtureRequest
) -> None:
    """Text or calls, but a call is a right one; the bias makes the model begin some."""
    with tool_daemon.client() as http:
        bodies = [{"prompt": text, "add_special_tokens": False} for text in "{<"]
        tokens = [http.post("/tokenize", json=body).json()["tokens"] for body in bodies]
    bias = {str(token): 30 for (token,) in tokens}
    answer = ask(client, tools=[STRICT, CLOCK], n=8, seed=1, max_tokens=300, logit_bias=bias)
    for choice in answer.choices:
        for call in choice.message.tool_calls or []:
            if choice.finish_reason == "tool_calls":
                check_call(call.function.name, call.function.arguments)
    if "llama3" in request.node.name:
        assert any(choice.message.tool_calls for choice in answer.choices), "nothing was called: nothing is shown"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": 3}]}, "tools.0.type"),
        ({"tools": [WEATHER, {"type": "retrieval"}], "tool_choice": {"type": "retrieval"}}, "tool_choice"),
        ({"tools": [{"type": "retrieval"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "nothing"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"response_format": {"type": "json_object", "scheme": {}}}, "response_format.scheme"),
        ({"tool_choice": {"type": "function", "function": {"name": "clock", "odd": 1}}}, "tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[1]"}}]},
                ]
            },
            "messages",
        ),
    ],
)
def test_tools_that_cannot_be_called_are_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    assert (caught.value.param or "").startswith(param), caught.value


@pytest.mark.slow
def test_the_demonstration_pairs_template_takes_tools(openai_client: openai.OpenAI) -> None:
    """Calls are forced in it, and calls and their results go back into it."""
    answer = ask(openai_client, tool_choice="required", max_tokens=600, seed=3, parallel_tool_calls=False)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    check_call(call.function.name, call.function.arguments)
    told = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
    again = ask(openai_client, messages=[USER, message.model_dump(exclude_none=True), told])
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens


@pytest.mark.sampled
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_tools_may_be_allowed(client: openai.OpenAI, mode: str) -> None:
    """The prompt contains these tools alone, and the model calls no other."""
    only_clock = {"mode": mode, "tools": [{"type": "function", "function": {"name": "clock"}}]}
    answer = ask(client, tool_choice={"type": "allowed_tools", "allowed_tools": only_clock}, n=3, seed=1)
    alone = ask(client, tools=[CLOCK], max_tokens=1)
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens
    if mode == "required":
        assert {call.function.name for one in answer.choices for call in one.message.tool_calls} == {"clock"}
    only_clock["tools"] = [{"type": "function", "function": {"name": "cook"}}]
    with pytest.raises(openai.BadRequestError, match="no function 'cook'"):
        ask(client, tool_choice={"type": "allowed_tools", "allowed_tools": only_clock})


def test_null_keywords_of_a_schema_are_taken_as_absent(client: openai.OpenAI) -> None:
    nulls = {"required": None, "enum": None, "items": None}
    parameters = {**nulls, "type": None, "properties": {"n": {"type": "integer", "maximum": 9, **nulls}}}
    tool = {"type": "function", "function": {"name": "count", "parameters": parameters, "strict": True}}
    choice = {"type": "function", "function": {"name": "count"}}
    (call,) = ask(client, tools=[tool], tool_choice=choice).choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) <= {"n"}
