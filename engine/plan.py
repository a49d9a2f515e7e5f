"""Values that the parts of a step exchange: the plan and the verdict.

Values only, in pure Python.

Words: a *row* is one sequence's part of a step. Its *input ids* are the tokens of its text whose
target K/V is missing (a prompt chunk, or just the last emitted token). A row *emits* when it
reaches the end of the text; drafted *nodes* then follow its last input id, the *root*. A *slot* is
the place of one token in the K/V pool, an *index* its place in the sequence. A *distribution* has
the probabilities of all next tokens, given the text before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from engine.fanout import Fanout, level_widths, num_chains, num_nodes
from engine.fixed_edits import FixedEdits
from engine.needs import needs_of_distribution, needs_of_drafts
from engine.request import DrafterCount, Sampling, Speculation, TextDraft, TokenLogprob
from engine.text_counts import TextCounts


def num_text_nodes(drafts: Sequence[TextDraft]) -> int:
    """Return the number of nodes of the tree that text drafts are together."""
    if len(drafts) <= 1:
        return sum([len(draft.tokens) for draft in drafts])
    return len({draft.tokens[:length] for draft in drafts for length in range(1, len(draft.tokens) + 1)})


def first_draft_key(draft_kv_first: int, draft_read_first: int, end: int, window: int) -> int:
    """Return the index of the first token that the draft model sees.

    It sees its window before `end` and all that it computes now, as far as they have draft K/V.
    draft_kv_first, window: as in `Row`; draft_read_first: first token that it computes now; end:
    index after the last known token of the pass.
    """
    nearest = min(draft_read_first, end - window) if window else 0
    return max(draft_kv_first, nearest)


@dataclass(frozen=True, slots=True)
class TargetShift:
    """Change of the target distribution by an earlier step (`speculation.target_shift`)."""

    remaining: int
    """Positions for which it holds, from the next token on."""
    state: tuple[float, float, float, float]
    num_chains: int


class Grammar(Protocol):
    """Masks of next tokens, by a grammar, a budget of thoughts, or one after the other."""

    def masks(
        self, answer: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> Callable[[], list[npt.NDArray[np.bool_] | None]]:
        """Ask which tokens may follow each path below an answer; the returned function waits.

        [V], or None if all may, also below a path that has ended.
        """

    def check_answer(self, emitted: Sequence[int]) -> None:
        """Note a failure of the grammar if it does not allow the tokens that a step has emitted."""


@dataclass(frozen=True, slots=True)
class LogitContext:
    """Text of a row, and the tokens that may follow it."""

    tokens: tuple[int, ...]
    """Prompt and answer so far."""
    num_prompt: int
    fixed: FixedEdits
    """Edits that are the same in every step; they mask end tokens before `min_tokens`."""
    counts: TextCounts
    """Carried from step to step."""
    min_tokens: int = 0
    grammar: Grammar | None = None


class StatePlaces(NamedTuple):
    """Places of a sequence's states in the recurrent layers of a model, for one pass."""

    seat: int
    """Place of the state at the end of the text that the pass reads."""
    source: int
    """Place of the state from which the pass starts; -1 starts from nothing."""
    covered: int
    """Tokens before that state's end."""
    kept: tuple[tuple[int, int], ...] = ()
    """(tokens before its end, place) of further states that the pass stores."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence's part of a step (a msgspec struct, as every step makes many)."""

    sequence_id: int
    input_ids: tuple[int, ...]
    """Tokens of the target's pass, from index `first_index`."""
    first_index: int
    draft_input_ids: tuple[int, ...]
    """Tokens of the draft model from `draft_first_index`; they end with `input_ids` if it draws."""
    draft_first_index: int
    draft_kv_first: int = 0
    """First token with draft K/V, now or later; the draft model sees none before it."""
    draft_window: int = 0
    """Tokens before its drafts that the draft model sees; 0 is all."""
    block_ids: tuple[int, ...]
    draft_block_ids: tuple[int, ...] | None = None
    """Blocks of draft K/V from `first_draft_key` on.

    None if shared with the target, or none yet.
    """
    emits: bool
    sampling: Sampling
    speculation: Speculation
    """Speculation of the request; `fanout` is what this step drafts."""
    fanout: Fanout
    """Children of drawn nodes by depth; empty if nothing is drawn."""
    text_drafts: tuple[TextDraft, ...] = ()
    shifts: tuple[TargetShift, ...] = ()
    """Oldest first."""
    text: LogitContext | None = None
    """Set if the distribution depends on it."""
    num_logprobs: int | None = None
    """Likeliest tokens to report with each emitted one; None reports nothing."""
    num_prompt_logprobs: int = 0
    """Likeliest tokens to report with each of `prompt_next`."""
    prompt_next: tuple[int, ...] = ()
    """Prompt tokens after the first input ids, if their logprobs are requested."""
    reports_drafts: bool = False
    request_id: str = ""
    state: StatePlaces | None = None
    """Set if the target has recurrent layers."""
    draft_state: StatePlaces | None = None

    @property
    def needs_path(self) -> bool:
        """Whether the allowed tokens depend on drafted tokens, which must then be on the host."""
        return self.text is not None and (self.text.grammar is not None or bool(self.sampling.bad_words))

    @property
    def needs(self) -> int:
        """Return what the row needs of a step (`engine.needs`)."""
        distribution_needs = needs_of_distribution(self.text is not None, bool(self.shifts), self.sampling)
        return distribution_needs | needs_of_drafts(self.speculation, self.fanout, bool(self.text_drafts))

    @property
    def num_known(self) -> int:
        """Return the number of known tokens that the target computes."""
        return len(self.input_ids)

    @property
    def num_draft_known(self) -> int:
        """Return the number of known tokens that the draft model computes."""
        return len(self.draft_input_ids)

    @property
    def end(self) -> int:
        """Return the index after the last input id, that of the first drafted or emitted token."""
        return self.first_index + len(self.input_ids)

    @property
    def draft_table(self) -> tuple[int, ...]:
        """Return the blocks of the draft model's K/V."""
        return self.block_ids if self.draft_block_ids is None else self.draft_block_ids

    @property
    def first_draft_key(self) -> int:
        """Return the index of the first token that the draft model sees."""
        return first_draft_key(self.draft_kv_first, self.draft_first_index, self.end, self.draft_window)

    @property
    def num_drafts(self) -> int:
        """Return the number of chains drawn below the root; 0 if nothing is drawn."""
        return num_chains(self.fanout) if self.fanout else 0

    @property
    def draft_length(self) -> int:
        """Return the number of tokens in a drawn chain."""
        return len(self.fanout)

    @property
    def first_text_draft(self) -> int:
        """Return the rank of the first text draft, after the drawn chains.

        A row that draws none has one chain of length 0.
        """
        return max(1, self.num_drafts)

    @property
    def longest_chain(self) -> int:
        """Return the longest chain's length, drawn or text; 0 if the row does not speculate."""
        return max([len(self.fanout), *[len(draft.tokens) for draft in self.text_drafts]])

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the number of drawn nodes by depth, from 1 on."""
        return level_widths(self.fanout)

    @property
    def num_nodes(self) -> int:
        """Return the nodes of text drafts and drawn ones, before equal ones are merged."""
        return num_nodes(self.fanout) + num_text_nodes(self.text_drafts)

    @property
    def num_tokens(self) -> int:
        """Return the most tokens that the row adds to a pass, before merging."""
        return max(len(self.input_ids) + self.num_nodes, len(self.draft_input_ids))


@dataclass(frozen=True)
class Plan:
    """The rows of one step."""

    rows: tuple[Row, ...]

    @cached_property
    def sampling_rows(self) -> tuple[Row, ...]:
        """Return the rows that will emit tokens, in order."""
        return tuple([row for row in self.rows if row.emits])


class Emission(msgspec.Struct, frozen=True):
    """Tokens that a row emits: accepted drafts and one more (a msgspec struct, as a row is)."""

    accepted: tuple[int, ...]
    next_token: int
    num_nodes: int
    """Verified nodes."""
    num_draft_kept: int = 0
    """Accepted tokens with K/V of the draft model."""
    text_draft_counts: tuple[DrafterCount, ...] = ()
    shifts: tuple[TargetShift, ...] = ()
    """Oldest first; they hold after these tokens."""
    gap: float | None = None
    """Optimum acceptance minus the rule's at the first position; None if not observed."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token, if the row asked for them."""
    bias: float = 0.0
    """Distance from the target by lossy acceptance, summed over positions."""
    chains: tuple[tuple[int, ...], ...] = ()
    """Drawn chains, then text drafts, if the row reports them."""
    rank: int = 0
    """Rank of the chain that the accepted path follows."""


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """Emissions of the plan's sampling rows, in their order."""

    emissions: tuple[Emission, ...]
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    """Logprobs of `prompt_next`, one entry per row; empty if none asks."""
    broken: frozenset[int] = frozenset()
    """Ids of sequences whose models computed non-finite numbers; they are ended."""
