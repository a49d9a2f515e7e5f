"""Calls with a part left out or written twice are repaired if there is one reading."""

from __future__ import annotations

from typing import Any

import pytest

from server.text import literal_calls
from server.text.argument_types import follows
from server.text.call_pieces import Calls
from server.text.chat_variants import with_named_ids
from server.text.literal_calls import _LiteralParser
from server.text.tools import ToolUse
from server.wire.fields import Function, Tool
from tests.server.call_spellings import SPELL, Call
from tests.server.text.call_cases import read
from tests.server.text.conversations import called, result
from tests.wrong import instead

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "parts": {"type": "array", "items": {"type": "string"}},
        "from": {"type": "string"},
        "month": {"type": "integer"},
    },
}
TOOLS = tuple(
    Tool(type="function", function=Function(name=name, parameters=SCHEMA)) for name in ("weather", "files.read")
)
Q = '<|"|>'


def gemma(arguments: str) -> str:
    return f"<|tool_call>call:weather{{{arguments}}}<tool_call|>"


def lfm(arguments: str) -> str:
    return f"<|tool_call_start|>[weather({arguments})]<|tool_call_end|>"


def kimi(call_id: str) -> str:
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"


BOTH = {"city": "Rome", "days": 2}
REPAIRED: list[tuple[str, str, dict[str, Any]]] = [
    ("gemma4", gemma(f"city:Rome{Q},days:2"), BOTH),
    ("gemma4", gemma("city:Rome,days:2"), BOTH),
    ("gemma4", gemma(f"city:{Q}Rome{Q}days:2"), BOTH),
    ("gemma4", gemma(f"city:{Q}Rome{Q},days:2")[: -len("<tool_call|>")], BOTH),
    ("gemma4", gemma(f"city:{Q}say {Q}hi{Q}, so{Q}"), {"city": 'say "hi", so'}),
    ("gemma4", gemma(f"city:{Q}a,b{{c}}[d]: e}}{Q}"), {"city": "a,b{c}[d]: e}"}),
    ("gemma4", gemma(f'parts:["a","b, c",\'d\',{Q}e{Q}]'), {"parts": ["a", "b, c", "d", "e"]}),
    ("gemma4", gemma('city:"Rome",days:2'), BOTH),
    ("lfm2", lfm("city='it's so', days=2"), {"city": "it's so", "days": 2}),
    ("lfm2", lfm("city='say 'a', or 'b', so'"), {"city": "say 'a', or 'b', so"}),
    ("lfm2", lfm("city='a\nb'"), {"city": "a\nb"}),
    ("lfm2", lfm('city="a\\n\\"b\\" \\u00fc"'), {"city": 'a\n"b" ü'}),
    ("lfm2", lfm("month=07, from='now'"), {"month": 7, "from": "now"}),
    ("lfm2", lfm("city='Rome', days=2") + "[weather(city='Rome', days=2)]", BOTH),
    ("lfm2", lfm("city='a)]b', days=2"), {"city": "a)]b", "days": 2}),
    ("pythonic", '[weather(city="Rome", days=2)]', BOTH),
    ("pythonic", '<|python_start|>[weather(city="Rome", days=2)]<|python_end|>', BOTH),
    ("pythonic", '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}', BOTH),
    ("pythonic", '<|python_start|>{"name": "weather", "parameters": {"days": 2}}<|python_end|>', {"days": 2}),
    ("llama3_json", '[weather(city="Rome", days=2)]', BOTH),
    ("kimi_k2", kimi("functions.weather:0"), {}),
    ("kimi_k2", kimi("functionsweather5"), {}),
    ("kimi_k2", f"<|tool_call_section_begin|>{kimi('weather:12')}<|tool_call_section_end|>", {}),
    ("minimax_m2", '<invoke name="weather">\n<parameter name="days">2</parameter>\n</invoke>', {"days": 2}),
    ("deepseek_v32", '<｜DSML｜invoke name="weather">{"days": 2}</｜DSML｜invoke>', {"days": 2}),
    (
        "deepseek_v4",
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n<｜DSML｜ parameter name="days" string="false">2'
        "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>",
        {"days": 2},
    ),
    (
        "deepseek_v4",
        SPELL["deepseek_v4"]([("weather", {"city": "2"})]),
        {"city": "2"},
    ),
    (
        "hy3",
        "<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</arg_value>\n"
        "</tool_calls>",
        {"days": 2},
    ),
    (
        "kimi_k3",
        '<|open|>call tool="weather" index="1"<|sep|><|open|>json type="object"<|sep|>{"days": 2}<|close|>json<|sep|>'
        "<|close|>call<|sep|>",
        {"days": 2},
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "answer", "arguments"), REPAIRED, ids=[f"{one[0]} {n}" for n, one in enumerate(REPAIRED)]
)
def test_one_reading_is_a_call(form: str, answer: str, arguments: dict[str, Any]) -> None:
    for pieces in ([answer], list(answer), *([answer[:cut], answer[cut:]] for cut in range(1, len(answer)))):
        assert read(form, pieces, tools=TOOLS) == ("", [("weather", arguments)]), pieces


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ("gemma4", gemma(f"city{Q}Rome{Q}")),
        ("gemma4", gemma("days:two words")),
        ("gemma4", "It writes <|tool_call> so."),
        ("lfm2", "<|tool_call_start|>[weather('Rome')]<|tool_call_end|>"),
        ("lfm2", lfm("days=two")),
        ("lfm2", lfm("days=" + "1" * 5000)),
        ("lfm2", lfm("days=1e999")),
        ("pythonic", "See [weather] and [other(a=1)]."),
        ("kimi_k2", kimi("3")),
        ("kimi_k2", kimi("call00003")),
        ("minimax_m3", ']<]minimax[>[<invoke name="weather">]<]minimax[>[<a>1]<]minimax[>[</b>]<]minimax[>[</invoke>'),
        ("deepseek_v32", '<｜DSML｜invoke name="weather">{"days": }</｜DSML｜invoke>'),
    ],
)
def test_several_readings_are_text(form: str, answer: str) -> None:
    for pieces in ([answer], list(answer)):
        assert read(form, pieces, tools=TOOLS) == (answer, [])


@pytest.mark.parametrize("properties", [{"days": True}, [1], True])
@pytest.mark.parametrize("required", [True, [1, {}], "days"])
@pytest.mark.parametrize("form", ["gemma4", "lfm2", "pythonic", "qwen3_coder", "glm"])
def test_odd_schemas_are_no_fault(form: str, properties: Any, required: Any) -> None:
    """Schemas of tools that are not strict are not checked."""
    odd = {"type": "object", "properties": properties, "required": required}
    tools = (Tool(type="function", function=Function(name="weather", parameters=odd)),)
    call: Call = ("weather", {"days": 2})
    answer = SPELL[form]([call])
    assert read(form, [answer], tools=tools) in (("", [call]), ("", [("weather", {"days": "2"})]))
    read(form, [answer.replace("2", "two")], tools=tools)
    assert follows({"days": 2}, odd, is_exact=False) in (True, False)


def test_an_id_without_a_name_is_that_of_the_only_function() -> None:
    for call_id in ("3", "call00003"):
        assert read("kimi_k2", [kimi(call_id)], tools=TOOLS[:1]) == ("", [("weather", {})])


def test_dotted_names_are_read() -> None:
    assert read("lfm2", ["<|tool_call_start|>[files.read(days=1), weather()]<|tool_call_end|>"], tools=TOOLS)[1] == [
        ("files.read", {"days": 1}),
        ("weather", {}),
    ]


def test_strings_that_end_at_the_first_mark_are_noticed() -> None:
    """A wrong variant that takes the next quote for the end."""

    def at_once(right: Any, self: Any, *_: Any) -> Any:
        yield from ()
        return True

    call: Call = ("weather", {"city": "it's, so"})
    with instead(_LiteralParser, "_ends", at_once):
        assert read("lfm2", [lfm("city='it's, so'")], tools=TOOLS)[1] != [call]
    assert literal_calls.QUOTE == Q


def test_kimis_ids_have_the_name_and_count_over_the_conversation() -> None:
    """Both ways: of the history, and of an answer."""
    turns = [called("call_1", "call_2", x=1), result("call_2"), result("call_1"), called("other", x=2)]
    named = with_named_ids(turns)
    assert [call["id"] for turn in named for call in turn.get("tool_calls", ())] == [
        *("functions.f0:0", "functions.f1:1", "functions.f0:2")
    ]
    assert [turn["tool_call_id"] for turn in named if "tool_call_id" in turn] == ["functions.f1:1", "functions.f0:0"]
    use = ToolUse(TOOLS, "kimi_k2", parallel=True, forced=False, num_earlier_calls=3)
    assert use.call_id("weather", 1) == "functions.weather:4"
    assert ToolUse(TOOLS, "hermes", parallel=True, forced=False).call_id("weather", 1) is None
    with instead(Calls, "name_in", lambda right, self, call_id: call_id):
        assert read("kimi_k2", [kimi("functions.weather:0")], tools=TOOLS)[1] == []


def test_nested_values_have_the_types_of_their_schemas() -> None:
    """MiniMax M3; a string that looks like a number stays one."""
    arguments = {"city": "2", "parts": ["1", "b"], "days": 2}
    answer = SPELL["minimax_m3"]([("weather", arguments)])
    assert read("minimax_m3", [answer], tools=TOOLS)[1] == [("weather", arguments)]
