"""`analyze times --of prefixes`: tokens that the prefix cache finds with and without a head, and memory of a token.

Requests with a few shared beginnings, four at once, first without a draft model and then with heads of random weights.
What the cache finds depends on no weights, so it needs no trained head.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any, NamedTuple

from tqdm import tqdm

from analysis.loading import random_prompts
from analysis.times import heads
from analysis.times.heads import check_names, load_target, random_head
from analysis.times.steps import most_drafts
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.models.runner import ModelRunner
from engine.request import Limits, Request, Sampling, Speculation
from engine.step.building import assemble
from engine.step.distribution_check import run_to_end
from engine.step.engine import Engine
from loadtest.results import document, table

KINDS = ["eagle3", *heads.KINDS]
DEFAULTS: dict[str, Any] = {"kinds": KINDS, "layers": 1}
_AT_ONCE = 4
_ANSWER = 16
_DRAFTS = Speculation(rule="block", num_drafts=1, draft_length=3)
_NONE = "none"


class Prompts(NamedTuple):
    """Counts of the prompts and their tokens."""

    requests: int = 16
    beginnings: int = 4
    """Number of shared beginnings."""
    shared: int = 200
    """Tokens of a beginning."""
    own: int = 33
    """Further tokens of each prompt."""


_PROMPTS = Prompts()


def load(kind: str, layers: int) -> Engine:
    """Return an engine of the embedded target with a head of this type, or without a draft model."""
    target = load_target("embedded")  # an engine takes the weights out of its target
    head = None if kind == _NONE else random_head(kind, target, layers, _DRAFTS.draft_length)
    config = EngineConfig(
        model=ModelConfig(target="target", draft=None if head is None else "head", device="cpu"),
        cache=CacheConfig(memory_bytes=1 << 28),
        scheduler=SchedulerConfig(max_num_seqs=_AT_ONCE),
        speculation=most_drafts(1, _DRAFTS.draft_length),
    )
    return assemble(config, target, head, is_owner=True)


def requests(prompts: Prompts, speculation: Speculation) -> list[Request]:
    """Return the requests: beginnings in turn, each followed by other tokens."""
    beginnings = random_prompts(prompts.beginnings, prompts.shared, 0)
    ends = random_prompts(prompts.requests, prompts.own, 1)
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


def measure(engine: Engine, prompts: Prompts) -> dict[str, int]:
    """Answer the requests; return tokens asked for and found, and bytes of one token in target and head."""
    speculation = Speculation() if engine.drafter is None else _DRAFTS
    run_to_end(engine, requests(prompts, speculation))
    scheduler = engine.scheduler
    return {
        "cached_prompt_tokens": scheduler.num_cache_hits,
        "queries": scheduler.num_cache_queries,
        "target_bytes_per_token": _token_bytes(engine.target),
        "head_bytes_per_token": 0 if engine.draft_runner is None else _token_bytes(engine.draft_runner),
    }


def _token_bytes(runner: ModelRunner) -> int:
    """Return the bytes of a token's K, V and hidden states."""
    storage = runner.storage
    num_bytes = storage.keys.nbytes + storage.values.nbytes
    if storage.hidden is not None:
        num_bytes += storage.hidden.nbytes
    return num_bytes // storage.keys.shape[1]


def markdown(result: dict[str, Any]) -> str:
    """Return a table with a row per head."""
    names = ("cached_prompt_tokens", "queries", "target_bytes_per_token", "head_bytes_per_token")
    rows = [[cell["head"], *(f"{cell[name]:,}" for name in names)] for cell in result["cells"]]
    return table(["head", "cached prompt tokens", "of", "target's bytes per token", "head's bytes per token"], rows)


def analyze(options: argparse.Namespace, prompts: Prompts = _PROMPTS) -> dict[str, Any]:
    """Serve the same requests without a draft model and with each head."""
    check_names("--kinds", options.kinds, KINDS)
    cells = []
    for kind in tqdm([_NONE, *options.kinds], unit="head"):
        engine = load(kind, options.layers)
        cells.append({"head": kind, **measure(engine, prompts)})
    what = "prompt tokens that the prefix cache finds with and without a head, four requests at once; bytes of a token"
    shown = argparse.Namespace(of=options.of, layers=options.layers, **prompts._asdict())
    return document(what, shown, cells=cells)
