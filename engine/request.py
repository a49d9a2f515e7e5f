"""What a client asked for, in tokens. Frozen: the running state is `scheduling.sequence`."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.config import MODEL

_MIN_TEMPERATURE = 1e-5
GRAMMAR = "grammar"
"""Field that errors of grammars name; who made the grammar knows which of its own fields that was."""


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Thoughts at the beginning of an answer, which one token opens and one closes."""

    opens: int
    closes: int
    is_begun: bool
    """Whether the prompt has opened them; otherwise the answer may, with its first token."""
    budget: int | None = None
    """Most tokens of the thoughts; then they are closed."""
    may_end: bool = True
    """Whether the answer may end in them."""


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
    repetition_penalty: float = 1.0
    """Above 1, tokens of the text (prompt and answer) become less likely."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time it is in the answer."""
    presence_penalty: float = 0.0
    """Taken from a token's logit when it is in the answer."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit)."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these may be emitted; empty allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that may not be emitted."""
    grammar: str = ""
    """What the answer must follow, as llguidance reads it; empty is anything."""
    thinking: Thinking | None = None
    """Thoughts that have a budget, or come before what follows the grammar."""
    seed_stable: bool = False
    """The same seed gives the same answer whatever is drafted (`sampling/stable.py`)."""
    seed: int = 0
    """Every random number of the request is a function of this (64 bits)."""

    @property
    def has_penalties(self) -> bool:
        """Whether a token's logit depends on how often it is in the text."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def edits_logits(self) -> bool:
        """Whether the logits are changed before temperature and filters."""
        masks = self.allowed_token_ids or self.bad_words or self.grammar or self.thinking
        return self.has_penalties or bool(self.logit_bias or masks)

    @property
    def is_certain(self) -> bool:
        """Whether law and seed leave one token only: drafts are right or wrong, and no rule is needed."""
        return self.is_greedy or self.seed_stable

    @property
    def is_greedy(self) -> bool:
        """Whether the law is the most likely token: below this a temperature is 0, float32 could not scale by it."""
        return self.temperature < _MIN_TEMPERATURE


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """When an answer ends."""

    max_tokens: int = 16
    min_tokens: int = 0
    """No end and no stop token before this many tokens."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens are drafted, and how they are verified."""

    rule: str = "bv_race"
    num_drafts: int = 0
    """Chains per step (the leaves of a tree); 0 is plain decoding."""
    draft_length: int = 0
    """Tokens in a chain (the depth of a tree)."""
    draft_method: str = ""
    """How the children of one node are drawn; empty is the rule's own method."""
    tree: tuple[int, ...] = ()
    """Children of every node by depth, `draft_length` entries with product `num_drafts`; empty is chains that part at
    the root."""
    drafters: tuple[str, ...] = (MODEL,)
    """Where drafts come from: the draft model, `prompt_lookup`, the request's `prediction`."""
    adaptive: bool = False
    """Whether the engine chooses the shape by load and acceptance (`scheduling.controller`); the two counts above are
    the most it drafts then."""
    over_acceptance: float = 0.0
    """Lossy: drafts are accepted as if the target law were larger by this much; 0 is exact."""
    over_acceptance_residual: Literal["optimal", "target"] = "optimal"
    """Lossy: where rejected drafts are drawn again from: `optimal` (Theorem 4 of Yin et al.) or `target`."""

    @property
    def copies(self) -> bool:
        """Whether chains may be copied instead of drawn."""
        return self.drafters != (MODEL,)

    @property
    def fanout(self) -> tuple[int, ...]:
        """Children of every node by depth."""
        if not self.num_drafts:
            return ()
        return self.tree or (self.num_drafts, *(1,) * (self.draft_length - 1))


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """How likely the model found an emitted token, and the likeliest ones instead.

    Of the target model's own law: before temperature, filters, bias, penalties and masks (as vLLM's raw_logprobs).
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token, logprob), likeliest first."""


class DrafterCount(msgspec.Struct, frozen=True, array_like=True):
    """What one drafter contributed to a step."""

    name: str
    num_chains: int
    num_nodes: int
    """Nodes the target verified, each counted for one drafter."""
    num_accepted: int


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One completion of one prompt."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    speculation: Speculation = Speculation()
    num_logprobs: int | None = None
    """Report each emitted token's logprob, and this many of the likeliest tokens; None reports nothing."""
    priority: int = 0
    """Lower is served earlier and preempted later; among equals the first come."""
    prediction: tuple[int, ...] = ()
    """What the answer will probably be."""
    cache_salt: str = ""
    """K/V is shared among requests of the same salt only."""
    client: str = ""
    """Opaque name of the client: clients take turns where they wait for grammars."""
    num_prompt_logprobs: int | None = None
    """The same for the prompt's tokens (all but the first)."""
    reports_drafts: bool = False
    """Report the chains of every step."""
