"""Lines on which tokenizers are compared: texts of this repository, and synthetic lines.

The repository's texts are English and code. Synthetic lines mix the characters at which splits of
texts differ, characters of all of Unicode, and special tokens inside text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).parents[2]
_ENGLISH = ("README.md", "CONTRIBUTING.md", "docs/*.md", "loadtest/prompts/heldout_*.jsonl")
_CODE = ("engine/**/*.py", "server/**/*.js", "deploy/**/*", "docs/examples/**/*", "Makefile", "Dockerfile", "*.toml")
_MOST_CHARACTERS = 400
_SMALL_TEXTS = 300
ALPHABET = (
    *"abZ é É ß ſ ö Ω я Я ʰ ǅ ª 中 か ア 한 ا ก א".split(" "),
    *"012 ٣ Ⅷ ½ ²".split(" "),
    *"a\u0301 \u0301 ि ्".split(" "),
    *". , ! ' \" ’ - _ / ( [ 。 ، … ¿".split(" "),
    *"$ + < = ^ ` | ~ € × ¨ ™ 😀".split(" "),
    *"\u200d \ufe0f \u00ad \x00 \x1c \ufeff \ue000 \u0378 \U000e0041".split(" "),
    *"'s 'S 't 're 'RE 'll 'LL 'd 'x".split(" "),
    *(" ", " ", " ", "  ", "\n", "\n", "\r", "\r\n", "\t", "\v", "\xa0", "\x85", "\u2028", "\u3000"),
    *"a b c A B C 1 2 3 4".split(" "),
)
"""Characters and short texts of each kind at which a split may divide a text."""


class Line(NamedTuple):
    """A text to compare, and the kind of its content."""

    kind: str
    text: str


Generator = Callable[[random.Random], str]


def lines(
    count: int, seed: int, special: Sequence[str], render: Callable[[list[dict[str, str]]], str] | None
) -> list[Line]:
    """Return `count` lines of all kinds.

    special: texts of the special tokens, which are put into text. render: the file's chat template,
    if it has one.
    """
    source = random.Random(seed)
    english, code = _excerpts(_ENGLISH, source), _excerpts(_CODE, source)
    generators: dict[str, Generator] = {
        "English": lambda draw: draw.choice(english),
        "code": lambda draw: draw.choice(code),
        "characters": _any_characters,
        "mixtures": lambda draw: "".join(draw.choices(ALPHABET, k=draw.randint(1, 16))),
    }
    if special:
        generators["special tokens"] = lambda draw: _with_special(draw, special, english)
    if render is not None:
        generators["chats"] = lambda draw: render(_conversation(draw, english))
    kinds = [kind for _, kind in zip(range(count), _around(generators), strict=False)]
    return [Line(kind, generators[kind](source)) for kind in kinds]


def small_texts(seed: int) -> list[str]:
    """Return texts of the characters at which splits differ.

    Small vocabularies are made of them.
    """
    source = random.Random(seed)
    mixtures = ["".join(source.choices(ALPHABET, k=16)) for _ in range(_SMALL_TEXTS)]
    return [*mixtures, *source.sample(_excerpts(_ENGLISH, source), _SMALL_TEXTS // 10)]


def _around(generators: dict[str, Generator]) -> Iterator[str]:
    while True:
        yield from generators


def _excerpts(patterns: Sequence[str], draw: random.Random) -> list[str]:
    """Return excerpts of the repository's files, of one to several lines."""
    found = []
    paths = [path for pattern in patterns for path in sorted(_ROOT.glob(pattern)) if path.is_file()]
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="ignore")
        begin = 0
        while begin < len(text):
            length = draw.randint(1, _MOST_CHARACTERS)
            found.append(text[begin : begin + length])
            begin += length
    return found


def _character(draw: random.Random, first: int, last: int) -> str:
    """Return a character of a range, surrogates apart."""
    number = draw.randint(first, last)
    return " " if 0xD800 <= number <= 0xDFFF else chr(number)


def _any_characters(draw: random.Random) -> str:
    """Return characters of all of Unicode, also unassigned ones.

    They stand between letters, digits and spaces.
    """
    ends = (0x2FFF, 0x2FFF, 0xFFFF, 0x1FFFF, 0x323AF, 0x10FFFF)
    found = [_character(draw, 0x80, draw.choice(ends)) for _ in range(12)]
    return "".join(character + draw.choice(("a", "Z", "1", "!", " ", "", "")) for character in found)


def _with_special(draw: random.Random, special: Sequence[str], english: Sequence[str]) -> str:
    """Return text with whole and cut special tokens."""
    parts = []
    for _ in range(draw.randint(1, 5)):
        token = draw.choice(special)
        parts.append(token if draw.random() < 0.8 else token[: draw.randint(1, len(token))])
        parts.append(draw.choice(("", " ", "\n", "  \n", draw.choice(english)[:40])))
    return "".join(parts)


def _conversation(draw: random.Random, english: Sequence[str]) -> list[dict[str, str]]:
    roles = [("user", "assistant")[number % 2] for number in range(draw.choice((1, 3, 5)))]
    return [{"role": role, "content": draw.choice(english)} for role in roles]
