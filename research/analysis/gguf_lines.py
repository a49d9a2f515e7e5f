"""Lines on which tokenizers are compared: texts of this repository, and synthetic lines from ranges
of Unicode.

The repository's texts are English and code. Synthetic lines have the characters at which splits of
texts differ: white space of all kinds, numbers, marks, cases, controls, emoji, and special tokens
inside text. Not for: measuring speed.
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
_SCRIPTS = (
    (0x41, 0x17F),
    (0x370, 0x3FF),
    (0x400, 0x52F),
    (0x531, 0x587),
    (0x590, 0x5FF),
    (0x600, 0x6FF),
    (0x900, 0x97F),
    (0x980, 0x9FF),
    (0xB80, 0xBFF),
    (0xE00, 0xE7F),
    (0x1000, 0x109F),
    (0x10A0, 0x10FF),
    (0x1200, 0x137F),
    (0x1780, 0x17FF),
    (0x1E00, 0x1FFF),
    (0x3040, 0x30FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xA640, 0xA7FF),
    (0xAC00, 0xD7AF),
    (0xFF00, 0xFFEF),
    (0x10400, 0x104FF),
    (0x1D400, 0x1D7FF),
    (0x1E900, 0x1E95F),
    (0x20000, 0x2A6DF),
)
"""First and last characters of blocks."""
_SPACES = " \t\n\r\v\f\x1c\x1f\x85\xa0\u1680\u2000\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
_CONTROLS = "\0\x01\x07\x08\x1b\x7f\x80\x9f\xad\u200b\u200c\u200d\u200e\u2060\ufeff\ufffd\ufffe\uffff\ue000\U000e0001"
_EMOJI = ("😀", "👍🏽", "👩‍👩‍👧‍👦", "🇨🇭", "1️⃣", "❤️", "🏴‍☠️", "™", "☃", "✅", "🫠", "♯", "Ⓐ", "🀄")
_NUMBERS = ("٣٤", "१२", "Ⅷ", "½", "²", "①", "〇", "五", "𝟘", "៣", "1.000,50", "1_000", "0xFF", "1e-9", "３", "๑๒๓๔")
_ENDINGS = ("'s", "'S", "'t", "'re", "'RE", "'ve", "'Ve", "'m", "'ll", "'LL", "'d", "'D", "’s", "'ſ", "'x", "' s")
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
        "scripts": _script,
        "characters": _any_characters,
        "numbers": _number,
        "white space": _white_space,
        "endings": lambda draw: _joined(draw, _ENDINGS, ("I", "we", "O", "é", "1", "the dog")),
        "emoji": lambda draw: _joined(draw, _EMOJI, ("a", "1", "!", "中")),
        "control characters": lambda draw: _joined(draw, _CONTROLS, ("a", "B", "1", ".", "é")),
        "mixtures": lambda draw: "".join(draw.choices(ALPHABET, k=draw.randint(1, 16))),
    }
    if special:
        generators["special tokens"] = lambda draw: _with_special(draw, special, english)
    if render is not None:
        generators["chats"] = lambda draw: render(_conversation(draw, english))
    kinds = [kind for _, kind in zip(range(count), _around(generators), strict=False)]
    return [Line(kind, generators[kind](source)) for kind in kinds]


def small_texts(seed: int) -> list[str]:
    """Return texts of the characters at which splits differ, of which small vocabularies are
    made.
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


def _script(draw: random.Random) -> str:
    """Return a line of words in a few scripts."""
    words = []
    for _ in range(draw.randint(1, 8)):
        first, last = draw.choice(_SCRIPTS)
        words.append("".join(_character(draw, first, last) for _ in range(draw.randint(1, 7))))
    return draw.choice((" ", " ", "", "-", ", ")).join(words)


def _any_characters(draw: random.Random) -> str:
    """Return characters of all of Unicode, also unassigned ones, between letters, digits and
    spaces.
    """
    ends = (0x2FFF, 0x2FFF, 0xFFFF, 0x1FFFF, 0x323AF, 0x10FFFF)
    found = [_character(draw, 0x80, draw.choice(ends)) for _ in range(12)]
    return "".join(character + draw.choice(("a", "Z", "1", "!", " ", "", "")) for character in found)


def _number(draw: random.Random) -> str:
    digits = "".join(draw.choices("0123456789", k=draw.randint(1, 12)))
    grouped = f"{draw.randrange(10**9):,}.{draw.randrange(100):02}"
    choices = (digits, digits, grouped, draw.choice(_NUMBERS), f"-{digits}", f"{digits}px", f"v{digits}", f"{digits}%")
    return draw.choice((" ", "", ", ", "+", "/")).join(draw.choices(choices, k=draw.randint(1, 5)))


def _white_space(draw: random.Random) -> str:
    """Return runs of white space, with and without words between them."""
    parts = []
    for _ in range(draw.randint(1, 6)):
        kinds = draw.sample(_SPACES, draw.randint(1, 3)) if draw.random() < 0.5 else [" ", "\n"]
        parts.append("".join(draw.choices(kinds, k=draw.randint(1, 9))))
        parts.append(draw.choice(("", "a", "word", "1", ".", "é", "The", "'s")))
    return "".join(parts)


def _joined(draw: random.Random, texts: Sequence[str], others: Sequence[str]) -> str:
    chosen = [draw.choice(texts) if draw.random() < 0.6 else draw.choice(others) for _ in range(draw.randint(1, 10))]
    return "".join(text + draw.choice(("", "", " ", "\n")) for text in chosen)


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
