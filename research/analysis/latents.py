"""`analyze latents`: passes over latents next to passes over the K and V of all heads.

The model has random weights, four layers and the head sizes of GLM-4.7-Flash. Its other layers are
small, so that attention takes most of the time. The forms take turns.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from engine.attention.inputs import NO_NODES, NodeInput, SequenceInput
from engine.attention.latent import METHOD, has_latents
from engine.cpu.attention import CpuAttention
from engine.models.runner import ModelRunner
from loadtest.results import document, table
from loadtest.statistics import median_of_ratios
from research.analysis.passes import BLOCK_SIZE, Forward, add_pass_arguments, in_turns, new_model, runner_of, tree_of

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pass_arguments(parser, [1024, 8192])


def runners(num_tokens: int) -> dict[str, ModelRunner]:
    """Return a runner of every form."""
    import transformers

    config = transformers.Glm4MoeLiteConfig(**_CONFIG)
    latents, expanded = (new_model(config, "GLM-4.7-Flash's heads") for _ in range(2))
    for module in expanded.model.modules():
        if has_latents(module):
            delattr(module, METHOD)
    return {
        EXPANDED: runner_of(expanded, num_tokens),
        TORCH: runner_of(latents, num_tokens),
        COMPILED: runner_of(latents, num_tokens, paged_kernel=CpuAttention()),
    }


def passes(runner: ModelRunner, context: int) -> dict[str, Forward]:
    """Return the measured passes by name; requests at once share the text's blocks."""
    blocks = range(runner.storage.num_slots // BLOCK_SIZE)

    def forward(num_tokens: int, drafted: NodeInput = NO_NODES, num_requests: int = 1) -> Forward:
        sequence = SequenceInput([0] * num_tokens, context - num_tokens, blocks, drafted, slice(0, None))
        return lambda: runner.forward([sequence] * num_requests)

    return {
        "a token": forward(1),
        "a token and 12 nodes": forward(1, tree_of(4, 3)),
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
            seconds = in_turns({form: by_form[form][name] for form in models}, options.repeats)
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
