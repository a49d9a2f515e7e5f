"""Models of request bodies (pydantic, strict). Not for: answers (`answers.py`).

Fields that would change an answer and are not supported are refused by name. Other unknown names at
the top of a body are ignored and reported (`unsupported_fields.py`). Inside this server's own
objects they are refused. Messages, their parts and tools may have unknown keys, because clients
send back what other servers returned.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from engine.api import DRAFTERS
from server.wire.limits import MOST_MESSAGES, MOST_NAMES, MOST_PARTS, MOST_STRINGS, MOST_TOOLS
from server.wire.unsupported_fields import Neutral

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=1)]
Item = TypeVar("Item")
Listed = Annotated[list[Item], Field(fail_fast=True)]
"""List whose validation ends at the first wrong element: a million errors would cost gigabytes."""
Name = Annotated[str, Field(max_length=1024)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""Amount of thinking."""


class Wire(BaseModel):
    """Model with strict types and finite numbers; unknown keys are ignored, null is absence."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict) or None not in body.values():
            return body
        return {key: value for key, value in body.items() if value is not None}


class Closed(Wire):
    """Model that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _with_few_names(cls, body: Any) -> Any:
        # Each unknown name causes an error.
        if isinstance(body, dict) and len(body) > MOST_NAMES:
            raise ValueError(f"an object has at most {MOST_NAMES} names here")
        return body


class StreamOptions(Closed):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False
    """Accepted without effect: chunks are never padded."""


class SpeculationFields(Closed):
    """Speculation settings of a request; omitted fields come from the server's settings."""

    enabled: bool = True
    num_drafts: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    draft_length: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    rule: str | None = None
    draft_method: str | None = None
    tree: Annotated[Listed[Annotated[int, Field(ge=1, lt=2**31)]], Field(min_length=1, max_length=256)] | None = None
    over_acceptance: Annotated[float, Field(ge=0, le=1)] | None = None
    over_acceptance_residual: Literal["optimal", "target"] | None = None
    drafters: Annotated[Listed[str], Field(min_length=1, max_length=len(DRAFTERS))] | None = None
    return_drafts: bool = False
    """Report every step's chains and the number of accepted tokens."""


class TextPart(Wire):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Prediction(Closed):
    """Expected text of the answer."""

    type: Literal["content"]
    content: str | Annotated[Listed[TextPart], Field(max_length=MOST_PARTS)]


class Body(Wire):
    """Body that collects its unknown names; `unsupported_fields.py` ignores or refuses them."""

    model_config = ConfigDict(extra="allow")


class GenerationFields(Body):
    """Common fields of chat, completions and `/v1/responses`."""

    model: Name | None = None
    """Name of the model; without one the served model answers, as with vLLM."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    """Newer name of `max_tokens`; it takes precedence."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """Maximum number of prompt tokens; -1 leaves room for the answer (vLLM's field)."""
    truncation_side: Literal["left", "right"] | None = None
    """Side on which a prompt is cut; by default left, so that its end remains."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Int64 | None = None
    random_seed: Int64 | None = None
    """Name of `seed` in Mistral's API."""
    stop: str | Annotated[Listed[str], Field(max_length=MOST_STRINGS)] | None = None
    stop_token_ids: Annotated[Listed[Int64], Field(max_length=4096)] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculation: SpeculationFields | None = None
    prediction: Prediction | None = None
    """Text that the answer is expected to repeat (OpenAI's Predicted Outputs)."""
    metrics: bool | None = None
    """Whether the answer has `metrics`; by default the server's setting."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    """Name of `repetition_penalty` in llama.cpp and Ollama."""
    logit_bias: Annotated[dict[str, float], Field(max_length=1024, fail_fast=True)] | None = None
    """Biases from -100 to 100 by token id (OpenAI's keys are strings)."""
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    allowed_token_ids: Annotated[Listed[Int64], Field(max_length=65536)] | None = None
    bad_words: Annotated[Listed[Annotated[str, Field(max_length=256)]], Field(max_length=128)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    """Priority; lower values are served earlier, as in vLLM."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Likeliest tokens reported at each position of the prompt (vLLM's field)."""
    seed_stable: bool | None = None
    """Whether drafts leave a seed's answer the same; by default the server's setting."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Only requests with the same salt share K/V."""
    return_token_ids: bool = False
    """Report the token ids of prompt and answer (vLLM's field)."""

    # Structured output (server/text/structured.py).
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    # Fields that do not affect an answer. There is one tier.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    verbosity: str | None = None

    # Known and not supported (`foreign_fields.py` has the fields of other servers). `Neutral` lists
    # values without effect; any other value is refused.
    best_of: Any = None
    spaces_between_special_tokens: Annotated[Any, Neutral(True)] = None
    return_tokens_as_token_ids: Annotated[Any, Neutral(False)] = None
    moderation: Annotated[Any, Neutral()] = None
    context_management: Annotated[Any, Neutral([])] = None


class Function(Wire):
    """Function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments."""
    strict: bool | None = None
    """Whether arguments must follow the schema also if the model chooses freely."""


class Tool(Wire):
    """A function among the tools."""

    type: Literal["function"] = "function"
    function: Function


class OtherTool(Wire):
    """Tool other than a function; prompts do not mention it."""

    type: str


def _kind_of_tool(tool: Any) -> str:
    kind = tool.get("type", "function") if isinstance(tool, dict) else getattr(tool, "type", "function")
    if isinstance(kind, str) and kind != "function":
        return "other"
    return "function"


AnyTool = Annotated[Annotated[Tool, Tag("function")] | Annotated[OtherTool, Tag("other")], Discriminator(_kind_of_tool)]
Tools = Annotated[Listed[AnyTool], Field(max_length=MOST_TOOLS)]


class FunctionName(Closed):
    """Name of a function."""

    name: str


class NamedChoice(Closed):
    """Choice of the one function that must be called, or of one that may be."""

    type: Literal["function"]
    function: FunctionName


class AllowedToolsChoice(Closed):
    """Some of the tools; `required`: an answer must call a tool."""

    mode: Literal["auto", "required"]
    tools: Annotated[Listed[NamedChoice], Field(min_length=1, max_length=MOST_TOOLS)]


class AllowedTools(Closed):
    """Choice of some tools; the prompt mentions no others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolsChoice


class CalledFunction(Wire):
    """Function of a call; its arguments are JSON in a string."""

    name: str
    arguments: str = ""


class MadeCall(Wire):
    """Call that the assistant has made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Wire):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[Listed[TextPart], Field(max_length=MOST_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[Listed[MadeCall], Field(max_length=128)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """Thoughts of the assistant, for templates that repeat them; also named `reasoning`."""
    reasoning: str | None = None
    prefix: bool = False
    """Whether the answer continues this message, the last one (Mistral's field)."""
    # Known and not supported.
    function_call: None = None
    audio: None = None


class ReasoningConfig(Closed):
    """Amount of thinking."""

    effort: Effort | None = None
    summary: str | None = None
    """Accepted without effect: thoughts are sent in full instead of a summary."""
    generate_summary: str | None = None


class ThinkingSwitch(Closed):
    """Switch for thinking, in the format of some hosted models."""

    type: Literal["enabled", "disabled", "auto", "adaptive"]


class ChatRequest(GenerationFields):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[Listed[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    chat_template_kwargs: dict[str, Any] | None = None
    """Additional variables for the model's chat template."""
    continue_final_message: bool = False
    """Continue the last message, which must be the assistant's, instead of answering it."""
    add_generation_prompt: bool = True
    """End the prompt with the opening of the assistant's message."""
    documents: Annotated[Listed[dict[str, Any]], Field(max_length=128)] | None = None
    """Texts to answer from, if the model's chat template supports them."""
    reasoning_effort: Effort | None = None
    """Hint how much to think; no effect if the model's chat template does not support it."""
    reasoning: ReasoningConfig | None = None
    """The same hint in the format of responses."""
    thinking: ThinkingSwitch | None = None
    enable_thinking: bool | None = None
    """Hint whether to think (`chat_template_kwargs` can set it, too)."""
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Maximum number of tokens of thoughts, which are then closed (vLLM's field)."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required", "any"] | NamedChoice | AllowedTools | None = None
    """Functions that the model may call; `none` hides them; `any` is Mistral's `required`."""
    attachment_placeholders: bool | None = None
    """Whether images and files in results of tools and earlier turns become placeholders."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls."""
    # Known and not supported.
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
    suffix: str = ""
    """Text after the completion: the model fills the gap, if it has tokens for that."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    """Begin the answer with the prompt, with its logprobs if logprobs are requested."""
    add_special_tokens: bool = True
    """Begin a text prompt with the tokenizer's initial tokens."""

    # Known and not supported, among them fields of conversations.
    chat_template_kwargs: Annotated[Any, Neutral({})] = None
    continue_final_message: Annotated[Any, Neutral(False)] = None
    add_generation_prompt: Annotated[Any, Neutral(True)] = None
    reasoning_effort: Any = None
    """Accepted without effect: a text has no chat template."""
    thinking_token_budget: Annotated[Any, Neutral()] = None


class TokenizeRequest(Body):
    """Body of `POST /tokenize`: a prompt, or a conversation."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[Listed[Message], Field(max_length=MOST_MESSAGES)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    attachment_placeholders: bool | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """Body of `POST /detokenize`."""

    model: Name | None = None
    tokens: Annotated[Listed[int], Field(max_length=1 << 18)]
