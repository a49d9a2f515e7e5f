"""Bodies as front ends, agents and frameworks send them: each is answered, whole or as a stream."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.grid import grid
from tests.server.daemon_process import MODEL, Daemon
from tests.server.weather_tools import PARAMETERS

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
PROGRAMS = sorted((Path(__file__).parents[3] / "docs" / "examples" / "clients").glob("*.py"))
INSTALLED = {distribution.name for distribution in importlib.metadata.distributions()}
USER = {"role": "user", "content": "What is the weather in Paris?"}
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
PARTS = [{"type": "text", "text": "What is the weather in Paris?"}]
CACHED = [{"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}}]
FUNCTION = {"name": "weather", "description": "Now.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
CALLED = [
    USER,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": [{"type": "text", "text": "12 degrees"}]},
]
INPUT = [{"type": "input_text", "text": "Be brief."}]
STREAM = {"stream": True, "stream_options": {"include_usage": True}}

ENDS = ("response.completed", "response.incomplete")

# By front end: path, body without the model, names that the header of the answer must have.
BODIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "Open WebUI": (
        CHAT,
        {
            "messages": [SYSTEM, USER], **STREAM, "max_tokens": 4, "temperature": 0.8, "top_k": 40,
            "repeat_penalty": 1.1,
            "num_ctx": 8192, "num_batch": 512, "num_gpu": 1, "num_thread": 4, "keep_alive": "5m", "use_mmap": True,
            "min_p": 0.05, "tfs_z": 1, "mirostat": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "stop": None,
        },
        "keep_alive, mirostat_eta, mirostat_tau, num_batch, num_ctx, num_gpu, num_thread, use_mmap",
    ),
    "Open WebUI, its tasks": (
        CHAT,
        {
            "messages": [USER], "stream": False, "max_completion_tokens": 4, "chat_id": "c", "session_id": "s",
            "id": "m",
            "metadata": {"task": "title_generation", "chat_id": "c"}, "features": {"web_search": False}, "params": {},
            "variables": {}, "background_tasks": {"title_generation": True}, "user": {"name": "a"}["name"],
        },
        "background_tasks, chat_id, features, id, params, session_id, variables",
    ),
    "LibreChat": (
        CHAT,
        {
            "messages": [SYSTEM, {"role": "user", "content": PARTS}], **STREAM, "max_tokens": 4, "user": "6650",
            "temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "conversationId": "c",
            "parentMessageId": "p", "endpoint": "custom", "promptPrefix": None, "reasoning_effort": "medium",
        },
        "conversationId, endpoint, parentMessageId, reasoning_effort",
    ),
    "LangChain": (
        CHAT,
        {
            "messages": CALLED, "max_completion_tokens": 4, "n": 1, "stream": False, "temperature": 0.7,
            "tools": [TOOL],
            "tool_choice": "auto", "parallel_tool_calls": True, "logprobs": False, "store": True, "verbosity": "low",
            "service_tier": "auto", "metadata": {"run": "1"},
        },
        "",
    ),
    "LangChain, VLLMOpenAI": (
        COMPLETIONS,
        {
            "prompt": ["Once"], "max_tokens": 4, "temperature": 0.7, "top_p": 1, "n": 1, "best_of": 1, "logit_bias": {},
            "frequency_penalty": 0, "presence_penalty": 0, "use_beam_search": False, "length_penalty": 1.0, "top_k": -1,
        },
        "",
    ),
    "LlamaIndex": (
        CHAT,
        {
            "messages": [SYSTEM, USER], **STREAM, "max_tokens": 4, "temperature": 0.1, "timeout": 60,
            "tools": [{**TOOL, "function": {**FUNCTION, "strict": False}}], "tool_choice": "auto",
        },
        "timeout",
    ),
    "Continue, completion": (
        COMPLETIONS,
        {
            "prompt": "def add(a, b):\n", "max_tokens": 4, "temperature": 0.01, "stream": True, "suffix": "",
            "stop": ["\n\n", "<|endoftext|>"], "raw": False, "keep_alive": 1800, "cachePrompt": True,
        },
        "cachePrompt, keep_alive",
    ),
    "Cline": (
        CHAT,
        {
            "messages": [SYSTEM, {"role": "user", "content": [*PARTS, {"type": "text",
            "text": "<env>x</env>"}]}], **STREAM,
            "temperature": 0, "max_tokens": 4, "reasoning_effort": "high", "thinking": {"type": "enabled"},
        },
        "reasoning_effort, thinking",
    ),
    "aider": (
        CHAT,
        {
            "messages": [SYSTEM, USER, {"role": "assistant", "content": "Ok."}, USER], "stream": True, "temperature": 0,
            "max_tokens": 4, "extra_headers": {"x": "y"}, "num_ctx": 8192, "caching": True,
        },
        "caching, extra_headers, num_ctx",
    ),
    "Zed": (
        CHAT,
        {
            "messages": [SYSTEM, USER], "stream": True, "stream_options": {"include_usage": True,
            "include_obfuscation": True},
            "max_completion_tokens": 4, "stop": [], "temperature": 1, "tools": [TOOL], "parallel_tool_calls": False,
            "prompt_cache_key": "thread-1", "reasoning_effort": "max", "tool_choice": "auto",
        },
        "reasoning_effort",
    ),
    "LobeChat": (
        CHAT,
        {
            "messages": [SYSTEM, USER], **STREAM, "max_tokens": 4, "temperature": 1, "top_p": 1, "presence_penalty": 0,
            "frequency_penalty": 0, "enable_thinking": False, "enable_search": False, "apiMode": "chatCompletion",
            "sessionId": "s", "trace_id": "t", "tools": [TOOL, {"type": "web_search", "web_search": {}}],
        },
        "apiMode, enable_thinking, sessionId, tools.web_search, trace_id",
    ),
    "n8n": (
        RESPONSES,
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}], "max_output_tokens": 4,
            "store": True, "truncation": "disabled", "parallel_tool_calls": True, "temperature": 0.7, "top_p": 1,
            "text": {"format": {"type": "text"}, "verbosity": "high"}, "service_tier": "priority", "background": False,
            "include": ["web_search_call.action.sources"], "reasoning": {"effort": "low", "summary": "concise"},
            "safety_identifier": "u", "max_tool_calls": 4, "tools": [{"type": "web_search_preview"}],
        },
        "reasoning.effort, tools.web_search_preview",
    ),
    "Vercel AI SDK": (
        CHAT,
        {
            "messages": CALLED, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 4,
            "top_p": 0.9,
            "tools": [TOOL], "tool_choice": "auto", "user": "u", "seed": 3, "response_format": {"type": "text"},
            "experimental_telemetry": {"isEnabled": False}, "providerOptions": {}, "maxRetries": 2,
        },
        "experimental_telemetry, maxRetries, providerOptions",
    ),
    "Claude Code": (
        f"{MESSAGES}?beta=true",
        {
            "messages": [{"role": "user", "content": [*PARTS, *CACHED]}, {"role": "system", "content": CACHED}],
            "system": [{"type": "text", "text": "x-anthropic-billing-header: x;"}, *CACHED], "max_tokens": 4,
            "stream": True,
            "tools": [{"name": "weather", "description": "Now.", "input_schema": PARAMETERS,
            "eager_input_streaming": True}],
            "metadata": {"user_id": "{}"}, "thinking": {"type": "adaptive", "display": "omitted"}, "speed": "standard",
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
        },
        "output_config.effort, speed",
    ),
    "Codex": (
        RESPONSES,
        {
            "input": [
                {"type": "message", "id": "m", "role": "developer", "content": INPUT},
                {"type": "message", "role": "developer", "content": INPUT},
                {"type": "message", "role": "user", "content": INPUT, "internal": {}},
            ],
            "stream": True, "store": False, "reasoning": {"summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "tool_choice": "auto", "parallel_tool_calls": True, "prompt_cache_key": "k", "client_metadata": {"x": "y"},
            "tools": [
                {"type": "function", "strict": False, **FUNCTION},
                {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", **FUNCTION}]},
                {"type": "web_search", "external_web_access": False},
            ],
        },
        "tools.web_search",
    ),
    "SillyTavern": (
        COMPLETIONS,
        {
            "prompt": "Once", "max_tokens": 4, "stream": True, "temperature": 1, "top_k": 0, "typical_p": 1, "top_a": 0,
            "tfs": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "mirostat_mode": 0, "mirostat_tau": 5, "mirostat_eta": 0.1,
            "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "xtc_probability": 0, "xtc_threshold": 0.1,
            "smoothing_factor": 0, "dynatemp_range": 0, "dynatemp_exponent": 1, "no_repeat_ngram_size": 0, "n": 1,
            "add_bos_token": True, "ban_eos_token": False, "custom_token_bans": "", "grammar_string": "",
        },
        "dry_allowed_length, dry_base, dynatemp_exponent, mirostat_eta, mirostat_tau, xtc_threshold",
    ),
}  # fmt: skip


@pytest.fixture
def client(tool_daemon: Daemon) -> Iterator[httpx.Client]:
    with tool_daemon.client() as client:
        yield client


@pytest.mark.parametrize("who", grid(BODIES, BODIES.keys() - {"Codex"}))
def test_a_body_of_a_front_end_is_answered(client: httpx.Client, who: str) -> None:
    """With what it has asked for, and a header that names what has no effect."""
    path, body, ignored = BODIES[who]
    answer = client.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    assert ", ".join(sorted(answer.headers.get("x-polydraft-ignored-fields", "").split(", "))) == ignored
    if body.get("stream"):
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]" or json.loads(events[-1])["type"] in ("message_stop", *ENDS)
        assert len(events) > 1
        assert "error" not in json.loads(events[0])
    else:
        assert answer.json()["usage"]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_programs_of_client_libraries_work(tool_daemon: Daemon, program: Path) -> None:
    """Of the libraries that are installed, as OpenAI's and Anthropic's are."""
    (package,) = re.findall(r"needs ([\w-]+)", program.read_text())
    if package not in INSTALLED:
        pytest.skip(f"{package} is not installed")
    settings = {"POLYDRAFT_URL": tool_daemon.url, "POLYDRAFT_MODEL": MODEL}
    done = subprocess.run(
        [sys.executable, str(program)], env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
