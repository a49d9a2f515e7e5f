"""Regular expressions of schemas without look-around, which the grammar library does not follow.

A look-ahead at the beginning becomes a second expression that the same text matches. Expressions
that zod and pydantic write have equals here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_ONE = r"\\[^bBdDsSwW0-9]|[^\\()\[\].*+?|^$]"
"""One literal character."""
# Denials at the beginning, with patterns that say the same: the text has another character than
# those of a class; it does not begin with a character; it does not have a character.
_DENIALS = (
    (re.compile(r"\(\?!\^\[((?:[^\]\\^]|\\.)+)\]\*\$\)"), r"[^\1]"),
    (re.compile(rf"\(\?!({_ONE})\)"), r"^(?:[^\1]|$)"),
    (re.compile(rf"\(\?!\.\*({_ONE})\)"), r"^[^\1]*$"),
)
_DECIMAL = re.compile(r"(\[\+-\]\?0\*)\(\?:(\\d\{0,\d+\})\|\(\?=(\[\\d\.\]\{1,\d+\}0\*\$)\)(.*\$)\)")
"""Numbers as text with a bound of their digits, as pydantic 2.12 writes them."""
_DAYS = r"(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)"
_SECONDS = r"\d+(?:[.,]\d+)?S"
_HOURS = rf"T(?:\d+H(?:\d+M)?(?:{_SECONDS})?|\d+M(?:{_SECONDS})?|{_SECONDS})"
_EQUALS = {
    # Addresses and durations of zod.
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(?:\d+W|{_DAYS}(?:{_HOURS})?|{_HOURS})$"
    ),
}


def has_look_around(pattern: str) -> bool:
    """Return whether a regular expression looks ahead or behind."""
    return _LOOK_AROUND.search(pattern) is not None


def without_look_around(pattern: str) -> list[str]:
    """Return patterns that together match the same texts; none if they are not known."""
    if pattern in _EQUALS:
        return [_EQUALS[pattern]]
    if not pattern.startswith("^") or has_outer_choice(pattern):
        return []
    rest = pattern[1:]
    patterns = []
    while rest.startswith(("(?=", "(?!")):
        end = _group_end(rest)
        patterns.append(_said_plainly(rest[:end]))
        rest = rest[end:]
    if decimal := _DECIMAL.fullmatch(rest):
        begin, whole, digits, fraction = decimal.groups()
        rest = f"{begin}(?:{whole}$|{fraction})"
        patterns.append(f"^{begin}{digits}")
    patterns.insert(0, f"^{rest}")
    return [] if any(map(has_look_around, patterns)) else patterns


def _said_plainly(look: str) -> str:
    """Return a pattern that says the same as a look-ahead at the beginning, or the look-ahead."""
    if look.startswith("(?="):
        return f"^(?:{look[3:]}"
    for denial, plain in _DENIALS:
        if match := denial.fullmatch(look):
            return match.expand(plain)
    return look


def _group_end(pattern: str) -> int:
    depth = 0
    for position, character in _outside_classes(pattern):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return position + 1
    return len(pattern)


def has_outer_choice(pattern: str) -> bool:
    """Return whether a regular expression has a `|` outside groups and classes."""
    depth = 0
    for _, character in _outside_classes(pattern):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "|" and not depth:
            return True
    return False


def _outside_classes(pattern: str) -> Iterator[tuple[int, str]]:
    in_class = False
    position = 0
    while position < len(pattern):
        character = pattern[position]
        if in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character != "\\":
            yield position, character
        position += 2 if character == "\\" else 1
