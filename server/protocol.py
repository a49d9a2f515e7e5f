"""Wire models: what clients send (pydantic, strict) and what they get (msgspec, fast).

Unknown keys are ignored, because clients add keys monthly. A known key whose value is not
supported is refused by name (`server/sampling_fields.py`); nothing is silently dropped.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("the text holds half of a surrogate pair, which is not valid Unicode") from error
    return text


Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, AfterValidator(_encodable)]
"""JSON can spell text that no encoding of Unicode has, and no tokenizer takes."""


class Wire(BaseModel):
    """Strict types, no NaN or infinity, unknown keys ignored; null is the same as left out."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        return {key: value for key, value in body.items() if value is not None} if isinstance(body, dict) else body


class StreamOptions(Wire):
    """What a stream carries beside text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SpeculationFields(Wire):
    """A request's own speculation; what is left out comes from the server's settings."""

    enabled: bool = True
    num_drafts: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    draft_length: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    rule: str | None = None
    draft_method: str | None = None
    tree: Annotated[list[Annotated[int, Field(ge=1, lt=2**31)]], Field(min_length=1, max_length=256)] | None = None
    over_acceptance: Annotated[float, Field(ge=0, le=1)] | None = None
    over_acceptance_residual: Literal["optimal", "target"] | None = None
    drafters: Annotated[list[str], Field(min_length=1, max_length=3)] | None = None


class TextPart(Wire):
    """A part of a message's content."""

    type: str
    text: Text | None = None


class Prediction(Wire):
    """What the answer will probably be."""

    type: Literal["content"]
    content: Text | list[TextPart]


class GenerationFields(Wire):
    """What chat and completions have in common."""

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Int64 | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: Annotated[list[Int64], Field(max_length=4096)] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    speculation: SpeculationFields | None = None
    prediction: Prediction | None = None
    """Drafts of the answer (OpenAI's Predicted Outputs)."""
    metrics: bool | None = None
    """Whether the answer carries `metrics`; the server's setting when left out."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=1024)] | None = None
    """By token id (OpenAI's keys are strings), each from -100 to 100."""
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    allowed_token_ids: Annotated[list[Int64], Field(max_length=65536)] | None = None
    bad_words: Annotated[list[Text], Field(max_length=128)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    """Lower is served earlier (vLLM's meaning)."""
    cache_salt: Annotated[Text, Field(min_length=1, max_length=1024)] | None = None
    """K/V is shared among requests of the same salt only."""

    # Structured output (server/structured.py).
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    # Known, and refused unless neutral (server/sampling_fields.py).
    best_of: int | None = None
    prompt_logprobs: Any = None
    reasoning_effort: Any = None
    use_beam_search: Any = None


class Message(Wire):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: str | None = None


class ChatRequest(GenerationFields):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    chat_template_kwargs: dict[str, Any] | None = None
    """More variables for the model's chat template."""
    continue_final_message: bool = False
    """Go on with the last message, which must be the assistant's, instead of answering it."""
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: list[str] | None = None
    store: bool | None = None
    web_search_options: Any = None


class CompletionRequest(GenerationFields):
    """Body of `POST /v1/completions`."""

    prompt: Text | list[Text] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    """Begin the answer with the prompt, with its logprobs where logprobs are asked for."""
    # Known, and refused unless neutral (server/sampling_fields.py).
    chat_template_kwargs: Any = None
    continue_final_message: Any = None
    suffix: str | None = None


class TokenizeRequest(Wire):
    """Body of `POST /tokenize`: a prompt, or a conversation."""

    model: str | None = None
    prompt: Text | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Wire):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """OpenAI's details of the prompt's tokens."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """OpenAI's details of the answer's tokens."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request, over all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class DrafterMetrics(msgspec.Struct, frozen=True):
    """What one drafter contributed."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int


class SpeculativeDecoding(msgspec.Struct, frozen=True):
    """What speculation did for one answer, counted after the cut at EOS, stop or length."""

    mean_acceptance_length: float | None
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
    """Mean of alpha* minus the rule's acceptance over the observed steps; None where none was observed."""
    bias_bound: float
    """0: exact. Else the distance from the target law that over-acceptance allowed, summed over positions."""
    drafters: dict[str, DrafterMetrics]


class Metrics(msgspec.Struct, frozen=True):
    """Times and speculation of one answer."""

    time_to_first_token_ms: float | None
    generation_time_ms: float
    queue_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None
    speculative_decoding: SpeculativeDecoding | None


class TopLogprob(msgspec.Struct, frozen=True):
    """A likely token in OpenAI's chat shape."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """An emitted token in OpenAI's chat shape."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a chat choice."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a completion choice."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatMessage(msgspec.Struct, frozen=True):
    """The answer of a chat."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One choice of a chat answer."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class CompletionChoice(msgspec.Struct, frozen=True):
    """One choice of a completion, whole or as a chunk."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    """One choice of a chat chunk."""

    index: int
    delta: dict[str, str]
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None


Choices = list[ChatChoice] | list[ChunkChoice] | list[CompletionChoice]


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
