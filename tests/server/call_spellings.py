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


def nemotron_v2(calls: list[Call]) -> str:
    return "<TOOLCALL>" + dumps([{"name": name, "arguments": arguments} for name, arguments in calls]) + "</TOOLCALL>"


def falcon_h1(calls: list[Call]) -> str:
    """Whole objects of the API."""
    listed = [
        {"type": "function", "id": f"c{number}", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return f"<tool_call>\n{dumps(listed)}\n</tool_call>"


def kimi_k2(calls: list[Call]) -> str:
    spelled = (
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{dumps(values)}<|tool_call_end|>"
        for number, (name, values) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(spelled)}<|tool_calls_section_end|>"


def solar_open(calls: list[Call]) -> str:
    spelled = (
        f"<|tool_call:begin|>a1b2<|tool_call:name|>{name}<|tool_call:args|>{dumps(values)}<|tool_call:end|>"
        for name, values in calls
    )
    return f"<|tool_calls|>{''.join(spelled)}<|calls|>"


def invokes(calls: list[Call], outer: str, tag: str = "", is_typed: bool = False) -> str:
    def spell(name: str, arguments: dict[str, Any]) -> str:
        values = ""
        for key, value in arguments.items():
            is_string = isinstance(value, str)
            attribute = f' string="{str(is_string).lower()}"' if is_typed else ""
            text = value if is_string else dumps(value)
            values += f'<{tag}parameter name="{key}"{attribute}>{text}</{tag}parameter>\n'
        return f'<{tag}invoke name="{name}">\n{values}</{tag}invoke>\n'

    return f"<{tag}{outer}>\n{''.join(spell(*call) for call in calls)}</{tag}{outer}>"


def minimax_m2(calls: list[Call]) -> str:
    return invokes(calls, "minimax:tool_call")


def deepseek_v32(calls: list[Call]) -> str:
    return invokes(calls, "function_calls", "｜DSML｜", is_typed=True)


def deepseek_v4(calls: list[Call]) -> str:
    return invokes(calls, "tool_calls", "｜DSML｜", is_typed=True)


def hy3(calls: list[Call], suffix: str = "") -> str:
    def spell(name: str, arguments: dict[str, Any]) -> str:
        values = "".join(
            f"<arg_key{suffix}>{key}</arg_key{suffix}>\n<arg_value{suffix}>"
            f"{value if isinstance(value, str) else dumps(value)}</arg_value{suffix}>\n"
            for key, value in arguments.items()
        )
        return f"<tool_call{suffix}>{name}<tool_sep{suffix}>\n{values}</tool_call{suffix}>\n"

    return f"<tool_calls{suffix}>\n{''.join(spell(*call) for call in calls)}</tool_calls{suffix}>"


def hy3_opensource(calls: list[Call]) -> str:
    return hy3(calls, ":opensource")


def minimax_m3(calls: list[Call]) -> str:
    begin = "]<]minimax[>[<"

    def nested(value: Any) -> str:
        if isinstance(value, dict):
            return "".join(f"{begin}{key}>{nested(one)}{begin}/{key}>" for key, one in value.items())
        if isinstance(value, list):
            return "".join(f"{begin}item>{nested(one)}{begin}/item>" for one in value)
        return value if isinstance(value, str) else dumps(value)

    spelled = (f'{begin}invoke name="{name}">{nested(values)}{begin}/invoke>\n' for name, values in calls)
    return f"{begin}tool_call>\n{''.join(spelled)}{begin}/tool_call>"


def gemma4(calls: list[Call]) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, str):
            return f'<|"|>{value}<|"|>'
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{shown(one)}" for key, one in sorted(value.items())) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(shown, value)) + "]"
        return dumps(value)

    return "".join(f"<|tool_call>call:{name}{shown(arguments)}<tool_call|>" for name, arguments in calls)


def python_calls(calls: list[Call]) -> str:
    """Calls in Python's syntax."""
    made = (f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})" for name, values in calls)
    return f"[{', '.join(made)}]"


def lfm2(calls: list[Call]) -> str:
    return f"<|tool_call_start|>{python_calls(calls)}<|tool_call_end|>"


def pythonic(calls: list[Call]) -> str:
    return f"<|python_start|>{python_calls(calls)}<|python_end|>"


def kimi_k3(calls: list[Call]) -> str:
    def tag(name: str, text: str, attributes: str = "") -> str:
        return f"<|open|>{name}{attributes}<|sep|>{text}<|close|>{name}<|sep|>"

    made = ""
    for number, (name, values) in enumerate(calls, start=1):
        arguments = "".join(
            tag("argument", value if isinstance(value, str) else dumps(value), f' key="{key}" type="{type_of(value)}"')
            for key, value in values.items()
        )
        made += tag("call", arguments, f' tool="{name}" index="{number}"')
    return tag("tools", made)


def type_of(value: Any) -> str:
    names = {str: "string", bool: "boolean", dict: "object", list: "array", type(None): "null"}
    return names.get(type(value), "number")


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
        nemotron_v2,
        falcon_h1,
        kimi_k2,
        solar_open,
        minimax_m2,
        minimax_m3,
        deepseek_v32,
        deepseek_v4,
        hy3,
        hy3_opensource,
        gemma4,
        lfm2,
        pythonic,
        kimi_k3,
    )
}
