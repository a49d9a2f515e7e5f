"""Interface of the engine: messages to and from its process, and how to start it.

The server imports this engine module alone, also for names of others (`implicit_reexport` in
`pyproject.toml`). It does not import torch. Messages are msgpack over two one-way sockets, one per
step and never one per token.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from engine.config import (
    DRAFTERS,
    EARLIER_ANSWERS,
    MODEL,
    MTP,
    PREDICTION,
    Activations,
    CacheConfig,
    Device,
    Dtype,
    EngineConfig,
    EngineFacts,
    GrammarConfig,
    KVDtype,
    ModelConfig,
    Probe,
    SchedulerConfig,
    SpeculationConfig,
    Weights,
)
from engine.config_check import check_settings
from engine.errors import (
    GRAMMAR_UNAVAILABLE,
    SERVER_FAULTS,
    TEMPLATE_FAILED,
    ConfigError,
    DeadlineExceeded,
    EngineBusy,
    EngineStopped,
    LoadError,
    PolydraftError,
    RequestError,
)
from engine.logs import log_fields, set_up_log, show_given_names
from engine.models.checkpoint import Source, check_vocabularies
from engine.models.files import INFILL_MARKS, check_source, file_fault, model_file, read_object, warn_of_adapter
from engine.models.gguf.names import with_folders
from engine.request import GRAMMAR, Limits, Request, Sampling, Speculation, Thinking, TokenLogprob
from engine.scheduling.outcome import PHASES, Outcome, StepStats, Timing, read_logprobs
from engine.scheduling.request_checks import check_requests, default_speculation, unknown_rule, with_fixed_shape

# Spins of an idle OpenMP thread. With the default, two threads are 8 to 36 times slower as soon as
# anything else runs on one of their cores.
_SPIN_COUNT = "10000"


class RequestVariant(msgspec.Struct, frozen=True, array_like=True):
    """Fields in which a request differs from the first one of its call."""

    request_id: str
    prompt: int
    seed: int
    max_tokens: int
    num_prompt_logprobs: int | None


class Submit(msgspec.Struct, frozen=True, tag=True):
    """To the engine: start the requests of one call, which share values."""

    first: Request
    """Without its prompt."""
    prompts: list[tuple[int, ...]]
    variants: list[RequestVariant]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Submit:
        """Return the message for requests that differ in prompts and `RequestVariant`s alone."""
        prompts = {id(request.prompt_token_ids): request.prompt_token_ids for request in requests}
        number = {name: index for index, name in enumerate(prompts)}
        variants = [
            RequestVariant(
                request.request_id,
                number[id(request.prompt_token_ids)],
                request.sampling.seed,
                request.limits.max_tokens,
                request.num_prompt_logprobs,
            )
            for request in requests
        ]
        return cls(msgspec.structs.replace(requests[0], prompt_token_ids=()), list(prompts.values()), variants)

    def requests(self) -> list[Request]:
        """Return the requests; they share prompts and lists as the sent ones did."""
        first, replace = self.first, msgspec.structs.replace
        return [
            replace(
                first,
                request_id=variant.request_id,
                prompt_token_ids=self.prompts[variant.prompt],
                sampling=replace(first.sampling, seed=variant.seed),
                limits=replace(first.limits, max_tokens=variant.max_tokens),
                num_prompt_logprobs=variant.num_prompt_logprobs,
            )
            for variant in self.variants
        ]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """To the engine: abort a request; no effect if it has ended."""

    request_id: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """To the engine: exit now."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """From the engine: progress while it loads."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From the engine: it serves from now on."""

    facts: EngineFacts


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """From the engine: the grammar of a request can be followed."""

    request_id: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """From the engine: last message of a request that it cannot serve."""

    request_id: str
    message: str
    param: str | None
    code: str | None


class StepResults(msgspec.Struct, frozen=True, tag=True):
    """From the engine: results of one step."""

    outcomes: list[Outcome]
    stats: StepStats


class Failed(msgspec.Struct, frozen=True, tag=True):
    """From the engine: it is about to exit. `exit_code` is 2 for configuration, else 1."""

    message: str
    exit_code: int


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """To the engine on its standard input: models, and the zmq addresses of its messages."""

    config: EngineConfig
    inbox: str
    outbox: str
    is_offline: bool


ToEngine = Submit | Abort | Stop
FromEngine = Loading | Ready | Accepted | Refused | StepResults | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder[ToEngine](ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder[FromEngine](FromEngine).decode
decode_launch = msgspec.msgpack.Decoder(Launch).decode


def start_process() -> subprocess.Popen[bytes]:
    """Start the engine process. It imports its libraries while it waits for `launch`.

    It exits when this process ends. (-P: modules in the user's folder are not ours.)
    """
    environment = {"GOMP_SPINCOUNT": _SPIN_COUNT, "TOKENIZERS_PARALLELISM": "false", **os.environ}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "engine"], stdin=subprocess.PIPE, env=environment, start_new_session=True
    )


def launch(
    process: subprocess.Popen[bytes], config: EngineConfig, inbox: str, outbox: str, is_offline: bool = False
) -> None:
    """Send an engine process its configuration and sockets.

    is_offline: whether models come from the hub's cache alone.
    """
    # The environment may have changed since the process was started, for instance after a download.
    is_offline = is_offline or os.environ.get("HF_HUB_OFFLINE") == "1"
    assert process.stdin is not None
    # A process that has ended is detected elsewhere.
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(encode(Launch(config=config, inbox=inbox, outbox=outbox, is_offline=is_offline)))


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of the `index`-th of several choices; choice 0 has the request's."""
    # It imports numpy (0.13 s), which `polydraft serve --help` does not need.
    from engine import noise

    return noise.choice_seed(seed, index)
