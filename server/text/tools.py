"""Function tools of a chat request: their description for the template, and the grammar.

Grammars enforce forced calls and strict tools in all formats but `response_template`.

Not for: finding the model's format (`dialogue.py`), or reading calls (`tool_calls.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.api import RequestError
from server.text.call_formats import HARMONY, KIMI_K2, KIMI_K3, SOLAR
from server.text.call_grammars import SYNTAXES, CallGrammar, SpecialToken
from server.text.chat_variants import named_id
from server.text.structured import NamedSchema, Structure
from server.wire.fields import AllowedTools, AnyTool, ChatRequest, MadeCall, Message, NamedChoice, TextPart, Tool
from server.wire.limits import LONGEST_GRAMMAR
from server.wire.nesting import nests_too_deeply
from server.wire.unsupported_fields import shown

PARTIAL_JSON = "partial_json"
"""Key of arguments that are not JSON, in an object with this key alone."""


@dataclass(frozen=True)
class ToolUse:
    """Tools of one request."""

    tools: tuple[Tool, ...]
    """Functions that the model may call."""
    format: str
    parallel: bool
    """Whether an answer may have several calls."""
    forced: bool
    """Whether an answer must have a call."""
    num_earlier_calls: int = 0

    @property
    def names(self) -> frozenset[str]:
        """Names of the functions."""
        return frozenset(tool.function.name for tool in self.tools)

    @property
    def followed(self) -> frozenset[str]:
        """Names of functions whose calls a grammar forces to follow their schema."""
        return frozenset(tool.function.name for tool in self.tools if self.forced or tool.function.strict)

    def call_id(self, name: str, index: int) -> str | None:
        """Return the id that the model's format demands of a call; None if any id will do."""
        if self.format != KIMI_K2:
            return None
        return named_id(name, self.num_earlier_calls + index)

    @property
    def covers_thoughts(self) -> bool:
        """Whether the grammar of calls contains the thoughts before them."""
        return self.format in (HARMONY, KIMI_K3, SOLAR)

    def for_template(self) -> list[dict[str, Any]]:
        """Return the tools in the format of chat templates."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    def structure(self, answer: Structure, special_token: SpecialToken) -> Structure:
        """Return the structure of the answer; an empty one if the model is unrestricted.

        answer: structure of an answer without calls. Calls are the alternative, or the only option
        if a call is forced. special_token: returns the special token with a text, with which the
        model may write a mark.
        """
        bound = bool(answer.grammar) and not self.forced
        if not bound and not self.forced and not any(tool.function.strict for tool in self.tools):
            return Structure()
        if bound and not answer.rule:
            raise RequestError(
                f"{answer.param}: a grammar of your own does not go with tools; send a schema, or tool_choice none",
                answer.param,
            )
        if self.format not in SYNTAXES:
            raise RequestError(
                f"calls in the format of this model ({self.format}) can be neither forced nor strict, nor a choice "
                "with structured output; use tool_choice auto with tools that are not strict and no schema, or none",
                "tool_choice" if self.forced else "tools",
            )
        grammar = CallGrammar(self.tools, self.format, special_token, self.parallel)
        if self.forced:
            lark = grammar.calls()
        elif bound:
            lark = grammar.calls_or(answer.rule)
        else:
            lark = grammar.text_and_calls()
        if len(lark) > LONGEST_GRAMMAR:
            raise RequestError(f"tools: schemas of {len(lark)} characters, more than {LONGEST_GRAMMAR}", "tools")
        schemas = {
            f"args_{number}": NamedSchema(f"tools: {tool.function.name}", "tools", tool.function.parameters)
            for number, tool in enumerate(self.tools)
        }
        if "" in answer.schemas:
            schemas["answer"] = answer.schemas[""]
        return Structure(lark, "tools", schemas=schemas)


def functions_of(tools: Sequence[AnyTool] | None) -> list[Tool]:
    """Return the functions among the tools."""
    return [tool for tool in tools or () if isinstance(tool, Tool)]


def other_kinds(tools: Sequence[AnyTool] | None) -> list[str]:
    """Return the types of the other tools, in a form that is safe in logs."""
    return sorted({shown(tool.type) for tool in tools or () if not isinstance(tool, Tool)})


def tool_use_of(body: ChatRequest, format_name: str | None, refusal: str = "") -> ToolUse | None:
    """Return the tools that a body's answer may call; None if there are none. Raises RequestError.

    refusal: reason why this server's model serves no tools; "" if it does.
    """
    functions = functions_of(body.tools)
    names = [tool.function.name for tool in functions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"tools: there are two functions {twice!r}", "tools")
    choice = body.tool_choice
    if not functions:
        if isinstance(choice, NamedChoice | AllowedTools) or choice in ("required", "any"):
            raise RequestError("tool_choice: there are no tools to choose from", "tool_choice")
        return None
    if choice == "none":
        return None
    if refusal or format_name is None:
        raise RequestError(f"tools: {refusal or 'this model has no chat template'}", "tools", "unsupported_value")
    tools = tuple(functions)
    if isinstance(choice, NamedChoice):
        tools = tuple(tool for tool in tools if tool.function.name == choice.function.name)
        if not tools:
            raise RequestError(f"tool_choice: there is no function {choice.function.name!r}", "tool_choice")
    if isinstance(choice, AllowedTools):
        allowed = [tool.function.name for tool in choice.allowed_tools.tools]
        if unknown := next((name for name in allowed if name not in names), None):
            raise RequestError(f"tool_choice: there is no function {unknown!r}", "tool_choice")
        tools, choice = tuple(tool for tool in tools if tool.function.name in allowed), choice.allowed_tools.mode
    forced = choice is not None and choice != "auto"
    parallel = body.parallel_tool_calls is not False and not isinstance(choice, NamedChoice)
    num_earlier_calls = sum(len(message.tool_calls or ()) for message in body.messages)
    return ToolUse(tools, format_name, parallel, forced, num_earlier_calls)


def plain_text(content: str | list[TextPart], param: str) -> str:
    """Return the text of a content; raises RequestError for parts that are not text."""
    if isinstance(content, str):
        return content
    for part in content:
        if part.type != "text" or part.text is None:
            raise RequestError(
                f"{param}: parts of type {part.type!r} are not supported; send text", param, "unsupported_value"
            )
    return "".join(part.text or "" for part in content)


def template_message(message: Message, number: int) -> dict[str, Any]:
    """Return the `number`-th message for chat templates; raises RequestError."""
    if message.content is None and not (message.tool_calls or message.reasoning_content or message.reasoning):
        raise RequestError("a message needs content, reasoning or tool_calls", f"messages.{number}.content")
    text = plain_text(message.content or "", "messages")
    result: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
    # Templates without support for names ignore the key.
    if message.name:
        result["name"] = message.name
    if thought := message.reasoning_content or message.reasoning:
        if message.role != "assistant":
            raise RequestError("messages: reasoning belongs to the assistant", "messages")
        # Names in different templates.
        result["reasoning_content"] = result["reasoning"] = result["thinking"] = thought
    if message.tool_calls:
        if message.role != "assistant":
            raise RequestError("messages: tool_calls belong to the assistant", "messages")
        result["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.function.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        if not message.tool_call_id:
            raise RequestError("messages: a tool's message needs the tool_call_id that it answers", "messages")
        result["tool_call_id"] = message.tool_call_id
    return result


def whole_arguments(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object; truncated arguments become one text in an object."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (ValueError, RecursionError):
        return {PARTIAL_JSON: arguments}
    if not isinstance(value, dict):
        return {PARTIAL_JSON: arguments}
    return value


def _arguments(call: MadeCall) -> dict[str, Any]:
    """Return a call's arguments, which are sent as a string, as an object for templates.

    Arguments that are not JSON, for example truncated arguments or arguments with NaN, become one
    text in the object.
    """
    if nests_too_deeply(call.function.arguments):
        raise RequestError(f"messages: arguments of call {call.id!r} are nested too deeply", "messages")
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    except RecursionError as error:
        raise RequestError(f"messages: arguments of call {call.id!r} are nested too deeply", "messages") from error
    except ValueError:
        return {PARTIAL_JSON: call.function.arguments}
    if not isinstance(arguments, dict):
        raise RequestError(f"messages: arguments of call {call.id!r} are not an object", "messages")
    return arguments
