"""One choice of an answer: takes each step's tokens and releases their text.

Stop strings, finish reason, usage and speculation counts agree on the end of the answer. Not for: formats of APIs.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from engine.api import Outcome, Request, StepStats
from server.serving.statistics import Clock, SpeculationCount, answer_part, drafters_of
from server.text.call_pieces import Call, Piece
from server.text.logprobs import SpelledToken, spell
from server.text.prompts import ShownPrompt
from server.text.reasoning import Thought, ThoughtReader
from server.text.stops import StopCut
from server.text.tokenizer import Tokenizer
from server.text.tool_calls import ToolCalls
from server.text.tools import ToolUse
from server.wire.answers import DraftedStep

# Some chat templates (Mistral) accept no other ids of calls.
_ID_LETTERS, _ID_LENGTH = string.ascii_letters + string.digits, 9


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
    reports_token_ids: bool = False
    """Report the tokens of prompt and answer by id."""


@dataclass(frozen=True)
class CallPiece:
    """Piece of a function call; the first one has id and name."""

    index: int
    call_id: str | None
    name: str | None
    arguments: str


Part = str | Thought | CallPiece
"""Text, a thought, or a piece of a function call."""


class Choice:
    """One answer while it is generated."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer, options: TextOptions, prompt: ShownPrompt | None = None
    ) -> None:
        """prompt: its shown part, if any; it is complete before the first tokens are added."""
        self.request = request
        self.num_tokens = 0
        self.num_cached = 0
        self.num_predicted = 0
        self.text = self.thoughts = ""
        self.num_thought = 0
        """Number of tokens of thoughts."""
        self.finish_reason: str | None = None
        self._last_token: int | None = None
        self.speculation = SpeculationCount(request.speculation.rule, request.speculation.draft_length)
        self.clock = Clock()
        self.logprobs: list[SpelledToken] | None = None if request.num_logprobs is None else []
        self.token_ids: list[int] | None = [] if options.reports_token_ids else None
        self.drafts: list[DraftedStep] | None = [] if options.reports_drafts else None
        self._tokenizer = tokenizer
        self._offset = 0
        """Number of characters before the next token."""
        self._num_characters: list[int] = []
        """Number of characters that each token of the last step has completed."""
        self._prompt = prompt
        self._has_begun = False
        self._shown = options.shown
        self._detokenizer = tokenizer.detokenizer(options.skip_special_tokens, options.shown)
        looks_at_hidden = options.skip_special_tokens and bool(options.stops)
        hidden = tokenizer.special_texts(options.shown) if looks_at_hidden else ()
        self._cut = StopCut(options.stops, options.include_stop, hidden)
        # One parser splits the released text, which lags because of stop strings; the other counts tokens at once.
        self._reasoning, self._counting = (None if options.thoughts is None else options.thoughts() for _ in range(2))
        tools, template = options.tools, tokenizer.response_template
        self._calls = None if tools is None else ToolCalls(tools, template)
        self._counting_calls = None if tools is None or tools.parallel else ToolCalls(tools, template)
        self.call_ids: list[str] = []

    @property
    def calls(self) -> Sequence[Call]:
        """Function calls of the answer."""
        return () if self._calls is None else self._calls.calls

    @property
    def stop_string(self) -> str | None:
        """Stop string that has ended the answer; None if it runs or has ended otherwise."""
        return self._cut.found

    @property
    def stop_reason(self) -> str | int | None:
        """Stop string, or the id from stop_token_ids, that has ended the answer; None if nothing of the request has."""
        if self.finish_reason is None or self.stop_string is not None:
            return self.stop_string
        ends = self.finish_reason != "length" and self._last_token in self.request.limits.stop_token_ids
        return self._last_token if ends else None

    @property
    def num_mispredicted(self) -> int:
        """Number of predicted tokens that are not in the answer."""
        return max(0, len(self.request.prediction) - self.num_predicted)

    @property
    def num_reported(self) -> int:
        """Number of logprobs, token ids and drafted tokens that a whole answer reports."""
        logprobs = len(self.logprobs or ()) * (1 + (self.request.num_logprobs or 0))
        num_drafted = sum(len(chain) for step in self.drafts or () for chain in step.chains)
        return logprobs + len(self.token_ids or ()) + num_drafted + len(bytes(self.prompt_logprobs or b"")) // 64

    @property
    def prompt_logprobs(self) -> msgspec.Raw | None:
        """Logprobs of the prompt as JSON, if they were requested."""
        return None if self._prompt is None else self._prompt.by_place

    def add(self, outcome: Outcome, stats: StepStats) -> tuple[list[Part], float | None, Outcome]:
        """Take a step's tokens. Returns the parts to release, the seconds per token, and the part of the outcome in
        the answer.
        """
        self.num_cached = outcome.num_cached
        echoed = self._echo_prompt()
        text, num_taken = self._detokenize(outcome)
        if self._cut.is_cut:
            self.finish_reason = "stop"
        elif self._counting_calls is not None and self._counting_calls.is_over:
            self.finish_reason = "stop"
            text += self._cut.finish()
        elif outcome.finish_reason is not None:
            self.finish_reason = outcome.finish_reason
            text += self._cut.finish()
        parts = self._read(echoed + text)
        self.num_tokens += num_taken
        self._last_token = outcome.token_ids[num_taken - 1] if num_taken else self._last_token
        self.num_predicted += min(outcome.num_predicted, num_taken)
        self.text += "".join(part for part in parts if isinstance(part, str))
        self.thoughts += "".join(part.text for part in parts if isinstance(part, Thought))
        self._spell(outcome, num_taken)
        if self.token_ids is not None:
            self.token_ids += outcome.token_ids[:num_taken]
        if self.drafts is not None:
            self.drafts.append(self._drafted(outcome, num_taken))
        taken = answer_part(outcome, num_taken)
        self.speculation.add_step(taken, stats)
        return parts, self.clock.add(outcome, num_taken), taken

    def _drafted(self, outcome: Outcome, num_taken: int) -> DraftedStep:
        def texts(tokens: Sequence[int]) -> list[str]:
            return [self._tokenizer.spell(token)[0] for token in tokens]

        num_accepted = min(outcome.num_accepted, num_taken)
        chains = [texts(chain) for chain in outcome.drafts]
        return DraftedStep(chains, drafters_of(outcome), num_accepted, texts(outcome.token_ids[:num_taken]))

    def _read(self, text: str) -> list[Part]:
        """Return the thoughts and the other parts of a text, in order."""
        is_last = self.finish_reason is not None
        found = [text] if self._reasoning is None else self._reasoning.feed(text, is_last)
        parts: list[Part] = []
        for part in found:
            parts += [part] if isinstance(part, Thought) else self._read_calls(part)
        return [*parts, *self._read_calls("", is_last)] if is_last else parts

    def _read_calls(self, text: str, is_last: bool = False) -> list[str | CallPiece]:
        """Return the text outside calls and the pieces of calls. If only one call is allowed, it ends the answer."""
        if self._calls is None:
            return [text] if text else []
        found = self._calls.feed(text, is_last)
        if is_last and self.finish_reason == "stop" and self._calls.are_complete:
            self.finish_reason = "tool_calls"
        return [part if isinstance(part, str) else self._named(part) for part in found]

    def _named(self, piece: Piece) -> CallPiece:
        if piece.name is not None:
            self.call_ids.append("".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH)))
        call_id = self.call_ids[piece.index] if piece.name is not None else None
        return CallPiece(piece.index, call_id, piece.name, piece.arguments)

    def _echo_prompt(self) -> str:
        """Return the prompt's text before the first tokens, and take its logprobs. Empty if it is not echoed."""
        if self._has_begun or self._prompt is None:
            return ""
        self._has_begun = True
        if self.logprobs is not None:
            self.logprobs += self._prompt.tokens
            self._offset = self._prompt.num_characters
        return self._prompt.text

    def _spell(self, outcome: Outcome, num_taken: int) -> None:
        """Add the logprobs of the tokens that belong to the answer."""
        if self.logprobs is None:
            return
        taken = zip(outcome.token_ids[:num_taken], outcome.logprobs, [*self._num_characters, 0], strict=False)
        for token, found, num_characters in taken:
            self.logprobs.append(spell(self._tokenizer, token, found, self._offset))
            self._offset += num_characters

    def _count(self, piece: str) -> None:
        """Count the tokens of thoughts (with their tags) and calls."""
        parts: Sequence[str | Thought] = [piece]
        if self._counting is not None:
            was_inside = self._counting.is_inside
            parts = self._counting.feed(piece)
            self.num_thought += was_inside or self._counting.is_inside
        if self._counting_calls is not None:
            self._counting_calls.feed("".join(part for part in parts if isinstance(part, str)), False)

    def _hidden_text(self, token: int) -> str:
        """Return the text of a token that the answer leaves out, if a stop string may spell it; else ""."""
        if not self._cut.looks_at_hidden or not self._tokenizer.is_special(token) or token in self._shown:
            return ""
        return self._tokenizer.token_text(token)

    def _detokenize(self, outcome: Outcome) -> tuple[str, int]:
        """Return the released text and the number of tokens in the answer; the end token counts, without its text."""
        text = ""
        self._num_characters = []
        ended_by_token = outcome.finish_reason == "stop"
        for count, token in enumerate(outcome.token_ids, start=1):
            if ended_by_token and count == len(outcome.token_ids):
                return text, count
            looks = self.num_tokens + count > self.request.limits.min_tokens
            piece = self._detokenizer.step(token)
            self._num_characters.append(len(piece))
            self._count(piece)
            text += self._cut.feed(piece, looks, self._hidden_text(token))
            if self._cut.is_cut or (self._counting_calls is not None and self._counting_calls.is_over):
                return text, count
        return text, len(outcome.token_ids)
