"""`/v1/messages` with Anthropic's own client: text, streams, tools, thinking, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.server.conftest import KEYS
from tests.server.daemon_process import MODEL, Daemon
from tests.server.weather_tools import PARAMETERS

USER = {"role": "user", "content": "What is the weather in Paris?"}
SEEDED = {"seed": 5, "temperature": 1}
WEATHER = {"name": "weather", "description": "Now.", "input_schema": PARAMETERS}


@pytest.fixture
def client(tool_daemon: Daemon) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tool_daemon.url, api_key="unused", max_retries=0) as client:
        yield client


def ask(client: anthropic.Anthropic, **more: Any) -> Any:
    fields: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 20}
    return client.messages.create(**fields | more)


def test_an_answer_has_blocks_usage_and_a_reason(client: anthropic.Anthropic) -> None:
    message = ask(client, system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
    assert message.id.startswith("msg_")
    assert (message.role, message.model) == ("assistant", MODEL)
    assert message.stop_reason in ("max_tokens", "end_turn")
    assert [block.type for block in message.content] == ["text"]
    assert message.usage.output_tokens <= 20
    counted = client.messages.count_tokens(model=MODEL, messages=[USER], system="Be brief.")  # type: ignore[list-item]
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_an_answer_goes_on_with_how_the_last_turn_begins(client: anthropic.Anthropic, tool_daemon: Daemon) -> None:
    """As a chat's `continue_final_message`."""
    turns: Any = [USER, {"role": "assistant", "content": "{"}]
    message = ask(client, messages=turns, extra_body=SEEDED)
    chat = {"model": MODEL, "messages": turns, "max_tokens": 20, **SEEDED}
    url = f"{tool_daemon.url}/v1/chat/completions"
    opened, closed = (httpx.post(url, json=chat | {"continue_final_message": opens}).json() for opens in (True, False))
    assert message.content[0].text == opened["choices"][0]["message"]["content"]
    as_mistral = {"messages": [USER, {**turns[1], "prefix": True}]}
    assert httpx.post(url, json=chat | as_mistral).json()["choices"] == opened["choices"]
    counted = client.messages.count_tokens(model=MODEL, messages=turns).input_tokens
    assert counted == opened["usage"]["prompt_tokens"] < closed["usage"]["prompt_tokens"]


def test_a_body_needs_no_model_and_a_text_has_no_citations(http: httpx.Client) -> None:
    """Strict clients refuse null for the list of citations."""
    body = {"messages": [USER], "max_tokens": 3}
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == MODEL
    assert answer.json()["content"][0].keys() == {"type", "text"}
    assert http.post("/v1/messages/count_tokens", json={"messages": [USER]}).json()["input_tokens"] > 0


def test_a_stream_gives_the_same_message(client: anthropic.Anthropic) -> None:
    """The client puts its events together; the same seed gives the same text."""
    whole = ask(client, extra_body=SEEDED)
    fields: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 20}
    with client.messages.stream(**fields, extra_body=SEEDED) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert message.content[0].text == whole.content[0].text
    assert message.usage.output_tokens == whole.usage.output_tokens
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    text = ask(client, extra_body=SEEDED).content[0].text
    message = ask(client, extra_body=SEEDED, stop_sequences=["never", text[3:6]])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", text[3:6])
    assert text.startswith(message.content[0].text)


def num_prompt(message: Any) -> int:
    """Tokens of a message's prompt, those whose K/V was there included."""
    return int(message.usage.input_tokens + message.usage.cache_read_input_tokens)


@pytest.mark.parametrize("streams", [False, True])
def test_a_forced_call_is_a_block(client: anthropic.Anthropic, streams: bool) -> None:
    fields: dict[str, Any] = {
        "model": MODEL, "messages": [USER], "max_tokens": 400, "tools": [WEATHER],
        "tool_choice": {"type": "tool", "name": "weather"},
    }  # fmt: skip
    if streams:
        with client.messages.stream(**fields) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**fields)
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use"
    assert (call.name, set(call.input)) == ("weather", {"city", "unit"})
    turns = [
        USER,
        {"role": "assistant", "content": [block.model_dump() for block in message.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"}]},
    ]
    again = ask(client, messages=turns, tools=[WEATHER])
    assert num_prompt(again) > num_prompt(message)


def test_a_format_is_followed(client: anthropic.Anthropic) -> None:
    """A schema that cannot be followed is refused by its name."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    asked = {"format": {"type": "json_schema", "schema": schema}}
    assert json.loads(ask(client, extra_body={"output_config": asked}).content[0].text)["n"] in (1, 2)
    bad = {"format": {"type": "json_schema", "schema": {"type": "no such type"}}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
        ask(client, extra_body={"output_config": bad})


def test_tool_errors_reach_the_prompt(client: anthropic.Anthropic) -> None:
    def num_tokens(**more: Any) -> int:
        call = {"type": "tool_use", "id": "c", "name": "weather", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": "no such city", **more}
        turns: Any = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        return client.messages.count_tokens(model=MODEL, messages=turns).input_tokens

    assert num_tokens(is_error=True) > num_tokens(is_error=False) == num_tokens()


def test_metrics_come_with_the_message(client: anthropic.Anthropic) -> None:
    message = ask(client, extra_body={"speculation": {"num_drafts": 2, "draft_length": 3}})
    counted = message.metrics["speculative_decoding"]
    assert counted["num_spec_tokens"] == 3
    assert "metrics" not in ask(client, extra_body={"metrics": False}).model_dump()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        ({"thinking": {"type": "sometimes"}}, "thinking"),
        ({"extra_body": {"container": "c"}}, "container"),
        ({"extra_body": {"speculation": {"return_drafts": True}}}, "return_drafts"),
        ({"extra_body": {"min_p": 0.5}}, "min_p"),
        ({"stop_sequences": [""]}, "stop"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"output_config": {"volume": 3}}}, "volume"),
        ({"extra_body": {"thinking": {"type": "adaptive", "volume": 3}}}, "volume"),
        (
            {
                "tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search"}],
                "tool_choice": {"type": "tool", "name": "web_search"},
            },
            "web_search",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_unserved_fields_are_refused_by_name(client: anthropic.Anthropic, more: dict[str, Any], words: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, **more)
    body = caught.value.response.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert words in body["error"]["message"]


def test_values_that_ask_for_nothing_are_taken(client: anthropic.Anthropic) -> None:
    """Blocks in the format of coding agents."""
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    ask(
        client, thinking={"type": "disabled"}, metadata={"user_id": "me"}, service_tier="auto",
        extra_body={"context_management": {"edits": edits}},
    )  # fmt: skip


def reported(client: anthropic.Anthropic, **more: Any) -> tuple[int, set[str]]:
    """Tokens of a prompt, and the fields without effect."""
    fields: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 2, **more}
    answer = client.messages.with_raw_response.create(**fields)
    names = answer.headers.get("x-polydraft-ignored-fields", "")
    return num_prompt(answer.parse()), set(names.split(", ")) - {""}


def test_effort_is_a_hint(client: anthropic.Anthropic) -> None:
    """Claude Code always sends it; this template has no setting for it."""
    asked = {"thinking": {"type": "adaptive", "display": "updates"}, "output_config": {"effort": "max"}}
    assert reported(client, extra_body=asked) == (reported(client)[0], {"output_config.effort"})
    assert reported(client, thinking={"type": "disabled"})[1] == {"thinking"}


def test_other_tools_are_left_out(client: anthropic.Anthropic) -> None:
    """The model sees functions only; the rest is reported."""
    other = {"type": "web_search_20250305", "name": "web_search"}
    alone = reported(client, tools=[WEATHER])
    assert reported(client, tools=[other, WEATHER]) == (alone[0], {"tools.web_search_20250305"})


def test_a_deferred_tool_is_shown_after_a_search_has_found_it(client: anthropic.Anthropic) -> None:
    clock = {**WEATHER, "name": "clock", "defer_loading": True}
    assert reported(client, tools=[WEATHER, clock])[0] == reported(client, tools=[WEATHER])[0]
    turns = [
        USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [
            {"type": "tool_reference", "tool_name": "clock"}
        ]}]},
    ]  # fmt: skip
    shown, hidden = (reported(client, messages=turns, tools=tools)[0] for tools in ([WEATHER, clock], [WEATHER]))
    assert shown - hidden > 20


def test_keys_may_come_in_anthropics_header(one_seat: Daemon) -> None:
    with anthropic.Anthropic(base_url=one_seat.url, api_key=KEYS[0], max_retries=0) as client:
        assert ask(client).content
    wrong = anthropic.Anthropic(base_url=one_seat.url, api_key="wrong", max_retries=0)
    with wrong, pytest.raises(anthropic.AuthenticationError):
        ask(wrong)
    both = {"authorization": "Bearer wrong", "x-api-key": KEYS[0]}
    assert httpx.post(f"{one_seat.url}/v1/messages", headers=both, json={}).status_code == 401


def test_other_models_are_not_found(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(client, model="other")
    assert json.loads(caught.value.response.text)["error"]["type"] == "not_found_error"
