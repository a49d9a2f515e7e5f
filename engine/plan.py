"""What passes between the parts of a step: the plan, and the verdict.

Values only; whoever receives them decides nothing about the past. Pure Python.

Words: a *row* is one sequence's part of a step. Its *known* tokens are those of its text whose
target K/V is missing (a prompt chunk, or just the last emitted token). A row *samples* when it
reaches the end of the text; drafted *nodes* then follow the last known token, the *root*.
A *slot* is the place of one token in the K/V pool, an *index* its place in the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import Sampling


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step."""

    sequence_id: int
    known: tuple[int, ...]
    """Tokens the target computes, at indices `first_index` and on."""
    first_index: int
    draft_known: tuple[int, ...]
    """Tokens the draft model computes, at `draft_first_index` and on; ends where `known` ends."""
    draft_first_index: int
    block_ids: tuple[int, ...]
    samples: bool
    sampling: Sampling
    rule: str
    num_drafts: int
    """Chains drafted below the root; 0 when the row does not speculate."""
    draft_length: int
    draft_method: str
    """How the chains' first tokens are drawn (`engine.speculation.drafting`); empty is the rule's own."""

    @property
    def end(self) -> int:
        """Index after the last known token: the index of the first drafted or emitted token."""
        return self.first_index + len(self.known)

    @property
    def num_tokens(self) -> int:
        """Most tokens the row puts into the target pass (before equal prefixes are merged)."""
        return len(self.known) + self.num_drafts * self.draft_length


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows of one step."""

    rows: tuple[Row, ...]

    @property
    def sampling_rows(self) -> tuple[Row, ...]:
        """The rows that will emit tokens, in order."""
        return tuple(row for row in self.rows if row.samples)

    @property
    def has_prefill(self) -> bool:
        """Whether any row computes more than the one token of a decode step."""
        return any(len(row.known) > 1 or not row.samples for row in self.rows)


@dataclass(frozen=True, slots=True)
class Emission:
    """What one sampling row emits: an accepted path of drafted tokens, then one more token."""

    accepted: tuple[int, ...]
    next_token: int
    num_nodes: int
    """Drafted nodes the target verified for this row."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The emissions of the plan's sampling rows, in their order."""

    emissions: tuple[Emission, ...]
