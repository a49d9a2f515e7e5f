"""Models of answers (msgspec, which is ten times as fast as pydantic), and large lists in them.

Not for: requests (`fields.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import msgspec

_SLICE = 4096
"""Values per call of the encoder, which holds the lock: well below a millisecond."""
_encoder = msgspec.json.Encoder()


def raw_list(items: Iterable[Any], per_slice: int = _SLICE) -> msgspec.Raw:
    """Return a list as JSON. per_slice: items per call of the encoder; fewer if each is large."""
    left = iter(items)
    parts = []
    while slice_ := list(islice(left, per_slice)):
        parts.append(_encoder.encode(slice_)[1:-1])
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """OpenAI's details of the prompt's tokens."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """OpenAI's details of the answer's tokens."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a request, over all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class DrafterMetrics(msgspec.Struct, frozen=True):
    """Contribution of one drafter."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int


class SpeculativeDecoding(msgspec.Struct, frozen=True):
    """Statistics of speculation for one answer, counted after the cut at EOS, stop or length."""

    mean_acceptance_length: float | None
    """Tokens of a speculative step, with the target's own token; plain passes do not count."""
    tokens_per_pass: float | None
    """Tokens of a target pass, plain passes included."""
    num_passes: int
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    speedup: float | None
    draft_time_share: float | None
    rule: str
    optimal_acceptance_gap: float | None
    """Mean of alpha* minus the rule's acceptance in observed steps, if any."""
    bias_bound: float
    """Distance from the target by over-acceptance, summed over positions; 0 if exact."""
    drafters: dict[str, DrafterMetrics]


class Metrics(msgspec.Struct, frozen=True):
    """Times and speculation of one answer."""

    time_to_first_token_ms: float | None
    generation_time_ms: float
    queue_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None
    speculative_decoding: SpeculativeDecoding | None
    """Over all choices."""
    choices: list[SpeculativeDecoding | None] | msgspec.UnsetType = msgspec.UNSET
    """Statistics of each choice, if there are several."""
    max_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Maximum number of answer tokens, if the context left less room than the request asked for."""
    num_resting_passes: int | msgspec.UnsetType = msgspec.UNSET
    """Passes without drafts, because plain decoding is as fast at this load; left out if none."""


class TopLogprob(msgspec.Struct, frozen=True):
    """A likely token in OpenAI's chat shape."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob, frozen=True):
    """An emitted token in OpenAI's chat shape."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a chat choice."""

    content: msgspec.Raw
    """A list of `ChatTokenLogprob`."""
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a completion choice."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Log probabilities; null for the first token of an echoed prompt."""
    top_logprobs: msgspec.Raw
    """Objects with logprobs by text."""
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Token at a position of the prompt, in vLLM's format."""

    logprob: float
    decoded_token: str
    rank: int | msgspec.UnsetType = msgspec.UNSET
    """Rank among the likeliest tokens, if it is known."""


class AnsweredFunction(msgspec.Struct, frozen=True):
    """The function of a call in an answer."""

    name: str
    arguments: str


class AnsweredCall(msgspec.Struct, frozen=True):
    """A call in a whole answer."""

    id: str
    function: AnsweredFunction
    type: str = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """Message of a chat answer."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    annotations: tuple[()] = ()
    """Citations of web pages; this server makes none."""
    tool_calls: list[AnsweredCall] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    """Thoughts of a model that thinks; `reasoning` is the same under vLLM's newer name."""
    reasoning: str | msgspec.UnsetType = msgspec.UNSET


class DraftedStep(msgspec.Struct, frozen=True):
    """Drafted and emitted tokens of one step, as texts."""

    chains: list[list[str]]
    """Drafted tokens of each chain; none in a plain step."""
    drafters: list[str]
    """Drafter of each chain: `model`, or the name of a text drafter."""
    num_accepted: int
    """Number of the step's tokens that are accepted drafts."""
    tokens: list[str]
    """Tokens that the step added to the answer."""


class ChatChoice(msgspec.Struct, frozen=True):
    """One choice of a chat answer."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None
    """Stop string or stop token id that ended the choice (vLLM's field)."""
    prompt_logprobs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET
    drafts: Sequence[DraftedStep] | msgspec.UnsetType = msgspec.UNSET
    speculative_decoding_stats: dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET
    """Statistics of speculation (vLLM's field); null if the choice did not speculate."""


class CompletionChoice(msgspec.Struct, frozen=True):
    """One choice of a completion, whole or as a chunk."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None = None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    """Stop string or stop token id that ended the choice (vLLM's field); last chunk only."""
    prompt_logprobs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET
    drafts: Sequence[DraftedStep] | msgspec.UnsetType = msgspec.UNSET
    speculative_decoding_stats: dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    """One choice of a chat chunk."""

    index: int
    delta: dict[str, Any]
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET
    drafts: Sequence[DraftedStep] | msgspec.UnsetType = msgspec.UNSET
    speculative_decoding_stats: dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A whole answer, or one chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: Any
    usage: Any = msgspec.UNSET
    """Usage, null or left out."""
    metrics: Metrics | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET
    """Prompt of a chat, if it was requested; in a stream only the first chunk has it."""
