"""Draft prefill: how far the draft model is behind a text, and how it catches up.

The draft model needs K/V of a text before it can draft from it. Requests with a shape of their own are never far
behind: the draft model reads their prompts together with the target, and they start from a cached prefix only as far
as the draft model can catch up in one step. For adaptive requests the draft model reads nothing while plain decoding is
chosen, because with long prompts and short answers that reading would be most of the work. When drafting is chosen
again, a step reads a bounded number of tokens. A request that is behind by no more than its share drafts at once; the
others decode plainly, and the draft model reads a chunk of their text in every step.

A head reads the target's states, which are stored for every token that the target has computed. It reads all that it is
missing when it drafts, so that nothing of a cached prefix is given up for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.config import SchedulerConfig
from engine.scheduling.sequence import Sequence

# Least tokens of a text that the draft model reads in a step while it catches up: more than a plain step adds.
_LEAST_READ = 4


class DraftPrefill:
    """How many tokens the draft model reads of texts that nothing is drafted from yet."""

    def __init__(self, config: SchedulerConfig, draft_window: int, by_head: bool = False) -> None:
        """by_head: whether a head drafts, which is never too far behind."""
        budget = config.max_num_batched_tokens
        sure = min(budget // 4, config.max_prompt_tokens or budget) - 1
        self.draft_window = draft_window
        self.by_head = by_head
        self.most_lag = max(0, min(max(budget // 8, draft_window), sure))
        """Most tokens that the draft model may catch up on in a step: one less than a prompt is guaranteed, so that the
        target advances too."""
        self._share = self.most_lag

    @property
    def chunk(self) -> int:
        """Tokens that it catches up on in a step in which a request drafts nothing."""
        return max(_LEAST_READ, self._share)

    def lag(self, sequence: Sequence) -> int:
        """Known tokens it must catch up on before the target's next; none where nothing is drafted."""
        if not sequence.request.speculation.num_drafts:
            return 0
        return max(0, sequence.num_target_computed - draft_from(sequence))

    def is_far(self, sequence: Sequence) -> bool:
        """Whether it is too far behind to catch up in a step that drafts."""
        if self.by_head:
            return False
        # As many as a chain has tokens fit a decoding row in any case.
        fitting = sequence.request.speculation.draft_length if sequence.num_missing == 1 else 0
        return self.lag(sequence) > max(self._share, fitting)

    def to_read(self, sequence: Sequence) -> int:
        """Prompt tokens it reads for a request that drafts."""
        missing = len(sequence.request.prompt_token_ids) - sequence.num_cached
        return min(missing, sequence.draft_window) if sequence.draft_window else missing

    def most_cached(self, sequence: Sequence, num_drafted: int) -> int:
        """Tokens of a cached prefix that a request begins behind if it is to draft in its first step: the draft model
        has K/V of `num_drafted` of them."""
        if self.by_head:
            return len(sequence.tokens)
        nearest = len(sequence.tokens) - sequence.draft_window if sequence.draft_window else 0
        return max(num_drafted, nearest) + self.most_lag

    def share_among(self, sequences: Iterable[Sequence]) -> None:
        """These may catch up in the next step."""
        self._share = self.most_lag // max(1, sum(self.lag(sequence) > 0 for sequence in sequences))


def draft_from(sequence: Sequence) -> int:
    """Index of the first token that the draft model would compute: no further back than it sees."""
    computed, window = sequence.num_draft_computed, sequence.draft_window
    return max(computed, len(sequence.tokens) - window) if window else computed
