"""Fields that are not served. One that would change an answer is refused by name, unless its value asks for nothing.
Any other is ignored, which a log line and a header of the answer report; the operator may have those refused, too.

Not for: what a served field means (`sampling_fields.py`), the fields themselves (`fields.py`), or the list of fields
of other servers (`foreign_fields.py`).
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from engine.api import RequestError
from server.http.calls import this_call
from server.suggest import did_you_mean

log = logging.getLogger("polydraft")

UNKNOWN = "unknown_parameter"
"""OpenAI's code for a name that no field has."""
UNSUPPORTED = "unsupported_value"
_LEAVE_OUT = "leave it out"
_MOST_SHOWN, _LONGEST_SHOWN = 8, 64
_MOST_REMEMBERED = 256
_MOST_UNKNOWN = 64
_CLOSE = 0.85
"""Likeness from which a name is taken for a misspelt one."""
_LONG = 6
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_HARMLESS = frozenset(
    """
    user metadata safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options client_metadata store
    service_tier verbosity reasoning_effort include max_tool_calls metrics priority return_token_ids return_token_strs
    n_keep
    """.split()
)
"""Names that every route may ignore, and fields of some: they do not change what the model answers."""

_REQUIRED = frozenset({"model", "messages", "prompt", "input", "tokens"})
"""Fields that are missed if they are misspelt."""


@dataclass(frozen=True, init=False, eq=False)
class Neutral:
    """Marks a field that is known and not served: its values that ask for nothing, beside null."""

    values: tuple[Any, ...]
    way_out: str

    def __init__(self, *values: Any, way_out: str = _LEAVE_OUT) -> None:
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "way_out", way_out)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, describe: GetJsonSchemaHandler) -> JsonSchemaValue:
        """What /openapi.json says of the field."""
        return {**describe(schema), "enum": [*self.values, None], "description": f"Not served; {self.way_out}."}

    def check(self, name: str, value: Any) -> None:
        """Raise RequestError for a value that asks for something."""
        if value is None or any(_is_same(value, one) for one in self.values):
            return
        served = " or ".join(json.dumps(one) for one in self.values)
        but = f" (only {served} is accepted)" if served else ""
        raise RequestError(f"{name} is not supported by this server{but}; {self.way_out}", name, UNSUPPORTED)


def _is_same(value: Any, one: Any) -> bool:
    """Whether two values are one to those who read JSON: 1 and 1.0 are, 1 and true are not."""
    return isinstance(value, bool) == isinstance(one, bool) and bool(value == one)


def _mark_of(field: FieldInfo) -> Neutral | None:
    return next((mark for mark in field.metadata if isinstance(mark, Neutral)), None)


def refuse_unsupported(body: BaseModel) -> None:
    """Raise RequestError for a known field that asks for what is not served."""
    for name, field in type(body).model_fields.items():
        if (mark := _mark_of(field)) is not None:
            mark.check(name, getattr(body, name))
    Neutral(getattr(body, "n", 1), way_out="send n").check("best_of", getattr(body, "best_of", None))


def unknown_field(names: Sequence[str], hint: str = "") -> RequestError:
    """The refusal of names that no field has, in OpenAI's words; hint: what may have been meant."""
    some = ", ".join(shown(name) for name in names[:_MOST_SHOWN])
    plural = "s" if len(names) > 1 else ""
    return RequestError(f"Unrecognized request argument{plural} supplied: {some}{hint}", shown(names[0]), UNKNOWN)


def shown(name: str) -> str:
    """A name that a client has sent, fit for a log line, a header and an answer."""
    return ascii(name[:_LONGEST_SHOWN])[1:-1]


@lru_cache(maxsize=1024)
def _misspelt(name: str, known: frozenset[str]) -> str | None:
    """The known name of which a name is another spelling; none for a longer name such as `conversation_id`, nor for a
    short one: `speed` is not `seed`."""
    plain = _HUMP.sub("_", name[:_LONGEST_SHOWN]).replace("-", "_").lower()
    if plain in known:
        return plain
    if len(name) < _LONG or len(name) > _LONGEST_SHOWN:
        return None
    # Comparing takes time on the event loop, so names that begin with another letter are no candidates.
    close = difflib.get_close_matches(plain, [one for one in known if one[0] == plain[0]], n=1, cutoff=_CLOSE)
    return close[0] if close and not plain.startswith(f"{close[0]}_") else None


class UnknownFields:
    """Finds names that no field of a body has: refuses those that would change an answer, ignores the others."""

    def __init__(
        self,
        is_strict: bool = False,
        bodies: Iterable[type[BaseModel]] = (),
        foreign: Mapping[str, Neutral] | None = None,
    ) -> None:
        """is_strict: refuse every unknown name. bodies: those of all routes. foreign: fields of other servers."""
        self._is_strict = is_strict
        self._foreign = foreign or {}
        self._elsewhere = {name: field for body in bodies for name, field in body.model_fields.items()}
        self._telling = frozenset(self._elsewhere.keys() | self._foreign.keys()) - _HARMLESS - _REQUIRED
        """Names whose misspelling must not be ignored."""
        self._logged: set[str] = set()

    def check(self, body: BaseModel) -> None:
        """Raise RequestError for unknown names that must not be ignored; report the others."""
        if not body.model_extra:
            return
        unknown = []
        for name, value in body.model_extra.items():
            if name in self._foreign:
                self._foreign[name].check(name, value)
            else:
                unknown.append(name)
        if len(unknown) > _MOST_UNKNOWN:
            raise unknown_field(sorted(unknown))
        if unknown and self._is_strict:
            hint = did_you_mean(min(unknown)[:_LONGEST_SHOWN], type(body).model_fields)
            raise unknown_field(sorted(unknown), hint)
        for name in sorted(unknown):
            if name not in _HARMLESS | self._elsewhere.keys() and (meant := _misspelt(name, self._telling)):
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
        """Report a part of the running request that has no effect: in the answer's header, and once in the log."""
        ignored = this_call().ignored
        if name not in ignored and len(ignored) < _MOST_SHOWN:
            ignored.append(name)
        if name not in self._logged and len(self._logged) < _MOST_REMEMBERED:
            self._logged.add(name)
            log.warning("request field %s was ignored: %s", name, why)
