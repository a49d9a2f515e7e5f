"""Depth of JSON, measured before it is decoded."""

from __future__ import annotations

import itertools

from server.wire.limits import DEEPEST

_DEPTHS = {**dict.fromkeys(b"[{", 1), **dict.fromkeys(b"]}", -1)}
_NO_BRACKETS = bytes(set(range(256)) - _DEPTHS.keys())


def nests_too_deeply(text: str) -> bool:
    """Whether JSON in a string nests deeper than a body may."""
    return is_deep(outside_strings(unescaped(text.encode())))


def unescaped(body: bytes) -> bytes:
    """Return JSON without its escaped quotation marks."""
    # An escaped backslash escapes nothing, so escaped backslashes are removed first.
    return body.replace(rb"\\", b"").replace(rb"\"", b"")


def outside_strings(plain: bytes) -> bytes:
    """Return the part of JSON without escaped quotation marks that is outside strings."""
    return b"".join(plain.split(b'"')[::2])


def is_deep(outside: bytes) -> bool:
    """Whether JSON nests deeper than a body may; outside: its part outside strings."""
    brackets = outside.translate(None, _NO_BRACKETS)
    return max(itertools.accumulate(map(_DEPTHS.__getitem__, brackets)), default=0) > DEEPEST
