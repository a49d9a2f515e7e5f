"""What a step gave one request: the message that leaves the engine."""

from __future__ import annotations

import msgspec

from engine.request import DrafterCount, TokenLogprob


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
    prompt_logprobs: list[TokenLogprob] = []
    """With the first tokens: of the prompt's tokens but the first, where the request asked for them."""
    gap: float | None = None
    """Optimum acceptance minus the rule's own at this step's first position; None where it was not observed."""
    bias: float = 0.0
    """Distance from the target law that lossy acceptance allowed in this step; 0 is exact."""
    drafts: tuple[tuple[int, ...], ...] = ()
    """The chains of the step, where the request asked for them; none of a plain step."""
