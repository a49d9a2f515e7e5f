"""Reads and checks lines of input files, without bodies.

Not for: their answers (`endpoint.py`).
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from server.batches.objects import LineError

_LONGEST_ID = 512
_LONGEST_SHOWN = 64


class _Fields(msgspec.Struct):
    """Fields of a line, any of which may be missing or wrong."""

    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True)
class InputLine:
    """A line of an input file that is not blank."""

    number: int
    """Number in the file, counted from 1."""
    start: int
    """Offset in the file, in bytes."""
    size: int
    """Bytes without the line break."""
    line_id: str
    custom_id: str | None = None
    error: LineError | None = None
    """Reason why the line cannot be sent to an endpoint."""


@dataclass(frozen=True)
class LineRequest:
    """Request of a line that has no error."""

    url: str
    body: bytes
    """JSON, as it stands in the file."""


def read_lines(file: BinaryIO, endpoints: Collection[str], name: str = "") -> Iterator[InputLine]:
    """Yield the lines of a file with the faults that its endpoint would not find.

    endpoints: allowed values of `url`. name: goes into the ids of lines, which depend on
    number and content, too.
    """
    start = 0
    custom_ids: set[str] = set()
    for number, line in enumerate(file, start=1):
        text = line.rstrip(b"\r\n")
        num_marks = 0
        if number == 1 and text.startswith(codecs.BOM_UTF8):
            num_marks = len(codecs.BOM_UTF8)
            text = text[num_marks:]
        if text.strip():
            line_id = _id_of(name, number, text)
            custom_id, error = _checked(text, endpoints, custom_ids)
            if error is not None:
                error = LineError(error.code, f"line {number}: {error.message}")
            yield InputLine(number, start + num_marks, len(text), line_id, custom_id, error)
        start += len(line)


def request_of(line: bytes) -> LineRequest:
    """Return the request of a line that `read_lines` has found right."""
    fields = msgspec.json.decode(line, type=_Fields)
    return LineRequest(fields.url, bytes(fields.body))


def _id_of(name: str, number: int, text: bytes) -> str:
    digest = hashlib.blake2b(f"{name}:{number}:".encode(), digest_size=16)
    digest.update(text)
    return f"batch_req_{digest.hexdigest()}"


def _checked(text: bytes, endpoints: Collection[str], seen: set[str]) -> tuple[str | None, LineError | None]:
    """Return a line's custom id and error; `seen` has earlier ids, and gets this one."""
    try:
        fields = msgspec.json.decode(text, type=_Fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return None, LineError("invalid_json_line", f"not a JSON object ({error})")
    custom_id = fields.custom_id
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _LONGEST_ID:
        message = f"custom_id must be a text of 1 to {_LONGEST_ID} characters"
        return None, LineError("invalid_custom_id", message)
    if custom_id in seen:
        return custom_id, LineError("duplicate_custom_id", "an earlier line has the same custom_id")
    seen.add(custom_id)
    if fields.method != "POST":
        return custom_id, LineError("invalid_method", 'method must be "POST"')
    if not isinstance(fields.url, str) or fields.url not in endpoints:
        allowed = " or ".join(sorted(endpoints))
        given = ascii(str(fields.url)[:_LONGEST_SHOWN])
        return custom_id, LineError("invalid_url", f"url must be {allowed} here, not {given}")
    if not bytes(fields.body).startswith(b"{"):
        return custom_id, LineError("invalid_body", "body must be an object")
    return custom_id, None
