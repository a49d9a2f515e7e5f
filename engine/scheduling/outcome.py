"""Results of a step in the message that leaves the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from operator import add, sub

import msgspec

from engine.request import DrafterCount, TokenLogprob

PHASES = ("draft", "target", "verify", "keep", "host")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one step for one request."""

    request_id: str
    token_ids: list[int]
    finish_reason: str | None
    """`stop`, `length`, or None while the answer continues."""
    draft_length: int
    """Length of the longest chain; 0 for a plain step."""
    num_chains: int
    text_draft_counts: list[DrafterCount]
    """Counts of each text drafter, which all counts below include."""
    num_predicted: int
    """Tokens of `token_ids` that the request's prediction contained."""
    rule: str
    num_nodes: int
    num_accepted: int
    num_cached: int
    """Prompt tokens with cached K/V at admission."""
    queue_s: float
    """Time until the first admission."""
    reading_s: tuple[float, float] = (0.0, 0.0)
    """Time of prompt-only steps since the last token, and of the same steps without drafts."""
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[msgspec.Raw] = []
    """Logprobs of the prompt after its first token, in the outcome of the first emission.

    Encoded by `write_logprobs`; the message's decoder skips them.
    """
    gap: float | None = None
    """Optimum acceptance minus the rule's at the step's first position; None if not observed."""
    bias: float = 0.0
    """Distance from the target distribution by lossy acceptance; 0 is exact."""
    drafts: tuple[tuple[int, ...], ...] = ()
    """Chains of the step, if the request asked for them."""
    rests: bool = False
    """Whether the controller chose plain decoding as equally fast at this load."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[TokenLogprob])


def write_logprobs(logprobs: Sequence[TokenLogprob]) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(logprobs))


def read_logprobs(written: Sequence[msgspec.Raw]) -> Iterator[TokenLogprob]:
    """Yield the logprobs of several steps in order."""
    for logprobs in written:
        yield from _decoder.decode(logprobs)


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the engine after a step; times in seconds, counts since start unless said."""

    wall_s: float
    plain_s: float | None
    """Time of a plain step of the emitting rows under this step's load; None until measured.

    With `prompt_s` it is at most `wall_s`.
    """
    usual_plain_s: float
    """Time of such a plain step by the model of step times, without this step's delays."""
    prompt_s: float
    """Time of this step's prompts, which plain decoding would take as well."""
    phases_s: dict[str, float]
    """Duration by phase (`PHASES`)."""
    num_running: int
    num_waiting: int
    num_blocks_used: int
    num_states_used: int = 0
    """Places of running sequences' states and of cached ones, of target and draft model."""
    num_preemptions: int
    num_cache_queries: int
    num_cache_hits: int
    num_state_hits: int = 0
    """Texts that started from a cached state."""
    num_state_evictions: int = 0
    num_steps: int


@dataclass
class Timing:
    """Times of steps, and of plain decoding for the tokens that they added to answers.

    pass: a step in which an answer received tokens, counted for each answer.

    speedup = (factor * plain_s + prompt_s) / wall_s

    `factor` is the number of plain passes that a pass replaces: the tokens per pass, each token
    weighted by the usual time of a plain pass at that moment, and at most the tokens per pass. No
    pass counts with more plain time than it took (`StepStats`), so a speedup is at most the tokens
    per pass, and at most 1 without an accepted draft.
    """

    num_passes: int = 0
    num_tokens: int = 0
    wall_s: float = 0.0
    """Time of the passes, and of earlier steps that read the answers' texts."""
    plain_s: float = 0.0
    """Time of one plain pass in place of each pass, under its load."""
    prompt_s: float = 0.0
    """Time of plain decoding for prompts in these steps."""
    usual_s: float = 0.0
    """Usual time of one plain pass in place of each pass."""
    usual_tokens_s: float = 0.0
    """Usual time of one plain pass for each token."""

    def add(self, stats: StepStats, outcome: Outcome) -> None:
        """Count a step's part in an answer, if plain steps were measured."""
        if stats.plain_s is None:
            return
        num_tokens = len(outcome.token_ids)
        read_s, plain_read_s = outcome.reading_s
        self.num_passes += bool(num_tokens)
        self.num_tokens += num_tokens
        self.wall_s += stats.wall_s + read_s
        self.prompt_s += stats.prompt_s + plain_read_s
        if num_tokens:
            self.plain_s += stats.plain_s
            self.usual_s += stats.usual_plain_s
            self.usual_tokens_s += num_tokens * stats.usual_plain_s

    def __add__(self, other: Timing) -> Timing:
        return Timing(*map(add, astuple(self), astuple(other)))

    def __sub__(self, earlier: Timing) -> Timing:
        """Return the counts since an earlier state of the same counts."""
        return Timing(*map(sub, astuple(self), astuple(earlier)))

    @property
    def speedup(self) -> float | None:
        """Time of plain decoding divided by the time taken; None if nothing was timed."""
        if not self.wall_s or not self.usual_s:
            return None
        factor = min(self.usual_tokens_s / self.usual_s, self.num_tokens / self.num_passes)
        return (factor * self.plain_s + self.prompt_s) / self.wall_s
