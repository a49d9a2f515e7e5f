"""`analyze times --of heads`: drafting of one-pass heads by chains, one request at a time.

Weights of the heads are random, because times do not depend on them. Steps of all shapes take
turns. Not for: acceptance, which only trained heads have (`polydraft analyze arms`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

from engine.attention.attention import HOOK, register
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.errors import ConfigError
from engine.heads.config import read_head
from engine.heads.head import TargetWeights
from engine.heads.loading import build_head, shapes_of
from engine.request import Speculation
from engine.start.building import assemble
from engine.start.loading import LoadedModel, adopt, adopt_head, load
from engine.start.measuring import synthetic_plan
from engine.step.engine import Engine
from loadtest.results import document, table
from research.analysis.loading import names_of
from research.analysis.times.steps import Seconds, measure_turns, most_drafts, part

KINDS = ["dflash", "dflash2", "dspark", "peagle"]
TARGETS = ["embedded", "larger"]
DEFAULTS: dict[str, Any] = {
    "targets": TARGETS,
    "kinds": KINDS,
    "layers": 1,
    "num_drafts": [1, 2, 4, 8],
    "draft_length": 7,
    "context": 256,
    "repeats": 5,
    "threads": 1,
}
_NUM_READ = 3
"""Tokens that a head reads in a step."""
_LARGER = {
    "hidden_size": 768,
    "intermediate_size": 2560,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32768,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
"""A target of 110 M parameters and random weights."""


def load_target(size: str) -> LoadedModel:
    """Return the embedded target, or a larger one."""
    if size == "embedded":
        options = argparse.Namespace(target=None, draft=None)
        return load(names_of(options)[0], None, "auto", torch.device("cpu"))
    from transformers import LlamaConfig, LlamaForCausalLM

    register()
    torch.manual_seed(1)
    model = LlamaForCausalLM._from_config(LlamaConfig(**_LARGER), attn_implementation=HOOK)
    return adopt(model, size)


def random_head(kind: str, target: LoadedModel, layers: int, length: int) -> LoadedModel:
    """Return a head with random weights for `length` tokens; kind: one of `KINDS`, or eagle3."""
    like = target.model.config
    names = [
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ]
    sizes = {name: getattr(like, name) for name in [*names, "vocab_size"]}
    depth = like.num_hidden_layers
    read_layers = [1, depth // 2, depth - 2]
    is_llama = kind in ("eagle3", "peagle")
    raw: dict[str, Any] = {
        "speculators_model_type": kind,
        "transformer_layer_config": {
            "model_type": "llama" if is_llama else "qwen3",
            "num_hidden_layers": layers,
            **sizes,
        },
        "mask_token_id": 0,
        "block_size": length + (kind != "dspark"),
        "aux_hidden_state_layer_ids": read_layers,
        "eagle_aux_hidden_state_layer_ids": read_layers,
    }
    config = read_head(kind, raw)
    assert config is not None
    torch.manual_seed(2)
    tensors = {}
    for name, shape in shapes_of(config, 3).items():
        # Norms stay norms, and everything else is small.
        tensors[name] = torch.ones(shape) if "norm" in name else torch.randn(shape) * 0.02
    head = build_head(config, 3, tensors)
    head.attach(TargetWeights.of(target.model, torch.float32))
    return adopt_head(head, target)


def measure(engine: Engine, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the summary of plain steps, and of steps with each number of chains."""
    shapes = {"off": Speculation()}
    for number in options.num_drafts:
        shapes[str(number)] = Speculation(
            rule="bv_race",
            num_drafts=number,
            draft_length=options.draft_length,
            draft_method="iid",
        )
    plans = {
        name: synthetic_plan(engine, 1, options.context, shape, num_read=_NUM_READ) for name, shape in shapes.items()
    }
    return summary(measure_turns(engine, plans, options.repeats))


def summary(turns: Mapping[str, list[Seconds]]) -> dict[str, dict[str, float]]:
    """Return medians by shape: drafting over that of one chain, and its share of the step."""

    def median_ms(name: str, phase: str) -> float:
        return 1000 * statistics.median(part(turns[name], phase))

    one_chain_ms = median_ms("1", "draft")
    shapes = {}
    for name in turns:
        draft_ms, step_ms = median_ms(name, "draft"), median_ms(name, "step")
        shapes[name] = {"draft_ms": draft_ms, "step_ms": step_ms}
        if name != "off":
            shapes[name]["draft_over_one"] = draft_ms / one_chain_ms
            shapes[name]["share_of_step"] = draft_ms / step_ms
    return {name: {key: round(value, 4) for key, value in shape.items()} for name, shape in shapes.items()}


def markdown(result: dict[str, Any]) -> str:
    """Return a table with a row per head: drafting of one chain, and of several over that.

    In brackets: the share of the step.
    """
    first, *more = result["options"]["num_drafts"]
    rows = []
    for cell in result["cells"]:
        shape = cell["shapes"][str(first)]
        row = [
            cell["target"],
            cell["kind"],
            f"{shape['draft_ms']:.1f} ({shape['share_of_step']:.0%})",
        ]
        for number in more:
            shape = cell["shapes"][str(number)]
            row.append(f"{shape['draft_over_one']:.2f}x ({shape['share_of_step']:.0%})")
        rows.append(row)
    return table(["target", "head", "1 chain, ms", *(f"{number} chains" for number in more)], rows)


def check_names(flag: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise ConfigError for a name that is not known."""
    for name in names:
        if name not in known:
            raise ConfigError(f"{flag} {name}: choose from {', '.join(known)}")


def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Measure heads of every type."""
    check_names("--targets", options.targets, TARGETS)
    check_names("--kinds", options.kinds, KINDS)
    if options.num_drafts[0] != 1:
        raise ConfigError("--num-drafts must begin with 1: drafting is shown over that of one chain")
    torch.set_num_threads(options.threads)
    cells = []
    for size in options.targets:
        for kind in tqdm(options.kinds, desc=size, unit="head"):
            target = load_target(size)
            head = random_head(kind, target, options.layers, options.draft_length)
            engine = assemble(_config(options), target, head, is_owner=True)
            cells.append({"target": size, "kind": kind, "shapes": measure(engine, options)})
    names = ("of", "layers", "num_drafts", "draft_length", "context", "repeats", "threads")
    what = "medians: milliseconds of drafting and of the step by number of chains, one request; shapes take turns"
    return document(what, options, names, cells=cells)


def _config(options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(target="target", draft="head", device="cpu", num_threads=options.threads),
        cache=CacheConfig(num_blocks=options.context // 8 + 16),
        scheduler=SchedulerConfig(max_model_len=2 * options.context, max_num_seqs=1),
        speculation=most_drafts(max(options.num_drafts), options.draft_length),
    )
