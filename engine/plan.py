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
from typing import Protocol

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
    """Return the index of the first token that the draft model sees: it sees all tokens that it
    computes now and its window before `end`, as far as they have draft K/V.

    draft_kv_first, window: as in `Row`; draft_read_first: index of the first token that it computes
    now; end: index after the last known token of the pass.
    """
    nearest = min(draft_read_first, end - window) if window else 0
    return max(draft_kv_first, nearest)


@dataclass(frozen=True, slots=True)
class TargetShift:
    """A change of the target distribution, caused by an earlier step of the sequence
    (`speculation.target_shift`).
    """

    remaining: int
    """Number of positions, from the next token on, for which it holds."""
    state: tuple[float, float, float, float]
    num_chains: int


class Grammar(Protocol):
    """Masks of an answer's next tokens: by the client's grammar, by a budget of thoughts, or by one
    after the other.
    """

    def masks(
        self, answer: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> Callable[[], list[npt.NDArray[np.bool_] | None]]:
        """Ask which tokens may follow each path below an answer: [V], or None if all may, also
        below a path that has ended. The returned function waits for the masks.
        """

    def check_answer(self, emitted: Sequence[int]) -> None:
        """Note a failure of the grammar if it does not allow the tokens that a step has emitted."""


@dataclass(frozen=True, slots=True)
class LogitContext:
    """Inputs of a row's distribution besides its logits: the text, and the tokens that may follow
    it.
    """

    tokens: tuple[int, ...]
    """Prompt and answer so far."""
    num_prompt: int
    fixed: FixedEdits
    """Edits of the request that are the same in every step; they mask end tokens before
    `min_tokens`.
    """
    counts: TextCounts
    """Counts of the text, carried from step to step."""
    min_tokens: int = 0
    grammar: Grammar | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence's part of a step. (A msgspec struct, because one is created for every sequence
    in every step.)
    """

    sequence_id: int
    input_ids: tuple[int, ...]
    """Tokens the target computes, at indices `first_index` and on."""
    first_index: int
    draft_input_ids: tuple[int, ...]
    """Tokens the draft model computes, at `draft_first_index` and on; they end where `input_ids`
    end if the row draws.
    """
    draft_first_index: int
    draft_kv_first: int = 0
    """Index of the first token with draft K/V, now or later; the draft model sees no token before
    it.
    """
    draft_window: int = 0
    """Tokens before its drafts that the draft model sees; 0 is all."""
    block_ids: tuple[int, ...]
    draft_block_ids: tuple[int, ...] | None = None
    """Blocks of the draft model's K/V, valid from `first_draft_key` on; None if they are
    `block_ids`, or if the sequence has none yet.
    """
    emits: bool
    sampling: Sampling
    speculation: Speculation
    """Speculation of the request; `fanout` is the part of it that this step drafts."""
    fanout: Fanout
    """Children of every drawn node by depth; empty when nothing is drawn."""
    text_drafts: tuple[TextDraft, ...] = ()
    """Text drafts of this step."""
    shifts: tuple[TargetShift, ...] = ()
    """Changes of the target distribution that hold for this step, oldest first."""
    text: LogitContext | None = None
    """Set if the distribution depends on it."""
    num_logprobs: int | None = None
    """Number of likeliest tokens to report with each emitted one; None reports nothing."""
    num_prompt_logprobs: int = 0
    """Number of likeliest tokens to report with each of `prompt_next`."""
    prompt_next: tuple[int, ...] = ()
    """Prompt tokens that follow the first input ids, if their logprobs are requested."""
    reports_drafts: bool = False
    """Whether the emission includes the chains."""
    request_id: str = ""

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
        """Return the index after the last input id, which is the index of the first drafted or
        emitted token.
        """
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
        """Return the rank of the first text draft. Drawn chains come first; a row that draws none
        has one chain of length 0.
        """
        return max(1, self.num_drafts)

    @property
    def longest_chain(self) -> int:
        """Return the length of the longest chain, drawn or text draft; 0 if the row does not
        speculate.
        """
        return max([len(self.fanout), *[len(draft.tokens) for draft in self.text_drafts]])

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the number of drawn nodes by depth, from 1 on."""
        return level_widths(self.fanout)

    @property
    def num_nodes(self) -> int:
        """Return the number of drawn nodes, before equal ones are merged, and of nodes of text
        drafts.
        """
        return num_nodes(self.fanout) + num_text_nodes(self.text_drafts)

    @property
    def num_tokens(self) -> int:
        """Return the most tokens that the row adds to a pass of the target or the draft model,
        before equal prefixes are merged.
        """
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
    """Tokens that one sampling row emits: accepted draft tokens, then one more token (a msgspec
    struct, as a row is).
    """

    accepted: tuple[int, ...]
    next_token: int
    num_nodes: int
    """Drafted nodes the target verified for this row."""
    num_draft_kept: int = 0
    """Number of accepted tokens with K/V in the draft model's cache."""
    text_draft_counts: tuple[DrafterCount, ...] = ()
    """Contributions of the text drafts."""
    shifts: tuple[TargetShift, ...] = ()
    """Changes of the target distribution that hold after these tokens, oldest first."""
    gap: float | None = None
    """Optimum acceptance minus the rule's own at the first position; None if it was not
    observed.
    """
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token, if the row asked for them."""
    bias: float = 0.0
    """Distance from the target distribution that lossy acceptance allowed at these tokens, summed
    over positions.
    """
    chains: tuple[tuple[int, ...], ...] = ()
    """Drafted chains, if the row reports them: drawn chains first, then text drafts."""
    rank: int = 0
    """Rank of the row's chain that the accepted path follows."""


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """Emissions of the plan's sampling rows, in their order."""

    emissions: tuple[Emission, ...]
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    """Logprobs of the tokens in `prompt_next`, one entry per row of the plan; empty if no row asks
    for them.
    """
    broken: frozenset[int] = frozenset()
    """Ids of sequences whose emission is invalid, because a model computed non-finite numbers. They
    are ended.
    """
