"""Names the places in a client's schema that the grammar library refuses, and what to do.

The library's message names a keyword, and not where it stands. Not for: what the
library is given (`schemas.py`).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from server.text.argument_types import referred
from server.text.schemas import NAMED_SCHEMAS, SCHEMAS, cleaned
from server.wire.unsupported_fields import shown

_MOST_SHOWN = 5
_LENIENT = 'or add "x-guidance": {"lenient": true} at the top of the schema, and the rest of it is followed'
_LARGEST_BOUND = 10**18
_NOT_REGULAR = re.compile(r"\(\?(?:[=!]|<[=!])|\\[bB1-9]")
"""Parts of regular expressions that the library does not follow."""


class _Keyword(NamedTuple):
    """A keyword of a schema."""

    path: str
    key: str
    value: Any
    root: Mapping[str, Any]


class _Fault(NamedTuple):
    message: re.Pattern[str]
    is_at: Callable[[_Keyword, re.Match[str]], bool]
    advice: str


def _is_unknown_reference(place: _Keyword, _: re.Match[str]) -> bool:
    return place.key == "$ref" and referred(place.root, place.value) is True


def _is_odd_pattern(place: _Keyword, _: re.Match[str]) -> bool:
    patterns = {"pattern": [place.value], "patternProperties": place.value}.get(place.key, [])
    return any(_NOT_REGULAR.search(str(pattern)) for pattern in patterns)


def _is_overlap(place: _Keyword, _: re.Match[str]) -> bool:
    if place.key != "oneOf" or not isinstance(place.value, list):
        return False
    return not all(_exclude(*pair, place.root) for pair in itertools.combinations(place.value, 2))


_FAULTS = (
    _Fault(
        re.compile(r"Unimplemented keys: (\[.*?\])"),
        lambda place, match: place.key in json.loads(match[1]),
        f"cannot be followed while an answer is written; leave it out, {_LENIENT}",
    ),
    _Fault(
        re.compile("oneOf constraints"),
        _is_overlap,
        f"has choices that one value may follow together; write anyOf, {_LENIENT}",
    ),
    _Fault(
        re.compile("oneOf constraints"),
        lambda place, _: place.key == "oneOf",
        f"may have choices that one value may follow together; write anyOf, {_LENIENT}",
    ),
    _Fault(
        re.compile("look-?around|backreferences"),
        _is_odd_pattern,
        "has look-around, a word boundary or a reference, which cannot be followed; write it without, or leave it out",
    ),
    _Fault(
        re.compile("regex parse error"),
        lambda place, _: place.key in ("pattern", "patternProperties"),
        "has a pattern that cannot be read; correct it, or leave it out",
    ),
    _Fault(
        re.compile("range"),
        lambda place, _: place.key.lower().endswith(("minimum", "maximum")) and abs(place.value) >= _LARGEST_BOUND,
        "is a larger number than can be followed; leave it out, or send a smaller one",
    ),
    _Fault(
        re.compile("regexes .* are not disjoint"),
        lambda place, _: place.key == "patternProperties" and len(place.value) > 1,
        "has patterns that one name may match together; change them so that a name matches one",
    ),
    _Fault(
        re.compile("not present in a registry|does not exist|Pointer"),
        _is_unknown_reference,
        "names a schema that is not in this one; put it into $defs",
    ),
)


def explained(reason: str, schema: Any) -> str:
    """Return the library's reason with the places in a schema that have caused it."""
    if not isinstance(schema, dict):
        return reason
    try:
        return _explained(reason, cleaned(schema))
    except (AttributeError, TypeError):  # keywords with values of other types than theirs
        return reason


def _explained(reason: str, schema: Mapping[str, Any]) -> str:
    for fault in _FAULTS:
        if not (match := fault.message.search(reason)):
            continue
        paths = [place.path for place in _places(schema, "", schema) if fault.is_at(place, match)]
        if paths:
            more = f" and {len(paths) - _MOST_SHOWN} more" * (len(paths) > _MOST_SHOWN)
            return f"{', '.join(paths[:_MOST_SHOWN])}{more} {fault.advice}"
    return reason


def _places(schema: Any, path: str, root: Mapping[str, Any]) -> Iterator[_Keyword]:
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        at = f"{path}.{shown(key)}".removeprefix(".")
        yield _Keyword(at, key, value, root)
        if key in NAMED_SCHEMAS and isinstance(value, dict):
            for name, part in value.items():
                yield from _places(part, f"{at}.{shown(name)}", root)
        elif key in SCHEMAS and isinstance(value, list):
            for number, part in enumerate(value):
                yield from _places(part, f"{at}.{number}", root)
        elif key in SCHEMAS:
            yield from _places(value, at, root)


def _exclude(left: Any, right: Any, root: Mapping[str, Any], with_properties: bool = True) -> bool:
    """Return whether two schemas certainly have no value in common."""
    left, right = _followed(left, root), _followed(right, root)
    pairs = ((_types(left), _types(right)), (_values(left), _values(right)))
    if any(mine and theirs and mine.isdisjoint(theirs) for mine, theirs in pairs):
        return True
    if not with_properties:
        return False
    marks = set(left.get("required", ())) & set(right.get("required", ()))
    first, second = left.get("properties", {}), right.get("properties", {})
    return any(_exclude(first.get(name), second.get(name), root, False) for name in marks)


def _followed(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(schema, dict) and "$ref" in schema:
        schema = referred(root, schema["$ref"])
    return schema if isinstance(schema, dict) else {}


def _types(schema: Mapping[str, Any]) -> set[str]:
    types = schema.get("type", ())
    names = {types} if isinstance(types, str) else set(map(str, types))
    return names | {"number"} if "integer" in names else names


def _values(schema: Mapping[str, Any]) -> set[str]:
    listed = [schema["const"]] if "const" in schema else schema.get("enum", ())
    return {json.dumps(value, sort_keys=True) for value in listed}
