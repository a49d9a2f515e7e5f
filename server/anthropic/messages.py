"""`POST /v1/messages`: the request becomes a chat; the answer is a list of content blocks.

Supports text, thinking and function tools, for coding agents with Anthropic's
protocol. Nothing is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from server.anthropic.contents import TOOL_REFERENCE, content_of, turn_of
from server.openai.translating import refuse_drafts
from server.serving.answering import AnswerWriter, encode
from server.serving.choice import CallPiece, Choice, Part
from server.serving.generation import Delta, Generation
from server.text.reasoning import Thought
from server.text.tools import whole_arguments
from server.wire.errors import anthropic_error, to_api_error
from server.wire.fields import (
    Body,
    ChatRequest,
    Closed,
    Count,
    Effort,
    Listed,
    Name,
    SpeculationFields,
    Wire,
)
from server.wire.ids import new_id
from server.wire.limits import MOST_MESSAGES, MOST_PARTS, MOST_STRINGS, MOST_TOOLS
from server.wire.unsupported_fields import Neutral, refuse_unsupported

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
Blocks = Annotated[Listed[dict[str, Any]], Field(max_length=MOST_PARTS)]


class ThinkingConfig(Closed):
    """Switch for thinking; `adaptive` leaves it to the model."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    """Maximum number of tokens of thoughts, which are then closed."""
    display: str | None = None
    """Accepted without effect: thoughts are always shown."""


class OutputFormat(Closed):
    """Schema of the answer."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Closed):
    """Effort, and format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class AnthropicTool(Wire):
    """A function that the model may call."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None
    defer_loading: bool = False
    """Whether the prompt contains the tool only after a tool search has named it."""


class AnthropicChoice(Closed):
    """Choice of tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class AnthropicMessage(Wire):
    """Turn of a conversation: text, or blocks of text, thoughts, calls and results."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class CountTokensRequest(Body):
    """Body of `POST /v1/messages/count_tokens`: the part of a request that makes its prompt."""

    model: Name | None = None
    """Name of the model; without one the served model answers."""
    messages: Annotated[Listed[AnthropicMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    system: str | Blocks | None = None
    tools: Annotated[Listed[AnthropicTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    attachment_placeholders: bool | None = None
    """Whether images and files in results of tools and earlier turns become placeholders."""


class MessagesRequest(CountTokensRequest):
    """Body of `POST /v1/messages`, extended by `speculation`, `seed` and `metrics`."""

    max_tokens: Count
    stop_sequences: Annotated[Listed[str], Field(max_length=MOST_STRINGS)] | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    metadata: dict[str, Any] | None = None
    speculation: SpeculationFields | None = None
    seed: int | None = None
    metrics: bool | None = None
    service_tier: str | None = None
    container: Annotated[Any, Neutral()] = None
    mcp_servers: Annotated[Any, Neutral([])] = None
    context_management: Annotated[
        Any, Neutral({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})
    ] = None


def as_chat(body: CountTokensRequest) -> ChatRequest:
    """Return the request as a chat; raise RequestError for unsupported values.

    Raises ValidationError for invalid values.
    """
    refuse_unsupported(body)
    messages = _messages(body)
    fields: dict[str, Any] = {"model": body.model, "messages": messages}
    fields["attachment_placeholders"] = body.attachment_placeholders
    # A final turn of the assistant is the beginning of the answer.
    last = messages[-1]
    is_text = bool(last["content"]) and "tool_calls" not in last
    fields["continue_final_message"] = last["role"] == "assistant" and is_text
    if body.tools:
        fields["tools"] = _tools(body)
    fields |= _tool_choice(body.tool_choice)
    fields["reasoning_effort"] = _effort(body)
    if body.thinking is not None:
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    if isinstance(body, MessagesRequest):
        refuse_drafts(body.speculation)
        if body.output_config is not None and body.output_config.format is not None:
            schema = {"name": "output", "schema": body.output_config.format.schema_, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        same = {"max_tokens", "temperature", "top_k", "top_p", "metadata", "speculation", "seed", "metrics"}
        fields |= body.model_dump(exclude_unset=True, include=same)
        fields["stop"] = body.stop_sequences
    return ChatRequest.model_validate(fields)


def _effort(body: CountTokensRequest) -> Effort | None:
    """Return chat's reasoning effort; None leaves it to the chat template."""
    effort: Effort | None = None
    if body.output_config is not None:
        effort = body.output_config.effort
    if body.thinking is not None and body.thinking.type == "disabled":
        return "none"
    if body.thinking is not None and body.thinking.type == "enabled":
        return effort or "high"
    return effort


def _tools(body: CountTokensRequest) -> list[dict[str, Any]]:
    """Return the tools, except deferred tools that no search result has named."""
    named = set(_referenced_tools(body))
    return [_tool(tool) for tool in body.tools or () if not tool.defer_loading or tool.name in named]


def _referenced_tools(body: CountTokensRequest) -> Iterator[str]:
    """Yield the names of the tools that search results refer to."""
    for turn in body.messages:
        for block in turn.content if isinstance(turn.content, list) else ():
            results = block.get("content")
            for result in results if isinstance(results, list) else ():
                if isinstance(result, dict) and result.get("type") == TOOL_REFERENCE:
                    yield str(result.get("tool_name"))


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        return {"type": tool.type}
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: AnthropicChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    named = {"type": "function", "function": {"name": choice.name}}
    asked = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
    return {"tool_choice": asked, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    """Return the turns as messages of a chat; results of calls become separate messages."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": content_of(body.system, "system")})
    for number, turn in enumerate(body.messages):
        if isinstance(turn.content, str):
            messages.append({"role": turn.role, "content": turn.content})
        else:
            messages += turn_of(turn.role, turn.content, f"messages.{number}.content")
    return messages


class MessageWriter(AnswerWriter):
    """Writes a generation as content blocks and events."""

    def __init__(self, body: MessagesRequest, generation: Generation, with_metrics: bool) -> None:
        self._body = body
        self._generation = generation
        self._with_metrics = with_metrics
        self._id = f"msg_{new_id()}"
        self.content: list[dict[str, Any]] = []
        self._arguments = ""
        self._is_open = False

    def whole(self) -> list[bytes]:
        """Return the message of an answer that has ended."""
        self._close()
        return [encode(self._message())]

    def _message(self) -> dict[str, Any]:
        """Return the current message."""
        choice = self._generation.choices[0]
        reason = None
        stop = None
        if choice.finish_reason is not None:
            reason = self._stop_reason(choice)
        if reason == "stop_sequence":
            stop = choice.stop_string
        result: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._body.model,
            "content": self.content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "stop_details": None,
            "container": None,
            "usage": self._usage(),
        }
        if reason is not None and self._with_metrics:
            result["metrics"] = msgspec.to_builtins(self._generation.metrics())
        return result

    def _stop_reason(self, choice: Choice) -> str:
        """Return Anthropic's reason for the end of an answer."""
        if choice.finish_reason == "length" and self._generation.cut_bound is not None:
            return "model_context_window_exceeded"
        usual = "end_turn" if choice.stop_string is None else "stop_sequence"
        return _STOP_REASONS.get(choice.finish_reason or "", usual)

    def _usage(self) -> dict[str, Any]:
        """Return the usage; Anthropic counts cached tokens separately."""
        usage = self._generation.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "cache_creation": {"ephemeral_1h_input_tokens": 0, "ephemeral_5m_input_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.completion_tokens_details.reasoning_tokens},
            "server_tool_use": None,
            "service_tier": "standard",
            "inference_geo": None,
        }

    def begin(self) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": {**self._message(), "content": []}}]

    def take(self, delta: Delta) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for part in delta.parts:
            block = _block(part)
            begins_call = isinstance(part, CallPiece) and bool(part.name)
            if begins_call or not self._is_open or self.content[-1]["type"] != block["type"]:
                events += self._close() + self._open(block)
            events.append(self._more(part))
        return events

    def _open(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        self.content.append(block)
        self._is_open = True
        self._arguments = ""
        return [{"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}]

    def _more(self, part: Part) -> dict[str, Any]:
        block = self.content[-1]
        if isinstance(part, CallPiece):
            self._arguments += part.arguments
            delta = {"type": "input_json_delta", "partial_json": part.arguments}
        elif isinstance(part, Thought):
            block["thinking"] += part.text
            delta = {"type": "thinking_delta", "thinking": part.text}
        else:
            block["text"] += part
            delta = {"type": "text_delta", "text": part}
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}

    def _close(self) -> list[dict[str, Any]]:
        """End the open block."""
        if not self._is_open:
            return []
        self._is_open = False
        block = self.content[-1]
        if block["type"] == "tool_use":
            block["input"] = whole_arguments(self._arguments)
        return [{"type": "content_block_stop", "index": len(self.content) - 1}]

    def end(self) -> list[dict[str, Any]]:
        events = self._close()
        message = self._message()
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence", "stop_details", "container")}
        last: dict[str, Any] = {"type": "message_delta", "delta": delta, "usage": message["usage"]}
        if "metrics" in message:
            last["metrics"] = message["metrics"]
        return [*events, last, {"type": "message_stop"}]

    def fail(self, error: Exception) -> list[dict[str, Any]]:
        return [anthropic_error(to_api_error(error))]


def _block(part: Part) -> dict[str, Any]:
    """Return the initial value of the block that a part belongs to."""
    if isinstance(part, CallPiece):
        fields = {"id": part.call_id, "name": part.name, "input": {}, "caller": {"type": "direct"}}
        return {"type": "tool_use", **fields}
    if isinstance(part, Thought):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}
