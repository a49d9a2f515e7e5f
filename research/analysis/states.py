"""`analyze states`: passes that store inputs of drafted nodes, next to states of nodes.

The model has random weights, three gated delta nets in the sizes of Qwen3.5-9B and a small layer
that attends. Both forms are the served pass. The second form also stores the recurrence's state
after each node, by the kernel that stores a text's state. It stores no windows of convolutions.
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from engine.attention.inputs import NO_NODES, NodeInput, SequenceInput
from engine.attention.states import StateSizes
from engine.models.runner import ModelRunner
from engine.plan import StatePlaces
from engine.start.choosing import choose
from engine.start.probe import find_kv_shape
from loadtest.results import document, shown_ratio, table
from loadtest.statistics import median_of_ratios
from research.analysis.passes import BLOCK_SIZE, add_pass_arguments, in_turns, new_model, runner_of, tree_of

_CONFIG = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
INPUTS, STATES = "inputs of nodes", "a state of each node"
_TREES = ((4, 3), (16, 4))
"""Numbers of chains and their lengths."""
_MOST_NODES = 64
_SIZES = StateSizes(num_seats=1, num_cached=_MOST_NODES + 1, num_nodes=_MOST_NODES)
_TEXT = _SIZES.num_seats + _MOST_NODES
"""Place of the state before a pass. No pass changes it, or it would shrink to subnormals."""
_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pass_arguments(parser, [1024, 8192, 32768])


def forward(runner: ModelRunner, context: int, nodes: NodeInput = NO_NODES, form: str = INPUTS) -> Tensor:
    """Run a pass over a text's last token and drafted nodes."""
    blocks = range(runner.storage.num_slots // BLOCK_SIZE)
    places = StatePlaces(seat=0, source=_TEXT, covered=context - 1)
    sequence = SequenceInput([1], context - 1, blocks, nodes, slice(0, None), state=places)
    prepared = runner.prepare([[sequence]])[0]
    if form == STATES:
        paths = prepared.metadata.paths
        assert paths is not None
        _input, _source, node_M, _row, _seat, cached_M = paths.steps.steps
        is_node_M = node_M >= 0
        cached_M[is_node_M] = _SIZES.num_seats + np.arange(is_node_M.sum())
    return runner.run(prepared)


@torch.inference_mode()
def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Measure trees after the first text in both forms, and a token after every text."""
    import transformers

    torch.set_num_threads(options.threads)
    model = new_model(transformers.AutoConfig.for_model("qwen3_5_text", **_CONFIG), "Qwen3.5-9B's gated delta nets")
    shape = find_kv_shape(model)
    most_tokens = max(options.contexts) + _MOST_NODES
    runner = runner_of(model, most_tokens, kernels=choose(torch.device("cpu")), sizes=_SIZES)
    for _, states in runner.storage.states.calls:
        states.normal_()
    node_bytes = {INPUTS: shape.input_bytes(torch.float32), STATES: shape.state_bytes(torch.float32)}
    trees = []
    for chains, length in tqdm(_TREES, unit="tree"):
        run = partial(forward, runner, options.contexts[0], tree_of(chains, length))
        seconds = in_turns({form: partial(run, form) for form in node_bytes}, options.repeats)
        ratio = median_of_ratios(seconds[STATES], seconds[INPUTS])._asdict()
        trees.append({"nodes": chains * length, "seconds": seconds, "states over inputs": ratio})
    tokens = in_turns(
        {f"{context}": partial(forward, runner, context) for context in options.contexts}, options.repeats
    )
    return document(
        "durations of passes that store inputs of nodes or their states, and of a token, in seconds", options,
        ("contexts", "threads", "repeats"), node_bytes=node_bytes, trees=trees, tokens=tokens,
    )  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    """Return a table with a row per tree, and one of a token after each text, in milliseconds."""
    rows = []
    for tree in result["trees"]:
        stored = [f"{tree['nodes'] * num_bytes / _MIB:.1f} MiB" for num_bytes in result["node_bytes"].values()]
        rows.append(
            [tree["nodes"], *stored, *map(_shown, tree["seconds"].values()), shown_ratio(tree["states over inputs"])]
        )
    forms = list(result["node_bytes"])
    trees = table(["nodes", *(f"{form}, bytes" for form in forms), *(f"{form}, ms" for form in forms), "ratio"], rows)
    tokens = [[f"{int(context):,}", _shown(seconds)] for context, seconds in result["tokens"].items()]
    return f"{trees}\n\n{table(['text', 'a token, ms'], tokens)}"


def _shown(seconds: list[float]) -> str:
    return f"{1000 * median(seconds):.1f}"
