"""Dialogues of families: each row is right, streamed too, or refused by name.

The models are scripted (`families.py`): a mark in the system prompt, a tool, a call or a result is
answered only if the template has brought it to the model. The model is its own draft.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.text.dialogue import dialogue_of
from server.text.tokenizer import Tokenizer
from tests.grid import grid, slow_fixture
from tests.server.daemon_process import MODEL, ROOT, Daemon, Daemons
from tests.server.event_stream import open_stream
from tests.server.families import FAMILIES, JSON_ANSWER, ONE, TWO, Call, Family, write_family

IN_THE_GATE = [family for family in FAMILIES if family.name in ("qwen3", "smollm2_with_tools")]
"""One that thinks, and one with a template that comes with the server."""


def schema_of(arguments: dict[str, Any]) -> dict[str, Any]:
    types = {key: {"type": "string" if isinstance(value, str) else "integer"} for key, value in arguments.items()}
    return {"type": "object", "properties": types, "required": list(types), "additionalProperties": False}


ANSWER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER, "strict": True}}
Read = tuple[str, str, list[Call], str]
"""Content, thoughts, calls and finish reason."""


def tools(mark: str, **more: Any) -> list[dict[str, Any]]:
    functions = [
        {"name": name, "description": f"Now {mark}.", "parameters": schema_of(arguments), **more}
        for name, arguments in ONE + TWO
    ]
    return [{"type": "function", "function": one} for one in functions]


def turn_2(content: str | None, city: str = "Paris", result: str = "«result»") -> dict[str, Any]:
    made = {"name": "weather", "arguments": json.dumps({"city": city, "days": 3})}
    call = {"id": "call_123", "type": "function", "function": made}
    answered = [
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_123", "content": f"12 degrees {result}"},
    ]
    return {"messages": [*user("«plain» How is it?"), *answered]}


def user(text: str, *before: dict[str, Any]) -> list[dict[str, Any]]:
    return [*before, {"role": "user", "content": text}]


SYSTEM = {"role": "system", "content": "Be brief «system»."}
TOLD = "It has twelve degrees."
NAMED = {"type": "function", "function": {"name": "weather"}}
ROWS: dict[str, tuple[dict[str, Any], tuple[str, list[Call]]]] = {
    "plain": ({"messages": user("How is it «plain»?")}, ("It is fine in Zürich, 東京 😀.", [])),
    "system": ({"messages": user("How is it «plain»?", SYSTEM)}, ("As the system says.", [])),
    "thought": ({"messages": user("How is it «thought»?")}, ("Then that.", [])),
    "schema": ({"messages": user("How is it «schema»?"), "response_format": FORMAT}, (JSON_ANSWER, [])),
    "call": ({"messages": user("How is it?"), "tools": tools("«call»")}, ("", ONE)),
    "two": ({"messages": user("How is it?"), "tools": tools("«two»")}, ("", TWO)),
    "forced": (
        {
            "messages": user("How is it?"),
            "tools": tools("«forced»"),
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
        ("", [("weather", {"city": "Lima", "days": 90})]),
    ),
    "named": (
        {"messages": user("How is it?"), "tools": tools("«named»"), "tool_choice": NAMED},
        ("", [("weather", {"city": "Nice", "days": 55})]),
    ),
    "strict": (
        {"messages": user("How is it?"), "tools": tools("«strict»", strict=True)},
        ("", [("rain", {"town": "Lyon", "hours": 41})]),
    ),
    "schema_or_call": (
        {"messages": user("How is it?"), "tools": tools("«either»", strict=True), "response_format": FORMAT},
        ("", [("sum", {"left": "Bern", "right": 77})]),
    ),
    "turn_2_null": (turn_2(None), (TOLD, [])),
    "turn_2_empty": (turn_2(""), (TOLD, [])),
    "turn_2_text": (turn_2("Let me see."), (TOLD, [])),
    "history": (turn_2(None, "Paris «history»", ""), ("You asked before.", [])),
}
"""Requests, with content and calls of their answers."""


@pytest.fixture(scope="module", params=grid(FAMILIES, IN_THE_GATE), ids=str)
@slow_fixture
def served(
    request: pytest.FixtureRequest, daemons: Daemons, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Family, Daemon]]:
    """A family with its daemon, which is ended when its rows are done."""
    family: Family = request.param
    folder = str(write_family(tmp_path_factory.mktemp("family") / family.name, family))
    fixed = ("--draft-model", folder, "--served-model-name", MODEL, "--no-calibrate", "--num-threads", "1")
    template = ("--chat-template", family.template) if family.template else ()
    daemon = daemons.get(folder, *fixed, *template)
    yield family, daemon
    daemon.terminate()
    assert daemon.exit_code() == 0


def whole(client: httpx.Client, body: dict[str, Any]) -> Read:
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    message = choice["message"]
    calls = [one["function"] for one in message.get("tool_calls") or []]
    read = [(one["name"], json.loads(one["arguments"])) for one in calls]
    return message["content"] or "", message.get("reasoning_content") or "", read, choice["finish_reason"]


def streamed(client: httpx.Client, body: dict[str, Any]) -> Read:
    content, thoughts, calls, reason = "", "", [], ""
    with open_stream(client, "/v1/chat/completions", **body) as stream:
        for choice in (choice for chunk in stream.read() for choice in chunk["choices"]):
            delta, reason = choice["delta"], choice["finish_reason"] or reason
            content += delta.get("content") or ""
            thoughts += delta.get("reasoning_content") or ""
            for piece in delta.get("tool_calls") or []:
                calls += [[piece["function"]["name"], ""]] if piece.get("id") else []
                calls[piece["index"]][1] += piece["function"].get("arguments") or ""
    return content, thoughts, [(name, json.loads(arguments)) for name, arguments in calls], reason


def expected_thoughts(family: Family, row: str) -> str:
    if row == "thought" and family.thoughts != "none":
        return "First this."
    if row == "strict" and family.thoughts in ("tags", "opened"):
        return "Hm <tool_call>."
    is_thought = family.thoughts == "opened" and not row.startswith("turn_2") and row != "history"
    is_bound = row in ("schema", "forced", "named")
    return "Hm." if is_thought or (is_bound and family.thoughts != "none") else ""


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_right_or_refused_by_name(served: tuple[Family, Daemon], row: str) -> None:
    family, daemon = served
    asked, (content, calls) = ROWS[row]
    calls = calls[: family.most_calls]
    body = {"model": MODEL, "max_tokens": 100, **asked}
    with daemon.client() as client:
        if refusal := family.expected_refusal(row):
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 400, answer.text
            assert refusal in answer.json()["error"]["message"]
            return
        read = whole(client, body)
        assert read == (content, expected_thoughts(family, row), calls, "tool_calls" if calls else "stop")
        assert streamed(client, body) == read


def test_drafts_of_several_chains_are_accepted(served: tuple[Family, Daemon]) -> None:
    _, daemon = served
    body = {"model": MODEL, "max_tokens": 100, **ROWS["plain"][0], "speculation": {"num_drafts": 3, "draft_length": 4}}
    with daemon.client() as client:
        usage = client.post("/v1/chat/completions", json=body).json()["metrics"]["speculative_decoding"]
    assert usage["num_accepted_draft_tokens"] > 0, usage


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_format_of_calls_is_recognised(family: Family, tmp_path: Path) -> None:
    """From the template alone, without a daemon; what is refused at requests is known at start."""
    tokenizer = Tokenizer(str(write_family(tmp_path / family.name, family)), family.template_text())
    dialogue = dialogue_of(tokenizer, "auto", "auto")
    refused = family.refused.get("call", "")
    assert (refused in dialogue.tools_refusal) if refused else not dialogue.tools_refusal
    if not refused:
        assert dialogue.call_format == family.calls
    assert dialogue.warnings == ()


def test_the_table_of_the_documentation_is_this_one() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    rows = page.partition("| family |")[2].partition("\n\n")[0].splitlines()[2:]
    assert rows == [family.documented() for family in FAMILIES]
