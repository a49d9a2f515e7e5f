"""Passes of small models with random weights and random K/V, timed in turns."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from engine.attention.attention import HOOK, register
from engine.attention.inputs import NodeInput
from engine.models.runner import ModelRunner
from engine.speculation.topology import merge_chains
from engine.start.loading import LoadedModel, adopt
from engine.start.probe import find_kv_shape
from loadtest.arguments import integers

BLOCK_SIZE = 16

Forward = Callable[[], Tensor]


def add_pass_arguments(parser: argparse.ArgumentParser, contexts: list[int]) -> None:
    """Add the lengths of texts, the cores and the number of measurements."""
    add = parser.add_argument
    shown = ",".join(map(str, contexts))
    add("--contexts", type=integers, default=contexts, help=f"tokens of the texts (default {shown})")
    add("--threads", type=int, default=2, help="cores (default 2)")
    add("--repeats", type=int, default=15, help="measurements of every pass (default 15)")


def new_model(config: Any, name: str) -> LoadedModel:
    """Return a model with random weights."""
    import transformers

    register()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=HOOK, dtype=torch.float32)
    return adopt(model, name)


def runner_of(loaded: LoadedModel, num_tokens: int, **parts: Any) -> ModelRunner:
    """Return a runner whose K/V are random numbers. parts: further arguments of `ModelRunner`."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    shape = find_kv_shape(loaded)
    runner = ModelRunner(loaded.model, shape, num_blocks, BLOCK_SIZE, loaded.vocab_size, **parts)
    for keys, values in runner.storage.layers.values():
        keys.normal_()
        values.normal_()
    return runner


def tree_of(num_chains: int, length: int) -> NodeInput:
    """Return the nodes of chains that share none."""
    tree = merge_chains([[length * chain + depth for depth in range(length)] for chain in range(num_chains)])
    return NodeInput(tree.tokens, tree.depths, (), tree.ancestry())


def in_turns(forms: Mapping[str, Forward], repeats: int) -> dict[str, list[float]]:
    """Return the durations of every form; the forms take turns."""
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    for turn in range(repeats + 1):
        for form, forward in forms.items():
            began = time.perf_counter()
            forward()
            if turn:  # the first turn compiles
                seconds[form].append(time.perf_counter() - began)
    return seconds
