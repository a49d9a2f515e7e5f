"""Calls of each format by hand: what its chat template makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "templates"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
RESPONSE_TEMPLATE: dict[str, Any] = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "content": {"content": "text", "content_args": {"strip": False}},
        "tool_calls": {
            "open_pattern": r"<call name=(?P<name>\w+)>",
            "close": "</call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
Call = tuple[str, dict[str, Any]]


def dumps(value: Any) -> str:
    """JSON as transformers' templates write it."""
    return json.dumps(value, ensure_ascii=False)


def hermes(calls: list[Call]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {dumps(arguments)}}}\n</tool_call>' for name, arguments in calls
    )


def llama3_json(calls: list[Call]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {dumps(arguments)}}}' for name, arguments in calls)


def mistral(calls: list[Call]) -> str:
    return "[TOOL_CALLS] " + dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def mistral_v11(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]a1b2[ARGS]{dumps(arguments)}" for name, arguments in calls)


def qwen3_coder(calls: list[Call]) -> str:
    def plain(value: Any) -> str:
        return dumps(value) if isinstance(value, dict | list) else str(value)

    def spell(name: str, arguments: dict[str, Any]) -> str:
        values = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"

    return "\n".join(spell(*call) for call in calls)


def glm(calls: list[Call]) -> str:
    def spell(name: str, arguments: dict[str, Any]) -> str:
        texts = {key: value if isinstance(value, str) else dumps(value) for key, value in arguments.items()}
        values = (f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in texts.items())
        return f"<tool_call>{name}\n{''.join(values)}</tool_call>"

    return "\n".join(spell(*call) for call in calls)


def tool_call_list(calls: list[Call]) -> str:
    return "<|tool_call|>" + dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def deepseek_v3(calls: list[Call]) -> str:
    spelled = (f"{BEGIN}function{SEPARATOR}{name}\n```json\n{dumps(values)}\n```{END}" for name, values in calls)
    return CALLS_BEGIN + "\n".join(spelled) + CALLS_END


def deepseek_v31(calls: list[Call]) -> str:
    return CALLS_BEGIN + "".join(f"{BEGIN}{name}{SEPARATOR}{dumps(values)}{END}" for name, values in calls) + CALLS_END


def response_template(calls: list[Call]) -> str:
    return "".join(f"<call name={name}>{dumps(arguments)}</call>" for name, arguments in calls)


def harmony(calls: list[Call]) -> str:
    return "".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(arguments)}<|call|>"
        for name, arguments in calls
    )


SPELL: dict[str, Callable[[list[Call]], str]] = {
    spell.__name__: spell
    for spell in (
        hermes,
        llama3_json,
        mistral,
        mistral_v11,
        tool_call_list,
        qwen3_coder,
        glm,
        deepseek_v3,
        deepseek_v31,
        harmony,
        response_template,
    )
}
