"""Treatment of unsupported fields.

A field that would change an answer is refused by name, unless its value has no effect. Any
other field is ignored and reported in a log line and a response header; `--strict-fields`
refuses such fields, too.

Not for: the meaning of supported fields (`sampling_fields.py`), their models (`fields.py`), or the
list of fields of other servers (`foreign_fields.py`).
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from engine.api import RequestError
from server.wire.current_call import this_call
from server.wire.limits import MOST_UNKNOWN
from server.wire.suggest import did_you_mean

log = logging.getLogger("polydraft")

UNKNOWN = "unknown_parameter"
"""OpenAI's error code for an unknown field."""
UNSUPPORTED = "unsupported_value"
_LEAVE_OUT = "leave it out"
_MOST_SHOWN = 8
_LONGEST_SHOWN = 64
_MOST_REMEMBERED = 256
_CLOSE = 0.85
"""Similarity from which a name counts as misspelt."""
_LONG = 6
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_HARMLESS = frozenset(
    """
    user metadata safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options client_metadata store
    service_tier verbosity reasoning_effort include max_tool_calls metrics priority return_token_ids return_token_strs
    n_keep
    """.split()
)
"""Names that every route ignores: they do not change an answer."""

_REQUIRED = frozenset({"model", "messages", "prompt", "input", "tokens"})
"""Fields whose misspelling shows, as they are missing, or changes nothing (`model`)."""


class Neutral:
    """Annotation of a known, unsupported field: its values without effect, besides null."""

    def __init__(self, *values: Any, way_out: str = _LEAVE_OUT) -> None:
        self.values = values
        self.way_out = way_out

    def __get_pydantic_json_schema__(self, schema: CoreSchema, describe: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the field's description in /openapi.json."""
        return {**describe(schema), "enum": [*self.values, None], "description": f"Not served; {self.way_out}."}

    def check(self, name: str, value: Any) -> None:
        """Raise RequestError for a value that would have an effect."""
        if value is None or any(_is_same(value, neutral) for neutral in self.values):
            return
        message = f"{name} is not supported by this server"
        if self.values:
            served = " or ".join(json.dumps(neutral) for neutral in self.values)
            message += f" (only {served} is accepted)"
        raise RequestError(f"{message}; {self.way_out}", name, UNSUPPORTED)


def _is_same(value: Any, other: Any) -> bool:
    """Whether two JSON values are equal: 1 and 1.0 are, 1 and true are not."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _mark_of(field: FieldInfo) -> Neutral | None:
    return next((mark for mark in field.metadata if isinstance(mark, Neutral)), None)


@cache
def _marks_of(model: type[BaseModel]) -> dict[str, Neutral]:
    """Return the marks of a body's fields."""
    marks = ((name, _mark_of(field)) for name, field in model.model_fields.items())
    return {name: mark for name, mark in marks if mark is not None}


def refuse_unsupported(body: BaseModel) -> None:
    """Raise RequestError for a known field with an unsupported value."""
    for name, mark in _marks_of(type(body)).items():
        mark.check(name, getattr(body, name))
    Neutral(getattr(body, "n", 1), way_out="send n").check("best_of", getattr(body, "best_of", None))


def unknown_field(names: Sequence[str], hint: str = "") -> RequestError:
    """Return OpenAI's error for unknown fields; hint: a suggestion."""
    supplied = ", ".join(shown(name) for name in names[:_MOST_SHOWN])
    plural = "s" if len(names) > 1 else ""
    return RequestError(f"Unrecognized request argument{plural} supplied: {supplied}{hint}", shown(names[0]), UNKNOWN)


def shown(name: str) -> str:
    """Return a client's field name in a form that is safe in logs, headers and answers."""
    return ascii(name[:_LONGEST_SHOWN])[1:-1]


@lru_cache(maxsize=1024)
def _misspelt(name: str, known: frozenset[str]) -> str | None:
    """Return the known name that a name misspells, or None.

    Longer names such as `conversation_id` are not misspelt, nor are short names:
    `speed` is not `seed`.
    """
    plain = _HUMP.sub("_", name[:_LONGEST_SHOWN]).replace("-", "_").lower()
    if plain in known:
        return plain
    if len(name) < _LONG or len(name) > _LONGEST_SHOWN:
        return None
    # Comparison takes time on the event loop, so only names with the same first letter are
    # compared.
    candidates = [candidate for candidate in known if candidate[0] == plain[0]]
    close = difflib.get_close_matches(plain, candidates, n=1, cutoff=_CLOSE)
    if not close or plain.startswith(f"{close[0]}_"):
        return None
    return close[0]


class UnknownFields:
    """Policy for unknown fields: refuse those that change answers, ignore all others."""

    def __init__(
        self,
        is_strict: bool = False,
        bodies: Iterable[type[BaseModel]] = (),
        foreign: Mapping[str, Neutral] | None = None,
    ) -> None:
        """is_strict: refuse every unknown name. bodies: all routes'. foreign: other servers'."""
        self._is_strict = is_strict
        self._foreign = foreign or {}
        self._elsewhere = {name: field for body in bodies for name, field in body.model_fields.items()}
        known = self._elsewhere.keys() | self._foreign.keys()
        self._never_misspelt = frozenset(known) - _HARMLESS - _REQUIRED
        """Names whose misspelling is refused."""
        self._logged: set[str] = set()

    def check(self, body: BaseModel) -> None:
        """Raise RequestError for unknown names that must not be ignored; report all others."""
        if not body.model_extra:
            return
        unknown = []
        for name, value in body.model_extra.items():
            if name in self._foreign:
                self._foreign[name].check(name, value)
            else:
                unknown.append(name)
        if len(unknown) > MOST_UNKNOWN:
            raise unknown_field(sorted(unknown))
        if unknown and self._is_strict:
            hint = did_you_mean(min(unknown)[:_LONGEST_SHOWN], type(body).model_fields)
            raise unknown_field(sorted(unknown), hint)
        for name in sorted(unknown):
            if name not in _HARMLESS | self._elsewhere.keys() and (meant := _misspelt(name, self._never_misspelt)):
                raise unknown_field([name], f" (did you mean {meant}?)")
            self._check_elsewhere(name, body.model_extra[name])
            self.ignore(shown(name), "no field has this name here; --strict-fields refuses such names")

    def _check_elsewhere(self, name: str, value: Any) -> None:
        """Raise RequestError for a field of another route that would change the answer there."""
        field = self._elsewhere.get(name)
        if field is None or name in _HARMLESS or _is_same(value, field.default):
            return
        if (mark := _mark_of(field)) is not None:
            mark.check(name, value)
            return
        raise RequestError(f"{name} is not a field of this endpoint; {_LEAVE_OUT}", name, UNKNOWN)

    def ignore(self, name: str, why: str) -> None:
        """Report a part of the request without effect: in a header, and once in the log."""
        ignored = this_call().ignored
        if name not in ignored and len(ignored) < _MOST_SHOWN:
            ignored.append(name)
        if name not in self._logged and len(self._logged) < _MOST_REMEMBERED:
            self._logged.add(name)
            log.warning("request field %s was ignored: %s", name, why)
