"""`/v1/responses` with the official client: a chat's answers, items, events, tools."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from engine.api import Request
from server.openai.response_tools import chat_tools, names_of
from server.openai.responses import Record, ResponsesRequest, ResponseWriter, as_chat
from server.serving.choice import CallPiece
from server.serving.generation import Delta
from tests.server.completions import SHAPES
from tests.server.daemon_process import MODEL, Daemon
from tests.server.weather_tools import PARAMETERS, check_call

FUNCTION = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
CALL: dict[str, Any] = {"model": MODEL, "input": "A short story, please.", "max_output_tokens": 20}


@pytest.fixture
def tool_client(tool_daemon: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tool_daemon.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES)
def test_responses_equal_chat_answers(openai_client: openai.OpenAI, shape: str) -> None:
    """Instructions are the system's message; sampling and speculation are the same."""
    more = {"seed": 5, "ignore_eos": True, "speculation": SHAPES[shape]}
    answer = openai_client.responses.create(
        model=MODEL,
        instructions="Be brief.",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "A story"}]}],
        max_output_tokens=20,
        temperature=0.7,
        extra_body=more,
    )
    chat = openai_client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A story"}],
        max_tokens=20,
        temperature=0.7,
        extra_body=more,
    )
    assert answer.output_text == chat.choices[0].message.content
    assert answer.status == "incomplete"
    assert {item.status for item in answer.output} == {"incomplete"}
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert chat.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat.usage.prompt_tokens, 20)
    assert answer.temperature == 0.7
    counted = answer.model_dump()["metrics"]["speculative_decoding"]
    assert (counted is None) == (shape == "off")


def test_a_user_is_there_if_the_request_names_one(openai_client: openai.OpenAI) -> None:
    """OpenAI's schema has a text there, and no null."""
    assert "user" not in openai_client.responses.create(**CALL).model_fields_set
    assert openai_client.responses.create(**CALL, user="someone").user == "someone"


def test_a_response_repeats_what_the_request_said(tool_client: openai.OpenAI) -> None:
    """Omitted values are those that were used."""
    names = "presence_penalty frequency_penalty reasoning max_tool_calls safety_identifier prompt_cache_key tools"

    def repeated(**more: Any) -> dict[str, Any]:
        answer = tool_client.responses.create(**CALL, **more).model_dump()
        assert (answer["background"], answer["service_tier"], answer["top_logprobs"]) == (False, "default", 0)
        assert (answer["completed_at"] is None) == (answer["status"] != "completed")
        return {name: answer[name] for name in names.split()}

    tool = {name: value for name, value in FUNCTION.items() if name != "strict"}
    said: Any = {
        "extra_body": {"presence_penalty": 0.5, "frequency_penalty": -0.25}, "max_tool_calls": 3,
        "reasoning": {"effort": "low", "summary": "auto"}, "safety_identifier": "x", "prompt_cache_key": "y",
        "tools": [FUNCTION, {**tool, "name": "other"}],
    }  # fmt: skip
    found = repeated(**said)
    assert {"effort": "low", "summary": "auto"}.items() <= found["reasoning"].items()
    assert [(one["strict"], one["description"]) for one in found["tools"]] == [(True, None), (False, None)]
    assert (found["presence_penalty"], found["frequency_penalty"], found["max_tool_calls"]) == (0.5, -0.25, 3)
    assert (found["safety_identifier"], found["prompt_cache_key"]) == ("x", "y")
    plain = repeated()
    assert (plain["presence_penalty"], plain["max_tool_calls"], plain["safety_identifier"]) == (0, None, None)


def test_stream_has_an_event_for_every_step(openai_client: openai.OpenAI) -> None:
    """Numbered events that open and close the same item, and end with the whole response."""
    wish = {**CALL, "temperature": 0}
    whole = openai_client.responses.create(**wish)
    events = list(openai_client.responses.create(**wish, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


def test_the_clients_own_stream_helper_follows(openai_client: openai.OpenAI) -> None:
    """It checks every event against what it has built up."""
    choice = {"structured_outputs": {"choice": ["yes", "no"]}}
    with openai_client.responses.stream(**CALL, temperature=1, extra_body=choice) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text in ("yes", "no")


def test_some_functions_may_be_allowed(tool_client: openai.OpenAI) -> None:
    """The prompt contains these tools alone, and the model calls no other."""
    clock = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}, "strict": True}
    wish = {**CALL, "tools": [FUNCTION, clock], "max_output_tokens": 200, "temperature": 1}

    def ask(name: str) -> Any:
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": name}]}
        return tool_client.responses.create(**wish, tool_choice=allowed, parallel_tool_calls=False)

    assert {call.name for call in ask("clock").output} == {"clock"}
    with pytest.raises(openai.BadRequestError, match="no function 'cook'"):
        ask("cook")


def test_call_and_result_round_trip(tool_client: openai.OpenAI) -> None:
    """Function calls as items; the client sends its own objects back with the result."""
    wish = {**CALL, "tools": [FUNCTION], "max_output_tokens": 200, "temperature": 1}
    answer = tool_client.responses.create(**wish, tool_choice={"type": "function", "name": "weather"})
    (call,) = answer.output
    assert (call.type, answer.status) == ("function_call", "completed")
    check_call(call.name, call.arguments)
    back = [
        {"role": "user", "content": CALL["input"]},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "18 C"},
    ]
    after = tool_client.responses.create(**{**wish, "input": back, "max_output_tokens": 5}, tool_choice="none")
    before = tool_client.responses.create(**{**wish, "input": back[:1], "max_output_tokens": 5}, tool_choice="none")
    assert after.usage.input_tokens > before.usage.input_tokens + 10


def test_a_streamed_call_has_its_arguments_in_pieces(tool_client: openai.OpenAI) -> None:
    wish = {**CALL, "tools": [FUNCTION], "max_output_tokens": 200, "temperature": 1, "extra_body": {"seed": 3}}
    whole = tool_client.responses.create(**wish, tool_choice="required", parallel_tool_calls=False)
    events = list(tool_client.responses.create(**wish, tool_choice="required", parallel_tool_calls=False, stream=True))
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert len(pieces) > 1
    assert "".join(pieces) == done.arguments == whole.output[0].arguments
    assert events[-1].type == "response.completed"


class Thing(pydantic.BaseModel):
    """Model of a parsed structured answer."""

    name: str = pydantic.Field(pattern="^[a-z]{2,6}$")
    count: int = pydantic.Field(ge=0, le=9)


def test_a_structured_answer_is_parsed(openai_client: openai.OpenAI) -> None:
    answer = openai_client.responses.parse(**{**CALL, "max_output_tokens": 200}, text_format=Thing, temperature=1)
    assert isinstance(answer.output_parsed, Thing)
    assert set(json.loads(answer.output_text)) == {"name", "count"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"include": ["message.output_text.logprobs"]}, "include.0"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "namespace", "name": "x"}]}, "tools"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input"),
        ({"input": []}, "input"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"volume": "high"}}, "text.volume"),
        ({"extra_body": {"max_tokens": 5}}, "max_tokens"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
    ],
)
def test_unserved_fields_are_refused_by_name(openai_client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.responses.create(**{**CALL, **fields})
    assert caught.value.param == param, caught.value


def test_bodies_of_codex_are_accepted(tool_client: openai.OpenAI) -> None:
    """A wish for a summary, tools that are no functions, and what it asks to be included."""
    asked: Any = {
        "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"], "store": False,
        "tools": [{"type": "web_search", "external_web_access": False}, FUNCTION], "parallel_tool_calls": True,
        "extra_body": {"client_metadata": {"x": "y"}}, "tool_choice": "auto",
    }  # fmt: skip
    answer = tool_client.responses.with_raw_response.create(**CALL, **asked)
    assert answer.headers["x-polydraft-ignored-fields"] == "tools.web_search"
    assert answer.parse().status in ("completed", "incomplete")


SPACES = [
    {"type": "namespace", "name": "files", "description": "On disk.", "tools": [{**FUNCTION, "name": "read"}]},
    {"type": "namespace", "name": "mail", "tools": [{**FUNCTION, "name": "read"}, {**FUNCTION, "name": "send"}]},
    {"type": "namespace", "name": "odd", "tools": [{"type": "web_search"}]},
]


def test_functions_of_namespaces_have_names_of_their_own() -> None:
    """The same name in two of them stands behind its namespace; items of calls have both again."""
    names = names_of([*SPACES, FUNCTION])
    tools = chat_tools([*SPACES, FUNCTION], names)
    offered = [tool["function"]["name"] for tool in tools if tool["type"] == "function"]
    assert offered == ["files__read", "mail__read", "send", "weather"]
    assert tools[0]["function"]["description"] == "[files: On disk.]"
    assert "description" not in tools[1]["function"]
    assert {"type": "web_search"} in tools
    assert [names.called(name) for name in offered] == [
        {"name": "read", "namespace": "files"},
        {"name": "read", "namespace": "mail"},
        {"name": "send", "namespace": "mail"},
        {"name": "weather"},
    ]
    assert [names.offered("mail", "read"), names.offered(None, "weather")] == ["mail__read", "weather"]


@pytest.mark.slow
def test_a_function_of_a_namespace_is_called_and_its_result_sent_back(tool_client: openai.OpenAI) -> None:
    """Choosing it by its two names, which the item of the call has, and the history."""
    choice: Any = {"type": "function", "namespace": "mail", "name": "read"}
    asked: Any = {"model": MODEL, "tools": SPACES[:2], "max_output_tokens": 200, "temperature": 1}
    answer = tool_client.responses.create(**asked, input="What is new?", tool_choice=choice)
    called: Any = answer.output[0]
    assert (called.type, called.name, called.namespace) == ("function_call", "read", "mail")
    check_call("weather", called.arguments)
    call = called.model_dump()
    result = {
        "type": "function_call_output",
        "call_id": call["call_id"],
        "output": [{"type": "input_text", "text": "x"}],
    }
    history: Any = [{"role": "user", "content": "What is new?"}, call, result]
    again = tool_client.responses.create(**asked, input=history)
    assert again.usage is not None
    assert answer.usage is not None
    assert again.usage.input_tokens > answer.usage.input_tokens
    body = ResponsesRequest.model_validate({"model": MODEL, "input": history, "tools": SPACES})
    made = as_chat(body).messages[1].tool_calls
    assert made is not None
    assert made[0].function.name == "mail__read"


def test_a_socket_is_refused_with_the_status_that_codex_knows(daemon: Daemon) -> None:
    """It then sends POST requests at once, instead of trying again for seven seconds."""
    upgrade = {
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "eA==",
    }
    with daemon.client() as http:
        refused, plain = (http.get("/v1/responses", headers=headers) for headers in (upgrade, {}))
    assert (refused.status_code, plain.status_code) == (426, 405)
    assert refused.json()["error"]["code"] == "sockets_not_supported"


def test_text_right_behind_a_call_is_an_item_of_its_own() -> None:
    """A step of several tokens may end a call and go on with text."""

    class Generated:
        choices = (types.SimpleNamespace(finish_reason="stop", request=Request(request_id="x", prompt_token_ids=(1,))),)

    body = ResponsesRequest.model_validate({"model": "m", "input": "x"})
    writer = ResponseWriter(Record(), body, Generated(), with_metrics=False)  # type: ignore[arg-type]
    writer.take(Delta(0, ["Well: ", CallPiece(0, "call_1", "f", '{"a":1')], None))
    events = writer.take(Delta(0, [CallPiece(0, None, None, "}"), " Hello"], None))
    assert [item["type"] for item in writer.output] == ["message", "function_call", "message"]
    assert writer.output[1]["arguments"] == '{"a":1}'
    assert [event["output_index"] for event in events] == [1, 1, 1, 2, 2, 2]


def test_each_text_after_a_thought_is_said() -> None:
    """The first text belongs to the message of the thought."""
    texts = [{"role": "assistant", "content": text} for text in ("one", "two")]
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "so"}]}
    chat = as_chat(ResponsesRequest(input=[{"role": "user", "content": "go"}, thought, *texts]))
    said = [(message.content, message.reasoning_content) for message in chat.messages]
    assert said == [("go", None), ("one", "so"), ("two", None)]
