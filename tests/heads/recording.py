"""Engines that note the logits of drafting nodes, and their errors."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from engine.drafting.chains import draw_by_level
from engine.heads.dflash import DFlash
from engine.heads.eagle import Eagle3
from engine.plan import Plan
from engine.request import Speculation
from engine.start.loading import LoadedModel
from engine.step.eager import EagerStep
from engine.step.engine import Engine
from tests.engine import tiny
from tests.heads import folders, oracles

VOCABULARY = 97
SPECULATIONS = {
    "chains": Speculation(rule="bv_race", num_drafts=3, draft_length=3),
    "tree": Speculation(rule="traversal", num_drafts=4, draft_length=3, tree=(2, 2, 1)),
}


@dataclass
class Node:
    """A place that logits were asked for."""

    sequence: int
    length: int
    """Tokens of the text there."""
    path: tuple[int, ...]
    logits: Tensor


class Recorder:
    """Notes the logits of every node that an engine's drafter gives."""

    def __init__(self, engine: Engine) -> None:
        self.nodes: list[Node] = []
        self._level: list[tuple[int, tuple[int, ...]]] = []
        """(number of the row, path) of each node of the level that was computed last."""
        self._drawing: list[Any] = []
        drafter: Any = engine.drafter
        self._begin, self._below = drafter.begin, drafter.below
        drafter.begin, drafter.below = self.begin, self.below
        drafter.draw = partial(draw_by_level, drafter)
        # The logits of nodes are asked for level by level.
        engine.unrecorded = EagerStep(engine.target, drafter)

    def begin(self, plan: Plan) -> Tensor:
        logits_NV: Tensor = self._begin(plan)
        self._drawing = [row for row in plan.sampling_rows if row.fanout]
        self._level = [(number, ()) for number in range(len(self._drawing))]
        self._note(logits_NV)
        return logits_NV

    def below(self, depth: int, token_N: Tensor) -> Tensor:
        tokens, level = iter(token_N.tolist()), []
        for number, path in self._level:
            fanout = self._drawing[number].fanout
            if len(fanout) > depth:
                level += [(number, (*path, next(tokens))) for _ in range(fanout[depth - 1])]
        assert next(tokens, None) is None
        self._level = level
        logits_NV: Tensor = self._below(depth, token_N)
        self._note(logits_NV)
        return logits_NV

    def _note(self, logits_NV: Tensor) -> None:
        for (number, path), logits_V in zip(self._level, logits_NV, strict=True):
            row = self._drawing[number]
            self.nodes.append(Node(row.sequence_id, row.end, path, logits_V.cpu().clone()))


class Oracle(Protocol):
    """A head in the plainest way."""

    def logits(self, text: Sequence[int], states: Tensor, path: Sequence[int]) -> Tensor:
        """Return [V] logits below a path; states: the target's, also of a longer text."""


def served(
    target: LoadedModel, written: folders.Written, speculation: Speculation, few: bool = False, paged: bool = False
) -> tuple[Recorder, list[list[int]]]:
    """Return an engine after texts with a common beginning, and the texts by sequence.

    paged: attention by the kernel of devices.
    """
    with tiny.with_paged_models() if paged else contextlib.nullcontext():
        engine = tiny.build(target, folders.load(written, target), num_blocks=30, budget=48)
    assert engine.target.fast_paths["paged attention"] or not paged
    assert engine.draft_runner is not None
    assert engine.draft_runner.fast_paths["paged attention"] or not paged
    if not paged and tiny.DEVICE.type == "cpu":
        assert engine.draft_runner.fast_paths["fast decoder"] == isinstance(engine.draft_runner.model, Eagle3 | DFlash)
    recorder = Recorder(engine)
    shared = tiny.prompts(VOCABULARY, [20])[0]
    rests = tiny.prompts(VOCABULARY, [3, 9] if few else [3, 30, 9, 5, 60, 2], seed=1)
    prompts = [*([] if few else [[5]]), *(shared + rest for rest in rests)]
    requests = [
        tiny.request(str(number), prompt, speculation, max_tokens=12 if few else 40, temperature=1.0, seed=number)
        for number, prompt in enumerate(prompts)
    ]
    run = tiny.run(engine, requests)
    if not few:
        assert run.num_preemptions > 0
        assert engine.scheduler.num_cache_hits > 0
        assert run.num_accepted > 5, "too few drafts are accepted to move anything"
    return recorder, [prompt + run.tokens[str(number)] for number, prompt in enumerate(prompts)]


def largest_error(
    target: LoadedModel,
    written: folders.Written,
    oracle: Oracle,
    recorder: Recorder,
    texts: Sequence[Sequence[int]],
    most: int = 40,
) -> float:
    """Return the largest difference between the logits of some nodes and the oracle's."""
    states = [oracles.target_states(target, text, written.taps) for text in texts]
    chosen = np.random.default_rng(3).permutation(len(recorder.nodes))[:most]
    assert len(chosen) > 10
    pairs = []
    for number in chosen:
        node = recorder.nodes[number]
        text = texts[node.sequence][: node.length]
        pairs.append((node.logits, oracle.logits(text, states[node.sequence], node.path)))
    return oracles.largest_error(pairs)
