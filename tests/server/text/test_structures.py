"""From a body's fields to a grammar, and refusals by field."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from engine.api import RequestError
from server.text.schemas import cleaned, closed
from server.text.structured import Structure, structure_of
from server.wire.fields import CompletionRequest
from server.wire.limits import LONGEST_GRAMMAR
from server.wire.unsupported_fields import UNKNOWN

COMPACT = {"whitespace_flexible": False}
FLEXIBLE = {"whitespace_flexible": True}
OBJECT = {"type": "object", "properties": {"a": {"type": "boolean"}}}


def structure(**fields: Any) -> Structure:
    return structure_of(CompletionRequest(model="m", prompt="p", **fields))


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        structure(**fields)
    return caught.value


def json_structure(param: str, schema: Any) -> Structure:
    return Structure(json.dumps({"grammars": [{"json_schema": schema}]}), param, f"%json {json.dumps(schema)}")


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {"json": None}}])
def test_nothing_may_be_asked_for(fields: dict[str, Any]) -> None:
    assert structure(**fields) == Structure("", None, "")


@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        ({"response_format": {"type": "json_object"}}, {"x-guidance": COMPACT, "type": "object"}),
        ({"response_format": {"type": "json_object", "schema": OBJECT}}, {"x-guidance": COMPACT, **OBJECT}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": OBJECT},
                }
            },
            {"x-guidance": COMPACT, **OBJECT},
        ),
        ({"structured_outputs": {"json": OBJECT}}, {"x-guidance": COMPACT, **OBJECT}),
        ({"structured_outputs": {"json": json.dumps(OBJECT)}}, {"x-guidance": COMPACT, **OBJECT}),
        ({"structured_outputs": {"json": True}}, True),
        ({"guided_json": OBJECT}, {"x-guidance": COMPACT, **OBJECT}),
        ({"guided_json": {**OBJECT, "x-guidance": FLEXIBLE}}, {**OBJECT, "x-guidance": FLEXIBLE}),
        (
            {"structured_outputs": {"json": OBJECT, "disable_any_whitespace": True, "whitespace_pattern": " *"}},
            {"x-guidance": COMPACT, **OBJECT},
        ),
        (
            {"structured_outputs": {"json": OBJECT, "disable_any_whitespace": False}},
            {"x-guidance": FLEXIBLE, **OBJECT},
        ),
        (
            {"structured_outputs": {"json": OBJECT, "whitespace_pattern": " *"}},
            {"x-guidance": {"whitespace_pattern": " *"}, **OBJECT},
        ),
        ({"structured_outputs": {"json": True, "disable_any_whitespace": True}}, True),
    ],
)
def test_schemas_become_json_of_the_grammar_library(fields: dict[str, Any], schema: Any) -> None:
    (param,) = fields
    found = structure(**fields)
    assert found.param == param
    assert json.loads(found.grammar) == {"grammars": [{"json_schema": schema}]}
    assert found.rule.startswith("%json ")
    assert json.loads(found.rule.removeprefix("%json ")) == schema


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"structured_outputs": {"regex": "a+"}}, Structure("start: /a+/", "structured_outputs", "/a+/")),
        ({"guided_regex": "a|b"}, Structure("start: /a|b/", "guided_regex", "/a|b/")),
        ({"guided_regex": "a/b"}, Structure(r"start: /a\/b/", "guided_regex", r"/a\/b/")),
        ({"guided_regex": r"a\/b\\"}, Structure(r"start: /a\/b\\/", "guided_regex", r"/a\/b\\/")),
        ({"guided_regex": "a\n\r"}, Structure(r"start: /a\n\r/", "guided_regex", r"/a\n\r/")),
        ({"guided_regex": "a\\\n\\\r"}, Structure(r"start: /a\n\r/", "guided_regex", r"/a\n\r/")),
        (
            {"structured_outputs": {"choice": ["a", "b.c"]}},
            Structure(r"start: /(a)|(b\.c)/", "structured_outputs", r"/(a)|(b\.c)/"),
        ),
        ({"guided_choice": ["x"]}, Structure("start: /(x)/", "guided_choice", "/(x)/")),
        ({"guided_grammar": 'start: "a"'}, Structure('start: "a"', "guided_grammar", "")),
        (
            {"structured_outputs": {"grammar": 'start: "a"', "regex": None}},
            Structure('start: "a"', "structured_outputs", ""),
        ),
    ],
)
def test_other_kinds_become_lark(fields: dict[str, Any], expected: Structure) -> None:
    assert structure(**fields) == expected


LARGEST = 92 * 10**17


@pytest.mark.parametrize(
    ("schema", "bounds"),
    [
        ({"type": "integer"}, {"minimum": -LARGEST, "maximum": LARGEST}),
        ({"type": ["integer", "null"]}, {"minimum": -LARGEST, "maximum": LARGEST}),
        ({"type": "integer", "minimum": 0}, {"maximum": LARGEST}),
        ({"type": "integer", "exclusiveMaximum": 9}, {"minimum": -LARGEST}),
        ({"type": "integer", "minimum": 1, "maximum": 2}, {}),
        ({"type": "integer", "minimum": 10**19}, {}),
        ({"type": "integer", "enum": [10**20]}, {}),
        ({"type": ["integer", "number"]}, {}),
        ({"type": "number"}, {}),
        ({"type": "string"}, {}),
    ],
)
def test_integers_have_bounds(schema: dict[str, Any], bounds: dict[str, int]) -> None:
    """Wherever they stand, but not where a bound would allow more."""
    expected = {**schema, **bounds}
    for around in ("items", "additionalProperties", "contains"):
        assert cleaned({"properties": {"a": {around: schema}}}) == {"properties": {"a": {around: expected}}}
    assert cleaned({"not": schema, "anyOf": [schema]}) == {"not": schema, "anyOf": [expected]}


def test_an_answer_of_one_digit_for_ever_ends() -> None:
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, structure(guided_json={"type": "integer"}).grammar)
    assert matcher.validate_tokens(tokenizer.tokenize_str("1" * 40)) == len(str(LARGEST))


def test_formats_that_are_not_known_are_left_out_wherever_schemas_stand() -> None:
    """A property of that name, and a constant, are no formats; what is no schema stays."""
    odd, known = {"type": "string", "format": "odd"}, {"type": "string", "format": "date"}
    plain = {"type": "string"}

    def wrapped(one: Any) -> dict[str, Any]:
        named = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
        single = ("items", "contains", "not", "additionalProperties", "if", "then", "else")
        lists = ("prefixItems", "anyOf", "allOf", "oneOf")
        return {
            **{name: {"format": one, "b": known} for name in named},
            **dict.fromkeys(single, one),
            **{name: [one, known, True] for name in lists},
            "const": odd,
            "required": ["format"],
        }

    grammar = json.loads(structure(guided_json={**wrapped(odd), "format": "odd"}).grammar)
    assert grammar["grammars"][0]["json_schema"] == {"x-guidance": COMPACT, **wrapped(plain)}
    kept = {"properties": [odd], "items": {"format": "date"}, "format": "time"}
    grammar = json.loads(structure(guided_json=kept).grammar)
    assert grammar["grammars"][0]["json_schema"] == {"x-guidance": COMPACT, **kept}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "text, json_object or json_schema"),
        ({"response_format": {"type": ["text"]}}, "response_format", "text, json_object or json_schema"),
        ({"response_format": {}}, "response_format", "text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must hold the schema"),
        ({"response_format": {"type": "json_schema", "json_schema": []}}, "response_format", "must hold the schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
            "response_format",
            "must hold the schema",
        ),
        ({"structured_outputs": {"poem": "x"}}, "structured_outputs", r"structured_outputs\.poem is not supported"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": "[" * 100_000}, "guided_json", "not valid JSON"),
        ({"guided_json": '{"minimum": NaN}'}, "guided_json", "not valid JSON"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs", "must be an object"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "strings that are not empty"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs", "strings that are not empty"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs", "strings that are not empty"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs", "strings that are not empty"),
        ({"structured_outputs": 3}, "structured_outputs", "must be an object with json"),
        ({"response_format": "text"}, "response_format", "text, json_object or json_schema"),
        (
            {"structured_outputs": {"json": [1], "disable_any_whitespace": True}},
            "structured_outputs",
            "must be an object",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "response_format and structured_outputs",
        ),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs", "regex must be a string"),
        ({"structured_outputs": {"grammar": 3}}, "structured_outputs", "grammar must be a string"),
        ({"guided_regex": "a\ud800"}, "guided_regex", r"half characters .*\(UnicodeEncodeError\)"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "one structure only"),
        ({"guided_regex": "a", "guided_grammar": "b"}, "guided_grammar", "guided_regex and guided_grammar"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex",
            "response_format and guided_regex",
        ),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "structured_outputs", "json only"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs", "json only"),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": "no"}}, "structured_outputs", "true or false"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": 3}}, "structured_outputs", "regular expression"),
    ],
)
def test_unreadable_structures_are_refused_by_their_field(fields: dict[str, Any], param: str, words: str) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert param in str(error)
    with pytest.raises(RequestError, match=words):
        raise error


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "text", "schema": {}}, "response_format.schema"),
        ({"type": "json_object", "strict": True}, "response_format.strict"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "odd": 1}}, "response_format.json_schema.odd"),
    ],
)
def test_keys_that_a_format_does_not_have_are_unknown(form: dict[str, Any], param: str) -> None:
    error = refusal(response_format=form)
    assert (error.param, error.code) == (param, UNKNOWN)
    assert str(error) == f"Unrecognized request argument supplied: {param}"


def test_keys_without_a_value_are_no_keys() -> None:
    form = {"type": "json_schema", "odd": None, "json_schema": {"schema": OBJECT, "odd": None}}
    assert structure(response_format=form) == json_structure("response_format", {**OBJECT, "x-guidance": COMPACT})


def test_a_grammar_has_a_greatest_length() -> None:
    """The bound applies to the grammar's text, from any source."""
    literal = "start: //"
    assert structure(guided_regex="a" * (LONGEST_GRAMMAR - len(literal))).param == "guided_regex"
    error = refusal(guided_regex="a" * (LONGEST_GRAMMAR - len(literal) + 1))
    assert error.param == "guided_regex"
    assert f"{LONGEST_GRAMMAR + 1} characters" in str(error)


CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
DEFINED = {"$defs": {"city": CITY}}
ALL_OF = {"allOf": [{"$ref": "#/$defs/city"}, {"properties": {"unit": {}}}], **DEFINED}


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (CITY, {"city": "x"}, {"city": "x", "more": 1}),
        ({}, {}, {"more": 1}),
        ({**CITY, "additionalProperties": True}, {"more": 1}, {"city": 1}),
        ({**CITY, "additionalProperties": {"type": "string"}}, {"more": "x"}, {"more": 1}),
        ({"properties": {"at": CITY}}, {"at": {"city": "x"}}, {"at": {"more": 1}}),
        ({"properties": {"any": {"type": "object"}}}, {"any": {"more": 1}}, {"any": 1}),
        ({"properties": {"all": {"type": "array", "items": CITY}}}, {"all": [{"city": "x"}]}, {"all": [{"more": 1}]}),
        ({"properties": {"at": {"anyOf": [CITY, {"type": "null"}]}}}, {"at": None}, {"at": {"more": 1}}),
        ({"$defs": {"c": CITY}, "properties": {"at": {"$ref": "#/$defs/c"}}}, {"at": {}}, {"at": {"more": 1}}),
        (ALL_OF, {"city": "x", "unit": 1}, {"city": 1}),
        ({**CITY, "anyOf": [{"properties": {"unit": {}}, "required": ["unit"]}]}, {"city": "x", "unit": 1}, {}),
        ({**CITY, "patternProperties": {"^x": {}}}, {"city": "x", "x1": 1}, {"city": 1}),
        ({"properties": {"two": {"prefixItems": [CITY]}}}, {"two": [{"city": "x"}]}, {"two": [{"more": 1}]}),
        ({"properties": {"at": {"oneOf": [CITY, {"type": "null"}]}}}, {"at": None}, {"at": {"more": 1}}),
        ({"additionalProperties": CITY}, {"any": {"city": "x"}}, {"any": {"more": 1}}),
        ({"definitions": {"c": CITY}, "properties": {"at": {"$ref": "#/definitions/c"}}}, {"at": {}}, {"at": {"b": 1}}),
        ({"properties": {"in": {"properties": {"at": CITY}}}}, {"in": {"at": {}}}, {"in": {"at": {"more": 1}}}),
        ({"properties": {"at": ALL_OF}, **DEFINED}, {"at": {"city": "x", "unit": 1}}, {"at": {"city": 1}}),
        ({"properties": {"all": {"items": CITY}, "n": True}}, {"n": 1}, {"n": 1, "more": 1}),
        ({"properties": {"n": {"type": "integer", "properties": CITY["properties"]}}}, {"n": 1}, {"n": {}}),
        ({"allOf": [CITY]}, {"city": "x", "more": 1}, {"city": 1}),
        ({"properties": {"at": {"allOf": [{"$ref": "#/$defs/city"}]}}, **DEFINED}, {"at": {}}, {"at": {"more": 1}}),
    ],
)
def test_objects_of_arguments_are_closed_by_default(schema: Any, allowed: Any, refused: Any) -> None:
    """Objects are closed unless that would forbid a listed property."""
    found = closed({"type": "object", **schema}, is_root=True)
    jsonschema.validate(allowed, found)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(refused, found)


def test_closing_a_schema_leaves_the_given_one_and_its_order() -> None:
    given = {"type": "object", "properties": {"b": {"items": CITY}, "a": {}}, "required": ["b"]}
    before = json.dumps(given)
    found = closed(given)
    assert json.dumps(given) == before
    assert list(found["properties"]) == ["b", "a"]
    assert found["required"] == ["b"]
    assert closed({"type": "object"}) == {"type": "object"}, "no named property, and not the root"
    assert closed({"type": "object"}, is_root=True) == {"type": "object", "additionalProperties": False}


def test_keywords_that_are_null_are_absent() -> None:
    """A null that is a value stays, and so do properties of that name."""
    nulls = dict.fromkeys("type required enum properties items anyOf allOf $ref additionalProperties".split())
    inner = {"const": None, "default": None}
    odd = {**nulls, "type": "object", "properties": {"enum": {**nulls, **inner}}}
    expected = {"x-guidance": COMPACT, "type": "object", "properties": {"enum": inner}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": odd}}
    assert json.loads(structure(response_format=form).grammar)["grammars"][0]["json_schema"] == expected
    assert json.loads(structure(guided_json=odd).grammar)["grammars"][0]["json_schema"] == expected


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ('root ::= "a"', 'start: "a"'),
        ('# c\nroot ::= digit+ "x"\ndigit ::= [0-9]', "DIGIT"),
        ('start: "a ::= b"', 'start: "a ::= b"'),
    ],
)
def test_a_grammar_of_llama_cpp_is_translated(grammar: str, expected: str) -> None:
    found = structure(structured_outputs={"grammar": grammar}).grammar
    assert expected in found
    assert ("::=" in found) == ("::=" in expected)


def test_a_wrong_grammar_of_llama_cpp_says_what_to_do() -> None:
    for grammar in ("root ::= (", "root ::= ::=", "root ::= " + "(" * 30_000, "root ::= nowhere"):
        error = refusal(structured_outputs={"grammar": grammar})
        assert error.param == "structured_outputs"
        assert "not valid GBNF" in str(error)
