"""Results of a step in the message that leaves the engine: for each request, and for the engine itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    """Longest chain this step drafted; 0 for a plain step."""
    num_chains: int
    text_draft_counts: list[DrafterCount]
    """Contributions of the text drafters; the other counts include them."""
    num_predicted: int
    """Tokens among `token_ids` that the request's prediction contained."""
    rule: str
    num_nodes: int
    """Drafted nodes verified for this request."""
    num_accepted: int
    """Drafted tokens among `token_ids`."""
    num_cached: int
    """Prompt tokens whose K/V was cached when the request was admitted."""
    queue_s: float
    """Time until the request was first admitted."""
    reading_s: tuple[float, float] = (0.0, 0.0)
    """Time of earlier steps that read its text since its last token, and the time that plain decoding would have taken
    for them.
    """
    logprobs: list[TokenLogprob] = []
    """One per token, if the request asked for them."""
    prompt_logprobs: list[msgspec.Raw] = []
    """Logprobs of the prompt's tokens after the first, sent with the first emitted tokens if the request asked for
    them. `write_logprobs` encodes them for each step that read the prompt; the message's decoder skips them.
    """
    gap: float | None = None
    """Optimum acceptance minus the rule's own at this step's first position; None if it was not observed."""
    bias: float = 0.0
    """Distance from the target distribution that lossy acceptance allowed in this step; 0 is exact."""
    drafts: tuple[tuple[int, ...], ...] = ()
    """Chains of the step, if the request asked for them; empty for a plain step."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[TokenLogprob])


def write_logprobs(logprobs: Sequence[TokenLogprob]) -> msgspec.Raw:
    """Encode the logprobs of one step."""
    return msgspec.Raw(_encoder.encode(logprobs))


def read_logprobs(written: Sequence[msgspec.Raw]) -> Iterator[TokenLogprob]:
    """Yield the logprobs of several steps in order."""
    for some in written:
        yield from _decoder.decode(some)


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the engine after a step; times in seconds, counts since start unless said."""

    wall_s: float
    """Duration of this step."""
    plain_s: float | None
    """Time of a plain decoding step of the rows that emit, at their contexts; None if plain steps were not measured."""
    prompt_s: float
    """Part of this step's time that prompts took, and that plain decoding would take as well; noise can make it
    negative.
    """
    phases_s: dict[str, float]
    """Duration of this step by phase (`PHASES`)."""
    num_running: int
    num_waiting: int
    num_blocks_used: int
    num_preemptions: int
    num_cache_queries: int
    """Tokens of admitted texts."""
    num_cache_hits: int
    """Those of them with cached K/V."""
    num_steps: int

    def times_of(self, outcome: Outcome) -> tuple[float, float] | None:
        """Return the seconds that plain decoding would have taken for the tokens of this step, and those that
        it took; with the steps before it that read the request's text. None if plain steps were not measured.
        """
        if self.plain_s is None:
            return None
        taken_s, plain_s = outcome.reading_s
        return len(outcome.token_ids) * self.plain_s + self.prompt_s + plain_s, self.wall_s + taken_s
