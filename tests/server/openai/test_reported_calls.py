"""Bug reports of other servers about calls of functions, tried here, with the right value of each.

Every test names its reports by project and number, as in `test_public_reports.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.text.tool_calls import ToolCalls
from server.text.tools import ToolUse
from server.wire.fields import Function, Tool
from tests.server.daemon_process import MODEL, Daemon
from tests.server.event_stream import open_stream
from tests.server.good_bodies import CHAT, token_of
from tests.server.thing_schema import FORMAT, is_valid

UNIT = {"$ref": "#/$defs/Unit"}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "도시, 예: '서울'", "maxLength": 9}, "unit": UNIT},
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"Unit": {"enum": ["celsius", "fahrenheit"]}},
}
NAMED = {"type": "function", "function": {"name": "weather"}}
CHOICES = ["required", NAMED]


@pytest.fixture
def http(tool_daemon: Daemon) -> Iterator[httpx.Client]:
    with tool_daemon.client() as client:
        yield client


def asked(**more: Any) -> dict[str, Any]:
    functions: list[dict[str, Any]] = [{"name": "weather", "parameters": PARAMETERS}, {"name": "clock"}]
    tools = [{"type": "function", "function": one} for one in functions]
    messages = [{"role": "user", "content": "How is it?"}]
    return {"model": MODEL, "messages": messages, "tools": tools, "max_tokens": 400, "seed": 3, **more}


def choice_of(http: httpx.Client, **more: Any) -> dict[str, Any]:
    answer = http.post(CHAT, json=asked(**more))
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    found: dict[str, Any] = choice
    return found


def chunks_of(http: httpx.Client, **more: Any) -> list[dict[str, Any]]:
    with open_stream(http, CHAT, **asked(**more)) as stream:
        return [choice for chunk in stream.read() for choice in chunk["choices"]]


@pytest.mark.parametrize("choice", CHOICES, ids=["required", "named"])
def test_calls_end_with_their_own_reason(http: httpx.Client, choice: Any) -> None:
    """vllm-project/vllm#25054, #9209, #53255, Blaizzy/mlx-vlm#990: another reason."""
    found = choice_of(http, tool_choice=choice, parallel_tool_calls=False)
    assert (found["finish_reason"], len(found["message"]["tool_calls"])) == ("tool_calls", 1)
    reasons = [one["finish_reason"] for one in chunks_of(http, tool_choice=choice, parallel_tool_calls=False)]
    assert [reason for reason in reasons if reason] == ["tool_calls"]


def test_calls_have_logprobs_in_streams_too(http: httpx.Client) -> None:
    """sgl-project/sglang#28601, am17an/llama.cpp#35: lost or refused with calls."""
    wish = {"tool_choice": NAMED, "logprobs": True, "top_logprobs": 2}
    whole = choice_of(http, **wish)["logprobs"]["content"]
    streamed = [token for one in chunks_of(http, **wish) for token in (one.get("logprobs") or {}).get("content") or []]
    assert [token["token"] for token in streamed] == [token["token"] for token in whole]
    assert "weather" in "".join(token["token"] for token in whole)


def test_a_strict_function_without_parameters(http: httpx.Client) -> None:
    """sgl-project/sglang#14006: null in the place of a schema ended the server."""
    tool = {"type": "function", "function": {"name": "now", "parameters": None, "strict": True}}
    (call,) = choice_of(http, tools=[tool], tool_choice="required", parallel_tool_calls=False)["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("now", {})


def test_white_space_does_not_fill_structured_output(http: httpx.Client) -> None:
    """vllm-project/vllm#55313: 250,000 spaces between two parts of an answer in JSON."""
    bias = {str(token_of(http, text)): 100 for text in (" ", "\n")}
    wish = {"response_format": FORMAT, "tool_choice": "none", "logit_bias": bias, "max_tokens": 300}
    found = choice_of(http, **wish)
    assert found["finish_reason"] == "stop"
    assert is_valid(found["message"]["content"])


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "2026-01-15", "2026-01-15"),
        ({"type": "integer"}, "140.0", 140),
        ({"type": "number"}, "140.0", 140.0),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        ({"type": "string"}, "123", "123"),
    ],
)
def test_plain_text_is_typed_by_its_schema(schema: dict[str, Any], text: str, value: Any) -> None:
    """ml-explore/mlx-lm#1330, #1635, openvinotoolkit/model_server#3727: calls were lost."""
    tool = Tool(type="function", function=Function(name="f", parameters={"properties": {"x": schema}}))
    reader = ToolCalls(ToolUse((tool,), "qwen3_coder", True, forced=False), None)
    reader.feed(f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>", True)
    assert [call.arguments for call in reader.calls] == [json.dumps({"x": value})]
