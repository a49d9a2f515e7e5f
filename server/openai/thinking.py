"""Decides whether an answer may begin with thoughts, and whether the engine tracks them.

The engine tracks thoughts that have a budget, or after which a grammar applies. Not for: separating
thoughts from the answer's text (`text/reasoning.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from engine.api import RequestError, Thinking
from server.state import Server
from server.text.answer_parts import part_reader
from server.text.reasoning import ThoughtReader, is_closed, is_open
from server.text.thought_calls import ThoughtCalls
from server.text.thought_marks import DEEPSEEK_R1, HARMONY, MARKS, ThoughtMarks
from server.text.tools import ToolUse
from server.wire.fields import ChatRequest, GenerationFields

_PROMPT_END = 16
"""Number of last prompt tokens in which a chat template may open or close the thoughts."""


@dataclass(frozen=True)
class Thoughts:
    """Thoughts of one request."""

    reader: Callable[[], ThoughtReader] | None = None
    """Makes a parser that separates them; None if the answer has none."""
    shown: frozenset[int] = frozenset()
    """Special tokens that the parser needs in the text."""
    followed: Thinking | None = None
    """Thoughts that the engine tracks."""


@dataclass(frozen=True)
class GrammarScope:
    """Part of an answer to which a request's grammar applies."""

    is_whole: bool
    """Whether all of the answer but its thoughts must follow the grammar; false for text with
    strict calls.
    """
    covers_thoughts: bool
    """Whether the grammar contains the thoughts."""


def thoughts_of(
    server: Server,
    body: GenerationFields,
    prompt: Sequence[int],
    bound: int,
    grammar: GrammarScope | None,
    tools: ToolUse | None = None,
) -> Thoughts:
    """Return the thoughts that an answer may contain.

    bound: maximum number of answer tokens. tools: functions whose calls may end thoughts, unless a
    grammar demands the closing mark. grammar: None if the request has none. It applies after
    the thoughts, or, if it contains them or the marks are not tokens of the model, from the first
    token on. Raises RequestError for a budget that cannot be enforced.
    """
    marks = server.thoughts
    if marks is None or not isinstance(body, ChatRequest):
        return Thoughts()
    end = server.tokenizer.decode(prompt[-_PROMPT_END:])
    is_begun = is_open(end, marks)
    if server.settings.reasoning_parser == DEEPSEEK_R1 and not is_closed(end, marks):
        is_begun = not body.continue_final_message or _ends_in_thoughts(server.tokenizer.decode(prompt), marks)
    budget = body.thinking_token_budget
    if budget is not None and budget >= bound:
        budget = None  # the length ends the answer first
    shown = server.tokenizer.special_in(marks.texts())
    tokens = _mark_tokens(server, marks)
    if budget is not None and tokens is None:
        raise RequestError(
            f"thinking_token_budget: {marks.open.strip()} and {marks.close} are not tokens of this model, so that its "
            "thoughts cannot be ended; leave it out, and bound thoughts and answer together by max_tokens",
            "thinking_token_budget",
            "unsupported_value",
        )
    is_bound = grammar is not None and grammar.is_whole
    if grammar is not None and grammar.covers_thoughts:
        if budget is not None:
            raise _not_with_calls("thinking_token_budget")
        if marks == MARKS[HARMONY] and (is_open(end, marks) or is_closed(end, marks)):
            raise _not_with_calls("continue_final_message")
        return Thoughts(partial(part_reader, marks, end, False), shown)
    can_begin = not (is_closed(end, marks) or body.continue_final_message)
    may_think = is_begun or can_begin
    is_followed = may_think
    if grammar is None:
        # Without a lead, thoughts may begin although the prompt has closed some.
        is_followed = budget is not None and (may_think or not marks.lead)
    followed = None
    if is_followed and tokens is not None:
        followed = Thinking(
            opens=tokens.opens,
            closes=tokens.closes,
            between=tokens.between,
            lead=tokens.lead,
            is_begun=is_begun,
            budget=budget,
            may_end=not is_bound,
        )
    starts_inside = is_begun and (followed is not None or not is_bound)
    search = None
    if tools is not None and not is_bound:
        search = partial(ThoughtCalls, tools, server.tokenizer.response_template)
    return Thoughts(partial(part_reader, marks, end, starts_inside, search), shown, followed)


def _ends_in_thoughts(prompt: str, marks: ThoughtMarks) -> bool:
    return prompt.rfind(marks.open) > prompt.rfind(marks.close)


def _not_with_calls(field: str) -> RequestError:
    return RequestError(
        f"{field}: this model's calls cannot be forced or strict together with it; leave one of them out",
        field,
        "unsupported_value",
    )


class MarkTokens(NamedTuple):
    """Tokens of the marks around thoughts."""

    opens: tuple[int, ...]
    closes: int
    between: tuple[int, ...]
    lead: tuple[int, ...]


def _mark_tokens(server: Server, marks: ThoughtMarks) -> MarkTokens | None:
    """Return the tokens of the marks; None if the model has no tokens for them."""
    tokenizer = server.tokenizer
    opens, closes, between, lead = (tuple(tokenizer.encode(text, False)) if text else () for text in marks.texts())
    if tokenizer.token_of(marks.close) is None or len(closes) != 1:
        return None
    if tokenizer.token_of(marks.open) is None and tokenizer.special_in([marks.open]).isdisjoint(opens):
        return None
    return MarkTokens(opens, closes[0], between, lead)
