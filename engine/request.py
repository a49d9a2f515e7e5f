"""A client's request, in tokens. Frozen: the running state is `scheduling.sequence`."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.config import MODEL
from engine.fanout import Fanout

_MIN_TEMPERATURE = 1e-5
GRAMMAR = "grammar"
"""Field in errors of grammars, for which the server puts the client's."""


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Thoughts at the beginning of an answer, between an opening mark and a closing token."""

    opens: tuple[int, ...]
    closes: int
    between: tuple[int, ...] = ()
    """Tokens after closed thoughts, before further thoughts or the lead."""
    lead: tuple[int, ...] = ()
    """Mark that begins the rest of the answer; empty if it follows the closing token."""
    is_begun: bool
    """Whether the prompt has opened the thoughts; else the answer's first tokens may."""
    budget: int | None = None
    """Most tokens of the thoughts, which are closed then."""
    may_end: bool = True
    """Whether the answer may end in them."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of sampling. Both the target and the draft distribution are computed with them."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0 uses all."""
    top_p: float = 1.0
    """Sample from the smallest set with this probability; 1 uses all."""
    min_p: float = 0.0
    """Drop tokens below this share of the largest probability."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of prompt and answer become less likely."""
    frequency_penalty: float = 0.0
    """Subtracted from a logit for each time the token is in the answer."""
    presence_penalty: float = 0.0
    """Subtracted from a logit if the token is in the answer."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, addend of its logit)."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these may be emitted; empty allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""
    """In llguidance's format; empty allows everything."""
    thinking: Thinking | None = None
    """Thoughts with a budget, or before the part that follows the grammar."""
    seed_stable: bool = False
    """Whether a seed gives one answer for any drafts (`sampling/stable.py`)."""
    seed: int = 0
    """All random numbers are a function of it (64 bits)."""

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
        """Return whether distribution and seed allow one token only, so no rule is needed."""
        return self.is_greedy or self.seed_stable

    @property
    def is_greedy(self) -> bool:
        """Return whether the most likely token has probability 1; less would overflow float32."""
        return self.temperature < _MIN_TEMPERATURE


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions that end an answer."""

    max_tokens: int = 16
    min_tokens: int = 0
    """Tokens before which no end token and no stop token is allowed."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """Number of drafted tokens, and their verification."""

    rule: str = "bv_race"
    num_drafts: int = 0
    """Chains drawn per step (leaves of a tree); 0 draws none."""
    draft_length: int = 0
    """Tokens in a chain (depth of a tree)."""
    draft_method: str = ""
    """Method of drawing a node's children; empty is the rule's own."""
    tree: tuple[int, ...] = ()
    """Children by depth, with product `num_drafts`; empty is chains from the root."""
    drafters: tuple[str, ...] = (MODEL,)
    """Sources: `model`, `prompt_lookup`, `prediction`, `earlier_answers`."""
    adaptive: bool = False
    """Whether the engine chooses the shape by load and acceptance (`engine.control`).

    The limit is num_drafts chains and num_drafts x draft_length tokens, so fewer
    chains may be longer.
    """
    over_acceptance: float = 0.0
    """Lossy: target probabilities seem larger by this amount; 0 is exact."""
    over_acceptance_residual: Literal["optimal", "target"] = "optimal"
    """Lossy: law that replaces rejected drafts, `optimal` (Theorem 4 of Yin et al.) or `target`."""

    @property
    def uses_text_drafts(self) -> bool:
        """Whether text drafts may be used."""
        return self.drafters != (MODEL,)

    @property
    def without_drawn(self) -> Speculation:
        """Return the same with text drafts alone."""
        return msgspec.structs.replace(self, num_drafts=0, draft_length=0, tree=(), draft_method="")

    @property
    def adapts_shape(self) -> bool:
        """Whether the engine chooses the shape of drawn drafts."""
        return self.adaptive and self.num_drafts > 0

    @property
    def fanout(self) -> Fanout:
        """Return the children by depth, the maximum if the engine chooses the shape."""
        if not self.num_drafts:
            return ()
        return self.tree or (self.num_drafts, *(1,) * (self.draft_length - 1))


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of an emitted token, and the likeliest tokens at its position.

    They are those of the target model's distribution before temperature, filters, bias, penalties
    and masks (vLLM's raw_logprobs).
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token, logprob), likeliest first."""


class DrafterCount(msgspec.Struct, frozen=True, array_like=True):
    """Contribution of one drafter to a step."""

    name: str
    num_chains: int
    num_nodes: int
    """Verified nodes, each counted for one drafter."""
    num_accepted: int


class TextDraft(msgspec.Struct, frozen=True):
    """A chain that was found in a text instead of drawn."""

    source: str
    tokens: tuple[int, ...]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One completion of one prompt."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    speculation: Speculation = Speculation()
    num_logprobs: int | None = None
    """Likeliest tokens reported with each emitted one; None reports no logprobs."""
    priority: int = 0
    """Lower is served earlier and preempted later; equal ones by arrival."""
    prediction: tuple[int, ...] = ()
    """Predicted text of the answer."""
    cache_salt: str = ""
    """K/V is shared among requests of the same salt only."""
    client: str = ""
    """Opaque name; clients take turns in steps and in the queue of grammars."""
    num_prompt_logprobs: int | None = None
    """Likeliest tokens reported for each prompt token but the first; None reports nothing."""
    reports_drafts: bool = False
