"""A request while it runs. Only the scheduler writes it."""

from __future__ import annotations

import msgspec

from engine.fixed_edits import SharedEdits
from engine.plan import Grammar, TargetShift
from engine.request import Request
from engine.scheduling.store import Key, next_key, root_key
from engine.scheduling.text_drafters import TextDraftFinder
from engine.text_counts import TextCounts

_RATIO_WEIGHT = 10.0
"""Weight, in tokens, of the prior belief that a request's drafts are accepted as often as those of all requests."""
_KEEP_DRAFTS = 0.95
"""Share of the drafts' weight that a further step leaves."""


class Sequence:
    """Running state of one request: its text so far, and how much of it has K/V."""

    __slots__ = (
        "_arrived_s",
        "_drafts_expected",
        "_drafts_taken",
        "_keys",
        "_stop_ids",
        "_was_admitted",
        "block_ids",
        "by_head",
        "copier",
        "counts",
        "draft_start",
        "draft_window",
        "edits_logits",
        "ends",
        "fanout",
        "fixed_edits",
        "grammar",
        "last_step",
        "num_cached",
        "num_draft_computed",
        "num_drafted_blocks",
        "num_prompt",
        "num_published_blocks",
        "num_target_computed",
        "prompt_logprobs",
        "queue_s",
        "request",
        "sequence_id",
        "shares_blocks",
        "shifts",
        "tokens",
    )

    def __init__(
        self,
        sequence_id: int,
        request: Request,
        arrived_s: float,
        grammar: Grammar | None = None,
        draft_window: int = 0,
        fixed_draft_law: bool = False,
        eos_token_ids: frozenset[int] = frozenset(),
        edits: SharedEdits | None = None,
        by_head: bool = False,
    ) -> None:
        """sequence_id: they count up, so that their order is that of arrival; draft_window: the server's, 0 is none;
        fixed_draft_law: whether the draft law below a text must be the same in every step, which a window does not give
        because it begins somewhere else in each; edits: those that it may share with others; by_head: whether a head
        drafts, which reads the target's states of the text before the last token."""
        self.sequence_id = sequence_id
        self.request = request
        self.by_head = by_head
        self.grammar = grammar
        # Of the request, because every step asks for them.
        self.num_prompt = len(request.prompt_token_ids)
        self.edits_logits = request.sampling.edits_logits
        self._stop_ids = frozenset(request.limits.stop_token_ids)
        self.ends: tuple[int, ...] = ()
        """Tokens that would end the answer, held back before min_tokens; none if it has no min_tokens."""
        if request.limits.min_tokens:
            self.ends = tuple(sorted(self._stop_ids if request.limits.ignore_eos else self._stop_ids | eos_token_ids))
        self.fixed_edits = (edits or SharedEdits()).of(request.sampling, self.ends)
        self.copier = TextDraftFinder(request)
        self.counts = TextCounts(len(request.prompt_token_ids))
        """Counts of the tokens of the text, for penalties."""
        self.tokens: list[int] = list(request.prompt_token_ids)
        self.num_target_computed = 0
        self.num_draft_computed = 0
        self.draft_start = 0
        """Index from which on the computed draft K/V has no gap."""
        self.draft_window = 0 if fixed_draft_law else draft_window
        """Tokens before its drafts that the draft model sees; 0 is all."""
        self.shares_blocks = self.draft_window == draft_window
        """Whether it uses the prefix cache. False where the server has a draft window, but this request must draft
        without one: cached draft K/V was computed with the window."""
        self.fanout = request.speculation.fanout
        """What its request drafts in a step."""
        self.block_ids: list[int] = []
        self.num_published_blocks = 0
        self.num_drafted_blocks = 0
        """How many of its blocks others may use: for the target, and for the draft model."""
        self.num_cached = 0
        """Prompt tokens whose K/V was there at the first admission."""
        self._keys: list[Key] = []
        self._drafts_taken = self._drafts_expected = 0.0
        self.last_step = -1
        self.prompt_logprobs: list[msgspec.Raw] = []
        self.shifts: tuple[TargetShift, ...] = ()
        self._arrived_s = arrived_s
        self.queue_s = 0.0
        """How long it waited for its first admission."""
        self._was_admitted = False

    @property
    def num_emitted(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Tokens the answer may still get."""
        return self.request.limits.max_tokens + self.num_prompt - len(self.tokens)

    @property
    def num_missing(self) -> int:
        """Known tokens whose target K/V is missing; at least one while the request runs."""
        return len(self.tokens) - self.num_target_computed

    @property
    def may_draft(self) -> bool:
        """Whether drafts can follow its text now. A head drafts behind a lone token whose target K/V is missing, and
        never before the answer's first: so that what is drafted does not depend on how the prompt was cut."""
        return not self.by_head or (self.num_missing == 1 and self.num_emitted > 0)

    @property
    def num_shared(self) -> int:
        """Tokens of its text whose K/V may come from the prefix cache: the last is computed in any case. In the step
        that shares blocks with those that compute them, a head cannot draft: a text that goes on drafting takes two."""
        return len(self.tokens) - (2 if self.by_head and self.num_emitted else 1)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logprobs of the prompt are still to be reported: they come with the first emitted tokens."""
        return self.request.num_prompt_logprobs is not None and not self.num_emitted

    @property
    def acceptance_ratio(self) -> float:
        """Drafted tokens accepted over those expected of any request; near 1 while little is known."""
        return (self._drafts_taken + _RATIO_WEIGHT) / (self._drafts_expected + _RATIO_WEIGHT)

    def note_drafts(self, num_taken: int, expected: float) -> None:
        """Drafts have been verified: so many tokens were accepted, so many were expected; older drafts count less."""
        self._drafts_taken = _KEEP_DRAFTS * self._drafts_taken + num_taken
        self._drafts_expected = _KEEP_DRAFTS * self._drafts_expected + expected

    def cut(self, emitted: list[int], eos_token_ids: frozenset[int]) -> tuple[list[int], str | None]:
        """(the emitted tokens that the answer takes, why it ends with them: `stop`, `length` or None)."""
        limits, num_remaining = self.request.limits, self.num_remaining
        if not limits.max_tokens:  # the prompt alone was asked for; what was drawn after it is dropped
            return [], "length"
        ends = self._stop_ids if limits.ignore_eos else self._stop_ids | eos_token_ids
        emitted = emitted[:num_remaining]
        for count, token in enumerate(emitted, start=1):
            if token in ends:
                return emitted[:count], "stop"
        return emitted, "length" if len(emitted) == num_remaining else None

    def block_keys(self, count: int, block_size: int) -> list[Key]:
        """Keys of the first `count` blocks of its text, all of them full."""
        for start in range(len(self._keys) * block_size, count * block_size, block_size):
            before = self._keys[-1] if self._keys else root_key(self.request.cache_salt)
            self._keys.append(next_key(before, self.tokens[start : start + block_size]))
        return self._keys[:count]

    def note_admission(self, now_s: float) -> None:
        """Remember how the first admission went; later ones (after preemption) do not count."""
        if not self._was_admitted:
            self._was_admitted = True
            self.queue_s = now_s - self._arrived_s
            self.num_cached = self.num_target_computed

    def forget_computed(self) -> list[int]:
        """Drop all K/V (preemption by recomputation) and return the blocks that held it."""
        block_ids, self.block_ids = self.block_ids, []
        self.num_target_computed = self.num_draft_computed = self.draft_start = 0
        self.num_published_blocks = self.num_drafted_blocks = 0
        self.prompt_logprobs = []
        return block_ids


def urgency(sequence: Sequence) -> tuple[int, int]:
    """Order of admission."""
    return sequence.request.priority, sequence.sequence_id


def expendability(sequence: Sequence) -> tuple[int, int, int]:
    """The largest is preempted first: the least urgent, of these the one that loses least, of these the latest."""
    return sequence.request.priority, -sequence.num_target_computed, sequence.sequence_id
