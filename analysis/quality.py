"""`analyze quality`: perplexity of target and draft model in another number format, on held-out text.

Both formats read the same tokens, one text after the other, with the passes that serve. The perplexity is over all
tokens after the first of each text. The interval of the difference is of texts drawn again in pairs, so it says how far
other texts of this kind may differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from analysis.draft_logits import draft_logits, drafts_by_head
from analysis.loading import add_pair_arguments, config_of, load_engine, names_of, prompts_of
from engine.attention.inputs import NO_NODES, SequenceInput
from engine.errors import ConfigError
from engine.step.engine import Engine
from loadtest.results import document, table
from loadtest.statistics import interval

Texts = Sequence[tuple[int, ...]]
_CACHE_BYTES = 1 << 29


@torch.inference_mode()
def nats_of(engine: Engine, texts: Texts, description: str) -> dict[str, list[float]]:
    """Return minus the log probability of all tokens after the first, by model and text.

    A head as the drafter is left out: its weights keep their format.
    """
    found: dict[str, list[float]] = {"target": []}
    if not drafts_by_head(engine):
        found["draft"] = []
    for text in tqdm(texts, desc=description, unit="text"):
        known, following = text[:-1], torch.tensor(text[1:])
        blocks = tuple(range(-(-len(known) // engine.facts.block_size)))
        of_target = engine.target.forward([SequenceInput(known, 0, blocks, NO_NODES, slice(0, None))])
        found["target"].append(_nats(of_target, following))
        if "draft" in found:
            found["draft"].append(_nats(draft_logits(engine, known, 0), following))
    return found


def _nats(logits_NV: Tensor, following_N: Tensor) -> float:
    log_p_NV = logits_NV.double().log_softmax(-1)
    return -float(log_p_NV.gather(1, following_N.to(log_p_NV.device).unsqueeze(1)).sum())


def compared(before: Sequence[float], after: Sequence[float], num_tokens: Sequence[int]) -> dict[str, Any]:
    """Return both perplexities, and the relative difference with its 95 % interval; nats and tokens of each text."""

    def difference(before_N: Any, after_N: Any, tokens_N: Any, axis: int) -> Any:
        return np.expm1((after_N.sum(axis) - before_N.sum(axis)) / tokens_N.sum(axis))

    found = interval(difference, before, after, num_tokens)
    total = sum(num_tokens)
    return {
        "tokens": total,
        "perplexity_before": float(np.exp(sum(before) / total)),
        "perplexity": float(np.exp(sum(after) / total)),
        "difference": {"value": found.ratio, "low": found.low, "high": found.high},
    }


def markdown(result: Mapping[str, Any]) -> str:
    """Return a table with a row per kind of text and model."""
    rows = [
        [
            cell["texts"],
            cell["model"],
            cell["tokens"],
            f"{cell['perplexity_before']:.3f}",
            f"{cell['perplexity']:.3f}",
            "{value:+.2%} ({low:+.2%} to {high:+.2%})".format(**cell["difference"]),
        ]
        for cell in result["cells"]
    ]
    head = ["texts", "model", "tokens", "perplexity", "in the other format", "difference (95 % interval)"]
    return table(head, rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    parser.add_argument("--weights", choices=["auto", "int8"], default="int8", help="as of `serve` (default int8)")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as of `serve`, e.g. bfloat16 (default auto)")
    parser.add_argument(
        "--texts",
        action="append",
        help="dialogues and gutenberg, both embedded (default both), or a file of JSON lines with text, prompt or "
        "messages that no model was trained on; may be repeated",
    )
    parser.add_argument("--length", type=int, default=512, help="last tokens of a text that are read (default 512)")


def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the checkpoint's format, then the other one."""
    options.texts = options.texts or ["dialogues", "gutenberg"]
    options.prompt_length = options.length
    texts = {Path(kind).stem: [text for text in prompts_of(kind, options) if len(text) > 1] for kind in options.texts}
    if empty := [kind for kind, of_kind in texts.items() if not of_kind]:
        raise ConfigError(f"--texts {empty[0]}: no text has two tokens")
    config = config_of(options, cache_bytes=_CACHE_BYTES)
    changed = {"weights": options.weights, "kv_dtype": options.kv_cache_dtype}
    configs = [config, msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, **changed))]
    nats = []
    for name, one in zip(("as loaded", "other format"), configs, strict=True):
        engine = load_engine(one)
        nats.append({kind: nats_of(engine, of_kind, f"{kind}, {name}") for kind, of_kind in texts.items()})
    cells = [
        {"texts": kind, "model": model, **compared(of_model, nats[1][kind][model], [len(t) - 1 for t in texts[kind]])}
        for kind, found in nats[0].items()
        for model, of_model in found.items()
    ]
    options.target, options.draft = (Path(name).name for name in names_of(options))
    what = "perplexity of all tokens after the first of each text, as loaded and with these weights and K/V cache"
    names = ("target", "draft", "dtype", "weights", "kv_cache_dtype", "texts", "length", "threads")
    return document(what, options, names, cells=cells)
