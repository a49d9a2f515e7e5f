"""Grammars of calls in Lark, for forced calls and strict tools.

The format's reader reads calls of its grammar back as they are, with arguments that follow their
schema. A mark is text, or the special token with this text. Text outside calls is free.

Not for: arguments between tags (`xml_grammars.py`), or choosing a format (`dialogue.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.api import RequestError
from server.text.call_formats import (
    BEGIN,
    CALL_LIST,
    CALLS_BEGIN,
    CALLS_END,
    DSML,
    END,
    FENCE,
    GEMMA4,
    HARMONY,
    HERMES,
    KIMI_BEGIN,
    KIMI_END,
    KIMI_K2,
    KIMI_K3,
    KIMI_SECTIONS,
    LFM2,
    LFM2_MARK,
    LIST_MARK,
    LLAMA3_JSON,
    MINIMAX,
    PYTHONIC,
    SEPARATOR,
    SOLAR,
    SOLAR_BEGIN,
    SOLAR_NAME,
)
from server.text.literal_calls import QUOTE
from server.text.literal_grammars import LITERAL_GRAMMARS, LiteralArguments
from server.text.schemas import cleaned, closed, compact
from server.text.structured import lark_literal
from server.text.text_values import CannotSplit
from server.text.xml_grammars import XML_SYNTAXES, XmlArguments
from server.wire.fields import Tool

SpecialToken = Callable[[str], int | None]
"""Returns the special token with a text, or None."""


@dataclass(frozen=True)
class CallSyntax:
    """Calls of a format: mark, first, call, any number of (between, call), last. Each is a rule."""

    call: str
    """NAME and ARGUMENTS stand for a function's name and arguments."""
    mark: str = ""
    """Text that begins calls."""
    first: str = ""
    between: str | None = None
    """None if an answer has one call at most."""
    last: str = ""
    more_marks: tuple[str, ...] = ()
    """Other literals that may be special tokens."""
    not_in_text: tuple[str, ...] = ()
    """Further texts that the reader takes for the beginning of a call."""
    before: str = ""
    """Text before calls that must be made, or before an answer that follows a rule."""
    answer: str = "answer"
    """An answer without calls that follows the rule `answer`."""
    in_text: tuple[str, ...] = ()
    """Rules of an answer with calls or text, if it is not text with calls at any place."""
    rules: tuple[str, ...] = ()


def _object(key: str = "arguments") -> str:
    return rf'"{{\"name\":\"NAME\",\"{key}\":" ARGUMENTS "}}"'


def _invokes(outer: str, in_text: str, tag: str = "") -> CallSyntax:
    return CallSyntax(
        rf'"<{tag}invoke name=\"NAME\">" "\n"? ARGUMENTS "</{tag}invoke>"',
        f"<{outer}>",
        r'"\n"?',
        r'"\n"?',
        rf'"\n"? "</{outer}>"',
        more_marks=(f"</{outer}>", f"</{tag}parameter>"),
        not_in_text=(in_text,),
    )


def _hy3(suffix: str) -> CallSyntax:
    return CallSyntax(
        rf'"<tool_call{suffix}>" "NAME" "<tool_sep{suffix}>" "\n"? ARGUMENTS "</tool_call{suffix}>"',
        f"<tool_calls{suffix}>",
        r'"\n"?',
        r'"\n"?',
        rf'"\n"? "</tool_calls{suffix}>"',
        more_marks=(
            *(f"<tool_call{suffix}>", f"<tool_sep{suffix}>", f"</tool_call{suffix}>", f"</tool_calls{suffix}>"),
            *(f"{begin}arg_{part}{suffix}>" for part in ("key", "value") for begin in ("<", "</")),
        ),
        not_in_text=(f"<tool_call{suffix}>",),
    )


_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_NEXT = rf'"\n" "{_OPEN}"'
_DEEPSEEK_MARKS = (CALLS_END, BEGIN, SEPARATOR, END)
SYNTAXES: Mapping[str, CallSyntax] = {
    HERMES: CallSyntax(rf'"\n" {_object()} "\n" "{_CLOSE}"', _OPEN, between=_NEXT, more_marks=(_CLOSE,)),
    LLAMA3_JSON: CallSyntax(
        _object("parameters"),
        between='"; "',
        in_text=("start: TEXT | calls", r"TEXT: /(\s*[^{\s](?s:.*))?/"),
    ),
    "mistral": CallSyntax(_object(), "[TOOL_CALLS]", '" "? "["', '"," " "?', '"]"'),
    "mistral_v11": CallSyntax(
        '"NAME" ("[CALL_ID]" /[a-zA-Z0-9]{9}/)? "[ARGS]"? ARGUMENTS',
        "[TOOL_CALLS]",
        between='"[TOOL_CALLS]"',
        more_marks=("[CALL_ID]", "[ARGS]"),
    ),
    CALL_LIST: CallSyntax(
        _object(), LIST_MARK, '"["', '"," " "?', '"]" "<|/tool_call|>"?', more_marks=("<|/tool_call|>",)
    ),
    "deepseek_v3": CallSyntax(
        rf'"{BEGIN}" "function" "{SEPARATOR}" "NAME\n{FENCE}json\n" ARGUMENTS "\n{FENCE}" "{END}"',
        CALLS_BEGIN,
        between=r'"\n"?',
        last=f'"{CALLS_END}"',
        more_marks=_DEEPSEEK_MARKS,
        not_in_text=(BEGIN,),
    ),
    "deepseek_v31": CallSyntax(
        f'"{BEGIN}" "NAME" "{SEPARATOR}" ARGUMENTS "{END}"',
        CALLS_BEGIN,
        between='""',
        last=f'"{CALLS_END}"',
        more_marks=_DEEPSEEK_MARKS,
        not_in_text=(BEGIN,),
    ),
    "qwen3_coder": CallSyntax(
        rf'"\n<function=NAME>\n" ARGUMENTS "</function>\n" "{_CLOSE}"', _OPEN, between=_NEXT, more_marks=(_CLOSE,)
    ),
    "glm": CallSyntax(
        rf'"NAME" "\n"? ARGUMENTS "{_CLOSE}"',
        _OPEN,
        between=rf'"\n"? "{_OPEN}"',
        more_marks=(_CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "nemotron_v2": CallSyntax(
        _object(), "<TOOLCALL>", '"["', '"," " "?', '"]" "</TOOLCALL>"', more_marks=("</TOOLCALL>",)
    ),
    "falcon_h1": CallSyntax(_object(), _OPEN, r'"\n"? "["', '"," " "?', rf'"]" "\n"? "{_CLOSE}"', more_marks=(_CLOSE,)),
    KIMI_K2: CallSyntax(
        f'"{KIMI_BEGIN}" "functions.NAME:" /[0-9]{{1,4}}/ "<|tool_call_argument_begin|>" ARGUMENTS "{KIMI_END}"',
        KIMI_SECTIONS[0],
        between='""',
        last='"<|tool_calls_section_end|>"',
        more_marks=(KIMI_BEGIN, "<|tool_call_argument_begin|>", KIMI_END, "<|tool_calls_section_end|>"),
        not_in_text=(KIMI_BEGIN,),
    ),
    # Thoughts and texts are messages, as in harmony.
    SOLAR: CallSyntax(
        f'"{SOLAR_BEGIN}" /[a-zA-Z0-9]{{1,24}}/ "{SOLAR_NAME}" "NAME" "<|tool_call:args|>" ARGUMENTS '
        '"<|tool_call:end|>"',
        "<|tool_calls|>",
        between='""',
        last='"<|calls|>"?',
        more_marks=(
            *(SOLAR_BEGIN, SOLAR_NAME, "<|tool_call:args|>", "<|tool_call:end|>", "<|calls|>"),
            *("<|begin|>", "<|think|>", "<|content|>", "<|end|>"),
        ),
        before="(thought next)*",
        answer='"<|content|>" answer',
        in_text=("start: (message next)* (message | calls)", 'message: ("<|think|>" | "<|content|>") WORDS'),
        rules=(
            'thought: "<|think|>" WORDS',
            'next: "<|end|>" "<|begin|>" "assistant"',
            r"WORDS: /(?s:.*)/ & ~/(?s:.*)<\|(?:end|begin|calls|tool_call:begin|tool_calls)\|>(?s:.*)/",
        ),
    ),
    "minimax_m2": _invokes("minimax:tool_call", '<invoke name="'),
    "deepseek_v32": _invokes(f"{DSML}function_calls", f"<{DSML}invoke", DSML),
    "deepseek_v4": _invokes(f"{DSML}tool_calls", f"<{DSML}invoke", DSML),
    "hy3": _hy3(""),
    "hy3_opensource": _hy3(":opensource"),
    "minimax_m3": CallSyntax(
        rf'"{MINIMAX}<invoke name=\"NAME\">" ARGUMENTS "{MINIMAX}</invoke>"',
        f"{MINIMAX}<tool_call>",
        r'"\n"?',
        r'"\n"?',
        rf'"\n"? "{MINIMAX}</tool_call>"',
        not_in_text=(f"{MINIMAX}<i",),
    ),
    GEMMA4: CallSyntax(
        '"call:NAME{" ARGUMENTS "}" "<tool_call|>"',
        "<|tool_call>",
        between='"<|tool_call>"',
        more_marks=("<tool_call|>", QUOTE),
    ),
    LFM2: CallSyntax(
        '"NAME(" ARGUMENTS ")"', LFM2_MARK, '"["', '", "', '"]" "<|tool_call_end|>"', more_marks=("<|tool_call_end|>",)
    ),
    PYTHONIC: CallSyntax(
        '"NAME(" ARGUMENTS ")"',
        first='"["',
        between='", "',
        last='"]"',
        in_text=("start: TEXT | calls", r"TEXT: /(\s*[^{\[\s](?s:.*))?/ & ~/(?s:.*)\[\s*(?:NAMES)\s*\((?s:.*)/"),
    ),
    # The prompt has opened the thoughts or the text, and their close is of several tokens.
    KIMI_K3: CallSyntax(
        r'"<|open|>" "call tool=\"NAME\" index=\"" /[1-9][0-9]{0,2}/ "\"" "<|sep|>" ARGUMENTS '
        '"<|close|>" "call" "<|sep|>"',
        first='"<|open|>" "tools" "<|sep|>"',
        between='""',
        last='"<|close|>" "tools" "<|sep|>"',
        more_marks=("<|open|>", "<|close|>", "<|sep|>"),
        before="opened? thought*",
        answer='"<|open|>" "response" "<|sep|>" answer "<|close|>" "response" "<|sep|>"',
        in_text=('start: (opened | WORDS "<|close|>" "response" "<|sep|>")? (thought | said)* (WORDS | calls)?',),
        rules=(
            'opened: WORDS? "<|close|>" "think" "<|sep|>" | "<|close|>" "response" "<|sep|>"',
            'thought: "<|open|>" "think" "<|sep|>" WORDS? "<|close|>" "think" "<|sep|>"',
            'said: "<|open|>" "response" "<|sep|>" WORDS "<|close|>" "response" "<|sep|>"',
            r"WORDS: /(?s:.+)/ & ~/(?s:.*)<\|(?:open|close|sep)\|>(?s:.*)/",
        ),
    ),
    # One call ends an answer. Its thoughts are messages, too, so they are a part of the grammar.
    HARMONY: CallSyntax(
        '"commentary to=functions." "NAME" " "? ("<|constrain|>" "json")? "<|message|>" ARGUMENTS',
        "<|channel|>",
        more_marks=("<|message|>", "<|constrain|>", "<|end|>", "<|start|>"),
        before="(thought next)*",
        answer='"<|channel|>" "final" "<|message|>" answer',
        in_text=("start: (message next)* (message | calls)", 'message: "<|channel|>" CHANNEL "<|message|>" WORDS'),
        rules=(
            'thought: "<|channel|>" "analysis" "<|message|>" WORDS',
            'next: "<|end|>" "<|start|>" "assistant"',
            "CHANNEL: /analysis|commentary|final/",
            r"WORDS: /(?s:.*)/ & ~/(?s:.*)<\|(?:end|return|call|start|channel)\|>(?s:.*)/",
        ),
    ),
}
"""Syntax by format. Calls of other formats can be neither forced nor strict."""


class CallGrammar:
    """Grammar of an answer that may call functions. Methods raise RequestError."""

    def __init__(self, tools: Sequence[Tool], form: str, special_token: SpecialToken, is_parallel: bool) -> None:
        """form: a key of SYNTAXES. is_parallel: whether calls may follow each other."""
        self._tools = tools
        self._form = form
        self._syntax = SYNTAXES[form]
        self._is_parallel = is_parallel and self._syntax.between is not None
        marks = [mark for mark in (self._syntax.mark, *self._syntax.more_marks) if mark]
        self._tokens = {mark: special_token(mark) for mark in marks}

    def calls(self) -> str:
        """Return the grammar of calls alone."""
        return self._lark([f"start: {self._syntax.before} calls"], is_forced=True)

    def calls_or(self, answer_rule: str) -> str:
        """Return the grammar of calls, or of an answer with this right side of a rule."""
        start = f"start: {self._syntax.before} ({self._syntax.answer} | calls)"
        return self._lark([start], is_forced=False, more=[f"answer: {answer_rule}"])

    def text_and_calls(self) -> str:
        """Return the grammar of text with calls."""
        mark = self._syntax.mark
        if self._syntax.in_text:
            return self._lark(self._syntax.in_text, is_forced=False)
        # In free text, a call with its own mark follows another call like any other text.
        has_own_mark = f'"{mark}"' in (self._syntax.between or "")
        after_mark = "call" if has_own_mark else "rest"
        before = "trigger"
        if token := self._token(mark):
            before = f"trigger | TEXT {token}"
        without = "".join(f" & ~{_containing(text)}" for text in self._syntax.not_in_text)
        more = [
            f"before: {before}",
            f"trigger[lazy]: {lark_literal(f'(?s:.*){re.escape(mark)}')}{without}",
            f"TEXT: /(?s:.*)/ & ~{_containing(mark)}{without}",
        ]
        return self._lark([f"start: (before {after_mark})* TEXT"], is_forced=False, more=more)

    def _lark(self, head: Sequence[str], is_forced: bool, more: Sequence[str] = ()) -> str:
        """Return a grammar. head: its first rules; more: rules without marks."""
        syntax = self._syntax
        calls = "rest"
        if syntax.mark:
            calls = f'"{syntax.mark}" rest'
        further = " (between call)*" if self._is_parallel else ""
        names = "|".join(re.escape(tool.function.name) for tool in self._tools)
        rules = [
            *(self._with_marks(rule.replace("NAMES", names)) for rule in (*head, *syntax.rules)),
            *more,
            f"calls: {self._with_marks(calls)}",
            f"rest: {self._with_marks(f'{syntax.first} call{further} {syntax.last}')}",
        ]
        if self._is_parallel and syntax.between:
            rules.append(f"between: {self._with_marks(syntax.between)}")
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(self._tools))))
        for number, tool in enumerate(self._tools):
            call = syntax.call.replace("ARGUMENTS", f"args_{number}").replace("NAME", tool.function.name)
            rules += [f"call_{number}: {self._with_marks(call)}", *self._argument_rules(tool, number, is_forced)]
        return "\n".join([*rules, *self._mark_rules()])

    def _argument_rules(self, tool: Tool, number: int, is_forced: bool) -> list[str]:
        is_followed = is_forced or bool(tool.function.strict)
        parameters: dict[str, Any] = {}
        if is_followed:
            parameters = cleaned(tool.function.parameters or {})
        # The schema is a separate root, for its references.
        schema = closed({"type": "object", **parameters}, is_followed)
        if self._form in LITERAL_GRAMMARS:
            literal = LiteralArguments(self._form, self._with_marks, self._token(QUOTE), number)
            try:
                return literal.following(schema) if is_followed else literal.unrestricted()
            except CannotSplit as error:
                raise RequestError(
                    f"tools: {tool.function.name}: calls of this model cannot be forced or strict with {error}; change "
                    "the schema, or use tool_choice auto without strict",
                    "tools",
                    "unsupported_value",
                ) from error
        if self._form not in XML_SYNTAXES:
            return [f"args_{number}: %json {json.dumps(compact(schema))}"]
        syntax = XML_SYNTAXES[self._form]
        arguments = XmlArguments(syntax, self._with_marks, self._token(syntax.end), tool.function.name, number)
        if is_followed:
            return arguments.following(schema)
        return arguments.unrestricted(tool.function.parameters or {})

    def _token(self, mark: str) -> str:
        token = self._tokens.get(mark)
        return "" if token is None else f"<[{token}]>"

    def _with_marks(self, lark: str) -> str:
        """Return the right side of a rule with the names of rules in place of marks."""
        for number, mark in enumerate(self._tokens):
            lark = lark.replace(f'"{mark}"', f"mark_{number}")
        return lark

    def _mark_rules(self) -> list[str]:
        """Return the rules of marks. A mark is text, or the special token with this text."""
        rules = []
        for number, mark in enumerate(self._tokens):
            spellings = json.dumps(mark)
            if token := self._token(mark):
                spellings = f"{spellings} | {token}"
            rules.append(f"mark_{number}: {spellings}")
        return rules


def _containing(text: str) -> str:
    """Return a regular expression in Lark for texts that contain a text."""
    return lark_literal(f"(?s:.*){re.escape(text)}(?s:.*)")
