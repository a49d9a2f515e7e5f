"""Bodies of agents complete a turn on layouts that refuse or misread their effort.

The application runs in this process. Its engine answers with a thought and a call.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from server.app import build_app
from server.serving.metrics import ServerMetrics
from server.serving.observer import Observer
from server.settings.settings import Serve
from server.state import Server
from server.text.dialogue import dialogue_of
from server.text.reasoning import is_open
from server.text.tokenizer import GenerationDefaults, Tokenizer
from tests.server.daemon_process import MODEL
from tests.server.serving.test_stops_and_thoughts import ScriptedEngine
from tests.server.step_results import facts
from tests.server.text.layouts import LAYOUTS, Layout
from tests.server.tiny_models import VOCAB_SIZE, TinyModels

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
CLAUDE = {
    "model": MODEL,
    "max_tokens": 200,
    "system": [{"type": "text", "text": "You code.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Read it."}]}],
    "tools": [{"name": "Read", "description": "Reads.", "input_schema": SCHEMA}],
    "thinking": {"type": "adaptive", "display": "updates"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "me"},
}
CODEX = {
    "model": MODEL,
    "instructions": "You code.",
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Read it."}]}],
    "tools": [
        {"type": "web_search", "external_web_access": False},
        {"type": "function", "name": "Read", "parameters": SCHEMA, "strict": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "high", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "store": False,
    "client_metadata": {"x": "y"},
}
OLLAMA = {
    "model": f"{MODEL}:latest",
    "messages": [
        {"role": "user", "content": "Read it."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "Read", "arguments": {"path": "b"}}}],
        },
        {"role": "tool", "tool_name": "Read", "content": "Empty."},
    ],
    "tools": [{"type": "function", "function": {"name": "Read", "parameters": SCHEMA}}],
    "think": "high",
    "keep_alive": "5m",
    "options": {"num_ctx": 8192, "temperature": 1},
}
WORDS = {"qwen38": "Effort: xhigh", "mistral_small4": '"high"', "glm52": "Effort: High", "gemma4": "<|think|>"}
"""Text of the prompt by layout, for effort high."""


@pytest.fixture(scope="module", params=WORDS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return next(layout for layout in LAYOUTS if layout.name == request.param)


@pytest.fixture(scope="module")
def server(layout: Layout, models: TinyModels) -> Iterator[Server]:
    settings = Serve(model=str(models.target), served_model_name=MODEL)
    client = ScriptedEngine(settings.engine_config(), 8)
    client.facts = facts(vocab_size=VOCAB_SIZE + 8, max_model_len=4000)
    tokenizer: Tokenizer = layout.tokenizer()
    observer = Observer(ServerMetrics(MODEL, compat=False), logs_requests=False)
    dialogue = dialogue_of(tokenizer, "auto", "auto")
    made = Server(settings, client, tokenizer, GenerationDefaults(), observer, MODEL, dialogue)
    yield replace(made, thoughts=dialogue.thoughts)
    tokenizer.close()


def asked(server: Server, layout: Layout, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], str, str]:
    """(answer, prompt, names of ignored fields); of a stream of lines the list of them."""
    prompts: list[str] = []
    client = server.client
    assert isinstance(client, ScriptedEngine)
    assert server.dialogue.thoughts is not None
    marks = server.dialogue.thoughts

    class Noting(type(client)):  # type: ignore[misc]
        def _send(self, message: Any) -> None:
            (request,) = message.requests()
            end = server.tokenizer.token_of("<|tool_response>")
            assert end is None or end in request.limits.stop_token_ids
            prompts.append(server.tokenizer.decode(request.prompt_token_ids))
            opened = is_open(prompts[-1], marks)
            text = layout.answer(server.dialogue, opened, "Hm.", "", [("Read", {"path": "it's a.py"})])
            self.answer = server.tokenizer.encode(text, False)
            super()._send(message)

    client.__class__ = Noting

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.post(path, json=body)

    answer = asyncio.run(post())
    client.__class__ = ScriptedEngine
    assert answer.status_code == 200, answer.text
    lines = [json.loads(line) for line in answer.text.splitlines()]
    return (
        lines[0] if len(lines) == 1 else {"lines": lines},
        prompts[0],
        answer.headers.get("x-polydraft-ignored-fields", ""),
    )


def test_a_turn_of_claude_code_has_its_call(server: Server, layout: Layout) -> None:
    answer, prompt, ignored = asked(server, layout, "/v1/messages", CLAUDE)
    thought, call = answer["content"]
    assert (thought["type"], call["type"], call["name"]) == ("thinking", "tool_use", "Read")
    assert call["input"] == {"path": "it's a.py"}
    assert answer["stop_reason"] == "tool_use"
    assert (WORDS[layout.name] in prompt) == (server.dialogue.thinking.on is not None)
    assert ("output_config.effort" in ignored) == (layout.name in ("qwen38", "gemma4"))


def test_a_turn_of_codex_has_its_call(server: Server, layout: Layout) -> None:
    answer, prompt, ignored = asked(server, layout, "/v1/responses", CODEX)
    thought, call = answer["output"]
    assert (thought["type"], call["type"], call["name"]) == ("reasoning", "function_call", "Read")
    assert json.loads(call["arguments"]) == {"path": "it's a.py"}
    assert WORDS[layout.name] in prompt
    assert "tools.web_search" in ignored
    assert ("reasoning.effort" in ignored) == (layout.name in ("qwen38", "gemma4"))


def test_a_turn_of_an_ollama_client_has_its_call(server: Server, layout: Layout) -> None:
    """A stream has the same thought and call as the whole answer, and ends with one last line."""
    whole, prompt, ignored = asked(server, layout, "/api/chat", OLLAMA | {"stream": False})
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "Read", "arguments": {"path": "it's a.py"}}
    assert (whole["model"], whole["done"], whole["done_reason"]) == (OLLAMA["model"], True, "stop")
    assert WORDS[layout.name] in prompt
    assert "Empty." in prompt
    assert ignored == ("num_ctx, think" if layout.name in ("qwen38", "gemma4") else "num_ctx")
    lines = asked(server, layout, "/api/chat", OLLAMA)[0]["lines"]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    thought = "".join(line["message"].get("thinking", "") for line in lines)
    assert thought == whole["message"]["thinking"] == "Hm."
    calls = [call["function"] for line in lines for call in line["message"].get("tool_calls", ())]
    assert calls == [call["function"]]
    assert lines[-1]["eval_count"] == whole["eval_count"] > 0


def test_thoughts_that_are_turned_off_are_closed(server: Server, layout: Layout) -> None:
    """Each API has a word for it."""
    for path, body in (
        ("/v1/messages", CLAUDE | {"thinking": {"type": "disabled"}, "output_config": {}}),
        ("/v1/responses", CODEX | {"reasoning": {"effort": "none"}}),
        ("/api/chat", OLLAMA | {"think": False}),
    ):
        _, prompt, ignored = asked(server, layout, path, body)
        assert server.dialogue.thoughts is not None
        assert not is_open(prompt, server.dialogue.thoughts)
        assert WORDS[layout.name] not in prompt
        assert "effort" not in ignored
        assert "thinking" not in ignored


def test_the_model_card_has_the_table_of_efforts(server: Server, layout: Layout) -> None:
    async def get() -> dict[str, Any]:
        transport = httpx.ASGITransport(build_app(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return dict((await http.get("/v1/models")).json()["data"][0]["thinking"])

    card = asyncio.run(get())
    efforts = {"qwen38": "xhigh", "mistral_small4": "high", "glm52": "high"}
    assert card["efforts"].get("high") == efforts.get(layout.name)
    assert card["off"] is not None
