"""Reads calls whose arguments are literals.

Gemma 4's objects with bare keys, and calls in Python's syntax (LFM2, Llama 4):

    <|tool_call>call:NAME{days:3,city:<|"|>Paris<|"|>}<tool_call|>
    <|tool_call_start|>[NAME(days=3, city='Paris')]<|tool_call_end|>

A call is reported when it is complete. Strings are not escaped, so one ends only where an argument
may end: before the next key or before the bracket that closes the call. What the model leaves out
is added if there is one reading: the mark that opens a string, a comma before a known key. A region
without a reading is text.
"""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from server.text.argument_types import as_value, finite_number
from server.text.call_pieces import CallParts, Calls

QUOTE = '<|"|>'
Steps = Generator[None, None, Any]
"""Steps of a parser, which yields when it needs more text."""
_LONGEST_BEGIN = 512
_MOST_NESTED = 64
_KEY = (
    r'(?:"(?P<json>(?:[^"\\]|\\.){0,400})"'
    + rf"|{regex.escape(QUOTE)}(?P<marked>[^<]{{0,400}}){regex.escape(QUOTE)}|'(?P<single>[^']{{0,400}})'"
    + r"|(?P<bare>[^\s:=,{}\[\]()\"'<|]{1,400}))\s*"
)
_START = rf"\s*(?:(?P<quote>{regex.escape(QUOTE)}|[\"'])|(?P<bracket>[\[{{])|(?=[^\s,)\]}}<]|<[^|]|<\|[^\"]|<\|\"[^|]))"
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_NUMBER = regex.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class LiteralFormat:
    """Texts around calls, as regular expressions."""

    begin: str
    """Begin of a call or of a list of calls; NAME stands for the functions' names."""
    first: str
    brackets: tuple[str, str]
    """Around the arguments of a call."""
    assign: str
    more: str
    """Text before another call; empty if each call has its own begin."""
    end: str
    """Text after the last call's bracket; empty if there is none."""
    last: str
    """Mark after all calls, which may be missing."""


_NAME = r"(?P<name>NAME)\s*\("
LITERAL_FORMATS = {
    "gemma4": LiteralFormat(
        r"<\|tool_call>\s*call:(?P<name>NAME)\s*\{", "<", ("{", "}"), ":", "", "", r"<tool_call\|>"
    ),
    "lfm2": LiteralFormat(
        rf"<\|tool_call_start\|>\s*\[\s*{_NAME}", "<", ("(", ")"), "=", rf"\s*,\s*{_NAME}", r"\s*\]",
        r"<\|tool_call_end\|>",
    ),
    "pythonic": LiteralFormat(
        rf"(?:<\|python_(?:start|tag)\|>\s*)?\[\s*{_NAME}", "<[", ("(", ")"), "=", rf"\s*,\s*{_NAME}", r"\s*\]",
        r"<\|python_end\|>",
    ),
}  # fmt: skip


class _NoCall(Exception):
    """A text that cannot be read as a call."""


class _LiteralParser:
    """Parser of one region, after its begin."""

    def __init__(self, form: LiteralFormat, name: str, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self.text = ""
        self.position = 0
        self.is_last = False
        """Whether no more text comes."""
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._form = form
        self._name = name
        self._schemas = schemas
        names = "|".join(sorted(map(regex.escape, schemas), key=len, reverse=True))
        self._more = regex.compile(form.more.replace("NAME", names))
        after = [form.last, form.more.replace("NAME", names), form.end]
        self._after_call = "|".join(text for text in after if text)

    def run(self) -> Steps:
        """Read the calls of the region; raises _NoCall."""
        name: str | None = self._name
        while name is not None:
            self.calls.append((name, (yield from self._arguments(name))))
            name = None
            if self._form.more:
                further = yield from self._see(self._more)
                if further is not None:
                    self.position = further.end()
                    name = further["name"]
        if self._form.end:
            yield from self._take(regex.compile(self._form.end))

    def _see(self, pattern: regex.Pattern[str]) -> Steps:
        """Return the match at the position, or None."""
        while True:
            match = pattern.match(self.text, self.position, partial=not self.is_last)
            if match is None or not match.partial:
                return match
            yield

    def _take(self, pattern: regex.Pattern[str]) -> Steps:
        match = yield from self._see(pattern)
        if match is None:
            raise _NoCall
        self.position = match.end()
        return match

    def _arguments(self, name: str) -> Steps:
        assign = regex.escape(self._form.assign)
        close = regex.escape(self._form.brackets[1])
        properties = self._schemas[name].get("properties")
        known = "|".join(map(regex.escape, properties if isinstance(properties, Mapping) else ())) or "(?!)"
        follow = rf"\s*(?:,\s*{_KEY}{assign}|(?:{known})\s*{assign}|{close}\s*(?:{self._after_call}))"
        raw = yield from self._object(assign, close, follow, 0, self._schemas[name])
        return raw

    def _object(
        self, assign: str, close: str, follow: str, depth: int, schema: Mapping[str, Any] | None = None
    ) -> Steps:
        """Return the values up to the closing bracket; follow: text after a string."""
        values: dict[str, Any] = {}
        key_or_end = regex.compile(rf"\s*(?:(?P<end>{close})|{_KEY}{assign})")
        while True:
            match = yield from self._take(key_or_end)
            if match["end"]:
                return values
            key = _key_in(match)
            value = yield from self._value(follow, depth)
            if isinstance(value, _Bare):
                value = value.as_value(key, schema)
            values[key] = value
            yield from self._take(regex.compile(rf"\s*(?:,|(?={close})|(?={_KEY}{assign}))"))

    def _list(self, depth: int) -> Steps:
        values = []
        while not (yield from self._see(regex.compile(r"\s*\]"))):
            value = yield from self._value(r"\s*(?:,\s*[^\s,\]]|\])", depth)
            values.append(value.as_value("", None) if isinstance(value, _Bare) else value)
            yield from self._take(regex.compile(r"\s*(?:,|(?=\]))"))
        yield from self._take(regex.compile(r"\s*\]"))
        return values

    def _value(self, follow: str, depth: int) -> Steps:
        if depth > _MOST_NESTED:
            raise _NoCall
        start = yield from self._take(regex.compile(_START))
        if start["quote"]:
            text = yield from self._string(start["quote"], follow)
            return text
        if start["bracket"] == "[":
            values = yield from self._list(depth + 1)
            return values
        if start["bracket"]:
            values = yield from self._object(":", r"\}", rf"\s*(?:,\s*{_KEY}:|\}})", depth + 1)
            return values
        bare = yield from self._bare(follow)
        return bare

    def _ends(self, place: int, follow: regex.Pattern[str]) -> Steps:
        while True:
            match = follow.match(self.text, place, partial=not self.is_last)
            if match is None and self.is_last:
                # The marks after the call may be missing at the end of the answer.
                close = regex.escape(self._form.brackets[1])
                return regex.compile(rf"\s*{close}\s*\Z").match(self.text, place) is not None
            if match is None or not match.partial:
                return match is not None
            yield

    def _string(self, quote: str, follow: str) -> Steps:
        begin = place = self.position
        after = regex.compile(follow)
        while True:
            end = self.text.find(quote, place)
            if end < 0:
                place = max(begin, len(self.text) - len(quote) + 1)
                if self.is_last:
                    raise _NoCall
                yield
                continue
            place = end + len(quote)
            is_escaped = quote != QUOTE and _num_backslashes(self.text, begin, end) % 2 == 1
            if not is_escaped and (yield from self._ends(place, after)):
                self.position = place
                return _unescaped(self.text[begin:end], quote)

    def _bare(self, follow: str) -> Steps:
        """Read a number, a word, or a string whose opening mark is missing."""
        begin = place = self.position
        after = regex.compile(follow)
        stop = regex.compile(rf"{regex.escape(QUOTE)}|(?=[,)\]}}])|\s(?=\S)")
        while True:
            match = stop.search(self.text, place, partial=not self.is_last)
            if match is None or match.partial:
                place = match.start() if match else len(self.text)
                if self.is_last:
                    raise _NoCall
                yield
                continue
            if (yield from self._ends(match.end(), after)):
                self.position = match.end()
                text = self.text[begin : match.start()]
                return text if match[0] == QUOTE else _Bare(text.strip())
            place = max(match.end(), match.start() + 1)


@dataclass(frozen=True)
class _Bare:
    """Value without quotes."""

    text: str

    def as_value(self, key: str, schema: Mapping[str, Any] | None) -> Any:
        """Return the value; text that is no literal is a string if its schema admits one."""
        if self.text in _WORDS:
            return _WORDS[self.text]
        if _NUMBER.fullmatch(self.text):
            whole = self.text.lstrip("-").lstrip("0") or "0"
            sign = "-" if self.text.startswith("-") else ""
            try:
                return json.loads(sign + ("0" + whole if whole[0] in ".eE" else whole), parse_float=finite_number)
            except ValueError as error:  # infinite, or of thousands of digits
                raise _NoCall from error
        if schema is None:
            raise _NoCall
        value = as_value(self.text, key, schema)
        properties = schema.get("properties")
        part = properties.get(key) if isinstance(properties, Mapping) else None
        if not isinstance(value, str) or not isinstance(part, Mapping) or part.get("type") != "string":
            raise _NoCall
        return value


def _key_in(match: regex.Match[str]) -> str:
    if match["json"] is not None:
        return _unescaped(match["json"], '"')
    return str(next(match[group] for group in ("marked", "single", "bare") if match[group] is not None))


def _num_backslashes(text: str, begin: int, end: int) -> int:
    return end - begin - len(text[begin:end].rstrip("\\"))


def _unescaped(raw: str, quote: str) -> str:
    """Return the text of a string; Python's escapes count between its quotes."""
    if quote == QUOTE:
        return raw.replace(QUOTE, '"')
    if "\\" not in raw:
        return raw
    if quote == '"':
        with contextlib.suppress(ValueError):
            return str(json.loads(f'"{raw}"', strict=False))
    escaped = regex.sub(r"(?s)\\(?![\\'\"abfnrtvxuU0-7N\n])|(\\.)", lambda part: part[1] or r"\\", raw)
    plain = escaped.replace("\n", "\\n").replace("\r", "\\r")
    odd = regex.sub(r"(?s)(\\.)|(\")", lambda part: part[1] or '\\"', plain)
    try:
        return str(ast.literal_eval(f'"{odd}"'))
    except (SyntaxError, ValueError):
        return raw


class LiteralRegions:
    """Reader of calls with literals, and of the text outside them."""

    def __init__(self, calls: Calls, form: LiteralFormat, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._calls = calls
        self._form = form
        self._schemas = schemas
        names = "|".join(sorted(map(regex.escape, schemas), key=len, reverse=True))
        self._begin = regex.compile(form.begin.replace("NAME", names))
        self._text = ""
        self._echo: regex.Pattern[str] | None = None
        """Mark and text of the last region, which some models write again."""
        self._raw: list[str] = []
        """Text of the open region."""
        self._parser: _LiteralParser | None = None
        self._steps: Steps | None = None

    @property
    def is_open(self) -> bool:
        return self._parser is not None

    def feed(self, text: str, output: CallParts) -> None:
        self._text += text
        while self._text and self._advance(output):
            pass

    def _advance(self, output: CallParts) -> bool:
        """Read a part of the text. Returns whether more can be read."""
        if self._parser is not None:
            self._raw.append(self._text)
            self._parser.text += self._text
            self._text = ""
            self._parse(output)
            return self._parser is None
        if self._echo is not None:
            echo = self._echo.match(self._text, partial=True)
            if echo is not None and echo.partial:
                return False
            self._echo = None
            self._text = self._text[echo.end() if echo else 0 :]
        mark = self._begin.search(self._text)
        end = mark.start() if mark else self._first_held()
        output.say(self._text[:end])
        self._text = self._text[mark.end() if mark else end :]
        if mark is None:
            return False
        self._raw = [mark[0]]
        self._parser = _LiteralParser(self._form, mark["name"], self._schemas)
        self._steps = self._parser.run()
        self._parse(output)
        return True

    def _first_held(self) -> int:
        """Return the begin of the text that may become a mark."""
        for place in range(max(0, len(self._text) - _LONGEST_BEGIN), len(self._text)):
            is_first = self._text[place] in self._form.first
            if is_first and self._begin.match(self._text, place, partial=True) is not None:
                return place
        return len(self._text)

    def _parse(self, output: CallParts) -> None:
        """Continue the open region with the text that it has."""
        assert self._parser is not None
        assert self._steps is not None
        parser = self._parser
        try:
            next(self._steps)
            if parser.is_last:
                raise _NoCall
        except StopIteration:
            for name, arguments in parser.calls:
                self._calls.whole(name, json.dumps(arguments), output)
            self._text = parser.text[parser.position :]
            region = "".join(self._raw).removesuffix(self._text)
            if self._form.end and len(region) < _LONGEST_BEGIN:
                again = regex.escape(region[region.index("[") :])
                self._echo = regex.compile(rf"\s*{self._form.last}\s*{again}")
            self._parser = None
        except (_NoCall, RecursionError):
            raw = "".join(self._raw)
            self._parser = None
            # Reading goes on after the mark, where another call may begin.
            output.say(raw[:1])
            self._text = raw[1:]

    def finish(self, output: CallParts) -> None:
        """Read the end of the answer."""
        while self._parser is not None:
            self._parser.is_last = True
            self._parse(output)
            if self._text:
                self.feed("", output)
        output.say(self._text)
        self._text = ""


def spelled(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return calls in Python's syntax, as LFM2 writes them."""
    made = []
    for name, arguments in calls:
        values = ", ".join(f"{key}={_literal(value)}" for key, value in arguments.items())
        made.append(f"{name}({values})")
    return f"[{', '.join(made)}]"


def _literal(value: Any) -> str:
    if isinstance(value, str) and not {*value} & {"'", "\\", "\n"}:
        return f"'{value}'"
    if value is None or isinstance(value, bool):
        return str(value)
    return json.dumps(value, ensure_ascii=False)
