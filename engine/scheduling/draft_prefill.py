"""Draft prefill: how far the draft model lags, and how it catches up.

The draft model needs K/V of a text before it can draft from it. For requests with a fixed shape it
reads the prompts together with the target, so it never lags far: they start from a cached prefix
only as far as the draft model can catch up in one step. For adaptive requests the draft model reads
nothing while plain decoding is chosen, because this reading would be most of the work for long
prompts with short answers. When drafting is chosen again, a step reads a bounded number of tokens.
A request whose lag is within its share drafts at once; other requests decode plainly, and the draft
model reads a chunk of their text in every step.

A head reads the target's states, which are stored for every token that the target has computed. It
reads all missing states when it drafts, so a cached prefix is always used in full.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.config import SchedulerConfig
from engine.scheduling.sequence import Sequence

# Minimum number of tokens of a text that the draft model reads per step while it catches up: more
# than a plain step adds.
_LEAST_READ = 4


class DraftPrefill:
    """Number of tokens that the draft model reads of texts from which nothing is drafted yet."""

    def __init__(self, config: SchedulerConfig, draft_window: int, by_head: bool = False) -> None:
        """by_head: whether a head drafts, which catches up with any lag in one step."""
        budget = config.max_num_batched_tokens
        guaranteed = min(budget // 4, config.max_prompt_tokens or budget)
        self.draft_window = draft_window
        self.by_head = by_head
        self.most_lag = max(0, min(max(budget // 8, draft_window), guaranteed - 1))
        """Most lagging tokens of a step.

        Fewer than a prompt's guaranteed ones, so the target advances.
        """
        self._share = self.most_lag

    @property
    def chunk(self) -> int:
        """Return how much of a lag the draft model makes up in a step without drafts."""
        return max(_LEAST_READ, self._share)

    def is_far(self, sequence: Sequence) -> bool:
        """Whether the lag is too large for one step that drafts."""
        if self.by_head:
            return False
        # A decoding row always has room for a lag of a chain's length.
        most = self._share
        if sequence.num_missing == 1:
            most = max(most, sequence.request.speculation.draft_length)
        return sequence.draft_lag > most

    def to_read(self, sequence: Sequence) -> int:
        """Return the number of prompt tokens that the draft model must read to draft."""
        missing = sequence.num_prompt - sequence.num_draft_cached
        return min(missing, sequence.draft_window) if sequence.draft_window else missing

    def most_cached(self, sequence: Sequence, num_with_draft_kv: int) -> int:
        """Return the most cached tokens with which a request can draft in its first step.

        num_with_draft_kv: leading tokens that the draft model need not compute
        (`BlockTables.take_cached`).
        """
        num_text = len(sequence.tokens)
        if self.by_head:
            return num_text
        num_read = num_with_draft_kv
        if sequence.draft_window:
            num_read = max(num_read, num_text - sequence.draft_window)
        return num_read + self.most_lag

    def share_among(self, sequences: Iterable[Sequence]) -> None:
        """Let these sequences catch up in the next step."""
        num_lagging = sum(sequence.draft_lag > 0 for sequence in sequences)
        self._share = self.most_lag // max(1, num_lagging)
