"""Grammars of calls, walked at random, are read back by their formats."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jsonschema import FormatChecker
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from engine.api import RequestError
from engine.grammar.grammar_tokens import read_vocabulary
from server.text import text_values
from server.text.call_formats import HARMONY, KIMI_K3, LLAMA3_JSON, MINIMAX, PYTHONIC, SOLAR
from server.text.call_grammars import SYNTAXES
from server.text.call_pieces import Piece
from server.text.harmony import HarmonyMessages
from server.text.reasoning import Thought
from server.text.structured import Structure
from server.text.tagged_messages import MESSAGE_FORMATS, TaggedMessages
from server.text.text_values import Alternatives
from server.text.tool_calls import ToolCalls
from server.text.tools import ToolUse
from server.text.xml_calls import _Region
from server.text.xml_grammars import XmlArguments
from server.wire.fields import Function, Tool
from tests.grammar.test_grammar_tokens import END, byte_level, vocabulary
from tests.server.call_spellings import SPELL
from tests.server.text.call_cases import DEFINITIONS, SCHEMAS
from tests.wrong import instead

TAGGED = ("qwen3_coder", "glm")
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "days": {"type": "integer", "minimum": 2},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "listed": {"enum": ["C", "5", 5, True, None, '"C"']},
        "words": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        "matching": {
            "type": ["string", "null"],
            "pattern": "^[a-z]{2,4}$",
            "minLength": 3,
            "allOf": [{"pattern": "[aeiou]"}],
        },
        "either": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}, "maxItems": 2}]},
        "any": {},
        "short": {"type": "string", "maxLength": 3},
        "when": {"type": "string", "format": "date-time"},
        "tree": {"$ref": "#/$defs/Tree"},
        "same": {"$ref": "#/properties/days"},
    },
    "required": ["text", "days", "listed", "either"],
    "additionalProperties": False,
    "$defs": {
        "Tree": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]}},
            "required": ["next"],
        }
    },
}


def tools(parameters: dict[str, Any] = PARAMETERS, **more: Any) -> tuple[Tool, ...]:
    functions = (Function(name=name, parameters=parameters, **more) for name in ("add", "Add-2.x"))
    return tuple(Tool(type="function", function=one) for one in functions)


class Model:
    """Writes random answers that a grammar allows."""

    def __init__(self, folder: Path, marks: Sequence[str], are_special: bool) -> None:
        self._tokens = byte_level()
        self._tokens.add_special_tokens([AddedToken(END, special=True)])
        self._tokens.add_tokens([AddedToken(mark, special=are_special, normalized=False) for mark in marks])
        folder.mkdir(exist_ok=True)
        self._tokens.save(str(folder / "tokenizer.json"))
        numbers: dict[str, int] = {one: self._tokens.token_to_id(one) for one in (END, *marks)}
        self._end = numbers[END]
        self._read: LLTokenizer = read_vocabulary(vocabulary(folder, numbers))
        self._special = {mark: numbers[mark] for mark in marks if are_special}

    def special_token(self, text: str) -> int | None:
        return self._special.get(text)

    def allows(self, grammar: str, text: str) -> bool:
        matcher = LLMatcher(self._read, grammar, log_level=0)
        return bool(matcher.consume_tokens(self._tokens.encode(text).ids)) and bool(matcher.is_accepting())

    def answers(self, grammar: str, count: int, likely: Sequence[str], seed: int = 0) -> list[str]:
        """Complete answers. likely: texts that are written more often than by chance."""
        rng = random.Random(seed)
        ids = [self._tokens.encode(text, add_special_tokens=False).ids for text in likely]
        found = (self._answer(grammar, rng, ids) for _ in range(20 * count))
        complete = [*itertools.islice((answer for answer in found if answer is not None), count)]
        assert len(complete) == count
        return complete

    def _answer(self, grammar: str, rng: random.Random, likely: Sequence[list[int]]) -> str | None:
        matcher = LLMatcher(self._read, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens: list[int] = []
        while len(tokens) < 500:
            if matcher.is_accepting() and rng.random() < 0.3:
                return str(self._tokens.decode(tokens, skip_special_tokens=False))
            some = next(
                (one for one in likely if rng.random() < 0.1 and matcher.validate_tokens(one) == len(one)), None
            )
            if some is None:
                mask = np.frombuffer(bytes(matcher.compute_bitmask()), dtype=np.uint8)
                allowed = [
                    token for token in np.flatnonzero(np.unpackbits(mask, bitorder="little")) if token != self._end
                ]
                if not allowed:
                    assert matcher.is_accepting()
                    return str(self._tokens.decode(tokens, skip_special_tokens=False))
                some = [int(rng.choice(allowed))]
            tokens += some
            assert matcher.consume_tokens(some)
        return None


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Model]:
    """Makes the model of a format, whose marks are special tokens or text."""

    @cache
    def made(form: str, are_special: bool) -> Model:
        syntax = SYNTAXES[form]
        marks = [mark for mark in (syntax.mark, *syntax.more_marks) if mark]
        return Model(tmp_path_factory.mktemp("model"), marks, are_special)

    return made


def grammar_of(use: ToolUse, model: Model, answer: Structure | None = None) -> str:
    return use.structure(answer or Structure(), model.special_token).grammar


def read(use: ToolUse, text: str) -> tuple[str, list[tuple[str, dict[str, Any]]], bool]:
    """Text outside calls, calls, and whether all are complete."""
    if use.format == HARMONY:
        parts = HarmonyMessages("<|start|>assistant").feed(text, True)
        text = "".join(part for part in parts if not isinstance(part, Thought))
    if use.format in MESSAGE_FORMATS:
        parts = TaggedMessages(MESSAGE_FORMATS[use.format], "").feed(text, True)
        text = "".join(part for part in parts if not isinstance(part, Thought))
    reader = ToolCalls(use, None)
    outside = "".join(part for part in reader.feed(text, True) if not isinstance(part, Piece))
    return outside, [(call.name, json.loads(call.arguments)) for call in reader.calls], reader.are_complete


LIKELY = (
    '"',
    "]",
    "}",
    "\n</parameter>",
    "</arg_value>",
    "</arg_value:opensource>",
    "</parameter>",
    "</｜DSML｜parameter>",
    '<|"|>',
    "[TOOL_CALLS]",
    "<tool_call>",
    "<|tool_call|>",
    "```json",
    "null",
)
HARMONY_CALL = "<|channel|>commentary to=functions."
"""Texts that end values or begin calls, also where they are a part of a value."""


def likely_in(form: str) -> list[str]:
    """Also the tags that end the values of MiniMax M3, which have the name of the argument."""
    if form != "minimax_m3":
        return [*LIKELY]
    return [*LIKELY, *5 * [f"]<]minimax[>[</{key}>" for key in PARAMETERS["properties"]]]


def check_forced(form: str, model: Model, parameters: dict[str, Any], count: int, parallel: bool = True) -> None:
    use = ToolUse(tools(parameters), form, parallel, forced=True)
    for answer in model.answers(grammar_of(use, model), count, likely_in(form)):
        outside, calls, are_complete = read(use, answer)
        assert (outside, are_complete) == ("", True), answer
        assert len(calls) == 1 or parallel
        for _, arguments in calls:
            jsonschema.validate(arguments, parameters)


WALKED = [form for form in SYNTAXES if form != KIMI_K3]
"""Formats whose grammars a random walk leaves. Kimi K3's begin with any text."""


@pytest.mark.sampled
@pytest.mark.parametrize("are_special", [False, True])
@pytest.mark.parametrize("form", WALKED)
def test_forced_calls_are_read_back(model_of: Callable[[str, bool], Model], form: str, are_special: bool) -> None:
    model = model_of(form, are_special)
    for parallel in (True, False):
        check_forced(form, model, PARAMETERS, 3, parallel)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("form", "are_special"),
    # In harmony, text that spells a mark ends a message wherever it is.
    [*((form, is_one) for form in WALKED for is_one in (False, True) if is_one or form not in (HARMONY, SOLAR))],
)
def test_strict_calls_in_free_text_are_read_back(
    model_of: Callable[[str, bool], Model], form: str, are_special: bool
) -> None:
    """Of other functions only the names are right."""
    model = model_of(form, are_special)
    strict, (_, free) = tools(strict=True)[0], tools()
    use = ToolUse((strict, free), form, True, forced=False)
    syntax = SYNTAXES[form]
    begin = "[add(" if form == PYTHONIC else syntax.mark or "{"
    answers = model.answers(
        grammar_of(use, model), 24, [HARMONY_CALL if form == HARMONY else begin] * 9 + likely_in(form)
    )
    seen = 0
    for answer in answers:
        outside, calls, _ = read(use, answer)
        is_too_large = re.search(r"[eE]\+?\d{4}|\d[eE]\+?[3-9]\d\d", outside)  # no float, so its call stays text
        assert begin not in outside or is_too_large or form in (LLAMA3_JSON, PYTHONIC, HARMONY), answer
        for name, arguments in calls:
            seen += 1
            if name == strict.function.name:
                jsonschema.validate(arguments, PARAMETERS)
    assert seen or form in (PYTHONIC, "minimax_m3")


# Right calls that a random walk hardly finds, and their integer replaced.
LONG = {
    KIMI_K3: "Hm.<|close|>think<|sep|>" + SPELL["kimi_k3"]([("add", {"text": 'it is "so"', "days": 3})]),
    PYTHONIC: r'[add(text="it is \"so\"", days=3)]',
    "minimax_m3": (
        f'{MINIMAX}<tool_call>\n{MINIMAX}<invoke name="add">{MINIMAX}<text>it is "so"{MINIMAX}</text>'
        f"{MINIMAX}<days>3{MINIMAX}</days>{MINIMAX}</invoke>\n{MINIMAX}</tool_call>"
    ),
}


@pytest.mark.parametrize("is_forced", [True, False])
@pytest.mark.parametrize("form", LONG)
def test_strict_calls_are_allowed_as_the_model_writes_them(
    model_of: Callable[[str, bool], Model], form: str, is_forced: bool
) -> None:
    model = model_of(form, form == KIMI_K3)
    properties = {"text": {"type": "string"}, "days": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["text", "days"]}
    use = ToolUse(tools(parameters, strict=True), form, True, forced=is_forced)
    grammar = grammar_of(use, model)
    assert model.allows(grammar, LONG[form])
    assert not model.allows(grammar, LONG[form].replace("3", "three"))
    call = LONG[form].rpartition("think<|sep|>")[2]
    if form == KIMI_K3:
        said = LONG[form].replace("<|open|>tools", "<|open|>response<|sep|>a<|close|>response<|sep|><|open|>tools", 1)
        assert model.allows(grammar, said) != is_forced
    assert read(use, call) == ("", [("add", {"text": 'it is "so"', "days": 3})], True)


@pytest.mark.slow
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 16))
@pytest.mark.parametrize("form", TAGGED)
def test_plain_text_follows_any_schema(
    model_of: Callable[[str, bool], Model], form: str, schema: dict[str, Any], seed: int
) -> None:
    """Or the schema is refused by name."""
    model = model_of(form, False)
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": DEFINITIONS, "required": ["x"]}
    use = ToolUse(tools(parameters), form, False, forced=True)
    try:
        grammar = grammar_of(use, model)
    except RequestError as error:
        refusal = error.param, error.code, "parameter 'x' of add" in str(error)
        assume(refusal != ("tools", "unsupported_value", True))
        raise
    for answer in model.answers(grammar, 2, [*LIKELY, "7", "x", "true", "5", "[]", "{}"], seed):
        # Numbers within lists and objects may be infinite.
        assume(not re.search(r"[eE]\+?\d{3}", answer))
        ((_, arguments),) = read(use, answer)[1]
        jsonschema.validate(arguments, parameters)


@pytest.mark.slow
def test_a_text_that_ends_early_is_noticed(model_of: Callable[[str, bool], Model]) -> None:
    def with_tags(right: Callable[..., str], self: XmlArguments, name: str, *operands: Any) -> str:
        side = right(self, name, *operands)
        self._rules[-1] = self._rules[-1].partition(" & ~")[0]
        return side

    with instead(XmlArguments, "_text", with_tags), pytest.raises(AssertionError):
        check_forced("qwen3_coder", model_of("qwen3_coder", False), PARAMETERS, 20)


@pytest.mark.slow
def test_text_that_reads_as_json_of_another_schema_is_noticed(model_of: Callable[[str, bool], Model]) -> None:
    """A string such as [1, "a"] becomes a list, also if lists have numbers only."""
    several = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}, "minItems": 2}]}
    parameters = {"type": "object", "properties": {"x": several}, "required": ["x"]}
    model = model_of("qwen3_coder", False)
    check_forced("qwen3_coder", model, parameters, 40)
    with instead(Alternatives, "are_bounded", lambda right, self: False):
        use = ToolUse(tools(parameters), "qwen3_coder", False, forced=True)
        answers = model.answers(grammar_of(use, model), 40, ["[]", "[1]", *3 * ["\n</parameter>"]])
    found = [read(use, answer)[1][0][1] for answer in answers]
    assert not all(jsonschema.Draft202012Validator(parameters).is_valid(arguments) for arguments in found)


@pytest.mark.parametrize("form", TAGGED)
def test_json_of_a_followed_schema_may_contain_tags(model_of: Callable[[str, bool], Model], form: str) -> None:
    """A value that is JSON ends when it is complete."""
    words = ["</parameter></function></tool_call>", "</arg_value></tool_call>", "<tool_call>"]
    parameters = {"type": "object", "properties": {"words": {"type": "array", "items": {"type": "string"}}}}
    use = ToolUse(tools(parameters), form, False, forced=True)
    text = SPELL[form]([("add", {"words": words})]).replace('", "', '","')
    assert model_of(form, False).allows(grammar_of(use, model_of(form, False)), text)
    assert read(use, text) == ("", [("add", {"words": words})], True)
    with instead(_Region, "_may_end", lambda right, self: True):
        assert read(use, text)[1] != [("add", {"words": words})]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"x": {"type": "string", "format": "duration"}}, "the format 'duration'"),
    ({"x": {"type": "string", "pattern": "^a|b$"}}, "put them into a group"),
    ({"x": {"type": "string", "pattern": "("}}, "the pattern"),
    ({"x": {"anyOf": [{"type": "string"}], "minLength": 2}}, "'anyOf' next to 'minLength'"),
    ({"x": {"minimum": 2}}, "'minimum' without a type"),
    ({"x": {"$ref": "#/properties/x"}}, "references without an end"),
    ({"x": {"const": "a</parameter>b"}}, "any of its values"),
    ({"<x>": {"type": "string"}}, "the name '<x>'"),
    ({}, "properties without names"),
]


@pytest.mark.parametrize(("properties", "told"), REFUSED)
def test_schemas_without_plain_text_are_refused_by_name(properties: dict[str, Any], told: str) -> None:
    parameters = {"type": "object", "properties": properties, "additionalProperties": True}
    use = ToolUse(tools(parameters), "qwen3_coder", False, forced=True)
    with pytest.raises(RequestError) as caught:
        use.structure(Structure(), lambda _: None)
    assert told in str(caught.value)
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_value")


@pytest.mark.slow
def test_formats_have_patterns_whose_texts_have_them() -> None:
    """Checked with the formats that the validator knows, on texts from the patterns."""
    for name in ("date", "ipv4", "uuid", "email"):
        pattern = text_values.FORMATS[name]
        texts = st.from_regex(pattern, fullmatch=True, alphabet=st.characters(codec="ascii"))

        @settings(deadline=None, max_examples=50)
        @given(text=texts)
        def check(text: str, name: str) -> None:
            jsonschema.validate(text, {"format": name}, format_checker=FormatChecker())

        check(name=name)
