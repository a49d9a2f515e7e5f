"""Fields that are not served: known ones are accepted with the values that ask for nothing, unknown ones are refused.

Not for: what a served field means (`sampling_fields.py`), or the fields themselves (`protocol.py`).
"""

from __future__ import annotations

import itertools
import json
import logging
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from engine.api import RequestError
from server.suggest import did_you_mean

log = logging.getLogger("polydraft")

UNKNOWN = "unknown_parameter"
"""OpenAI's code for a name that no field has."""
_LEAVE_OUT = "leave it out"
_MOST_SHOWN, _LONGEST_SHOWN = 8, 64
_MOST_REMEMBERED = 256


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
        if value is None or any(type(value) is type(one) and value == one for one in self.values):
            return
        # 1 and 1.0 are one value to those who read it.
        distinct = [one for number, one in enumerate(self.values) if one not in self.values[:number]]
        served = " or ".join(json.dumps(one) for one in distinct)
        but = f" (only {served} is accepted)" if served else ""
        raise RequestError(f"{name} is not supported by this server{but}; {self.way_out}", name, "unsupported_value")


def refuse_unsupported(body: BaseModel) -> None:
    """Raise RequestError for a known field that asks for what is not served."""
    for name, field in type(body).model_fields.items():
        for mark in field.metadata:
            if isinstance(mark, Neutral):
                mark.check(name, getattr(body, name))


def unknown_field(names: list[str], known: list[str]) -> RequestError:
    """The refusal of names that no field has, in OpenAI's words; the message says what may have been meant."""
    shown = ", ".join(_shown(name) for name in names[:_MOST_SHOWN])
    meant = did_you_mean(names[0][:_LONGEST_SHOWN], known)
    plural = "s" if len(names) > 1 else ""
    return RequestError(f"Unrecognized request argument{plural} supplied: {shown}{meant}", _shown(names[0]), UNKNOWN)


def _shown(name: str) -> str:
    """A name that a client has sent, fit for a log line and an answer."""
    return ascii(name[:_LONGEST_SHOWN])[1:-1]


class UnknownFields:
    """What is done about names that no field has: refused, or, where the operator allows them, logged."""

    def __init__(self, allowed: bool) -> None:
        self._allowed = allowed
        self._logged: set[tuple[str, ...]] = set()

    def check(self, body: BaseModel) -> None:
        """Raise RequestError for unknown names; where they are allowed, log each set of them once."""
        if not body.model_extra:
            return
        names = sorted(itertools.islice(body.model_extra, _MOST_SHOWN))
        if not self._allowed:
            raise unknown_field(names, sorted(type(body).model_fields))
        shown = tuple(_shown(name) for name in names)
        if shown not in self._logged and len(self._logged) < _MOST_REMEMBERED:
            self._logged.add(shown)
            log.warning("request fields that this server does not know were ignored: %s", ", ".join(shown))
