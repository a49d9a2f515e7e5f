"""Filters of an answer's text: thoughts, stop strings, the only call, bounds of lines.

They are chosen when a request is prepared, and a plain chat has none. Thoughts are separated first,
so that stop strings and calls are looked for in the answer alone. Not for: reading calls out of the
released text (`choice.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from server.text.line_bounds import LineBounds
from server.text.reasoning import CallEnd, CallHeader, Thought, ThoughtReader
from server.text.stops import StopCut
from server.text.tokenizer import Tokenizer
from server.text.tool_calls import ToolCalls
from server.text.tools import ToolUse


@dataclass(frozen=True)
class TextOptions:
    """Options for turning tokens into text."""

    stops: Sequence[str] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    """Begin with the prompt."""
    thoughts: Callable[[], ThoughtReader] | None = None
    """Makes a parser of thoughts; None if the answer has none."""
    shown: frozenset[int] = frozenset()
    """Special tokens that the parser of thoughts needs in the text."""
    tools: ToolUse | None = None
    """Functions that the answer may call."""
    num_prompt_logprobs: int | None = None
    """Number of likeliest tokens that are reported for each token of the prompt."""
    reports_drafts: bool = False
    """Report the chains of every step."""
    reports_speculation: bool = False
    """Whether choices have vLLM's `speculative_decoding_stats`."""
    reports_token_ids: bool = False
    """Report the tokens of prompt and answer by id."""
    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer and that the request did not name."""
    line_bounds: Callable[[], LineBounds] | None = None
    """Makes the bounds of the answer's lines; None if there are none."""


class TextFilter:
    """Filter of an answer that has none: it releases all text."""

    num_thought = 0
    """Number of tokens of thoughts."""

    @property
    def stop(self) -> str | None:
        """Return the stop string that has ended the answer; None if it goes on."""
        return None

    @property
    def finish_reason(self) -> str | None:
        """Return why the answer has ended before the engine's end; None if it goes on."""
        return None

    def feed(self, piece: str, token: int, num_tokens: int) -> Iterable[str | Thought]:  # noqa: ARG002
        """Return the thoughts and the text to release after a token's text.

        num_tokens: tokens of the answer, with this one.
        """
        return (piece,)

    def finish(self, num_tokens: int) -> Iterable[str | Thought]:  # noqa: ARG002
        """Return the text that was held back, when the engine has ended the answer."""
        return ()


def filter_of(options: TextOptions, tokenizer: Tokenizer, min_tokens: int) -> TextFilter:
    """Return a filter for one answer. min_tokens: first tokens in which no stop string counts."""
    has_only_call = options.tools is not None and not options.tools.parallel
    if options.stops or options.thoughts or options.line_bounds or has_only_call:
        return AnswerFilter(options, tokenizer, min_tokens)
    return TextFilter()


class AnswerFilter(TextFilter):
    """Filter of an answer with thoughts, stop strings, an only call, or bounds of lines."""

    def __init__(self, options: TextOptions, tokenizer: Tokenizer, min_tokens: int) -> None:
        hidden: Collection[str] = ()
        if options.skip_special_tokens and options.stops:
            hidden = tokenizer.special_texts(options.shown)
        self._cut = StopCut(options.stops, options.include_stop, hidden)
        self._thoughts = options.thoughts() if options.thoughts else None
        self._lines = options.line_bounds() if options.line_bounds else None
        self._only_call: ToolCalls | None = None
        if options.tools is not None and not options.tools.parallel:
            self._only_call = ToolCalls(options.tools, tokenizer.response_template)
        self._tokenizer = tokenizer
        self._shown = options.shown
        self._min_tokens = min_tokens
        self._num_unsure = 0
        """Number of last tokens that may be a call in the thoughts."""

    @property
    def stop(self) -> str | None:
        """Return the stop string that has ended the answer; None if it goes on."""
        return self._cut.stop

    @property
    def finish_reason(self) -> str | None:
        """Return why the answer has ended before the engine's end; None if it goes on."""
        if self._cut.is_cut or self._has_its_only_call:
            return "stop"
        if self._lines is not None and self._lines.is_over:
            return "length"
        return None

    def feed(self, piece: str, token: int, num_tokens: int) -> Iterator[str | Thought]:
        """Yield a token's thoughts, and what stop strings and line bounds leave of its text."""
        hidden = self._hidden_text(token)
        may_stop = num_tokens > self._min_tokens
        yield from self._answered(self._split(piece, False), may_stop)
        if hidden:
            yield self._within_lines(self._cut.feed("", may_stop, hidden))
        if self._has_its_only_call:
            yield self._cut.finish()

    def finish(self, num_tokens: int) -> Iterator[str | Thought]:
        """Yield the text that parsers, stop strings and line bounds have held back."""
        yield from self._answered(self._split("", True), num_tokens > self._min_tokens)
        if self._has_its_only_call:
            yield self._cut.finish()
        elif self.finish_reason is None:
            yield self._within_lines(self._cut.finish())

    def _answered(self, parts: Sequence[str | Thought], may_stop: bool) -> Iterator[str | Thought]:
        """Yield thoughts, and the text before a stop string and within the bounds of lines."""
        for part in parts:
            if isinstance(part, Thought):
                if self._only_call is not None and isinstance(part, CallEnd):
                    self._only_call.end_message()
                # No stop string continues after a thought.
                yield self._cut.finish()
                yield part
                continue
            if self._only_call is not None:
                self._only_call.feed(part, False)
            if isinstance(part, CallHeader):
                yield self._within_lines(self._cut.finish() + part)
                continue
            yield self._within_lines(self._cut.feed(part, may_stop))
            if self._cut.is_cut:
                return

    def _split(self, piece: str, is_last: bool) -> Sequence[str | Thought]:
        """Return the thoughts and text in a piece, called once per token to count thoughts."""
        if self._thoughts is None:
            return (piece,)
        was_inside = self._thoughts.is_inside
        parts = self._thoughts.feed(piece, is_last)
        if is_last or (was_inside and self._thoughts.has_called):
            # A call that has ended the thoughts is no thought.
            self.num_thought += 0 if self._thoughts.has_called else self._num_unsure
            self._num_unsure = 0
        elif self._thoughts.holds_call:
            self._num_unsure += 1
        elif was_inside or self._thoughts.is_inside:
            self.num_thought += 1 + self._num_unsure
            self._num_unsure = 0
        return parts

    @property
    def _has_its_only_call(self) -> bool:
        """Whether only one call is allowed, and it is complete."""
        return self._only_call is not None and self._only_call.is_over

    def _within_lines(self, text: str) -> str:
        """Return the part of a text that the bounds of lines leave."""
        return text if self._lines is None else self._lines.feed(text)

    def _hidden_text(self, token: int) -> str:
        """Return a hidden token's text if a stop string may spell it; else ""."""
        if not self._cut.looks_at_hidden or token in self._shown:
            return ""
        if self._thoughts is not None and self._thoughts.is_inside:
            return ""
        if not self._tokenizer.is_special(token):
            return ""
        return self._tokenizer.token_text(token)
