"""Wire models of what clients send (pydantic, strict). What they get: `answers.py`.

A field that would change an answer and is not served is refused by name; other unknown names at the top of a body are
ignored and reported (`unsupported_fields.py`), inside this server's own objects they are refused. Messages, their parts
and tools are the exception: clients send back what they were given by other servers, with keys of theirs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from server.openai.unsupported_fields import Neutral
from server.text.reasoning import Effort

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=1)]
Item = TypeVar("Item")
Listed = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose first wrong element ends its validation: an error for each of a million would cost gigabytes."""
Name = Annotated[str, Field(max_length=1024)]
_MOST_NAMES = 256
MAX_MESSAGES = 8192
MAX_PARTS = 4096
MAX_STRINGS = 1024
MAX_TOOLS = 512
"""Coding agents with several tool servers offer hundreds."""


class Wire(BaseModel):
    """Strict types, no NaN or infinity, unknown keys ignored; null is the same as left out."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict) or None not in body.values():
            return body
        return {key: value for key, value in body.items() if value is not None}


class Closed(Wire):
    """An object whose fields are all known: any other name in it is a mistake."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _with_few_names(cls, body: Any) -> Any:
        # Each unknown name is an error.
        if isinstance(body, dict) and len(body) > _MOST_NAMES:
            raise ValueError(f"an object has at most {_MOST_NAMES} names here")
        return body


class StreamOptions(Closed):
    """What a stream carries beside text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False
    """Never done here: it would add noise to chunks."""


class SpeculationFields(Closed):
    """A request's own speculation; what is left out comes from the server's settings."""

    enabled: bool = True
    num_drafts: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    draft_length: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    rule: str | None = None
    draft_method: str | None = None
    tree: Annotated[Listed[Annotated[int, Field(ge=1, lt=2**31)]], Field(min_length=1, max_length=256)] | None = None
    over_acceptance: Annotated[float, Field(ge=0, le=1)] | None = None
    over_acceptance_residual: Literal["optimal", "target"] | None = None
    drafters: Annotated[Listed[str], Field(min_length=1, max_length=3)] | None = None
    return_drafts: bool = False
    """Report every step's chains, and how much of them was accepted."""


class TextPart(Wire):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Prediction(Closed):
    """What the answer will probably be."""

    type: Literal["content"]
    content: str | Annotated[Listed[TextPart], Field(max_length=MAX_PARTS)]


class Body(Wire):
    """A whole body; names that no field has are kept apart, for `server/openai/unsupported_fields.py`."""

    model_config = ConfigDict(extra="allow")


class GenerationFields(Body):
    """What chat and completions have in common."""

    model: Name
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    """The newer name of `max_tokens`; counts where both are there."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """Keep this many tokens of the prompt; -1: as many as leave room for the answer (vLLM's field)."""
    truncation_side: Literal["left", "right"] | None = None
    """Where a prompt is cut; left when left out, so that its end stays."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Int64 | None = None
    stop: str | Annotated[Listed[str], Field(max_length=MAX_STRINGS)] | None = None
    stop_token_ids: Annotated[Listed[Int64], Field(max_length=4096)] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculation: SpeculationFields | None = None
    prediction: Prediction | None = None
    """Drafts of the answer (OpenAI's Predicted Outputs)."""
    metrics: bool | None = None
    """Whether the answer carries `metrics`; the server's setting when left out."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    """Name of `repetition_penalty` in llama.cpp and Ollama."""
    logit_bias: Annotated[dict[str, float], Field(max_length=1024, fail_fast=True)] | None = None
    """By token id (OpenAI's keys are strings), each from -100 to 100."""
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    allowed_token_ids: Annotated[Listed[Int64], Field(max_length=65536)] | None = None
    bad_words: Annotated[Listed[Annotated[str, Field(max_length=256)]], Field(max_length=128)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    """Lower is served earlier (vLLM's meaning)."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Report the prompt's tokens with this many of the likeliest ones (vLLM's field)."""
    seed_stable: bool | None = None
    """Whether the seed alone decides the answer, whatever is drafted; the server's setting when left out."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """K/V is shared among requests of the same salt only."""
    return_token_ids: bool = False
    """Report the tokens of prompt and answer by id (vLLM's field)."""

    # Structured output (server/text/structured.py).
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    # What they say changes nothing in an answer. Nothing is stored, and there is one tier.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    verbosity: str | None = None

    # Known, and not served (those of other servers: `foreign_fields.py`).
    best_of: Any = None
    spaces_between_special_tokens: Annotated[Any, Neutral(True)] = None
    return_tokens_as_token_ids: Annotated[Any, Neutral(False)] = None
    moderation: Annotated[Any, Neutral()] = None
    context_management: Annotated[Any, Neutral([])] = None


class Function(Wire):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments."""
    strict: bool | None = None
    """Whether arguments must follow the schema also where the model chooses freely."""


class Tool(Wire):
    """A function among the tools."""

    type: Literal["function"] = "function"
    function: Function


class OtherTool(Wire):
    """A tool that is no function: this server has none of these, and the model is not told of them."""

    type: str


def _kind_of_tool(tool: Any) -> str:
    kind = tool.get("type", "function") if isinstance(tool, dict) else getattr(tool, "type", "function")
    return "function" if kind == "function" or not isinstance(kind, str) else "other"


AnyTool = Annotated[Annotated[Tool, Tag("function")] | Annotated[OtherTool, Tag("other")], Discriminator(_kind_of_tool)]
Tools = Annotated[Listed[AnyTool], Field(max_length=MAX_TOOLS)]


class FunctionName(Closed):
    """Which function."""

    name: str


class NamedChoice(Closed):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTool(Closed):
    """One of the functions that may be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedToolsChoice(Closed):
    """Some of the tools; `required`: one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[Listed[AllowedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Closed):
    """The model is told of these tools alone."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolsChoice


class CalledFunction(Wire):
    """A call's function, its arguments as JSON in a string."""

    name: str
    arguments: str = ""


class MadeCall(Wire):
    """A call that the assistant has made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Wire):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[Listed[TextPart], Field(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[Listed[MadeCall], Field(max_length=128)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """What the assistant has thought, for chat templates that show it again; `reasoning` is another name of it."""
    reasoning: str | None = None
    # Known, and not served.
    function_call: None = None
    audio: None = None


class ThinkingSwitch(Closed):
    """Whether to think, as some hosted models have it."""

    type: Literal["enabled", "disabled", "auto", "adaptive"]


class ChatRequest(GenerationFields):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[Listed[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    chat_template_kwargs: dict[str, Any] | None = None
    """More variables for the model's chat template."""
    continue_final_message: bool = False
    """Go on with the last message, which must be the assistant's, instead of answering it."""
    add_generation_prompt: bool = True
    """End the prompt with what opens the assistant's message."""
    documents: Annotated[Listed[dict[str, Any]], Field(max_length=128)] | None = None
    """Texts to answer from, where the model's chat template has a place for them."""
    reasoning_effort: Effort | None = None
    """How much to think; a hint that has no effect if the model's chat template knows no such thing."""
    thinking: ThinkingSwitch | None = None
    enable_thinking: bool | None = None
    """Whether to think, likewise (`chat_template_kwargs` sets it, too)."""
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """The most tokens of thoughts; then they are closed (vLLM's field)."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | AllowedTools | None = None
    """What the model may call: with `none` it is not told of the tools."""
    parallel_tool_calls: bool | None = None
    """False: at most one call in an answer."""
    # Known, and not served.
    functions: Annotated[Any, Neutral([], way_out="send tools")] = None
    function_call: Annotated[Any, Neutral("none", "auto", way_out="send tool_choice")] = None
    audio: Annotated[Any, Neutral()] = None
    modalities: Annotated[Any, Neutral(["text"])] = None
    web_search_options: Annotated[Any, Neutral()] = None
    echo: Annotated[Any, Neutral(False)] = None
    add_special_tokens: Annotated[Any, Neutral(False)] = None
    include_reasoning: Annotated[Any, Neutral(True)] = None
    separate_reasoning: Annotated[Any, Neutral(True)] = None
    stream_reasoning: Annotated[Any, Neutral(True)] = None


class CompletionRequest(GenerationFields):
    """Body of `POST /v1/completions`."""

    prompt: str | Listed[str] | Listed[int] | Listed[Listed[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    """Begin the answer with the prompt, with its logprobs where logprobs are asked for."""
    add_special_tokens: bool = True
    """Begin a prompt that is text with the tokens that the tokenizer begins texts with."""

    # Known, and not served; those of conversations among them.
    chat_template_kwargs: Annotated[Any, Neutral({})] = None
    continue_final_message: Annotated[Any, Neutral(False)] = None
    add_generation_prompt: Annotated[Any, Neutral(True)] = None
    suffix: Annotated[Any, Neutral("")] = None
    reasoning_effort: Any = None
    """Without effect: a text has no chat template."""
    thinking_token_budget: Annotated[Any, Neutral()] = None


class TokenizeRequest(Body):
    """Body of `POST /tokenize`: a prompt, or a conversation."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[Listed[Message], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """Body of `POST /detokenize`."""

    model: Name | None = None
    tokens: Annotated[Listed[int], Field(max_length=1 << 18)]
