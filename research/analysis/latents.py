"""`analyze latents`: passes over latents next to passes over the K and V of all heads.

The model has random weights, four layers and the head sizes of GLM-4.7-Flash. Its other layers are
small, so that attention takes most of the time. The forms take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from engine.attention.attention import HOOK, PagedKernel, register
from engine.attention.inputs import NO_NODES, NodeInput, SequenceInput
from engine.attention.latent import METHOD, has_latents
from engine.cpu.latents import LatentKernel
from engine.models.runner import ModelRunner
from engine.speculation.topology import merge_chains
from engine.start.loading import LoadedModel, adopt
from engine.start.probe import find_kv_shape
from loadtest.arguments import integers
from loadtest.results import document, table
from loadtest.statistics import median_of_ratios

_BLOCK_SIZE = 16
_ROOM = 256
"""Tokens of the largest pass."""
_CONFIG = {
    "vocab_size": 1000,
    "hidden_size": 2048,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "mlp_layer_types": ["dense"] * 4,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
}
EXPANDED, TORCH, COMPILED = "expanded", "latents, torch", "latents, compiled"
_CHAINS = [[4 * chain + depth for depth in range(3)] for chain in range(4)]

Forward = Callable[[], Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--contexts", type=integers, default=[1024, 8192], help="tokens of the texts (default 1024,8192)")
    add("--threads", type=int, default=2, help="cores (default 2)")
    add("--repeats", type=int, default=15, help="measurements of every pass (default 15)")


def new_model() -> LoadedModel:
    """Return a model with random weights."""
    import transformers

    register()
    torch.manual_seed(0)
    config = transformers.Glm4MoeLiteConfig(**_CONFIG)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=HOOK, dtype=torch.float32)
    return adopt(model, "GLM-4.7-Flash's heads")


def runner_of(loaded: LoadedModel, num_tokens: int, kernel: PagedKernel | None) -> ModelRunner:
    """Return a runner whose K/V are random numbers."""
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    shape = find_kv_shape(loaded)
    runner = ModelRunner(loaded.model, shape, num_blocks, _BLOCK_SIZE, loaded.vocab_size, paged_kernel=kernel)
    for keys, values in runner.storage.layers.values():
        keys.normal_()
        values.normal_()
    return runner


def runners(num_tokens: int) -> dict[str, ModelRunner]:
    """Return a runner of every form."""
    latents, expanded = new_model(), new_model()
    for module in expanded.model.modules():
        if has_latents(module):
            delattr(module, METHOD)
    return {
        EXPANDED: runner_of(expanded, num_tokens, None),
        TORCH: runner_of(latents, num_tokens, None),
        COMPILED: runner_of(latents, num_tokens, LatentKernel()),
    }


def passes(runner: ModelRunner, context: int) -> dict[str, Forward]:
    """Return the measured passes by name; requests at once share the text's blocks."""
    blocks = range(runner.storage.num_slots // _BLOCK_SIZE)
    tree = merge_chains(_CHAINS)
    nodes = NodeInput(tree.tokens, tree.depths, (), tree.ancestry())

    def forward(num_tokens: int, drafted: NodeInput = NO_NODES, num_requests: int = 1) -> Forward:
        sequence = SequenceInput([0] * num_tokens, context - num_tokens, blocks, drafted, slice(0, None))
        return lambda: runner.forward([sequence] * num_requests)

    return {
        "a token": forward(1),
        "a token and 12 nodes": forward(1, nodes),
        "a token of 8 requests": forward(1, num_requests=8),
        f"{_ROOM} tokens of a prompt": forward(_ROOM),
    }


@torch.inference_mode()
def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every pass in every form."""
    torch.set_num_threads(options.threads)
    models = runners(max(options.contexts) + _ROOM)
    cells = []
    for context in options.contexts:
        by_form = {form: passes(runner, context) for form, runner in models.items()}
        for name in tqdm(by_form[EXPANDED], desc=f"{context} tokens", unit="pass"):
            seconds: dict[str, list[float]] = {form: [] for form in models}
            for turn in range(options.repeats + 1):
                for form in models:
                    began = time.perf_counter()
                    by_form[form][name]()
                    if turn:  # the first turn compiles
                        seconds[form].append(time.perf_counter() - began)
            cells.append({"context": context, "pass": name, "seconds": seconds})
    for cell in cells:
        cell["over expanded"] = {
            form: median_of_ratios(cell["seconds"][EXPANDED], cell["seconds"][form])._asdict()
            for form in (TORCH, COMPILED)
        }
    stored = {form: runner.token_bytes for form, runner in models.items()}
    return document(
        "durations of passes over latents and over the K and V of all heads, in seconds", options,
        ("contexts", "threads", "repeats"), token_bytes=stored, cells=cells,
    )  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    """Return a table with a row per text and pass, in milliseconds."""
    rows = []
    for cell in result["cells"]:
        times = [f"{1000 * median(seconds):.1f}" for seconds in cell["seconds"].values()]
        ratios = [f"{found['ratio']:.2f}x" for found in cell["over expanded"].values()]
        rows.append([f"{cell['context']:,}", cell["pass"], *times, *ratios])
    forms = list(result["token_bytes"])
    return table(["text", "pass", *forms, *(f"speed of {form}" for form in forms[1:])], rows)
