"""Running state of a request. The scheduler writes it; telemetry only notes the time of reading."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field

import msgspec

from engine.fixed_edits import SharedEdits
from engine.needs import needs_of_distribution
from engine.plan import Grammar, TargetShift
from engine.request import Request
from engine.scheduling.states import SequenceStates
from engine.scheduling.store import Key, next_key, root_key
from engine.scheduling.text_drafters import TextDraftFinder
from engine.scheduling.text_drafters.answers import AnswerStore
from engine.scheduling.text_drafters.tree import TextTree
from engine.text_counts import TextCounts


@dataclass(eq=False)
class Sequence:
    """Running state of one request: its text so far, and how much of it has K/V."""

    sequence_id: int
    """Increases in order of arrival."""
    request: Request
    arrived_s: float
    grammar: Grammar | None = None
    draft_window: int = 0
    """Tokens before its drafts that the draft model sees; 0 for all."""
    fixed_draft_distribution: InitVar[bool] = False
    """Whether all steps must draft from one distribution; with a window it depends on the step."""
    eos_token_ids: InitVar[frozenset[int]] = frozenset()
    edits: InitVar[SharedEdits | None] = None
    answers: InitVar[AnswerStore | None] = None
    """Shared with other requests, as `edits` are."""
    by_head: bool = False
    """Whether a head drafts, which reads the target's states before the last token."""
    num_target_computed: int = 0
    num_draft_computed: int = 0
    draft_kv_first: int = 0
    """Index from which draft K/V has no gap."""
    block_ids: tuple[int, ...] = ()
    """Block table of the target; a tuple, so that steps recognise an unchanged table."""
    draft_block_ids: tuple[int, ...] = ()
    """Block table of a separate draft pool."""
    states: SequenceStates = field(default_factory=SequenceStates)
    """Places of its states, if the target has recurrent layers."""
    draft_states: SequenceStates = field(default_factory=SequenceStates)
    num_alike_blocks: int = 0
    """Leading blocks that were cached at its admission, with states or without."""
    first_draft_block: int = 0
    """Index of the first draft block in its table; earlier ones are released or never allocated."""
    num_published_blocks: int = 0
    """Blocks whose target K/V others may use."""
    num_blocks_with_draft_kv: int = 0
    """Blocks whose draft K/V others may use."""
    num_cached: int = 0
    """Prompt tokens with cached K/V at the first admission."""
    num_draft_cached: int = 0
    """Prompt tokens that the draft model skipped at the first admission."""
    last_step: int = -1
    prompt_logprobs: list[msgspec.Raw] = field(default_factory=list)
    shifts: tuple[TargetShift, ...] = ()
    queue_s: float = 0.0
    """Time until the first admission."""

    def __post_init__(
        self,
        fixed_draft_distribution: bool,
        eos_token_ids: frozenset[int],
        edits: SharedEdits | None,
        answers: AnswerStore | None,
    ) -> None:
        request = self.request
        limits = request.limits
        self.tokens = list(request.prompt_token_ids)
        self.num_prompt = len(request.prompt_token_ids)
        self.edits_logits = request.sampling.edits_logits  # computed once: every step asks
        self._stops = frozenset(limits.stop_token_ids)
        if not limits.ignore_eos:
            self._stops |= eos_token_ids
        ends = tuple(sorted(self._stops)) if limits.min_tokens else ()
        self.fixed_edits = (edits or SharedEdits()).of(request.sampling, ends)
        self.counts = TextCounts(self.num_prompt)
        """Token counts for penalties."""
        self.text_draft_finder = TextDraftFinder(request, answers or AnswerStore())
        """False if the request uses no text drafts."""
        self.text_tree: TextTree | None = None
        """Continuations found by text drafters in this step, drafted or not."""
        self.shares_blocks = not (fixed_draft_distribution and self.draft_window)
        """Whether it uses the prefix cache; not if it must draft without the server's window.

        Cached draft K/V was computed with the window.
        """
        if fixed_draft_distribution:
            self.draft_window = 0
        self._keys: list[Key] = []
        self._was_admitted = False
        self._reading_s = (0.0, 0.0)

    @property
    def holds_back(self) -> bool:
        """Whether the next token must not end the answer."""
        return self.num_emitted < self.request.limits.min_tokens

    @property
    def has_context(self) -> bool:
        """Whether its distribution depends on more than its logits (`Row.text`)."""
        return self.edits_logits or self.holds_back

    @property
    def needs(self) -> int:
        """Return what an emitting row needs of a step, whatever it drafts (`engine.needs`)."""
        return needs_of_distribution(self.has_context, bool(self.shifts), self.request.sampling)

    @property
    def num_emitted(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        return self.request.limits.max_tokens + self.num_prompt - len(self.tokens)

    @property
    def num_missing(self) -> int:
        """Return the known tokens without target K/V, at least one while the request runs."""
        return len(self.tokens) - self.num_target_computed

    @property
    def next_draft_read(self) -> int:
        """Return the index of the first token that the draft model would compute, in its window."""
        if not self.draft_window:
            return self.num_draft_computed
        return max(self.num_draft_computed, len(self.tokens) - self.draft_window)

    @property
    def draft_lag(self) -> int:
        """Return how many tokens the draft model is behind the target; 0 if nothing is drafted."""
        if not self.request.speculation.num_drafts:
            return 0
        return max(0, self.num_target_computed - self.next_draft_read)

    @property
    def may_draft(self) -> bool:
        """Return whether drafts can follow its text now.

        A head drafts after a single token without target K/V, and never before the answer's first
        token, so drafts do not depend on how the prompt was cut.
        """
        return not self.by_head or (self.num_missing == 1 and self.num_emitted > 0)

    @property
    def num_shared(self) -> int:
        """Return the number of tokens of its text whose K/V may come from the prefix cache.

        The last token is always computed. A head drafts from the target's states of earlier steps,
        and another request may compute a cached block in this step. So a text that resumes drafting
        leaves out two tokens, and drafts in its second step.
        """
        resumes_by_head = self.by_head and self.num_emitted > 0
        return len(self.tokens) - (2 if resumes_by_head else 1)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logprobs of the prompt will be reported with the first emitted tokens."""
        return self.request.num_prompt_logprobs is not None and not self.num_emitted

    def note_reading(self, taken_s: float, plain_s: float) -> None:
        """Record a step that read its text without giving it a token."""
        earlier_taken_s, earlier_plain_s = self._reading_s
        self._reading_s = (earlier_taken_s + taken_s, earlier_plain_s + plain_s)

    def take_reading(self) -> tuple[float, float]:
        """Return (seconds of prompt-only steps since the last token, seconds if plain)."""
        reading_s = self._reading_s
        self._reading_s = (0.0, 0.0)
        return reading_s

    def cut(self, emitted: list[int]) -> tuple[list[int], str | None]:
        """Return the emitted tokens that the answer takes, and its finish reason or None."""
        # Only the prompt was requested: the token drawn after it is dropped.
        if not self.request.limits.max_tokens:
            return [], "length"
        num_remaining = self.num_remaining
        emitted = emitted[:num_remaining]
        for count, token in enumerate(emitted, start=1):
            if token in self._stops:
                return emitted[:count], "stop"
        return emitted, "length" if len(emitted) == num_remaining else None

    def block_keys(self, count: int, block_size: int) -> list[Key]:
        """Return the keys of the first `count` blocks of its text, all of them full."""
        for start in range(len(self._keys) * block_size, count * block_size, block_size):
            before = self._keys[-1] if self._keys else root_key(self.request.cache_salt)
            tokens = self.tokens[start : start + block_size]
            self._keys.append(next_key(before, tokens))
        return self._keys[:count]

    @property
    def held_draft_blocks(self) -> tuple[int, ...]:
        """Return the blocks of the draft model that it holds, if it has separate blocks."""
        return self.draft_block_ids[self.first_draft_block :]

    def note_admission(self, now_s: float) -> None:
        """Record the first admission; later admissions (after preemption) do not count."""
        if not self._was_admitted:
            self._was_admitted = True
            self.queue_s = now_s - self.arrived_s
            self.num_cached = self.num_target_computed
            self.num_draft_cached = self.num_draft_computed

    def forget_computed(self) -> None:
        """Forget which tokens have K/V, after its blocks were released (preemption)."""
        self.num_target_computed = 0
        self.num_draft_computed = 0
        self.draft_kv_first = 0
        self.num_published_blocks = 0
        self.num_blocks_with_draft_kv = 0
        self.prompt_logprobs = []


def urgency(sequence: Sequence) -> tuple[int, int]:
    """Return the key for the order of admission."""
    return sequence.request.priority, sequence.sequence_id


def expendability(sequence: Sequence) -> tuple[int, int, int]:
    """Return the key for preemption, largest first: the least urgent, least computed, latest."""
    return sequence.request.priority, -sequence.num_target_computed, sequence.sequence_id
