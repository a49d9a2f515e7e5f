"""`POST /api/chat` and `/api/generate`: requests become chats or completions, answers JSON lines.

`options` go to the fields of a chat: names that it does not serve are refused or ignored as in
`/v1/chat/completions`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from engine.api import RequestError
from server.openai.translating import refuse_drafts
from server.serving.answering import AnswerWriter, Event, encode
from server.serving.generation import Delta, Generation
from server.text.reasoning import Thought
from server.text.tools import whole_arguments
from server.wire.errors import ollama_error, to_api_error
from server.wire.fields import (
    Body,
    ChatRequest,
    CompletionRequest,
    Effort,
    Listed,
    Name,
    SpeculationFields,
    Tools,
    Wire,
)
from server.wire.limits import MOST_MESSAGES, MOST_PARTS
from server.wire.unsupported_fields import UNSUPPORTED, Neutral, refuse_unsupported

CHAT_NAMES = {
    "max_tokens": "num_predict",
    "response_format": "format",
    "enable_thinking": "think",
    "reasoning_effort": "think",
}
"""Names that `/api/chat` has for a chat's fields."""
_OPTIONS = frozenset(
    """
    temperature top_k top_p min_p seed stop repeat_penalty presence_penalty frequency_penalty logit_bias
    """.split()
)
"""Options that have the same name in a chat."""
_NS = 1_000_000_000
Images = Annotated[Listed[str], Field(max_length=MOST_PARTS)]


class MadeFunction(Wire):
    """Function of an earlier call; its arguments are an object."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class MadeCall(Wire):
    """Call that the assistant has made."""

    id: str | None = None
    function: MadeFunction


class OllamaMessage(Wire):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[Listed[MadeCall], Field(max_length=128)] | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None
    """Name of the function that a result is of, in place of the call's id."""


class OllamaFields(Body):
    """Common fields of `/api/chat` and `/api/generate`, with this server's extensions."""

    model: Name | None = None
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    """Schema of the answer, or `json` for any object."""
    options: dict[str, Any] | None = None
    think: bool | Effort | None = None
    keep_alive: Any = None
    """Accepted without effect: the operator decides how long the model stays loaded."""
    speculation: SpeculationFields | None = None
    metrics: bool | None = None
    attachment_placeholders: bool | None = None


class OllamaChatRequest(OllamaFields):
    """Body of `POST /api/chat`."""

    messages: Annotated[Listed[OllamaMessage], Field(max_length=MOST_MESSAGES)] = Field(default_factory=list)
    tools: Tools | None = None


class OllamaGenerateRequest(OllamaFields):
    """Body of `POST /api/generate`."""

    prompt: str = ""
    suffix: str = ""
    """Text after the answer: the model fills the gap, if it has tokens for that."""
    system: str = ""
    raw: bool = False
    """Whether the prompt is continued as it is, without the chat template."""
    images: Images | None = None
    template: Annotated[Any, Neutral("", way_out="the operator sets it (--chat-template)")] = None
    context: Annotated[Any, Neutral([], way_out="send the conversation to /api/chat")] = None


def as_chat(served: str, body: OllamaChatRequest | OllamaGenerateRequest) -> ChatRequest:
    """Return the request as a chat with the model `served`. Raises RequestError."""
    fields = _fields(served, body)
    if isinstance(body, OllamaChatRequest):
        fields["messages"] = _messages(body.messages)
        fields["tools"] = body.tools
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        fields["messages"] = [*system, {"role": "user", "content": _content(body.prompt, body.images)}]
    if isinstance(body.think, str):
        fields["reasoning_effort"] = body.think
    else:
        fields["enable_thinking"] = body.think
    fields["attachment_placeholders"] = body.attachment_placeholders
    return ChatRequest.model_validate(fields)


def as_completion(served: str, body: OllamaGenerateRequest) -> CompletionRequest:
    """Return the request as the completion of a text. Raises RequestError."""
    for name in ("system", "images"):
        if getattr(body, name):
            raise RequestError(f"{name} does not go with raw or suffix; leave it out", name, UNSUPPORTED)
    fields = {"prompt": body.prompt, "suffix": body.suffix}
    return CompletionRequest.model_validate(_fields(served, body) | fields)


def _fields(served: str, body: OllamaFields) -> dict[str, Any]:
    """Return the fields that chats and completions share."""
    refuse_unsupported(body)
    refuse_drafts(body.speculation)
    fields = dict(body.options or {})
    for name in fields:
        if name not in _OPTIONS and name in ChatRequest.model_fields:
            raise RequestError(f"options: {name} is no option; leave it out", "options", UNSUPPORTED)
    num_predict = fields.pop("num_predict", None)
    # Negative numbers ask for all the room that the context leaves.
    if not isinstance(num_predict, int) or isinstance(num_predict, bool) or num_predict >= 0:
        fields["max_tokens"] = num_predict
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format:
        schema = {"name": "format", "schema": body.format, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return {**fields, "model": served, "speculation": body.speculation, "metrics": body.metrics}


def _content(text: str, images: Sequence[str] | None) -> str | list[dict[str, Any]]:
    """Return a content; parts for images, which chats treat alike in all APIs."""
    if not images:
        return text
    return [{"type": "text", "text": text}, *({"type": "image"} for _ in images)]


def _messages(turns: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Return the messages of a chat, in which calls and results have ids."""
    messages: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # (id, name of the function)
    num_calls = 0
    for turn in turns:
        message: dict[str, Any] = {"role": turn.role, "content": _content(turn.content, turn.images)}
        if turn.thinking:
            message["reasoning_content"] = turn.thinking
        for call in turn.tool_calls or ():
            num_calls += 1
            # Nine letters and digits, because some chat templates accept no other ids.
            call_id = call.id or f"call{num_calls:05}"
            open_calls.append((call_id, call.function.name))
            function = {"name": call.function.name, "arguments": json.dumps(call.function.arguments)}
            message.setdefault("tool_calls", []).append({"id": call_id, "function": function})
        if turn.role == "tool":
            message["tool_call_id"] = _answered(turn, open_calls)
        messages.append(message)
    return messages


def _answered(turn: OllamaMessage, open_calls: list[tuple[str, str]]) -> str:
    """Return the id of the call that a result answers, which is removed from the open calls."""
    for number, (call_id, name) in enumerate(open_calls):
        is_meant = call_id == turn.tool_call_id if turn.tool_call_id else turn.tool_name in (None, name)
        if is_meant:
            del open_calls[number]
            return call_id
    named = turn.tool_call_id or turn.tool_name
    raise RequestError(f"messages: no call is open that the result {named or ''} could answer", "messages")


def loaded(model: str, is_chat: bool) -> dict[str, Any]:
    """Return the answer to a request without text, which asks to load the model."""
    said: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return {"model": model, "created_at": now(), **said, "done": True, "done_reason": "load"}


def now() -> str:
    """Return the time in Ollama's format."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaWriter(AnswerWriter):
    """Writes a generation as JSON lines; calls come whole, in the line before the last one."""

    media_type = "application/x-ndjson"

    def __init__(self, body: OllamaFields, generation: Generation, with_metrics: bool) -> None:
        self._model = body.model
        self._is_chat = isinstance(body, OllamaChatRequest)
        self._generation = generation
        self._choice = generation.choices[0]
        self._with_metrics = with_metrics

    def frame(self, event: Event) -> bytes:
        return encode(event) + b"\n"

    def silence(self) -> bytes:
        return self.frame(self._line(""))

    def take(self, delta: Delta) -> list[dict[str, Any]]:
        thoughts = [self._line("", part.text) for part in delta.parts if isinstance(part, Thought)]
        return [*thoughts, *(self._line(part) for part in delta.parts if isinstance(part, str))]

    def end(self) -> list[dict[str, Any]]:
        calls = [self._line("", calls=self._calls())] if self._choice.calls else []
        return [*calls, self._line("") | self._ending()]

    def fail(self, error: Exception) -> list[dict[str, Any]]:
        return [ollama_error(to_api_error(error))]

    def collect(self, delta: Delta) -> None:
        """Do nothing: the choice holds all that a whole answer needs."""

    def whole(self) -> list[bytes]:
        choice = self._choice
        return [encode(self._line(choice.text, choice.thoughts, self._calls()) | self._ending())]

    def _line(self, text: str, thought: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """Return a line with a piece of the answer."""
        piece: dict[str, Any] = {"content" if self._is_chat else "response": text}
        if thought:
            piece["thinking"] = thought
        if calls:
            piece["tool_calls"] = calls
        if self._is_chat:
            piece = {"message": {"role": "assistant", **piece}}
        return {"model": self._model, "created_at": now(), **piece, "done": False}

    def _calls(self) -> list[dict[str, Any]]:
        calls = []
        for index, call in enumerate(self._choice.calls):
            function = {"index": index, "name": call.name, "arguments": whole_arguments(call.arguments)}
            calls.append({"id": self._choice.call_ids[index], "function": function})
        return calls

    def _ending(self) -> dict[str, Any]:
        """Return the fields of the last line; durations are in nanoseconds."""
        choice = self._choice
        times = choice.clock.times_s()
        ending: dict[str, Any] = {
            "done": True,
            "done_reason": "length" if choice.finish_reason == "length" else "stop",
            "total_duration": round(_NS * (times.get("e2e") or 0.0)),
            "load_duration": 0,
            "prompt_eval_count": self._generation.num_prompt_tokens,
            "prompt_eval_duration": round(_NS * (times.get("prefill") or 0.0)),
            "eval_count": choice.num_tokens,
            "eval_duration": round(_NS * (times.get("decode") or 0.0)),
        }
        if self._with_metrics:
            ending["metrics"] = msgspec.to_builtins(self._generation.metrics())
        return ending
