"""Pair under analysis with an idle engine, and prompts for it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.errors import ConfigError
from engine.models.gguf.folder import CACHE
from engine.models.gguf.names import source_of
from engine.start.building import build_engine
from engine.start.host import keep_freed_memory, usable_cores
from engine.step.engine import Engine
from loadtest import workload

_CACHE_BYTES = 1 << 29
_BOTH = "name both --target and --draft, or neither for the embedded pair"
_FORMATS = ("weights", "draft_weights", "activations")


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select the pair and the device."""
    parser.add_argument("--target", help="target model: folder, GGUF file or hub name (default: the embedded pair)")
    parser.add_argument("--draft", help="draft model: folder, GGUF file or hub name")
    add_device_arguments(parser)


def add_format_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select the number formats of the pair."""
    parser.add_argument("--weights", default="auto", help="numbers of the weights, as of `serve` (default auto)")
    parser.add_argument("--draft-weights", default="auto", help="the same for the draft model (default auto)")
    parser.add_argument("--activations", default="auto", help="numbers of rows, as of `serve` (default auto)")


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select the device, and the type of weights."""
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default auto)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default auto)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: all cores but one)")


def names_of(options: argparse.Namespace) -> tuple[str, str]:
    """Return (target, draft), GGUF files as folders; raise ConfigError if only one is named."""
    if (options.target is None) != (options.draft is None):
        raise ConfigError(_BOTH)
    target, draft = models_of(options)
    assert draft is not None
    return target, draft


def models_of(options: argparse.Namespace) -> tuple[str, str | None]:
    """Return (target, draft), GGUF files as folders.

    The draft is None if only a target is named.
    """
    if options.target is None and options.draft is not None:
        raise ConfigError(_BOTH)
    if options.target is None:
        demo = Path(__file__).parents[2] / "server" / "demo"
        return str(demo / "target"), str(demo / "draft")
    draft = None if options.draft is None else source_of(options.draft, None, CACHE).name
    return source_of(options.target, None, CACHE).name, draft


def say(text: str) -> None:
    """Print to standard error, above a progress bar."""
    tqdm.write(text, file=sys.stderr)


def config_of(
    options: argparse.Namespace,
    scheduler: SchedulerConfig | None = None,
    speculation: SpeculationConfig | None = None,
    cache_bytes: int = 0,
    needs_draft: bool = True,
) -> EngineConfig:
    """Return the configuration of the pair that the command line names.

    Set `options.threads` to the number in use.

    cache_bytes: size of the K/V cache on a CPU; 0 is the engine's own choice, as always on a CUDA
    device. needs_draft: raise ConfigError for a target without a draft model.
    """
    target, draft = names_of(options) if needs_draft else models_of(options)
    options.threads = options.threads or max(1, usable_cores() - 1)
    formats = {name: value for name, value in vars(options).items() if name in _FORMATS}
    return EngineConfig(
        model=ModelConfig(
            target=target,
            draft=draft,
            dtype=options.dtype,
            device=options.device,
            num_threads=options.threads,
            **formats,
        ),
        cache=CacheConfig(memory_bytes=cache_bytes if options.device != "cuda" else 0),
        scheduler=scheduler or SchedulerConfig(),
        speculation=speculation or SpeculationConfig(),
    )


def load_engine(config: EngineConfig) -> Engine:
    """Return an idle engine in this process, which keeps freed memory as a daemon does."""
    torch.set_num_threads(config.model.num_threads)
    keep_freed_memory()
    return build_engine(config, say)


def load_pair(options: argparse.Namespace, max_num_seqs: int, num_drafts: int, draft_length: int) -> Engine:
    """Return an idle engine for `max_num_seqs` requests at once.

    Of `num_drafts` chains of `draft_length` tokens.
    """
    scheduler = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=1 << 14)
    speculation = SpeculationConfig(
        num_drafts=1, draft_length=1, max_num_drafts=num_drafts, max_draft_length=draft_length, observed_share=0.0
    )
    return load_engine(config_of(options, scheduler, speculation, _CACHE_BYTES))


def read_prompts(task: str | Path, target: str, most: int, room: int) -> list[tuple[int, ...]]:
    """Return token ids of the prompts of a task or a file (`loadtest.workload.load`).

    Prompts are cut to their last `room` tokens.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        bodies = [prompt.body for prompt in workload.load(str(task))[:most]]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    prompts = []
    for body in bodies:
        is_chat = "messages" in body
        text = body.get("prompt")
        if is_chat:
            text = tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        prompts.append(tuple(tokenizer(text, add_special_tokens=not is_chat)["input_ids"][-room:]))
    return prompts


def random_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Return random prompts of tokens that the embedded pair and the bench pair know."""
    return [prompt.body["prompt"] for prompt in workload.random_prompts(length, count, seed)]


def prompts_of(kind: str, options: argparse.Namespace) -> Sequence[tuple[int, ...]]:
    """Return random prompts for random:N, or those of a task or a file."""
    name, _, length = kind.partition(":")
    if name == "random" and length.isdigit():
        return [tuple(prompt) for prompt in random_prompts(256, int(length), 0)]
    return read_prompts(kind, models_of(options)[0], 256, options.prompt_length)
