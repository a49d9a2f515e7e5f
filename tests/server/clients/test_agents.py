"""Coding agents finish a task with calls: real programs if installed, and protocols.

The model's answers are scripted by its weights (`scripted_model.py`). Daemon,
protocols, parsing of calls, long prompts and speculation are real. Programs are found
on the path, or in tests/server/clients/npm/node_modules.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.server.clients.agents import AGENTS, Task
from tests.server.daemon_process import MODEL, Daemon, Daemons
from tests.server.scripted_model import call, write_scripted

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parent / "npm" / "node_modules" / ".bin"
DONE = "The file made.txt is written and has ten characters."
SCRIPTS = {
    "exec_command": [
        call("exec_command", {"cmd": "echo forty-two > made.txt"}),
        call("exec_command", {"cmd": "wc -c made.txt"}),
        f"Codex: {DONE}",
    ],
    "Bash": [
        call("Bash", {"command": "echo forty-two > made.txt", "description": "Write"}),
        call("Bash", {"command": "wc -c made.txt", "description": "Count"}),
        f"Claude: {DONE}",
    ],
    "bash": [
        call("bash", {"command": "echo forty-two > made.txt"}),
        call("bash", {"command": "wc -c made.txt"}),
        f"Pi: {DONE}",
    ],
}
CONTEXT = 65_536
ROOM = 32_000
"""Answer tokens that agents ask for in every request."""
_COUNTED = ("prompt_tokens_total", "prefix_cache_hits_total", "request_max_tokens_cut_total")
NOTES = "\n".join(f"Rule {number}: leave file {number} as it is." for number in range(2_100))
"""Instructions of a project."""
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}}


@pytest.fixture(scope="module")
def scripted(daemons: Daemons, tmp_path_factory: pytest.TempPathFactory) -> Daemon:
    """A daemon with the scripted model, which also drafts for itself."""
    folder = str(write_scripted(tmp_path_factory.mktemp("scripted") / "model", SCRIPTS, "A title"))
    names = ["--served-model-name", MODEL, "--max-model-len", str(CONTEXT)]
    return daemons.get(folder, "--draft-model", folder, *names, "--no-calibrate", "--enable-log-requests")


def counted(daemon: Daemon, name: str) -> float:
    """The sum of a counter over its labels."""
    page = httpx.get(f"{daemon.url}/metrics").text
    return sum(float(value) for value in re.findall(rf"^polydraft_{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE))


@pytest.mark.parametrize("name", AGENTS)
def test_the_program_finishes_a_task_with_calls(scripted: Daemon, tmp_path: Path, name: str) -> None:
    """It writes a file by one call, looks at it by another, and reports.

    The project's instructions make its prompts so long that 32,000 answer tokens do not fit into
    the context. They are mostly cached.
    """
    _, program, run = AGENTS[name]
    found = shutil.which(program, path=f"{FOLDER}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{program} is not installed")
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    for file in ("AGENTS.md", "CLAUDE.md"):
        (work / file).write_text(NOTES)
    before = {one: counted(scripted, one) for one in _COUNTED}
    done = run(Path(found), Task(scripted.url, MODEL, "unused", "Write made.txt and count it.", home, work))
    assert done.returncode == 0, done.stderr
    assert DONE in done.stdout
    assert (work / "made.txt").read_text() == "forty-two\n"
    prompts, cached, cut = (counted(scripted, one) - before[one] for one in before)
    assert cut or program == "codex"  # which sends no bound
    assert cached > prompts / 2
    assert "status=400" not in scripted.log
    assert "ERROR" not in scripted.log


def chat_turn(url: str, results: list[tuple[str, str]]) -> tuple[str, list[tuple[str, str, Any]]]:
    """One turn of a chat after these calls' results: (text, [(id, name, arguments)])."""
    messages: Any = [{"role": "user", "content": "Write a file."}]
    for number, (made, result) in enumerate(results):
        function = {"name": "exec_command", "arguments": made}
        messages.append(
            {"role": "assistant", "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": result})
    tools: Any = [{"type": "function", "function": {"name": "exec_command", "parameters": SCHEMA}}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        message = client.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0].message
    calls: Any = message.tool_calls or []
    return message.content or "", [(one.id, one.function.name, json.loads(one.function.arguments)) for one in calls]


def response_turn(url: str, results: list[tuple[str, str]]) -> tuple[str, list[tuple[str, str, Any]]]:
    """The same as a response, its function in a namespace."""
    items: Any = [{"role": "user", "content": "Write a file."}]
    for number, (made, result) in enumerate(results):
        named = {"name": "exec_command", "namespace": "shell", "arguments": made}
        items.append({"type": "function_call", "call_id": f"c{number}", **named})
        items.append({"type": "function_call_output", "call_id": f"c{number}", "output": result})
    function = {"type": "function", "name": "exec_command", "parameters": SCHEMA, "strict": False}
    tools: Any = [{"type": "namespace", "name": "shell", "description": "Commands.", "tools": [function]}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        answer = client.responses.create(model=MODEL, input=items, tools=tools)
    calls: Any = [one for one in answer.output if one.type == "function_call"]
    assert all(one.namespace == "shell" for one in calls)
    return answer.output_text, [(one.call_id, one.name, json.loads(one.arguments)) for one in calls]


def message_turn(url: str, results: list[tuple[str, str]]) -> tuple[str, list[tuple[str, str, Any]]]:
    """The same as a message, streamed."""
    turns: Any = [{"role": "user", "content": "Write a file."}]
    for number, (made, result) in enumerate(results):
        use = {"type": "tool_use", "id": f"c{number}", "name": "exec_command", "input": json.loads(made)}
        turns.append({"role": "assistant", "content": [use]})
        turns.append(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"c{number}", "content": result}]}
        )
    tools: Any = [{"name": "exec_command", "input_schema": SCHEMA}]
    with (
        anthropic.Anthropic(base_url=url, api_key="unused") as client,
        client.messages.stream(model=MODEL, messages=turns, tools=tools, max_tokens=100) as stream,
    ):
        message = stream.get_final_message()
    calls: Any = [block for block in message.content if block.type == "tool_use"]
    texts = [block.text for block in message.content if block.type == "text"]
    return "".join(texts), [(one.id, one.name, one.input) for one in calls]


@pytest.mark.parametrize("turn", [chat_turn, response_turn, message_turn])
def test_a_task_with_calls_comes_to_its_end(
    scripted: Daemon, turn: Callable[[str, list[tuple[str, str]]], tuple[str, list[tuple[str, str, Any]]]]
) -> None:
    """Two calls, each answered with a long result, then text."""
    results: list[tuple[str, str]] = []
    for command in ("echo forty-two > made.txt", "wc -c made.txt"):
        text, [(_, name, arguments)] = turn(scripted.url, results)
        assert (text, name, arguments) == ("", "exec_command", {"cmd": command})
        results.append((json.dumps(arguments), "a line of output\n" * 2000))
    assert turn(scripted.url, results) == (f"Codex: {DONE}", [])


AGENTS_BODIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Claude Code": (
        "/v1/messages",
        "max_tokens",
        {
            "system": [{"type": "text", "text": "You write code.", "cache_control": {"type": "ephemeral"}}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "TASK"}]}],
            "tools": [{"name": "Bash", "input_schema": SCHEMA}],
            "metadata": {"user_id": "x"}, "thinking": {"type": "adaptive"},
        },
    ),
    "pi": (
        "/v1/chat/completions",
        "max_completion_tokens",
        {
            "messages": [{"role": "system", "content": "You write code."}, {"role": "user", "content": "TASK"}],
            "tools": [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA, "strict": False}}],
            "stream_options": {"include_usage": True}, "store": False,
        },
    ),
    "Codex": (
        "/v1/responses",
        "max_output_tokens",
        {
            "instructions": "You write code.",
            "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "TASK"}]}],
            "tools": [{"type": "function", "name": "exec_command", "parameters": SCHEMA, "strict": False}],
            "tool_choice": "auto", "parallel_tool_calls": False, "store": False, "include": [],
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AGENTS_BODIES)
def test_a_long_prompt_gets_the_room_that_is_left(scripted: Daemon, name: str) -> None:
    """Agents send 40,000 tokens and more before an answer of up to 32,000."""
    path, field, body = AGENTS_BODIES[name]
    task = "\n".join(f"{number} {number * 7919 % 10007}" for number in range(6_000))
    text = json.dumps(body).replace('"TASK"', json.dumps(task))
    sent = {"model": MODEL, "stream": True, field: ROOM, **json.loads(text)}
    answer = httpx.post(f"{scripted.url}{path}", json=sent, timeout=300)
    assert answer.status_code == 200, answer.text
    room = int(answer.headers["x-polydraft-max-tokens"])
    assert CONTEXT - 60_000 < room < min(ROOM, CONTEXT - 40_000)
    assert "forty-two" in answer.text
    assert "model_context_window_exceeded" not in answer.text
