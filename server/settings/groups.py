"""The settings of `polydraft serve` by group; `settings.py` combines them in one class.

Flags have vLLM's names if the meaning is the same. The docstring of a group is its title, that of
a setting its help.
"""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from pydantic_settings import NoDecode

from engine.api import Activations, Device, Dtype, KVDtype, Probe, Weights, file_fault
from server.text.call_formats import CallFormat
from server.text.shipped_templates import SHIPPED
from server.text.thought_marks import Parser

RARE: dict[str, Any] = {"rare": True}
"""Mark of a setting that only `--help=all` prints."""

_MULTIPLES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def _words(value: Any) -> Any:
    """Return the values of one text or several, each a JSON list or separated by commas."""
    texts = value
    if isinstance(value, str):
        texts = [value]
    if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        return [word for text in texts for word in _split(text)]
    return value


def _split(text: str) -> list[Any]:
    if text.startswith("{"):
        return [text]
    if not text.startswith("["):
        return [part.strip() for part in text.split(",")]
    try:
        return list(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"not a JSON list ({error})") from error


def _tokens(value: Any) -> Any:
    """Return the values of a text as `_words` does; [PREFIX],[SUFFIX] is no JSON list."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, str) and not value.startswith('["'):
        return [part.strip() for part in value.split(",")]
    return _words(value)


def _amount(value: Any) -> Any:
    """Return the number of a text such as 4k (4,000) or 4K (4,096), as vLLM does."""
    if not isinstance(value, str) or re.fullmatch(r"\s*[-+]?[0-9]+(_[0-9]+)*\s*", value):
        return value
    parts = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmgKMG])", value.strip())
    if parts is None:
        raise ValueError("must be a number, which may end with K, M, G (powers of 1024) or k, m, g (of 1000)")
    number, unit = parts.groups()
    return round(float(number) * _MULTIPLES[unit])


def _automatic(value: Any) -> Any:
    """Return 0 for other servers' spellings of "as long as possible"."""
    return 0 if value in ("auto", "-1", -1) else value


def _never(value: Any) -> Any:
    """Return 0 for llama.cpp's spelling of "never"."""
    return 0 if value in ("-1", -1) else value


def _readable(value: str) -> str:
    if not Path(value).is_file():
        raise ValueError("no such file")
    if fault := file_fault(Path(value)):
        raise ValueError(fault)
    return value


def _template(value: str) -> str:
    if value in SHIPPED:
        return value
    return _readable(value)


Words = Annotated[list[str], NoDecode, BeforeValidator(_words)]
Tokens = Annotated[list[str], NoDecode, BeforeValidator(_tokens)]
File = Annotated[str, AfterValidator(_readable)] | None
Positive = Annotated[int, Field(ge=1)]
PositiveAmount = Annotated[Positive, BeforeValidator(_amount)]
PositiveSeconds = Annotated[float, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
NotNegativeAmount = Annotated[NotNegative, BeforeValidator(_amount)]

Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Setting = TypeVar("Setting")
Rare = Annotated[Setting, Field(json_schema_extra=RARE)]

_WINDOWS_S = {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0}


def rates_of(text: str) -> list[tuple[int, float]]:
    """Return (requests, seconds) of a text such as 60/minute,5/second; raises ValueError."""
    rates = []
    for part in text.split(","):
        rate = re.fullmatch(r"\s*([1-9][0-9]*)\s*/\s*(second|minute|hour|day)\s*", part)
        if rate is None:
            raise ValueError(
                "must be a number per second, minute, hour or day, such as 60/minute or 60/minute,5/second"
            )
        count, window = rate.groups()
        rates.append((int(count), _WINDOWS_S[window]))
    return rates


def _adapters(values: list[str]) -> list[str]:
    if len(values) > 1:
        raise ValueError(
            "one adapter is merged into the target's weights at start; start another daemon for each further adapter"
        )
    for value in values:
        name, _, path = value.partition("=")
        if not name or not path:
            raise ValueError(f"{value!r} must be NAME=PATH, such as billing=/models/billing-lora")
    return values


class _Group(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split())


class GeneralSettings(_Group):
    """general"""

    config: str | None = None
    """YAML, TOML or JSON file with any of these settings"""


class ModelSettings(_Group):
    """model"""

    model: str = ""
    """target model: a folder, a GGUF file, or a hub name (GGUF: OWNER/REPOSITORY:TYPE)"""
    tokenizer: str | None = None
    """folder or GGUF file of the tokenizer; default: the target's"""
    revision: str | None = None
    """hub revision of the target and its tokenizer"""
    quantization: str | None = None
    """quantisation method of MODEL, as in its config.json; int8, fp8 or int4 of a plain checkpoint:
    the same as
    --weights
    """
    dtype: Dtype = "auto"
    """type of the weights; auto: the checkpoint's (a CPU computes in float32)"""
    device: Device = "auto"
    """where the models run"""
    num_threads: NotNegative = 0
    """most CPU cores of the engine; 0: all"""
    tensor_parallel_size: Positive = 1
    """devices (on a CPU: processes) over which the target is split; experimental, never run on CUDA
    devices
    """
    max_model_len: Annotated[NotNegativeAmount, BeforeValidator(_automatic)] = 0
    """maximum tokens of prompt plus answer; 0: the model's limit, or the K/V cache's capacity"""
    served_model_name: Words = []
    """name that clients use; repeat for several, metrics have the first; default: MODEL"""
    lora_modules: Annotated[Words, AfterValidator(_adapters)] = []
    """NAME=PATH of a LoRA adapter in peft's format, merged into the target's weights at start;
    clients use NAME
    """
    chat_template: Annotated[str, AfterValidator(_template)] | None = None
    """file with a Jinja chat template, or one that comes with the server: chatml-tools,
    deepseek-tools, gemma-tools
    """
    special_tokens_in_messages: Literal["control", "text"] = "control"
    """special tokens that the text of messages spells: control tokens, as with the templates of
    transformers, or text, so that no part of a prompt can end a turn
    """
    attachment_placeholders: bool = False
    """replace images and files in results of tools and in earlier turns by a placeholder; without
    it they are refused, unless a request has this field
    """
    tool_call_parser: Literal["auto"] | CallFormat = "auto"
    """format of the model's tool calls; auto: the one that reads a call of the chat template
    back
    """
    reasoning_parser: Parser = "auto"
    """marks around the thoughts in answers, by the family that has them; qwen3: <think> tags;
    deepseek_r1: the prompt opens them; auto: from chat template and prompt
    """
    fim_tokens: Rare[Tokens] = []
    """tokens that fill gaps, PREFIX,SUFFIX,MIDDLE, or PREFIX,SUFFIX if the suffix comes first;
    default: those of known families
    """
    generation_config: Rare[Literal["auto", "neutral"]] = "auto"
    """sampling defaults: the model's generation_config.json, or neutral ones"""
    weights: Weights = "auto"
    """numbers of the weights: the checkpoint's; on a CPU int8 or int4, with a scale for every 32;
    on CUDA fp8 or int4, by torchao. The target is then the quantised model
    """
    draft_weights: Weights = "auto"
    """the same for the draft model or head, whose numbers change no answer's distribution; auto:
    those of --weights for a model, the head's own for a head
    """
    activations: Rare[Activations] = "auto"
    """numbers that a CPU multiplies with weights; auto: rounded to bfloat16 or to 8 bits where the
    processor's dot products need that; float32: never rounded, which is slower
    """
    kv_cache_dtype: KVDtype = "auto"
    """type of the K/V cache; auto: float32 on a CPU, the model's elsewhere"""
    enforce_eager: Rare[bool] = False
    """on a CUDA device, launch the operations of decode steps one by one, without CUDA graphs"""
    probe: Rare[Probe] = "refuse"
    """if a model's logits differ from plain transformers by more than rounding explains: refuse to
    serve it, or warn
    """

    @field_validator("fim_tokens")
    @classmethod
    def _two_or_three(cls, tokens: list[str]) -> list[str]:
        if tokens and (len(tokens) not in (2, 3) or not all(tokens) or len(set(tokens)) < len(tokens)):
            raise ValueError("must be two or three different tokens: PREFIX,SUFFIX or PREFIX,SUFFIX,MIDDLE")
        return tokens


class SpeculationSettings(_Group):
    """speculation"""

    draft_model: str | None = None
    """draft model: a folder, a GGUF file, a hub name, or mtp; default: plain decoding"""
    draft_revision: Rare[str | None] = None
    """hub revision of the draft model"""
    spec_drafters: Words = ["model"]
    """sources of drafts: model, prompt_lookup, earlier_answers (those to the same client)"""
    num_drafts: Positive = 4
    """chains drafted per step (K)"""
    draft_length: Positive = 5
    """tokens in a chain (L)"""
    spec_shape: str = "adaptive"
    """adaptive: up to K chains of L tokens, by load and acceptance; fixed: always K chains of L;
    fixed:4,5: always 4 of 5
    """
    spec_rule: str = "bv_race"
    """verification rule (docs/speculation.md lists them), or off"""
    seed_stable: bool = False
    """make answers depend on the seed and not on the drafts; lowers acceptance"""
    calibrate: bool = True
    """measure steps while serving; without it shapes are fixed and answers report no speedup"""
    draft_tree: Rare[str | None] = None
    """children per node by depth, e.g. 4,2,1; instead of num-drafts and draft-length"""
    draft_method: Rare[str | None] = None
    """sampling method of a node's children; default: the rule's"""
    draft_window: Rare[NotNegativeAmount] = 0
    """last tokens of a text that the draft model reads and stores; 0: all. With a window the answer
    to a seed may depend on other requests
    """
    seed_shape: Rare[str | None] = None
    """fixed K,L of requests with a seed; default: 1,4 on a CPU, else num-drafts and draft-length"""
    max_copied_tokens: Rare[NotNegative] = 32
    """maximum tokens of a text draft (prompt lookup, prediction); 0 turns both off"""
    max_num_drafts: Rare[Positive] = 16
    """maximum num_drafts of a request"""
    max_draft_length: Rare[Positive] = 16
    """maximum draft_length of a request"""
    max_over_acceptance: Rare[Share] = 0.0
    """maximum over-acceptance of a request; 0 allows exact answers only"""
    spec_observed_share: Rare[Share] = 0.01
    """share of steps on which acceptance is compared with the optimum"""
    profile_cache: Rare[str] = "~/.cache/polydraft"
    """folder that stores what GGUF files say, for the next start; off: nothing is stored"""
    selfcheck: Rare[bool] = False
    """check at start that outputs follow the target distribution (some seconds)"""

    @field_validator("spec_shape")
    @classmethod
    def _shape(cls, shape: str) -> str:
        if not re.fullmatch(r"adaptive|fixed(:[1-9][0-9]*,[1-9][0-9]*)?", shape):
            raise ValueError("must be adaptive, fixed, or fixed:K,L such as fixed:4,5")
        return shape

    @field_validator("seed_shape")
    @classmethod
    def _pair(cls, shape: str | None) -> str | None:
        if shape is not None and not re.fullmatch("[1-9][0-9]*,[1-9][0-9]*", shape):
            raise ValueError("must be K,L such as 1,3")
        return shape

    @field_validator("draft_tree")
    @classmethod
    def _whole_numbers(cls, tree: str | None) -> str | None:
        if tree is not None and not re.fullmatch(r"[1-9][0-9]*(,[1-9][0-9]*)*", tree):
            raise ValueError("must be whole numbers from 1 on with commas between, such as 4,2,1")
        return tree


class SchedulingSettings(_Group):
    """scheduling"""

    max_num_seqs: Positive = 64
    """requests that run at once"""
    max_num_batched_tokens: PositiveAmount = 2048
    """tokens of one target pass"""
    max_prompt_tokens_per_step: Rare[NotNegativeAmount] = 0
    """maximum prompt tokens of a step while other requests decode; 0: 512 on a CPU, else all that
    fit; with measured step times, prompts also add at most the time of decoding, or 0.1 s
    """
    max_num_queued_reqs: NotNegative = 1024
    """requests that may wait; more get 429"""
    max_num_queued_tokens: Rare[NotNegativeAmount] = 0
    """prompt tokens of requests without a first token; more get 429, unless none wait; 0: no
    limit
    """
    request_timeout: Seconds = 0.0
    """seconds a request may take, waiting included; then it ends with 504, unless it is a line of a
    batch; 0: no limit
    """
    stall_timeout: Rare[Seconds] = 60.0
    """seconds without a completed step after which /health is 503; 0: never"""
    shutdown_timeout: Seconds = 30.0
    """seconds to drain after SIGTERM"""
    grammar_start_timeout: Rare[PositiveSeconds] = 5.0
    """CPU seconds to compile a request's grammar; slower ones get 400"""
    grammar_mask_timeout: Rare[PositiveSeconds] = 0.05
    """CPU seconds for a grammar's masks in a step; slower requests end"""
    grammar_memory_bytes: Rare[PositiveAmount] = 1 << 30
    """memory that a request's grammar may take"""


class MemorySettings(_Group):
    """memory"""

    kv_cache_memory_bytes: NotNegativeAmount = 0
    """memory for K/V; 0: 1 GiB on a CPU, on CUDA 90 % of the memory that a step leaves free"""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """share of a CUDA device's memory for weights, steps and K/V together; default: 90 % of the
    memory that weights and steps leave free
    """
    enable_prefix_caching: bool = True
    """cache K/V of ended requests for others with the same prefix"""
    block_size: Rare[Positive] = 16
    """tokens in a K/V block"""
    num_gpu_blocks_override: Rare[NotNegative] = 0
    """K/V blocks; 0 sizes the pool from memory"""
    sleep_idle_seconds: Annotated[Seconds, BeforeValidator(_never)] = 0.0
    """seconds without a request after which weights and K/V are released; the next request waits
    until they are loaded again; 0: never
    """


class HttpSettings(_Group):
    """HTTP"""

    host: str = "127.0.0.1"
    """address to listen on"""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """port to listen on; 0 takes a free one"""
    uds: str | None = None
    """unix socket to listen on instead of host and port"""
    api_key: Words = []
    """key that clients must send; repeat for several, or put commas between. Other users of the
    machine see flags: better set POLYDRAFT_API_KEY
    """
    allowed_hosts: Words = []
    """name that requests may have in Host besides this machine's, if the daemon listens on loopback
    without a key; repeat for several, * for all
    """
    root_path: Rare[str] = ""
    """path prefix that a proxy strips"""
    allowed_origins: Words = []
    """origin allowed by CORS; repeat for several"""
    ssl_keyfile: File = None
    """TLS key"""
    ssl_certfile: File = None
    """TLS certificate"""
    rate_limit: str | None = None
    """limit of POSTs under /v1/ and /api/, and to /infill and /completion, per key (without keys:
    per address), such as 60/minute,5/second
    """
    max_request_bytes: PositiveAmount = 4 << 20
    """largest request body; more gets 413"""
    dashboard: bool = True
    """serve the live page at /dashboard"""
    strict_fields: bool = False
    """refuse unknown request fields, and a max_tokens beyond the context, instead of ignoring or
    cutting them
    """
    send_timeout: Rare[Seconds] = 60.0
    """seconds that a client may leave its answer unread before its requests are aborted; 0: no
    limit
    """
    receive_timeout: Rare[Seconds] = 60.0
    """seconds that a client may take to begin and to send a request; slower ones get 408; 0: no
    limit
    """
    max_connections: Rare[NotNegative] = 0
    """maximum open connections; 0: the limit of open files decides"""
    sse_keep_alive_interval: Rare[Seconds] = 15.0
    """seconds of silence after which a stream sends a comment; 0: never"""

    @field_validator("api_key")
    @classmethod
    def _not_empty(cls, keys: list[str]) -> list[str]:
        # An empty key, for example from an unset variable, would admit every client.
        if not all(key.strip() for key in keys):
            raise ValueError("a key must not be empty")
        return keys

    @field_validator("rate_limit")
    @classmethod
    def _rate(cls, rate: str | None) -> str | None:
        if rate is not None:
            rates_of(rate)
        return rate

    @field_validator("host")
    @classmethod
    def _address(cls, host: str) -> str:
        is_ipv4 = re.fullmatch(r"[0-9.]+", host) is not None
        if not is_ipv4 and re.fullmatch(r"[A-Za-z0-9._-]*", host):
            return host
        try:
            if is_ipv4:
                socket.inet_aton(host)
            else:
                socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
        except OSError:
            raise ValueError("must be an address such as 127.0.0.1, 0.0.0.0 or ::, or the name of a host") from None
        return host


class BatchSettings(_Group):
    """batches"""

    batch_folder: str | None = None
    """folder of files, batches and kept responses, made with mode 0700; with it /v1/files and
    /v1/batches are served, and /v1/responses keeps what it answers
    """
    batch_max_num_seqs: Rare[NotNegative] = 0
    """lines of batches that run at once; 0: three quarters of --max-num-seqs"""
    batch_max_file_bytes: Rare[PositiveAmount] = 200 << 20
    """largest file that may be uploaded; more gets 413"""
    response_store_bytes: Rare[NotNegativeAmount] = 1 << 30
    """bytes of the responses that are kept for each API key, at most 30 days; 0: none"""


class ObservabilitySettings(_Group):
    """observability"""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """minimum severity of log lines"""
    log_format: Literal["text", "json"] = "text"
    """format of log lines; json: one object per line"""
    enable_log_requests: bool = False
    """log one line per request when its answer ends: tokens, times, speedup; never its text"""
    enable_log_stats: bool = True
    """log load, tokens per second and speedup every 10 s while answers are generated"""
    otlp_traces_endpoint: str | None = None
    """address of an OpenTelemetry collector that gets a span per request, over HTTP"""
    metrics_compat: Rare[Literal["none", "vllm"]] = "vllm"
    """also export metrics under vLLM's names"""
    per_request_spec_decode_metrics: Rare[Literal["none", "detailed"]] = "detailed"
    """whether answers carry `metrics` unless the request says otherwise"""
    per_request_spec_decode_stats: Rare[Literal["none", "summary"]] = "none"
    """whether choices carry vLLM's `speculative_decoding_stats`, too"""
