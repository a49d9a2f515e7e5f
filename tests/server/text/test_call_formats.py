"""Calls in every format, however the text is cut into pieces."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.api import RequestError
from server.text.call_formats import CallFormat
from server.text.structured import Structure
from server.text.tool_calls import ToolCalls
from server.text.tools import ToolUse
from server.wire.fields import Function, Tool
from tests.server.call_spellings import BEGIN, RESPONSE_TEMPLATE, SPELL, Call
from tests.server.text.call_cases import BEFORE, BOTH, CASES, DEFINITIONS, MARKS, PARIS, SCHEMAS, TOOLS, pieces_of, read

ENDS = {
    "qwen3_coder": "</tool_call>",
    "glm": "</tool_call>",
    "minimax_m2": "</invoke>",
    "deepseek_v32": "</｜DSML｜invoke>",
    "deepseek_v4": "</｜DSML｜invoke>",
    "hy3": "</tool_call>",
    "hy3_opensource": "</tool_call:opensource>",
    "minimax_m3": "]<]minimax[>[</invoke>",
    "kimi_k3": "<|close|>call<|sep|>",
}
"""Ends of a call in formats whose values are plain text between tags."""
LITERAL = {"gemma4": "}<", "lfm2": ")]<", "pythonic": ")]<"}
"""Ends of a call whose arguments are literals, with the begin of its mark."""
TAGGED = tuple(ENDS)
NESTED = "minimax_m3"
"""Format whose tags have a text that no value contains."""
VALUE_ENDS = {
    "qwen3_coder": r"</parameter>\s*(</function>|<parameter=|\Z)",
    "glm": r"</arg_value>\s*(</tool_call>|<arg_key>|\Z)|</tool_call>",
    "minimax_m2": r"</parameter>\s*(</invoke>|<parameter name|\Z)",
    "hy3": r"</arg_value>\s*(</tool_call>|<arg_key>|\Z)|</tool_call>",
}
"""Text that ends a value although it is quoted."""
WHOLE = (*TAGGED, *LITERAL, "response_template", "falcon_h1")
STREAMED = [form for form in SPELL if form not in WHOLE]
"""Formats whose calls are passed on as the model writes them."""


def every_cut(answer: str) -> list[list[str]]:
    """Return an answer whole, by characters, and in two pieces at each cut."""
    return [[answer], list(answer), *([answer[:cut], answer[cut:]] for cut in range(1, len(answer)))]


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", SPELL)
def test_calls_are_read_the_same_at_every_cut(form: str, case: str) -> None:
    """What stands in strings and code is no mark."""
    calls = CASES[case]
    answer = BEFORE[form] + SPELL[form](calls)
    for pieces in every_cut(answer) if len(answer) < 1000 else every_cut(answer)[:2]:
        assert read(form, pieces) == (BEFORE[form], calls), pieces


@pytest.mark.parametrize("form", SPELL)
def test_a_call_that_quotes_a_whole_answer_of_its_format_is_one_call(form: str) -> None:
    """A coding agent that writes tests for this very format."""
    if form in (NESTED, "gemma4"):
        return  # the quoted marks are ambiguous
    call: Call = ("add", {"code": SPELL[form]([PARIS, ("add", {"code": "x"})])})
    answer = SPELL[form]([call, PARIS])
    for pieces in every_cut(answer)[:2]:
        assert read(form, pieces) == ("", [call, PARIS])


@pytest.mark.parametrize("form", [form for form in TAGGED if form != NESTED])
def test_a_quoted_beginning_of_a_call_does_not_hide_the_calls_behind_it(form: str) -> None:
    """Only the answer's end shows it, in the formats whose strings have no end mark."""
    opening = SPELL[form]([("add", {})]).partition("</")[0]
    calls: list[Call] = [("add", {"code": f"It begins {opening} so"}), PARIS]
    answer = SPELL[form](calls)
    for pieces in every_cut(answer):
        assert read(form, pieces) == ("", calls)


def test_every_format_is_tested() -> None:
    assert set(SPELL) == set(get_args(CallFormat))


@pytest.mark.sampled
@pytest.mark.parametrize("form", SPELL)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_text_in_arguments_is_no_mark(form: str, data: st.DataObject) -> None:
    quoted = st.lists(st.sampled_from(MARKS) | st.text(max_size=4), max_size=8).map("".join)
    if form in TAGGED:
        # The end of a parameter directly before what may follow it is where a value ends.
        quoted = quoted.filter(lambda text: not re.search(VALUE_ENDS.get(form, r"(?!)"), text))
        quoted = quoted.map(lambda text: text.replace("\r", ""))
    if form == "gemma4":
        quoted = quoted.filter(lambda text: '<|"|>' not in text)
    calls: list[Call] = [("weather", {"city": data.draw(quoted), "days": 3}), ("add", {"code": data.draw(quoted)})]
    answer = SPELL[form](calls)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(answer)), max_size=12)))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    assert read(form, pieces) == ("", calls)


@pytest.mark.sampled
@pytest.mark.parametrize("form", SPELL)
@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_any_text_reads_the_same_in_pieces_and_nothing_is_lost(form: str, data: st.DataObject) -> None:
    """Text that is no call is passed on as it came, also when it looks like one for a while."""
    noise = st.sampled_from([*MARKS, SPELL[form]([("rm", {"a": 1})]), '{"name": "add", ', "add", "function", "\n"])
    answer = "".join(data.draw(st.lists(noise | st.text(max_size=3), max_size=12)))
    whole, in_characters = pieces_of(form, [answer]), pieces_of(form, list(answer) or [""])
    assert whole[0] == in_characters[0]
    assert whole[1].calls == in_characters[1].calls
    if not whole[1].calls:
        assert whole[0] == answer


@pytest.mark.parametrize("form", SPELL)
def test_text_that_is_no_call_stays_text(form: str) -> None:
    for answer in ("Just text, 1 < 2 [and] {so} on.", SPELL[form]([("rm", {})]), "<tool_call> [TOOL_CALLS] " + BEGIN):
        for pieces in every_cut(answer):
            assert read(form, pieces) == (answer, [])


@pytest.mark.parametrize("form", SPELL)
def test_text_that_is_no_call_is_sent_once(form: str) -> None:
    """Also when text or a call stands behind it."""
    if form == "llama3_json":
        return  # from the first object that is no call on, an answer is text
    for behind, calls in (("done", []), (SPELL[form]([PARIS]), [PARIS])):
        answer = SPELL[form]([("rm", {})]) + behind
        text = answer.removesuffix(behind) if calls else answer
        for pieces in every_cut(answer):
            assert read(form, pieces) == (text, calls)


@pytest.mark.parametrize("form", SPELL)
def test_text_may_stand_behind_calls(form: str) -> None:
    answer = SPELL[form]([PARIS]) + "\nThat is it. <tool_call>"
    for pieces in every_cut(answer):
        assert read(form, pieces) == ("\nThat is it. <tool_call>", [PARIS])


@pytest.mark.parametrize("form", SPELL)
def test_a_call_that_is_cut(form: str) -> None:
    """It has the arguments so far if they are passed on, and is text if not."""
    answer = SPELL[form]([PARIS])
    if form in LITERAL:
        end = answer.rindex(LITERAL[form]) + len(LITERAL[form]) - 1
    else:
        end = answer.index(ENDS[form]) + len(ENDS[form]) if form in ENDS else answer.index('< is", "days": 3') + 16
    for length in range(answer.index("weather") + 7, end):
        text, reader = pieces_of(form, list(answer[:length]))
        assert not reader.are_complete
        if form not in STREAMED:
            assert (text, reader.calls) == (answer[:length], [])
        elif reader.calls:
            (call,) = reader.calls
            assert text == ""
            assert answer[:length].endswith(call.arguments)
            assert json.dumps(PARIS[1]).startswith(call.arguments)
        else:
            assert text == answer[:length]


@pytest.mark.parametrize("form", STREAMED)
def test_a_call_whose_json_breaks_keeps_what_was_written(form: str) -> None:
    """Up to its own end mark; what stands behind it is read on."""
    right = SPELL[form]([("add", {"days": 3}), ("weather", {})])
    broken = right.replace('{"days": 3}', '{"days": ?}')
    text, reader = pieces_of(form, list(broken))
    assert reader.calls[0].name == "add"
    assert reader.calls[0].arguments.startswith('{"days": ')
    assert (pieces_of(form, [broken])[0], [call.arguments for call in reader.calls]) == (
        text,
        [call.arguments for call in pieces_of(form, [broken])[1].calls],
    )
    if form in ("hermes", "deepseek_v3", "deepseek_v31"):
        assert [(call.name, call.arguments) for call in reader.calls[1:]] == [("weather", "{}")]
    assert "?" in text + reader.calls[0].arguments


@pytest.mark.parametrize("form", STREAMED)
def test_control_characters_in_strings_are_escaped(form: str) -> None:
    """Models write line breaks of code as they are, and JSON has none in its strings."""
    answer = SPELL[form]([("add", {"code": "a\n\tb"})]).replace("a\\n\\tb", "a\n\tb")
    assert "a\n\tb" in answer
    assert read(form, list(answer)) == ("", [("add", {"code": "a\n\tb"})])


@pytest.mark.parametrize("form", SPELL)
def test_the_second_call_is_dropped_without_parallel_calls(form: str) -> None:
    answer = SPELL[form](BOTH)
    for pieces in every_cut(answer):
        assert read(form, pieces, parallel=False) == ("", [PARIS])
    # Also behind one whose JSON breaks: what is streamed and what is kept are compared.
    broken = answer.replace('"days": 3', '"days": ?')
    for pieces in every_cut(broken):
        _, reader = pieces_of(form, pieces, parallel=False)
        assert len(reader.calls) <= 1


@pytest.mark.parametrize("form", SPELL)
def test_reading_takes_a_step_for_each_character(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept between pieces stays short."""
    code = 'if a < b: print("x")  # {[</\n' * 3500
    answer = SPELL[form]([("add", {"code": code})])
    reader = ToolCalls(ToolUse(TOOLS, form, True, forced=False), RESPONSE_TEMPLATE)
    longest = 0
    for begin in range(0, len(answer), 50):
        reader.feed(answer[begin : begin + 50], False)
        kept = vars(reader._reader)
        longest = max([longest, *(len(value) for value in kept.values() if isinstance(value, str))])
    reader.feed("", True)
    assert json.loads(reader.calls[0].arguments) == {"code": code}
    assert longest < 1000


def test_calls_of_a_response_template_cannot_be_forced() -> None:
    with pytest.raises(RequestError, match="neither forced nor strict"):
        ToolUse(TOOLS, "response_template", True, forced=True).structure(Structure(), lambda _: None)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.sampled_from([0.5, "C", "5", "7", "x", "true", "null", "a b", ""]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["next", "k"]), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=500, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(schema=SCHEMAS, value=VALUES)
def test_arguments_without_types_get_those_of_the_schema(schema: dict[str, Any], value: Any) -> None:
    """The argument that is read is valid for any value of a schema."""
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": DEFINITIONS}
    if not jsonschema.Draft202012Validator(parameters).is_valid({"x": value}):
        return
    tool = Tool(type="function", function=Function(name="f", parameters=parameters))
    spelled = value if isinstance(value, str) else json.dumps(value)
    for text in {spelled, str(value) if isinstance(value, bool) else spelled}:
        answer = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
        ((_, arguments),) = read("qwen3_coder", [answer], tools=(tool,))[1]
        is_python = text != spelled
        if is_python and jsonschema.Draft202012Validator(parameters).is_valid({"x": text}):
            continue  # a string as well
        jsonschema.validate(arguments, parameters)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1e999"])
def test_numbers_that_no_json_has_make_no_call(number: str) -> None:
    """If the name comes first, they have been sent by then."""
    answer = f'<tool_call>{{"arguments": {{"x": {number}}}, "name": "weather"}}</tool_call>'
    assert read("hermes", [answer]) == (answer, [])


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "string"}, '"a"', '"a"'),
        ({}, '"a"', '"a"'),
        ({"enum": ["a"]}, '"a"', "a"),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"$ref": "#"}, '{"x": {}}', {"x": {}}),
        ({"$ref": "#/properties/x"}, "5", 5),
        ({"anyOf": [{"$ref": "#/$defs/Whole"}, {"type": "null"}]}, "5", 5),
        ({"anyOf": [{"$ref": "#/$defs/Whole"}, {"type": "null"}]}, "None", None),
        ({"allOf": [{"$ref": "#/$defs/Whole"}]}, "5", 5),
        ({"enum": [5, 6]}, "5", 5),
        ({"enum": ["5"]}, "5", "5"),
        ({}, "[1, 2]", [1, 2]),
        ({}, "plain words", "plain words"),
        ({"type": "boolean"}, "True", True),
        ({"type": "string", "nullable": True}, "null", None),
        ({"$ref": "https://elsewhere/schema"}, "5", 5),
        ({"$ref": "#/nowhere"}, "5", 5),
        (True, "5", 5),
        ({"enum": [1]}, "true", "true"),
    ],
)
def test_a_text_becomes_what_its_schema_admits(schema: Any, text: str, value: Any) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": DEFINITIONS}
    for outer in (
        parameters,
        {"allOf": [{"$ref": "#/$defs/Outer"}], "$defs": {"Outer": parameters, **DEFINITIONS}, **parameters},
    ):
        tool = Tool(type="function", function=Function(name="f", parameters=outer))
        answer = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
        ((_, arguments),) = read("qwen3_coder", [answer], tools=(tool,))[1]
        assert json.dumps(arguments) == json.dumps({"x": value})
