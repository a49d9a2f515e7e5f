"""`python -m loadtest.clients --url URL`: client libraries and agent frameworks against a running
daemon.

Each installed client is used as in its documentation; the table shows the result by version. The
clients are not dependencies of the project. Install those you need (the lists are `CLIENTS` and
`JAVASCRIPT_CLIENTS` below, and `AGENTS` in `agents.py`; `npm install` the latter two into a folder
and pass `--npm FOLDER`). Agents have prompts of 20,000 tokens and need a model that calls
functions; select them with `--only program`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.agents import AGENTS, Task
from loadtest.results import add_output_argument, table, write

_QUESTION = "What is the weather in Paris?"
_TOKENS = 24
_WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class DaemonUnderTest:
    """Tested daemon."""

    url: str
    model: str
    key: str = "unused"

    @property
    def v1(self) -> str:
        """Return the base_url of OpenAI's clients."""
        return f"{self.url}/v1"


def openai_chat(server: DaemonUnderTest) -> None:
    """Whole and streamed answers, and legacy completions."""
    import openai

    with openai.OpenAI(base_url=server.v1, api_key=server.key) as client:
        messages: Any = [{"role": "user", "content": _QUESTION}]
        whole = client.chat.completions.create(model=server.model, messages=messages, max_tokens=_TOKENS)
        assert whole.choices[0].message.content
        stream = client.chat.completions.create(model=server.model, messages=messages, max_tokens=_TOKENS, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert client.completions.create(model=server.model, prompt="Once", max_tokens=_TOKENS).choices[0].text


def openai_responses(server: DaemonUnderTest) -> None:
    """Streamed answers of the Responses API."""
    import openai

    client = openai.OpenAI(base_url=server.v1, api_key=server.key)
    with client, client.responses.stream(model=server.model, input=_QUESTION, max_output_tokens=_TOKENS) as stream:
        kinds = [event.type for event in stream]
        assert "response.output_text.delta" in kinds
        assert kinds[-1] in ("response.completed", "response.incomplete")


def openai_tools(server: DaemonUnderTest) -> None:
    """Forced call whose result is sent back."""
    import openai

    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": _WEATHER}}
    messages: Any = [{"role": "user", "content": _QUESTION}]
    with openai.OpenAI(base_url=server.v1, api_key=server.key) as client:
        answer = client.chat.completions.create(
            model=server.model, messages=messages, tools=[tool], tool_choice="required", max_tokens=200
        )
        (call,) = (answer.choices[0].message.tool_calls or [])[:1]
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        more = [*messages, answer.choices[0].message.model_dump(exclude_none=True), result]
        again = client.chat.completions.create(model=server.model, messages=more, tools=[tool], max_tokens=_TOKENS)
        assert again.choices[0].finish_reason


def anthropic_messages(server: DaemonUnderTest) -> None:
    """Whole and streamed answers, a forced tool, counted tokens."""
    import anthropic

    messages: Any = [{"role": "user", "content": _QUESTION}]
    with anthropic.Anthropic(base_url=server.url, api_key=server.key) as client:
        assert client.messages.create(model=server.model, messages=messages, max_tokens=_TOKENS).content
        with client.messages.stream(model=server.model, messages=messages, max_tokens=_TOKENS) as stream:
            assert stream.get_final_text()
        tools: Any = [{"name": "weather", "input_schema": _WEATHER}]
        choice: Any = {"type": "any", "disable_parallel_tool_use": True}
        called = client.messages.create(
            model=server.model, messages=messages, max_tokens=200, tools=tools, tool_choice=choice
        )
        assert called.stop_reason == "tool_use"
        assert client.messages.count_tokens(model=server.model, messages=messages).input_tokens


def litellm_both(server: DaemonUnderTest) -> None:
    """OpenAI's and Anthropic's providers of litellm."""
    import litellm

    messages = [{"role": "user", "content": _QUESTION}]
    for model, base in ((f"openai/{server.model}", server.v1), (f"anthropic/{server.model}", server.url)):
        answer = litellm.completion(
            model=model, api_base=base, api_key=server.key, messages=messages, max_tokens=_TOKENS
        )
        assert answer.choices[0].message.content


def _invoke_and_stream(chat: Any) -> None:
    assert chat.invoke(_QUESTION).content
    assert "".join(str(chunk.content) for chunk in chat.stream(_QUESTION))


def langchain_openai(server: DaemonUnderTest) -> None:
    """invoke and stream."""
    from langchain_openai import ChatOpenAI

    _invoke_and_stream(ChatOpenAI(base_url=server.v1, api_key=server.key, model=server.model, max_tokens=_TOKENS))


def langchain_anthropic(server: DaemonUnderTest) -> None:
    """invoke and stream."""
    from langchain_anthropic import ChatAnthropic

    _invoke_and_stream(ChatAnthropic(base_url=server.url, api_key=server.key, model=server.model, max_tokens=_TOKENS))


def llama_index(server: DaemonUnderTest) -> None:
    """chat and stream_complete."""
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(model=server.model, api_base=server.v1, api_key=server.key, max_tokens=_TOKENS, is_chat_model=True)
    assert llm.chat([ChatMessage(role="user", content=_QUESTION)]).message.content
    assert [part.delta for part in llm.stream_complete(_QUESTION)]


def pydantic_ai(server: DaemonUnderTest) -> None:
    """Agent with OpenAI's protocol."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(server.model, provider=OpenAIProvider(base_url=server.v1, api_key=server.key))
    assert Agent(model, model_settings={"max_tokens": 200}).run_sync(_QUESTION).output


def openai_agents(server: DaemonUnderTest) -> None:
    """Agent with a tool that it must call once."""
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    @function_tool
    def weather() -> str:
        """The weather."""
        return "sunny"

    client = AsyncOpenAI(base_url=server.v1, api_key=server.key)
    agent = Agent(
        name="a",
        tools=[weather],
        model=OpenAIChatCompletionsModel(model=server.model, openai_client=client),
        model_settings=ModelSettings(max_tokens=200, tool_choice="required"),
    )
    assert Runner.run_sync(agent, _QUESTION).final_output is not None


def instructor_model(server: DaemonUnderTest) -> None:
    """Pydantic model from a JSON schema."""
    import instructor
    import openai
    from pydantic import BaseModel, ConfigDict, Field

    class Place(BaseModel):
        model_config = ConfigDict(extra="forbid")
        city: str = Field(max_length=12)

    client = instructor.from_openai(
        openai.OpenAI(base_url=server.v1, api_key=server.key), mode=instructor.Mode.JSON_SCHEMA
    )
    messages: Any = [{"role": "user", "content": _QUESTION}]
    assert client.create(model=server.model, response_model=Place, messages=messages, max_tokens=100).city is not None


def smolagents_model(server: DaemonUnderTest) -> None:
    """Model of smolagents, called like its agents do."""
    from smolagents import OpenAIServerModel

    model = OpenAIServerModel(server.model, api_base=server.v1, api_key=server.key, max_tokens=_TOKENS)
    assert model([{"role": "user", "content": [{"type": "text", "text": _QUESTION}]}]).content


def haystack(server: DaemonUnderTest) -> None:
    """Chat generator of haystack."""
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    generator = OpenAIChatGenerator(
        api_key=Secret.from_token(server.key),
        model=server.model,
        api_base_url=server.v1,
        generation_kwargs={"max_tokens": _TOKENS},
    )
    assert generator.run([ChatMessage.from_user(_QUESTION)])["replies"][0].text


def dspy_model(server: DaemonUnderTest) -> None:
    """Language model of dspy."""
    import dspy

    assert dspy.LM(f"openai/{server.model}", api_base=server.v1, api_key=server.key, max_tokens=_TOKENS)(_QUESTION)


def llm_command(server: DaemonUnderTest) -> None:
    """Command line tool with a configured model."""
    home = Path(os.environ.get("TMPDIR", "/tmp")) / "polydraft-llm-client"
    home.mkdir(exist_ok=True)
    entry = {"model_id": "polydraft", "model_name": server.model, "api_base": server.v1, "api_key_name": "polydraft"}
    (home / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    command = [sys.executable, "-m", "llm", "-m", "polydraft", "--key", server.key, "-o", "max_tokens", "24", _QUESTION]
    run = subprocess.run(
        command, env={**os.environ, "LLM_USER_PATH": str(home)}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()


def autogen(server: DaemonUnderTest) -> None:
    """Assistant of AutoGen."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info: Any = {
        "vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True,
    }  # fmt: skip
    client = OpenAIChatCompletionClient(
        model=server.model, base_url=server.v1, api_key=server.key, model_info=info, max_tokens=_TOKENS
    )
    assert asyncio.run(AssistantAgent("a", model_client=client).run(task=_QUESTION)).messages


CLIENTS: dict[str, tuple[str, Callable[[DaemonUnderTest], None]]] = {
    "openai: chat, stream, completions": ("openai", openai_chat),
    "openai: responses, streamed": ("openai", openai_responses),
    "openai: tools": ("openai", openai_tools),
    "anthropic: messages, stream, tools": ("anthropic", anthropic_messages),
    "litellm: both providers": ("litellm", litellm_both),
    "langchain, OpenAI": ("langchain-openai", langchain_openai),
    "langchain, Anthropic": ("langchain-anthropic", langchain_anthropic),
    "llama-index": ("llama-index-llms-openai-like", llama_index),
    "pydantic-ai: an agent": ("pydantic-ai-slim", pydantic_ai),
    "openai-agents: an agent with a tool": ("openai-agents", openai_agents),
    "instructor: JSON schema": ("instructor", instructor_model),
    "smolagents": ("smolagents", smolagents_model),
    "haystack": ("haystack-ai", haystack),
    "dspy": ("dspy", dspy_model),
    "llm, the command": ("llm", llm_command),
    "autogen: an assistant": ("autogen-agentchat", autogen),
}

JAVASCRIPT_CLIENTS: dict[str, str] = {
    "npm openai: stream, responses": "openai",
    "npm anthropic: messages, stream": "@anthropic-ai/sdk",
    "npm ai (Vercel): text, stream": "@ai-sdk/openai-compatible",
    "npm langchain, OpenAI": "@langchain/openai",
    "npm openai-agents: an agent with a tool": "@openai/agents",
}


def _row(name: str, package: str, version: str | None, use: Callable[[], str]) -> dict[str, str]:
    """Return the result of one client; use: returns its failure, or raises it. version: None if it
    is missing.
    """
    if version is None:
        return {"client": name, "package": package, "result": "not installed"}
    try:
        result = use() or "works"
    except Exception as error:  # any error is the client's result
        result = f"{type(error).__name__}: {error}"[:300]
    return {"client": name, "package": package, "version": version, "result": result}


def _version_in(folder: Path, package: str) -> str | None:
    manifest = folder / "node_modules" / package / "package.json"
    return str(json.loads(manifest.read_text())["version"]) if manifest.is_file() else None


def tried(server: DaemonUnderTest, name: str) -> dict[str, str]:
    """Return the result of one client."""
    package, use = CLIENTS[name]
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = None
    return _row(name, package, version, lambda: use(server) or "")


def tried_in_node(server: DaemonUnderTest, name: str, folder: Path) -> dict[str, str]:
    """Return the result of a JavaScript client that is installed in a folder."""
    package = JAVASCRIPT_CLIENTS[name]
    # A module from standard input finds packages in the current folder.
    command = ["node", "--input-type=module", "-", server.url, server.model, package]
    script = Path(__file__).with_suffix(".mjs").read_text()

    def use() -> str:
        run = subprocess.run(
            command, cwd=folder, input=script, capture_output=True, text=True, timeout=300, check=False
        )
        found = [line for line in run.stderr.splitlines() if "Error" in line] or run.stderr.splitlines()[-1:]
        return " ".join(found)[:300] or "it fails without a message" if run.returncode else ""

    return _row(name, package, _version_in(folder, package), use)


def tried_agent(server: DaemonUnderTest, name: str, folder: Path) -> dict[str, str]:
    """Return the result of a coding agent's task; its program is installed in a folder."""
    package, program, run = AGENTS[name]

    def use() -> str:
        with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as work:
            words = "Write a file made.txt and count its characters."
            task = Task(server.url, server.model, server.key, words, Path(home), Path(work))
            done = run(folder.resolve() / "node_modules" / ".bin" / program, task)
            worked = done.returncode == 0 and any(Path(work).iterdir())
            return "" if worked else (done.stderr or done.stdout or "no file was written")[-300:]

    return _row(name, package, _version_in(folder, package), use)


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """Return a row per client; the table of docs/quickstart.md."""
    return table(
        ["client", "version", "result"], [[row["client"], row.get("version", "-"), row["result"]] for row in rows]
    )


def main() -> int:
    """Run from the command line; the exit code is 1 if an installed client fails."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.clients", description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000", help="the daemon's address")
    parser.add_argument("--model", default="polydraft-demo", help="the served model")
    parser.add_argument("--only", help="clients whose names hold this")
    parser.add_argument("--npm", type=Path, help="folder with node_modules; without it JavaScript clients are left out")
    add_output_argument(parser)
    options = parser.parse_args()
    server = DaemonUnderTest(options.url, options.model)
    rows = [tried(server, name) for name in CLIENTS if not options.only or options.only in name]
    if options.npm:
        wanted = [name for name in JAVASCRIPT_CLIENTS if not options.only or options.only in name]
        rows += [tried_in_node(server, name, options.npm) for name in wanted]
        rows += [tried_agent(server, name, options.npm) for name in AGENTS if options.only and options.only in name]
    print(markdown(rows))
    write(rows, options.output)
    return 0 if all(row["result"] in ("works", "not installed") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
