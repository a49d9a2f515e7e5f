"""`POST /v1/responses`: the request becomes a chat; the answer is a list of items.

Supports text and function tools. Responses are kept if the daemon has a folder for them
(`batches/kept_responses.py`); otherwise `previous_response_id` is refused. `background` always is.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from engine.api import RequestError, Sampling
from server.openai.response_tools import Names, chat_tools, described, names_of
from server.openai.translating import refuse_drafts
from server.serving.answering import AnswerWriter, encode
from server.serving.generation import Delta, Generation
from server.text.attachments import is_attachment
from server.text.reasoning import Thought
from server.wire.errors import responses_error, to_api_error
from server.wire.fields import (
    ChatRequest,
    Closed,
    Count,
    Effort,
    GenerationFields,
    Listed,
    ReasoningConfig,
)
from server.wire.ids import new_id
from server.wire.limits import MOST_MESSAGES, MOST_TOOLS
from server.wire.unsupported_fields import Neutral, refuse_unsupported

Included = Literal[
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
]
"""Values of `include` without effect; thoughts are sent unencrypted, to be sent back."""
_TEXT_PARTS = ("input_text", "output_text", "text")


class TextConfig(Closed):
    """Format of the text."""

    format: dict[str, Any] | None = None
    verbosity: Any = None


class ResponsesRequest(GenerationFields):
    """Body of `POST /v1/responses`, with the common fields of sampling and speculation."""

    input: str | Annotated[Listed[dict[str, Any]], Field(max_length=MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[Listed[dict[str, Any]], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    attachment_placeholders: bool | None = None
    """Whether images and files in results of tools and earlier turns become placeholders."""
    max_tool_calls: int | None = None
    """Limit of calls that the server runs; this server runs none."""
    client_metadata: dict[str, Any] | None = None
    """Information about the client that Codex sends; no effect."""

    # Known and not supported; some belong to other endpoints.
    background: Annotated[Any, Neutral(False)] = None
    previous_response_id: Annotated[Any, Neutral(way_out="send the conversation whole, or use --batch-folder")] = None
    conversation: Annotated[Any, Neutral(way_out="send the conversation whole")] = None
    prompt: Annotated[Any, Neutral()] = None
    include: Annotated[Listed[Included], Field(max_length=16)] | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Annotated[Any, Neutral("disabled", way_out="send truncate_prompt_tokens")] = None
    top_logprobs: Annotated[Any, Neutral(0)] = None
    max_tokens: Annotated[Any, Neutral(way_out="send max_output_tokens")] = None
    max_completion_tokens: Annotated[Any, Neutral(way_out="send max_output_tokens")] = None
    n: Annotated[Any, Neutral(1)] = 1
    stream_options: Annotated[Any, Neutral({}, {"include_obfuscation": False}, {"include_obfuscation": True})] = None
    response_format: Annotated[Any, Neutral(way_out="send text.format")] = None
    prompt_logprobs: Annotated[Any, Neutral()] = None
    return_token_ids: Annotated[Any, Neutral(False)] = None


_SHARED = frozenset(ResponsesRequest.model_fields) & frozenset(ChatRequest.model_fields) - {
    "n",
    "stream_options",
    "reasoning",
}
"""Fields that are passed to the chat unchanged."""


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """Return the request as a chat. Raises RequestError for unsupported values."""
    refuse_unsupported(body)
    text = body.text or TextConfig()
    names = names_of(body.tools or ())
    refuse_drafts(body.speculation)
    fields = body.model_dump(exclude_unset=True, include=set(_SHARED))
    messages = _messages(body.input, names)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    fields["messages"] = messages
    fields["stream"] = False
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if text.format is not None:
        fields["response_format"] = _response_format(text.format)
    if body.tools:
        fields["tools"] = chat_tools(body.tools, names)
    if isinstance(body.tool_choice, dict):
        fields["tool_choice"] = _tool_choice(body.tool_choice, names)
    return ChatRequest.model_validate(fields)


def _reasoning(body: ResponsesRequest) -> dict[str, Any]:
    """Return the requested amount of thinking as the response repeats it."""
    asked = body.reasoning or ReasoningConfig()
    return {"effort": asked.effort or body.reasoning_effort, "summary": asked.summary}


def _response_format(text_format: dict[str, Any]) -> dict[str, Any]:
    if text_format.get("type") != "json_schema":
        return text_format
    json_schema = {name: text_format[name] for name in text_format if name != "type"}
    return {"type": "json_schema", "json_schema": json_schema}


def _tool_choice(choice: dict[str, Any], names: Names) -> dict[str, Any]:
    """Return a choice of tools in chat's format, which has names one level deeper."""

    def named(tool: Any) -> Any:
        if not isinstance(tool, dict):
            return tool
        name = names.offered(tool.get("namespace"), tool.get("name"))
        return {"type": tool.get("type"), "function": {"name": name}}

    if choice.get("type") != "allowed_tools":
        return dict(named(choice))
    tools = choice.get("tools")
    if not isinstance(tools, list):
        tools = []
    allowed = {"mode": choice.get("mode"), "tools": [named(tool) for tool in tools]}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _messages(items: str | list[dict[str, Any]], names: Names) -> list[dict[str, Any]]:
    """Return the input's items as messages; thoughts, text and calls together form one."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            message = {"role": item.get("role"), "content": _content(item.get("content"), number)}
            last = messages[-1] if messages else {}
            is_after_thought = last.keys() == {"role", "content", "reasoning_content"} and not last["content"]
            if is_after_thought and message["role"] == "assistant":
                messages[-1] |= message
            else:
                messages.append(message)
        elif kind == "reasoning":
            messages.append({"role": "assistant", "content": "", "reasoning_content": _thoughts(item, number)})
        elif kind == "function_call":
            name = names.offered(item.get("namespace"), item.get("name"))
            function = {"name": name, "arguments": item.get("arguments", "")}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": function})
        elif kind == "function_call_output":
            content = _content(item.get("output"), number)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            raise RequestError(f"input items of type {kind!r} are not supported", f"input.{number}")
    if not messages:
        raise RequestError("the input is empty", "input")
    return messages


def _thoughts(item: dict[str, Any], number: int) -> str:
    """Return the text of a reasoning item, or of its summary."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(map(_has_text, parts)):
        raise RequestError("input: a reasoning item holds parts with text", f"input.{number}")
    return "".join(part["text"] for part in parts)


def _has_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _content(content: Any, number: int) -> Any:
    """Return content with its parts in chat's format."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _TEXT_PARTS:
            parts.append({"type": "text", "text": part.get("text")})
        elif is_attachment(kind):
            parts.append({"type": kind})
        else:
            raise RequestError(f"input: parts of type {kind!r} are not supported; send text", f"input.{number}")
    return parts


_PREFIXES = {"message": "msg", "reasoning": "rs"}
"""Beginning of the id of an item with text."""
_FIELDS: dict[str, dict[str, Any]] = {"message": {"role": "assistant"}, "reasoning": {"summary": []}}
"""Further fields of such an item."""
_PARTS: dict[str, dict[str, Any]] = {
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text", "text": ""},
}
"""Part of such an item as it begins."""


def _echoed(body: ResponsesRequest, sampling: Sampling) -> dict[str, Any]:
    """Return the fields of the request as the response repeats them."""
    text_format = None
    if body.text is not None:
        text_format = body.text.format
    fields: dict[str, Any] = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": sampling.temperature,
        "text": {"format": text_format or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [described(tool) for tool in body.tools or ()],
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "top_logprobs": 0,
        "reasoning": _reasoning(body),
        "max_tool_calls": body.max_tool_calls,
        "background": False,
        "service_tier": "default",
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }
    # OpenAI's schema does not allow null for it.
    if body.user is not None:
        fields["user"] = body.user
    return fields


@dataclass(frozen=True)
class Record:
    """Place of a response in the store, and its predecessor."""

    previous_response_id: str | None = None
    save: Callable[[dict[str, Any]], Awaitable[None]] | None = None
    """Keeps a response, and sets its field `store`; None if it is not to be kept."""


class ResponseWriter(AnswerWriter):
    """Writes a generation as items and events."""

    def __init__(self, record: Record, body: ResponsesRequest, generation: Generation, with_metrics: bool) -> None:
        self._record = record
        self._body = body
        self._generation = generation
        self._with_metrics = with_metrics
        self._id = f"resp_{new_id()}"
        self._created = int(time.time())
        self._num_events = 0
        self.output: list[dict[str, Any]] = []
        self._names = names_of(body.tools or ())
        self._is_open = False
        self._last_events: list[dict[str, Any]] = []
        self._final: dict[str, Any] = {}
        self._echoed = _echoed(body, generation.choices[0].request.sampling)

    def response(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the current response object."""
        result: dict[str, Any] = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": error,
            "incomplete_details": None,
            "model": self._body.model,
            "output": self.output,
            "previous_response_id": self._record.previous_response_id,
            "store": self._record.save is not None,
            "usage": None,
            **self._echoed,
        }
        if status == "completed":
            result["completed_at"] = int(time.time())
        if status == "incomplete":
            result["incomplete_details"] = {"reason": "max_output_tokens"}
        if status in ("completed", "incomplete"):
            result["usage"] = self._usage()
            if self._with_metrics:
                result["metrics"] = msgspec.to_builtins(self._generation.metrics())
        return result

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage()
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }

    async def finish(self) -> None:
        """End the open item, and keep the response."""
        self._last_events = self._close(self.status)
        self._final = self.response(self.status)
        if self._record.save is not None:
            await self._record.save(self._final)

    def whole(self) -> list[bytes]:
        """Return the response object of an answer that has ended."""
        return [encode(self._final)]

    @property
    def status(self) -> str:
        """Final status of the answer."""
        finish_reason = self._generation.choices[0].finish_reason
        return "incomplete" if finish_reason == "length" else "completed"

    def begin(self) -> list[dict[str, Any]]:
        response = self.response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def take(self, delta: Delta) -> list[dict[str, Any]]:
        events = []
        for part in delta.parts:
            if isinstance(part, str):
                events += self._write("message", part)
            elif isinstance(part, Thought):
                events += self._write("reasoning", part.text)
            else:
                if part.name is not None:
                    events += self._close() + self._open_call(part.call_id or "", part.name)
                self.output[-1]["arguments"] += part.arguments
                events.append(self._item_event("response.function_call_arguments.delta", delta=part.arguments))
        return events

    def end(self) -> list[dict[str, Any]]:
        return [*self._last_events, self._event(f"response.{self.status}", response=self._final)]

    def fail(self, error: Exception) -> list[dict[str, Any]]:
        failed = self.response("failed", responses_error(to_api_error(error)))
        return [self._event("response.failed", response=failed)]

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self.output[-1]["id"], output_index=len(self.output) - 1, **fields)

    def _open(self, item: dict[str, Any]) -> dict[str, Any]:
        self.output.append(item)
        self._is_open = True
        return self._event("response.output_item.added", output_index=len(self.output) - 1, item=dict(item))

    def _open_call(self, call_id: str, name: str) -> list[dict[str, Any]]:
        item = {"type": "function_call", "id": f"fc_{new_id()}", "call_id": call_id, **self._names.called(name)}
        return [self._open({**item, "arguments": "", "status": "in_progress"})]

    def _write(self, item_type: str, text: str) -> list[dict[str, Any]]:
        """Add text to the open item if it has this type, else to a new one."""
        events = []
        part = _PARTS[item_type]
        if not self._is_open or self.output[-1]["type"] != item_type:
            events += self._close()
            item = {"type": item_type, "id": f"{_PREFIXES[item_type]}_{new_id()}", "status": "in_progress"}
            events.append(self._open({**item, **_FIELDS[item_type], "content": []}))
            self.output[-1]["content"] = [dict(part)]
            events.append(self._item_event("response.content_part.added", content_index=0, part=part))
        self.output[-1]["content"][0]["text"] += text
        return [*events, self._part_event("delta", delta=text)]

    def _part_event(self, change: str, **fields: Any) -> dict[str, Any]:
        """Return an event of the open item's only part."""
        part = self.output[-1]["content"][0]
        more: dict[str, Any] = {"logprobs": []} if "logprobs" in part else {}
        return self._item_event(f"response.{part['type']}.{change}", content_index=0, **fields, **more)

    def _close(self, status: str = "completed") -> list[dict[str, Any]]:
        """End the open item."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self.output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._item_event("response.function_call_arguments.done", **done)]
        else:
            part = item["content"][0]
            events = [
                self._part_event("done", text=part["text"]),
                self._item_event("response.content_part.done", content_index=0, part=dict(part)),
            ]
        return [*events, self._event("response.output_item.done", output_index=len(self.output) - 1, item=dict(item))]
