"""`analyze quality`: loss of target and draft model in other number formats, on held-out text.

All formats read the same tokens, one text after the other, with the passes that serve; the first
one multiplies float32 rows with the checkpoint's weights, or with a GGUF file's weights,
dequantised. The perplexity is over all tokens after the first of each text. The interval of the
difference is of texts drawn again in pairs, so it says how far other texts of this kind may differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from engine.attention.inputs import NO_NODES, SequenceInput
from engine.errors import ConfigError
from engine.models.gguf.folder import file_of
from engine.step.engine import Engine
from loadtest.results import document, table
from loadtest.statistics import interval
from research.analysis.draft_logits import draft_logits, drafts_by_head
from research.analysis.loading import add_pair_arguments, config_of, load_engine, models_of, prompts_of

Texts = Sequence[tuple[int, ...]]
Reader = Callable[[Sequence[int]], Mapping[str, Tensor]]
"""Returns [T - 1, V] logits after all tokens of a text but the last, by model."""
_CACHE_BYTES = 1 << 29


class Loss(NamedTuple):
    """Comparison of a format with the checkpoint's, by text."""

    nats_before: list[float]
    """Minus the log probability of all tokens after the first, in the checkpoint's format."""
    nats: list[float]
    num_equal: list[int]
    """Places whose most probable token is the same."""
    largest: list[float]
    """Largest difference of a logit from that of the checkpoint's format."""


def logits_of(engine: Engine, text: Sequence[int]) -> dict[str, Tensor]:
    """Return [T - 1, V] logits after all tokens of a text but the last, by model.

    A head as the drafter is left out: its weights keep their format.
    """
    blocks = tuple(range(-(-len(text) // engine.facts.block_size)))
    found = {"target": engine.target.forward([SequenceInput(text[:-1], 0, blocks, NO_NODES, slice(0, None))])}
    if engine.drafter is not None and not drafts_by_head(engine):
        found["draft"] = draft_logits(engine, text[:-1], 0)
    return found


@torch.inference_mode()
def losses_of(plain: Reader, others: Mapping[str, Reader], texts: Texts, what: str) -> dict[tuple[str, str], Loss]:
    """Return the losses by (format, model)."""
    found: dict[tuple[str, str], Loss] = {}
    for text in tqdm(texts, desc=what, unit="text"):
        before, following = plain(text), torch.tensor(text[1:])
        for name, read in others.items():
            for model, logits in read(text).items():
                loss = found.setdefault((name, model), Loss([], [], [], []))
                loss.nats_before.append(_nats(before[model], following))
                loss.nats.append(_nats(logits, following))
                loss.num_equal.append(int((before[model].argmax(-1) == logits.argmax(-1)).sum()))
                loss.largest.append(float((before[model] - logits).abs().max()))
    return found


def _nats(logits_NV: Tensor, following_N: Tensor) -> float:
    log_p_NV = logits_NV.double().log_softmax(-1)
    return -float(log_p_NV.gather(1, following_N.to(log_p_NV.device).unsqueeze(1)).sum())


def compared(before: Sequence[float], after: Sequence[float], num_tokens: Sequence[int]) -> dict[str, Any]:
    """Return both perplexities, and the relative difference with its 95 % interval; nats and tokens
    of each text.
    """

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
    """Return a table with a row per kind of text, model and format."""
    rows = [
        [
            cell["texts"],
            cell["model"],
            cell["format"],
            f"{cell['perplexity_before']:.3f}",
            f"{cell['perplexity']:.3f}",
            "{value:+.2%} ({low:+.2%} to {high:+.2%})".format(**cell["difference"]),
            f"{cell['equal_tokens']:.1%}",
            f"{cell['largest_logit_error']:.2f}",
        ]
        for cell in result["cells"]
    ]
    head = ["texts", "model", "format", "plain perplexity", "perplexity", "difference (95 % interval)"]
    return table([*head, "equal greedy tokens", "largest error of a logit"], rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    parser.add_argument(
        "--weights",
        dest="formats",
        action="append",
        choices=["auto", "int8", "int4"],
        help="as of `serve`, may be repeated (default int8, auto for a GGUF file); auto: the checkpoint's, with the "
        "processor's dot products",
    )
    parser.add_argument("--kv-cache-dtype", default="auto", help="as of `serve`, e.g. bfloat16 (default auto)")
    add_text_arguments(parser)


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the texts, and how much of them is read."""
    parser.add_argument(
        "--texts",
        action="append",
        help="dialogues and gutenberg, both embedded (default both), or a file of JSON lines with text, prompt or "
        "messages that no model was trained on; may be repeated",
    )
    parser.add_argument("--length", type=int, default=512, help="last tokens of a text that are read (default 512)")


def texts_of(options: argparse.Namespace) -> dict[str, Texts]:
    """Return the texts of each kind that the command line names; raise ConfigError for a kind
    without any.
    """
    options.texts = options.texts or ["dialogues", "gutenberg"]
    options.prompt_length = options.length
    texts: dict[str, Texts] = {
        Path(kind).stem: [text for text in prompts_of(kind, options) if len(text) > 1] for kind in options.texts
    }
    for kind, kind_texts in texts.items():
        if not kind_texts:
            raise ConfigError(f"--texts {kind}: no text has two tokens")
    return texts


def cells_of(plain: Reader, others: Mapping[str, Reader], texts: Mapping[str, Texts]) -> list[dict[str, Any]]:
    """Return the comparisons of all formats with the plain one, by kind of texts and model."""
    cells = []
    for kind, kind_texts in texts.items():
        num_tokens = [len(text) - 1 for text in kind_texts]
        for (name, model), loss in losses_of(plain, others, kind_texts, kind).items():
            shares = {
                "equal_tokens": sum(loss.num_equal) / sum(num_tokens),
                "largest_logit_error": max(loss.largest),
            }
            found = compared(loss.nats_before, loss.nats, num_tokens)
            cells.append({"texts": kind, "model": model, "format": name, **found, **shares})
    return cells


def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Compare each format with the checkpoint's weights and float32 rows."""
    texts = texts_of(options)
    config = config_of(options, cache_bytes=_CACHE_BYTES, needs_draft=False)
    names = [name for name in models_of(options) if name is not None]
    is_gguf = any(Path(name).is_dir() and file_of(Path(name)) is not None for name in names)
    options.formats = options.formats or ["auto" if is_gguf else "int8"]

    def reader(**changed: Any) -> Reader:
        changes = msgspec.structs.replace(config.model, **changed)
        return partial(logits_of, load_engine(msgspec.structs.replace(config, model=changes)))

    plain = reader(dtype="float32") if is_gguf else reader(activations="float32")
    kv_dtype = options.kv_cache_dtype
    others = {weights: reader(weights=weights, kv_dtype=kv_dtype) for weights in options.formats}
    cells = cells_of(plain, others, texts)
    options.target, options.draft = (name and Path(name).name for name in models_of(options))
    what = "perplexity of all tokens after the first of each text, with float32 rows and in other formats"
    fields = ("target", "draft", "dtype", "formats", "kv_cache_dtype", "texts", "length", "threads")
    return document(what, options, fields, cells=cells)
