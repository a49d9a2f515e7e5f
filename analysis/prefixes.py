"""`analyze prefixes`: tokens that the prefix cache finds with and without a head, and memory of a token.

Requests with a few shared beginnings, four at once, first without a draft model and then with heads of random weights.
What the cache finds depends on no weights, so it needs no trained head.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from tqdm import tqdm

from analysis.heads import KINDS, head_of, target_of
from analysis.loading import random_prompts
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.models.runner import ModelRunner
from engine.request import Limits, Request, Sampling, Speculation
from engine.start.building import assemble
from engine.start.distribution_check import run_to_end
from engine.step.engine import Engine
from loadtest.results import document, table

_AT_ONCE = 4
_ANSWER = 16
_DRAFTS = Speculation(rule="block", num_drafts=1, draft_length=3)
_NONE = "none"
_ALL = ("eagle3", *KINDS)


def load(kind: str, layers: int) -> Engine:
    """Return an engine of the embedded target with a head of this kind, or without a draft model."""
    target = target_of("embedded")  # an engine takes the weights out of its target
    head = None if kind == _NONE else head_of(kind, target, layers, _DRAFTS.draft_length)
    config = EngineConfig(
        model=ModelConfig(target="target", draft=None if head is None else "head", device="cpu"),
        cache=CacheConfig(memory_bytes=1 << 28),
        scheduler=SchedulerConfig(max_num_seqs=_AT_ONCE),
        speculation=SpeculationConfig(num_drafts=1, draft_length=_DRAFTS.draft_length, observed_share=0.0),
    )
    return assemble(config, target, head, is_owner=True)


def requests_of(options: argparse.Namespace, speculation: Speculation) -> list[Request]:
    """Return the requests: beginnings in turn, each followed by other tokens."""
    beginnings = random_prompts(options.beginnings, options.shared, 0)
    ends = random_prompts(options.requests, options.own, 1)
    return [
        Request(
            request_id=str(number),
            prompt_token_ids=(*beginning, *end),
            sampling=Sampling(temperature=1.0, seed=number),
            limits=Limits(max_tokens=_ANSWER, ignore_eos=True),
            speculation=speculation,
        )
        for number, (beginning, end) in enumerate(zip(itertools.cycle(beginnings), ends, strict=False))
    ]


def measure(engine: Engine, options: argparse.Namespace) -> dict[str, int]:
    """Answer the requests; return tokens asked for and found, and bytes of one token in target and head."""
    run_to_end(engine, requests_of(options, Speculation() if engine.drafter is None else _DRAFTS))
    scheduler = engine.scheduler
    return {
        "cached_prompt_tokens": scheduler.num_cache_hits,
        "queries": scheduler.num_cache_queries,
        "target_bytes_per_token": _token_bytes(engine.target),
        "head_bytes_per_token": 0 if engine.draft_runner is None else _token_bytes(engine.draft_runner),
    }


def _token_bytes(runner: ModelRunner) -> int:
    """Return the bytes of a token's K, V and hidden states."""
    stored = runner.storage
    num_slots = stored.keys.shape[1]
    parts = [stored.keys, stored.values, *([] if stored.hidden is None else [stored.hidden])]
    return sum(part.nbytes for part in parts) // num_slots


def markdown(result: dict[str, Any]) -> str:
    """Return a table with a row per head."""
    names = ("cached_prompt_tokens", "queries", "target_bytes_per_token", "head_bytes_per_token")
    rows = [[cell["head"], *(f"{cell[name]:,}" for name in names)] for cell in result["cells"]]
    return table(["head", "cached prompt tokens", "of", "target's bytes per token", "head's bytes per token"], rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", default=list(_ALL), choices=_ALL, help="types of heads (default all)")
    parser.add_argument("--layers", type=int, default=1, help="layers of the heads (default 1)")
    parser.add_argument("--requests", type=int, default=16, help="requests, four at once (default 16)")
    parser.add_argument("--beginnings", type=int, default=4, help="shared beginnings (default 4)")
    parser.add_argument("--shared", type=int, default=200, help="tokens of a beginning (default 200)")
    parser.add_argument("--own", type=int, default=33, help="further tokens of each prompt (default 33)")


def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Serve the same requests without a draft model and with each head."""
    cells = [
        {"head": kind, **measure(load(kind, options.layers), options)}
        for kind in tqdm([_NONE, *options.kinds], unit="head")
    ]
    what = "prompt tokens that the prefix cache finds with and without a head, four requests at once; bytes of a token"
    return document(what, options, ("layers", "requests", "beginnings", "shared", "own"), cells=cells)
