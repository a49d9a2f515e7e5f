"""What passes between the parts of a step: the plan, and the verdict.

Values only; whoever receives them decides nothing about the past. Pure Python.

Words: a *row* is one sequence's part of a step. Its *input ids* are the tokens of its text whose
target K/V is missing (a prompt chunk, or just the last emitted token). A row *emits* when it
reaches the end of the text; drafted *nodes* then follow its last input id, the *root*.
A *slot* is the place of one token in the K/V pool, an *index* its place in the sequence.
A *law* is a probability distribution over the vocabulary: that of the next token, given the text before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from operator import mul
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from engine.fixed_edits import FixedEdits
from engine.request import DrafterCount, Sampling, Speculation, TokenLogprob
from engine.text_counts import TextCounts


@lru_cache(maxsize=1024)
def level_widths(fanout: tuple[int, ...]) -> tuple[int, ...]:
    """Drafted nodes by depth, from 1 on, when every node of depth d has `fanout[d]` children."""
    return tuple(accumulate(fanout, mul))


@dataclass(frozen=True, slots=True)
class TargetShift:
    """A change of the target law that an earlier step of the sequence left behind (`speculation.target_shift`)."""

    remaining: int
    """For how many positions, from the next token on, it holds."""
    state: tuple[float, float, float, float]
    num_chains: int


class Grammar(Protocol):
    """What an answer must follow."""

    def masks(
        self, answer: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> Callable[[], list[npt.NDArray[np.bool_] | None]]:
        """Ask which tokens may follow an answer and each path below it ([V]; None where it has no law); the result
        waits for the masks."""


@dataclass(frozen=True, slots=True)
class LogitContext:
    """What a row's law depends on besides its logits: the text, and what may follow it."""

    tokens: tuple[int, ...]
    """Prompt and answer so far."""
    num_prompt: int
    min_tokens: int = 0
    ends: tuple[int, ...] = ()
    """Tokens that would end the answer; they are held back before `min_tokens`."""
    grammar: Grammar | None = None
    fixed: FixedEdits | None = None
    """Edits of the request that are the same in every step; None if they are not prepared."""
    counts: TextCounts | None = None
    """Counts of the text; None if they are not kept from step to step."""


@dataclass(frozen=True, slots=True)
class TextDraft:
    """A chain that is not drawn: its tokens were found somewhere."""

    source: str
    """Which drafter found it."""
    tokens: tuple[int, ...]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence's part of a step. (A msgspec struct: made for every sequence in every step.)"""

    sequence_id: int
    input_ids: tuple[int, ...]
    """Tokens the target computes, at indices `first_index` and on."""
    first_index: int
    draft_input_ids: tuple[int, ...]
    """Tokens the draft model computes, at `draft_first_index` and on; ends where `input_ids` end if the row draws."""
    draft_first_index: int
    draft_start: int = 0
    """Index of the first token whose draft K/V is there or will be; the draft model sees none before it."""
    draft_window: int = 0
    """Tokens before its drafts that the draft model sees; 0 is all."""
    block_ids: tuple[int, ...]
    emits: bool
    sampling: Sampling
    speculation: Speculation
    """What the request asked for; `fanout` is what this step drafts of it."""
    fanout: tuple[int, ...]
    """Children of every drawn node by depth; empty when nothing is drawn."""
    copies: tuple[TextDraft, ...] = ()
    """Chains beside the drawn ones."""
    shifts: tuple[TargetShift, ...] = ()
    """Changes of the target law that hold for this step, oldest first."""
    text: LogitContext | None = None
    """Set when the law depends on it."""
    num_logprobs: int | None = None
    """Likeliest tokens to report beside each emitted one; None reports nothing."""
    num_prompt_logprobs: int = 0
    """Likeliest tokens to report beside each of `prompt_next`."""
    prompt_next: tuple[int, ...] = ()
    """Prompt tokens that follow the first input ids, where their logprobs are asked for."""
    reports_drafts: bool = False
    """Whether the emission has the chains."""
    request_id: str = ""

    @property
    def needs_path(self) -> bool:
        """Whether what may follow depends on drafted tokens, which must then be on the host."""
        return self.text is not None and (self.text.grammar is not None or bool(self.sampling.bad_words))

    @property
    def end(self) -> int:
        """Index after the last input id: the index of the first drafted or emitted token."""
        return self.first_index + len(self.input_ids)

    @property
    def num_drafts(self) -> int:
        """Chains drawn below the root; 0 when nothing is drawn."""
        return prod(self.fanout) if self.fanout else 0

    @property
    def draft_length(self) -> int:
        """Tokens in a drawn chain."""
        return len(self.fanout)

    @property
    def first_copy(self) -> int:
        """Rank of the first copied chain: drawn chains come first, one of length 0 where the row draws none."""
        return max(1, self.num_drafts)

    @property
    def longest_chain(self) -> int:
        """Tokens of the longest chain, drawn or copied; 0 when the row does not speculate."""
        return max([self.draft_length, *(len(copy.tokens) for copy in self.copies)])

    @property
    def widths(self) -> tuple[int, ...]:
        """Drawn nodes by depth, from 1 on."""
        return level_widths(self.fanout)

    @property
    def num_nodes(self) -> int:
        """Drawn and copied nodes, equal ones not merged."""
        return sum(self.widths) + sum(len(copy.tokens) for copy in self.copies)

    @property
    def num_tokens(self) -> int:
        """Most tokens the row puts into a pass (before equal prefixes are merged): the target's, or the draft's."""
        return max(len(self.input_ids) + self.num_nodes, len(self.draft_input_ids))


@dataclass(frozen=True)
class Plan:
    """The rows of one step."""

    rows: tuple[Row, ...]

    @cached_property
    def sampling_rows(self) -> tuple[Row, ...]:
        """The rows that will emit tokens, in order."""
        return tuple([row for row in self.rows if row.emits])


class Emission(msgspec.Struct, frozen=True):
    """What one sampling row emits: an accepted path of drafted tokens, then one more token. (A msgspec struct, as a row
    is.)"""

    accepted: tuple[int, ...]
    next_token: int
    num_nodes: int
    """Drafted nodes the target verified for this row."""
    num_draft_kept: int = 0
    """How many of the accepted tokens the draft model has K/V of."""
    copied: tuple[DrafterCount, ...] = ()
    """What the copied chains gave."""
    shifts: tuple[TargetShift, ...] = ()
    """Changes of the target law that hold after these tokens, oldest first."""
    gap: float | None = None
    """Optimum acceptance minus the rule's own at the first position; None where it was not observed."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token, where the row asked for them."""
    bias: float = 0.0
    """Distance from the target law that lossy acceptance allowed at these tokens, summed over positions."""
    chains: tuple[tuple[int, ...], ...] = ()
    """What was drafted, where the row reports it: drawn chains first, then copied ones."""
    rank: int = 0
    """Which of the row's chains the accepted path follows."""


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """The emissions of the plan's sampling rows, in their order."""

    emissions: tuple[Emission, ...]
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    """Of the tokens in `prompt_next`, one entry per row of the plan; empty where no row asks."""
    broken: frozenset[int] = frozenset()
    """Sequences whose emission says nothing, because a model's numbers were not finite."""
