"""One choice of an answer: takes each step's tokens and releases their text.

Stop strings, finish reason, usage and speculation counts agree on the end of the answer. Not
for: formats of APIs.
"""

from __future__ import annotations

import itertools
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine.api import Outcome, Request, StepStats
from server.serving.filters import TextOptions, filter_of
from server.serving.statistics import Clock, SpeculationCount, answer_part, drafters_of
from server.text.call_pieces import Call, Piece
from server.text.logprobs import SpelledToken, spell
from server.text.prompts import ShownPrompt
from server.text.reasoning import CallEnd, Thought
from server.text.tokenizer import Tokenizer
from server.text.tool_calls import ToolCalls
from server.wire.answers import DraftedStep

# Some chat templates (Mistral) accept no other ids of calls.
_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
_BYTES_PER_LOGPROB = 64
"""Bytes of a prompt's logprobs that take about as long to encode as a logprob of the answer."""


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
        self.text = ""
        self.thoughts = ""
        self.finish_reason: str | None = None
        self._last_token: int | None = None
        self.speculation = SpeculationCount(request.speculation.rule, request.speculation.draft_length)
        self.clock = Clock()
        self.logprobs: list[SpelledToken] | None = None if request.num_logprobs is None else []
        self.token_ids: list[int] | None = [] if options.reports_token_ids else None
        self.reports_speculation = options.reports_speculation
        self.drafts: list[DraftedStep] | None = [] if options.reports_drafts else None
        self._tokenizer = tokenizer
        self._offset = 0
        """Number of characters before the next token."""
        self._num_characters: list[int] = []
        """Number of characters that each token of the last step has completed."""
        self._prompt = prompt
        self._has_begun = False
        self._detokenizer = tokenizer.detokenizer(options.skip_special_tokens, options.shown)
        self._filter = filter_of(options, tokenizer, request.limits.min_tokens)
        # It reads the released text, which lags because of stop strings.
        self._calls: ToolCalls | None = None
        if options.tools is not None:
            self._calls = ToolCalls(options.tools, tokenizer.response_template)
        self._tools = options.tools
        self.call_ids: list[str] = []
        self._end_token_ids = options.end_token_ids

    @property
    def calls(self) -> Sequence[Call]:
        """Function calls of the answer."""
        if self._calls is None:
            return ()
        return self._calls.calls

    @property
    def stop_string(self) -> str | None:
        """Stop string that has ended the answer; None if it runs or has ended otherwise."""
        return self._filter.stop

    @property
    def num_thought(self) -> int:
        """Number of tokens of thoughts."""
        return self._filter.num_thought

    @property
    def stop_reason(self) -> str | int | None:
        """Return the stop string, or id from stop_token_ids, that ended the answer, or None."""
        if self.finish_reason is None or self.stop_string is not None:
            return self.stop_string
        is_stop_token = self._last_token in self.request.limits.stop_token_ids
        is_stop_token = is_stop_token and self._last_token not in self._end_token_ids
        if self.finish_reason == "length" or not is_stop_token:
            return None
        return self._last_token

    @property
    def num_mispredicted(self) -> int:
        """Number of predicted tokens that are not in the answer."""
        return max(0, len(self.request.prediction) - self.num_predicted)

    @property
    def num_reported(self) -> int:
        """Number of logprobs, token ids and drafted tokens that a whole answer reports."""
        num_alternatives = self.request.num_logprobs or 0
        num_logprobs = len(self.logprobs or ()) * (1 + num_alternatives)
        num_token_ids = len(self.token_ids or ())
        num_drafted = sum(len(chain) for step in self.drafts or () for chain in step.chains)
        num_prompt_bytes = len(bytes(self.prompt_logprobs or b""))
        return num_logprobs + num_token_ids + num_drafted + num_prompt_bytes // _BYTES_PER_LOGPROB

    @property
    def prompt_logprobs(self) -> msgspec.Raw | None:
        """Logprobs of the prompt as JSON, if they were requested."""
        if self._prompt is None:
            return None
        return self._prompt.by_place

    def add(self, outcome: Outcome, stats: StepStats) -> tuple[list[Part], float | None, Outcome]:
        """Take a step's tokens; return (parts to release, seconds per token, its outcome).

        The outcome is that of the answer's tokens alone.
        """
        self.num_cached = outcome.num_cached
        said: list[str | Thought] = [self._echo_prompt()]
        num_taken = self._detokenize(outcome, said)
        if outcome.finish_reason is not None and self._filter.finish_reason is None:
            said += self._filter.finish(self.num_tokens + num_taken)
        self.finish_reason = self._filter.finish_reason or outcome.finish_reason
        parts = self._read(said)
        self.num_tokens += num_taken
        if num_taken:
            self._last_token = outcome.token_ids[num_taken - 1]
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

    def _read(self, said: Sequence[str | Thought]) -> list[Part]:
        """Return a step's thoughts, text and calls in order; adjacent pieces are joined."""
        parts: list[Part] = []
        released = [piece for piece in said if piece]
        for kind, pieces in itertools.groupby(released, type):
            text = "".join(piece.text if isinstance(piece, Thought) else piece for piece in pieces)
            if kind is CallEnd:
                parts += self._end_calls()
            else:
                parts += [Thought(text)] if kind is Thought else self._read_calls(text)
        if self.finish_reason is not None:
            parts += self._read_calls("", is_last=True)
        return parts

    def _read_calls(self, text: str, is_last: bool = False) -> list[str | CallPiece]:
        """Return the text outside calls, and pieces of calls; a single call may end it."""
        if self._calls is None:
            return [text] if text else []
        parts = self._with_ids(self._calls.feed(text, is_last))
        if is_last and self.finish_reason == "stop" and self._calls.are_complete:
            self.finish_reason = "tool_calls"
        return parts

    def _end_calls(self) -> list[str | CallPiece]:
        """Return the rest of a message with calls, which has ended."""
        if self._calls is None:
            return []
        return self._with_ids(self._calls.end_message())

    def _with_ids(self, pieces: Sequence[str | Piece]) -> list[str | CallPiece]:
        return [piece if isinstance(piece, str) else self._identified(piece) for piece in pieces]

    def _identified(self, piece: Piece) -> CallPiece:
        """Return a piece of a call; the first piece of each call gets an id."""
        call_id = None
        if piece.name is not None:
            if self._tools is not None:
                call_id = self._tools.call_id(piece.name, piece.index)
            call_id = call_id or "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
            self.call_ids.append(call_id)
        return CallPiece(piece.index, call_id, piece.name, piece.arguments)

    def _echo_prompt(self) -> str:
        """Return the prompt's text before the first tokens if it is echoed; take its logprobs."""
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
        tokens = outcome.token_ids[:num_taken]
        lengths = [*self._num_characters, 0]
        for token, logprob, num_characters in zip(tokens, outcome.logprobs, lengths, strict=False):
            self.logprobs.append(spell(self._tokenizer, token, logprob, self._offset))
            self._offset += num_characters

    def _detokenize(self, outcome: Outcome, said: list[str | Thought]) -> int:
        """Append released text and thoughts; return the answer's tokens, with the end token."""
        self._num_characters = []
        ended_by_token = outcome.finish_reason == "stop"
        for count, token in enumerate(outcome.token_ids, start=1):
            if ended_by_token and count == len(outcome.token_ids):
                return count
            piece = self._detokenizer.step(token)
            self._num_characters.append(len(piece))
            said += self._filter.feed(piece, token, self.num_tokens + count)
            if self._filter.finish_reason is not None:
                return count
        return len(outcome.token_ids)
