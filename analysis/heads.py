"""Drafting times of one-pass heads by the number of chains: `polydraft analyze heads`.

Weights of the heads are random, because times do not depend on them. Steps of all shapes take turns. Not for:
acceptance, which only trained heads have (`polydraft analyze arms`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

from analysis.loading import names_of
from engine.attention.attention import HOOK, register
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.heads.config import read_head
from engine.heads.head import TargetWeights
from engine.heads.loading import build_head, shapes_of
from engine.request import Speculation
from engine.start.building import assemble
from engine.start.calibration import middle_steps, synthetic_plan
from engine.start.loading import LoadedModel, adopt, adopt_head, load
from engine.step.engine import Engine
from loadtest.arguments import integers
from loadtest.results import document, table

KINDS = ("dflash", "dflash2", "dspark", "peagle")
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


def target_of(size: str) -> LoadedModel:
    """Return the embedded target, or a larger one."""
    if size == "embedded":
        options = argparse.Namespace(target=None, draft=None)
        return load(names_of(options)[0], None, "auto", torch.device("cpu"))
    from transformers import LlamaConfig, LlamaForCausalLM

    register()
    torch.manual_seed(1)
    model = LlamaForCausalLM._from_config(LlamaConfig(**_LARGER), attn_implementation=HOOK)
    return adopt(model, size)


def head_of(kind: str, target: LoadedModel, layers: int, length: int) -> LoadedModel:
    """Return a head with random weights that drafts at most `length` tokens."""
    like = target.model.config
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    depth = like.num_hidden_layers
    raw: dict[str, Any] = {
        "speculators_model_type": kind,
        "transformer_layer_config": {
            "model_type": "llama" if kind in ("eagle3", "peagle") else "qwen3",
            "num_hidden_layers": layers,
            **{name: getattr(like, name) for name in names},
        },
        "mask_token_id": 0,
        "block_size": length + (kind != "dspark"),
        "aux_hidden_state_layer_ids": [1, depth // 2, depth - 2],
        "eagle_aux_hidden_state_layer_ids": [1, depth // 2, depth - 2],
    }
    config = read_head(kind, raw)
    assert config is not None
    torch.manual_seed(2)
    # Norms stay norms, and everything else is small.
    tensors = {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape) * 0.02
        for name, shape in shapes_of(config, 3).items()
    }
    head = build_head(config, 3, tensors)
    head.attach(TargetWeights.of(target.model, torch.float32))
    return adopt_head(head, target)


def speculations_of(numbers: Sequence[int], length: int) -> Mapping[str, Speculation]:
    """Return plain decoding, and these numbers of chains."""
    chains = {
        str(number): Speculation(rule="bv_race", num_drafts=number, draft_length=length, draft_method="iid")
        for number in numbers
    }
    return {"off": Speculation(), **chains}


@torch.inference_mode()
def measure(engine: Engine, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return milliseconds of drafting and of the whole step, by shape."""
    speculations = speculations_of(options.num_drafts, options.draft_length)
    plans = [synthetic_plan(engine, 1, options.context, one, num_read=options.read) for one in speculations.values()]
    found: dict[str, dict[str, list[float]]] = {name: {"draft_ms": [], "step_ms": []} for name in speculations}
    for _ in range(options.repeats):
        for times, (wall_s, phases_s) in zip(found.values(), middle_steps(engine, plans), strict=True):
            times["draft_ms"].append(1000 * phases_s["draft"])
            times["step_ms"].append(1000 * wall_s)
    return found


def summary(found: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, float]]:
    """Return medians by shape: drafting over that of one chain, and its share of the step."""
    medians = {
        name: {what: statistics.median(values) for what, values in times.items()} for name, times in found.items()
    }
    for of_shape in (one for name, one in medians.items() if name != "off"):
        of_shape["draft_over_one"] = of_shape["draft_ms"] / medians["1"]["draft_ms"]
        of_shape["share_of_step"] = of_shape["draft_ms"] / of_shape["step_ms"]
    return {name: {what: round(value, 4) for what, value in one.items()} for name, one in medians.items()}


def markdown(result: dict[str, Any]) -> str:
    """Return a table with a row per head: drafting of one chain, and of several over that, with shares of the step."""
    numbers = result["options"]["num_drafts"]
    head = ["target", "head", "1 chain, ms", *(f"{number} chains" for number in numbers if number > 1)]
    rows = []
    for cell in result["cells"]:
        one, *several = (cell["shapes"][str(number)] for number in numbers)
        shown = [f"{one['draft_ms']:.1f}", *(f"{shape['draft_over_one']:.2f}x" for shape in several)]
        shares = [f"({shape['share_of_step']:.0%})" for shape in (one, *several)]
        rows.append([cell["target"], cell["kind"], *map(" ".join, zip(shown, shares, strict=True))])
    return table(head, rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--targets", nargs="+", default=["embedded", "larger"], choices=["embedded", "larger"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="types of heads (default all)")
    parser.add_argument("--layers", type=int, default=1, help="layers of the heads (default 1)")
    parser.add_argument("--num-drafts", type=integers, default=[1, 2, 4, 8], help="chains (default 1,2,4,8)")
    parser.add_argument("--draft-length", type=int, default=7, help="tokens of a chain (default 7)")
    parser.add_argument("--context", type=int, default=256, help="tokens of the text (default 256)")
    parser.add_argument("--read", type=int, default=3, help="tokens that the head reads in a step (default 3)")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of every shape (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine (default 1)")


def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Measure heads of every type, one request at a time."""
    torch.set_num_threads(options.threads)
    cells = []
    for size in options.targets:
        for kind in tqdm(options.kinds, desc=size, unit="head"):
            target = target_of(size)
            head = head_of(kind, target, options.layers, options.draft_length)
            engine = assemble(_config(options), target, head, is_owner=True)
            cells.append({"target": size, "kind": kind, "shapes": summary(measure(engine, options))})
    names = ("layers", "num_drafts", "draft_length", "context", "read", "repeats", "threads")
    what = "medians: milliseconds of drafting and of the step by number of chains, one request; shapes take turns"
    return document(what, options, names, cells=cells)


def _config(options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(target="target", draft="head", device="cpu", num_threads=options.threads),
        cache=CacheConfig(num_blocks=options.context // 8 + 16),
        scheduler=SchedulerConfig(max_model_len=2 * options.context, max_num_seqs=1),
        speculation=SpeculationConfig(
            num_drafts=1,
            draft_length=1,
            max_num_drafts=max(options.num_drafts),
            max_draft_length=options.draft_length,
            observed_share=0.0,
        ),
    )
