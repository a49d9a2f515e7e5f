"""What a client asked for, in tokens. Frozen: the running state is `scheduling.sequence`."""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. The same values make the target law and the draft law."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens that holds this mass; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens below this share of the most likely token's probability."""
    seed: int = 0
    """Every random number of the request is a function of this (64 bits)."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """When an answer ends."""

    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens are drafted, and how they are verified."""

    rule: str = "bv_race"
    num_drafts: int = 0
    """Chains per step; 0 is plain decoding."""
    draft_length: int = 0
    draft_method: str = ""
    """How the chains' first tokens are drawn; empty is the rule's own method."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One completion of one prompt."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    speculation: Speculation = Speculation()
