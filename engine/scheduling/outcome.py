"""What a step gave, in the message that leaves the engine: to each request, and of the engine itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from engine.request import DrafterCount, TokenLogprob

PHASES = ("draft", "target", "verify", "keep", "host")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one step gave one request."""

    request_id: str
    token_ids: list[int]
    finish_reason: str | None
    """`stop`, `length`, or None while the answer goes on."""
    draft_length: int
    """Longest chain this step drafted; 0 for a plain step."""
    num_chains: int
    copied: list[DrafterCount]
    """What each text drafter contributed; the other counts include it."""
    num_predicted: int
    """Tokens among `token_ids` that the request's prediction has foreseen."""
    rule: str
    num_nodes: int
    """Drafted nodes verified for this request."""
    num_accepted: int
    """Drafted tokens among `token_ids`."""
    num_cached: int
    """Prompt tokens whose K/V was there when the request was admitted."""
    queue_s: float
    """How long the request waited before it was first admitted."""
    logprobs: list[TokenLogprob] = []
    """One per token, where the request asked for them."""
    prompt_logprobs: list[msgspec.Raw] = []
    """With the first tokens: of the prompt's tokens but the first, where the request asked for them. Written by
    `write_logprobs` for each step that read the prompt, so that none of it is decoded with the message."""
    gap: float | None = None
    """Optimum acceptance minus the rule's own at this step's first position; None where it was not observed."""
    bias: float = 0.0
    """Distance from the target law that lossy acceptance allowed in this step; 0 is exact."""
    drafts: tuple[tuple[int, ...], ...] = ()
    """The chains of the step, where the request asked for them; none of a plain step."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[TokenLogprob])


def write_logprobs(logprobs: Sequence[TokenLogprob]) -> msgspec.Raw:
    """Logprobs of one step as bytes."""
    return msgspec.Raw(_encoder.encode(logprobs))


def read_logprobs(written: Sequence[msgspec.Raw]) -> Iterator[TokenLogprob]:
    """The logprobs of several steps in their order."""
    for some in written:
        yield from _decoder.decode(some)


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the engine after a step; times in seconds, counts since start unless said."""

    wall_s: float
    """Duration of this step."""
    plain_s: float | None
    """What a plain decoding step of the rows that emit takes, at their contexts; None where no steps were measured."""
    prompt_s: float
    """How much of this step went into prompts, which plain decoding would have to read as well; by chance below 0."""
    phases_s: dict[str, float]
    """Duration of this step by phase (`PHASES`)."""
    num_running: int
    num_waiting: int
    num_blocks_used: int
    num_preemptions: int
    num_cache_queries: int
    """Tokens of admitted texts."""
    num_cache_hits: int
    """Those of them whose K/V was there."""
    num_steps: int
