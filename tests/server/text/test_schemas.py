"""Schemas of zod 4 and pydantic 2: taken, or refused with a way out."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, ConfigDict, Field

from engine.api import RequestError
from engine.grammar.grammar_process import GrammarMatcher
from engine.request import GRAMMAR
from server.text.patterns import has_look_around, without_look_around
from server.text.schemas import cleaned, compact
from server.text.structured import Structure, structure_of
from server.text.tools import ToolUse
from server.wire.fields import CompletionRequest, Tool

PAGE = Path(__file__).parents[3] / "docs" / "api.md"
ZOD: dict[str, Any] = json.loads((Path(__file__).parent / "zod_schemas.json").read_text())
"""Schemas by zod 4.6 and 4.1, of `z.toJSONSchema`."""


class Colour(enum.Enum):
    RED = "red"
    DARK_BLUE = "dark blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    friends: list[Cat] | None = None


class Tree(BaseModel):
    model_config = ConfigDict(extra="forbid")
    branches: dict[str, Tree] = {}


class Ticket(BaseModel):
    model_config = ConfigDict(extra="allow")
    number: int = Field(alias="ticketNumber", deprecated=True)
    price: Annotated[decimal.Decimal, Field(max_digits=6, decimal_places=2)]


class Point(NamedTuple):
    x: float
    label: str = "origin"


@dataclasses.dataclass
class Order:
    items: list[Annotated[Cat | Dog, Field(discriminator="kind")]]
    at: datetime.datetime | None = None


Short = Annotated[str, Field(min_length=2, max_length=4)]
Code = Annotated[str, Field(pattern=r"^[A-Z]{3}\d+$")]
PYDANTIC: list[Any] = [
    *(str, int, float, bool, bytes, decimal.Decimal, complex, None, Any, uuid.UUID, pathlib.Path, re.Pattern),
    *(
        datetime.date,
        datetime.datetime,
        datetime.time,
        datetime.timedelta,
        ipaddress.IPv4Address,
        ipaddress.IPv6Network,
    ),
    *(pydantic.AwareDatetime, pydantic.PastDate, pydantic.UUID4, pydantic.SecretStr, pydantic.Base64Bytes),
    *(pydantic.Json[int], pydantic.ByteSize, pydantic.HttpUrl, pydantic.PostgresDsn, pydantic.PositiveInt),
    *(pydantic.FiniteFloat, pydantic.StrictInt, Short, Code, Literal["a", 1, None], Colour, Cat | None, Cat | Dog),
    *(Annotated[Cat | Dog, Field(discriminator="kind")], Tree, Ticket, Point, Order, pydantic.RootModel[list[int]]),
    *(list[str], list, tuple[int, str], tuple[int, ...], tuple[()], set[int], frozenset[Colour], dict[str, int], dict),
    *(dict[Colour, int], dict[Literal["a", "b"], Cat], dict[uuid.UUID, int], dict[Code, int], dict[Short, str]),
    *(dict[datetime.date, list[int]], dict[str, dict[str, bool]], Annotated[dict[str, int], Field(max_length=2)]),
    *(Annotated[int, Field(gt=0, multiple_of=5)], Annotated[float, Field(ge=0, lt=1)]),
]
# Texts with a number, of pydantic 2.12.
DECIMALS = [
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$",
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)",
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,6}|(?=[\d.]{1,7}0*$)\d*\.\d*0*$)",
]
SCHEMAS: dict[str, Any] = {
    **{f"zod's {name}": schema for name, schema in ZOD.items()},
    **{f"pydantic's {kind}": pydantic.TypeAdapter(kind).json_schema() for kind in PYDANTIC},
    **{f"decimal {pattern}": {"type": "string", "pattern": pattern} for pattern in DECIMALS},
}
REFUSED = {
    "zod's never": "not",
    "zod's xorOver": "oneOf",
    "zod's xorObj as input": "oneOf",
    **dict.fromkeys(("zod's notfoo", "zod's wordb", "zod's backref", "zod's behind"), "pattern"),
    f"pydantic's {set[int]}": "uniqueItems",
    f"pydantic's {frozenset[Colour]}": "uniqueItems",
}
"""Keywords at the top of the schemas that no grammar can follow."""
LENIENT = {"x-guidance": {"lenient": True}}
TOKENIZER = LLTokenizer("byte")


def refusal(structure: Structure) -> RequestError | None:
    """Return the error of a client whose grammar the library refuses."""
    fault = GrammarMatcher(TOKENIZER, structure.grammar).fault
    if not fault:
        return None
    return structure.refused(RequestError(f"the grammar cannot be used: {fault}", GRAMMAR))


def of_answer(schema: Any) -> Structure:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return structure_of(CompletionRequest(model="m", prompt="p", response_format=form))


def of_tools(form: str, is_forced: bool, **schemas: Any) -> Structure:
    """Return the structure of calls of strict tools with these schemas."""
    functions = [{"name": name, "parameters": schema, "strict": True} for name, schema in schemas.items()]
    tools = tuple(Tool.model_validate({"type": "function", "function": function}) for function in functions)
    return ToolUse(tools, form, parallel=True, forced=is_forced).structure(Structure(), lambda _: None)


def test_schemas_of_everyday_tools_are_taken_or_refused_by_place() -> None:
    assert len(SCHEMAS) >= 140
    refused = {}
    for name, schema in SCHEMAS.items():
        if error := refusal(of_answer(schema)):
            refused[name] = str(error).partition(" ")[2].partition(" ")[0]
            assert error.param == "response_format"
            assert re.search("leave it out|write anyOf", str(error))
    assert refused == REFUSED


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize("is_forced", [True, False])
def test_a_refused_tool_is_named_with_the_place_and_a_way_out_that_works(form: str, is_forced: bool) -> None:
    """Other tools are not accused. Patterns have no lenient reading."""
    fine = {"type": "object", "properties": {"n": {"type": "integer"}}}
    for name in ("zod's xorOver", "zod's notfoo", f"pydantic's {set[int]}"):
        more = {"type": "object", "properties": {"deep": SCHEMAS[name]}}
        bad = {"type": "object", "properties": {"more": more}}
        error = refusal(of_tools(form, is_forced, fine=fine, search=bad))
        assert error is not None
        assert str(error).startswith(f"tools: search: properties.more.properties.deep.{REFUSED[name]} ")
        has_lenient_reading = REFUSED[name] != "pattern"
        assert ("lenient" in str(error)) == has_lenient_reading
        assert (refusal(of_tools(form, is_forced, search={**bad, **LENIENT})) is None) == has_lenient_reading


def accepts(schema: Any, value: Any) -> bool:
    """Return whether the grammar of a schema allows a value."""
    matcher = LLMatcher(TOKENIZER, of_answer(schema).grammar)
    tokens = TOKENIZER.tokenize_str(json.dumps(value, separators=(",", ":"), ensure_ascii=False))
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (ZOD["record"], {"any": 1.5}, {"any": "x"}),
        (ZOD["recordEnum"], {"a": 1, "b": 2}, {"a": 1, "c": 2}),
        (ZOD["partialRecord"], {"b": 2}, {"c": 2}),
        (ZOD["recordRegex"], {"ab": 1}, {"aB": 1}),
        (ZOD["recordLen"], {"abc": 1}, {"a": 1}),
        (ZOD["recordUnion"], {"a": 1, "bxy": 2}, {"axy": 1}),
        (ZOD["hostname"], "a" * 60 + ".org", "a..org"),
        (ZOD["hostname"], ".".join(["a" * 60] * 4), ".".join(["a" * 60] * 5)),
        (ZOD["emoji"], "\N{ROCKET}", "1"),
        (ZOD["password"], "abcdefgH1", "abcdefgh1"),
        (ZOD["never prop"], {"b": "x"}, {"a": 1, "b": "x"}),
        (ZOD["float32"], 1.5, "x"),
        ({"type": "string", "pattern": "^(?! )(?!.*_)[a-z _]*$"}, "a b", " ab"),
        ({"type": "string", "pattern": "^(?! )(?!.*_)[a-z _]*$"}, "", "a_b"),
        ({"type": "string", "format": "ipv4", "pattern": r"^(?!10\.)(?!.*9\.9)[\d.]+$"}, "1.2.3.4", "1.2.3"),
        (LENIENT | {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1, 1], ["a"]),
        ({"type": "array", "uniqueItems": False}, [1], {}),
        ({"type": "object", "then": {}, "dependentRequired": {}, "not": False, "minContains": 1}, {}, []),
    ],
)
def test_translated_schemas_allow_the_same_values(schema: Any, allowed: Any, refused: Any) -> None:
    assert accepts(schema, allowed)
    assert not accepts(schema, refused)


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (ZOD["email of 4.1"]["pattern"], "a@b.co a.b'c@d-e.org .a@b.co a..b@c.de a.@b.co a'@b.co a@b a@.co a@b..co"),
        (ZOD["duration"]["pattern"], "P1W P1Y P1M2D PT1H P1DT2H3M4.5S PT0,5S P PT P1YT P1W2D P1D1Y PT1S1M 1D PT1M2S"),
        *((pattern, "0 12 -1.5 +.5 1. . - +- 123456 1234567 0001.20 1.234 123.45 12345.678 x") for pattern in DECIMALS),
    ],
)
def test_patterns_without_look_around_match_the_same_texts(pattern: str, texts: str) -> None:
    """Pydantic forgets the end of a text in one of two choices."""
    meant = pattern.replace("}|(?=", "}$|(?=")
    plain = without_look_around(pattern)
    assert plain
    assert not any(map(has_look_around, plain))
    for text in texts.split():
        assert all(re.search(part, text) for part in plain) == bool(re.search(meant, text)), text


@pytest.mark.parametrize("pattern", ["^(?!foo)a", "^(?=a(?!b))", "a(?=b)", "^(?=a)b|c", "(?<=a)b", r"^(?!.*\d)x"])
def test_other_look_around_is_not_guessed(pattern: str) -> None:
    assert without_look_around(pattern) == []
    assert cleaned({"pattern": pattern}) == {"pattern": pattern}


def test_odd_keywords_do_not_hide_the_reason() -> None:
    for odd in ({"properties": 1}, {"required": [{}]}, {"$ref": 1}, {"minimum": "x"}, {"patternProperties": 3}):
        schema = {"oneOf": [odd, {"type": "object"}], **odd}
        of_answer({"propertyNames": odd, "allOf": 1, "pattern": "^(?=a)b"})
        error = of_answer(schema).refused(RequestError("oneOf constraints, range, are not disjoint", GRAMMAR))
        assert str(error).startswith("response_format: ")


def test_many_names_of_properties_make_no_long_grammar() -> None:
    """Records in records, whose names would multiply."""
    schema: Any = {"type": "integer"}
    for _ in range(6):
        names = {"enum": [f"name {number}" for number in range(100)]}
        schema = {"type": "object", "propertyNames": names, "additionalProperties": schema}
    assert len(of_answer(schema).grammar) < 100_000
    assert accepts(schema["additionalProperties"]["additionalProperties"], {"name 7": {"name 99": {}}})
    assert not accepts(schema, {"name 100": {}})


def test_white_space_stays_compact_in_lenient_schemas() -> None:
    assert compact(LENIENT)["x-guidance"] == {"whitespace_flexible": False, "lenient": True}  # type: ignore[index]


BESIDE: Mapping[str, Any] = {
    "if": {"then": {}},
    **{key: {"if": {}} for key in ("then", "else")},
    **{key: {"contains": {}} for key in ("minContains", "maxContains")},
}
"""Keywords without which others say nothing."""
EXAMPLES: Mapping[str, Any] = {
    "$ref": "#/$defs/a",
    "const": 1,
    "enum": [1],
    "type": "string",
    **{key: [{"type": "string"}] for key in ("allOf", "anyOf", "oneOf", "prefixItems")},
    "not": {"const": 1},
    "if": {"const": 1},
    "then": {"const": 1},
    "else": {"const": 1},
    **{key: {"a": {"const": 1}} for key in ("properties", "patternProperties", "dependentSchemas", "$defs")},
    **{key: {"const": 1} for key in ("items", "contains", "additionalProperties", "unevaluatedProperties")},
    "unevaluatedItems": {"const": 1},
    "propertyNames": {"not": {"const": "a"}},
    "dependentRequired": {"a": ["b"]},
    "required": ["a"],
    "pattern": "a",
    "format": "date",
    "uniqueItems": True,
    "multipleOf": 2,
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"), 1),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minContains", "maxContains"), 1),
}
"""Keywords of JSON schema that restrict values, each with a value."""


def test_the_page_lists_the_keywords() -> None:
    """The library decides which."""
    followed, not_followed = [], []
    for key, value in EXAMPLES.items():
        error = refusal(of_answer({"$defs": {"a": {}}, **BESIDE.get(key, {}), key: value}))
        (not_followed if error and key in str(error) else followed).append(key)
    page = PAGE.read_text()
    for title, keys in (("Followed", followed), ("Refused", not_followed)):
        assert f"| {title} | {', '.join(f'`{key}`' for key in sorted(keys))} |" in page
