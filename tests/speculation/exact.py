"""Laws of the emitted stream by enumeration of several steps, and models to enumerate."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path as FilePath

import numpy as np

from engine.plan import TargetShift
from engine.speculation.verification import RULES
from tests.oracles.enumeration import Path, Rows, RuleOutcome, TabularModel, joint, rule_outcomes

Law = dict[Path, float]
Step = Callable[[TabularModel], list[RuleOutcome]]
ModelOf = Callable[[TabularModel, Path, int, tuple[TargetShift, ...]], TabularModel]
"""The model of a step: of the world, the text before, the length of chains, and the shifts."""

GOLDEN = json.loads((FilePath(__file__).parent.parent / "vectors" / "golden.json").read_text())


BLOCK_NAMES = {
    "token": "token_single_chain",
    "block": "bv",
    "greedy_block": "gbv",
    "bv_race": "bv_race",
    "spectr_gbv": "race_select_gbv",
    "traversal": "traversal_iid",
    "rrs": "tree_rrs",
    "rrs_without_replacement": "tree_rrs_dedupe_wor",
    "kseq": "tree_kseq",
    "weighted_race": "tree_weighted_race",
    "nss": "tree_nss",
}
"""Rules by their names in golden.json's blocks, which have K i.i.d. chains."""


def golden_rows(rows: dict, which: str) -> dict[Path, np.ndarray]:
    """Laws by prefix, as golden.json writes them."""
    return {tuple(int(token) for token in key.split(",") if token): np.array(row[which]) for key, row in rows.items()}


def golden_model(case: dict) -> TabularModel:
    return TabularModel(golden_rows(case["rows"], "p"), golden_rows(case["rows"], "q"), case["V"], case["L"])


def outcomes_of(rule: str, model: TabularModel, num_drafts: int, method: str = "iid") -> list[RuleOutcome]:
    """One step of a rule on independent chains, or on one chain where it takes no more."""
    count = min(num_drafts, RULES[rule].max_drafts or num_drafts)
    return rule_outcomes(rule, model, (count, *(1,) * (model.length - 1)), method)


def random_model(seed: int, vocabulary: int = 3, length: int = 2, kind: str = "any") -> TabularModel:
    """Laws with corners: zeros, ties, equal laws, disjoint supports, one-hot rows."""
    rng = np.random.default_rng(seed)

    def row() -> np.ndarray:
        weights = rng.dirichlet(np.full(vocabulary, rng.choice([0.3, 1.0, 5.0])))
        if rng.random() < 0.25:
            weights = weights * (rng.random(vocabulary) < 0.6)
        if rng.random() < 0.1 or weights.sum() == 0:
            weights = np.eye(vocabulary)[rng.integers(vocabulary)]
        return weights / weights.sum()

    target, draft = {}, {}
    for depth in range(length + 1):
        for prefix in itertools.product(range(vocabulary), repeat=depth):
            target[prefix], draft[prefix] = row(), row()
            if kind == "dense":
                target[prefix], draft[prefix] = rng.dirichlet(np.ones(vocabulary), size=2)
            if kind == "equal" or (kind == "any" and rng.random() < 0.15):
                draft[prefix] = target[prefix]
    return TabularModel(target, draft, vocabulary, length)


def from_prefix(world: TabularModel, prefix: Path, length: int, shifts: tuple[TargetShift, ...] = ()) -> TabularModel:
    """Return the model of a step that begins after `prefix`."""

    def below(rows: Rows) -> dict[Path, np.ndarray]:
        rows_below = {}
        for depth in range(length + 1):
            for path in world.paths(depth):
                rows_below[path] = np.asarray(rows[prefix + path])
        return rows_below

    return TabularModel(below(world.target), below(world.draft), world.vocabulary, length, shifts)


def stream_law(world: TabularModel, step: Step, num_tokens: int, length: int, model_of: ModelOf = from_prefix) -> Law:
    """Return the law of the first tokens that step after step emits.

    model_of: the model of a step, by default with the world's own draft laws
    and chains of `length`.
    """
    law: Law = defaultdict(float)

    def go_on(prefix: Path, shifts: tuple[TargetShift, ...], probability: float) -> None:
        if len(prefix) >= num_tokens:
            law[prefix[:num_tokens]] += probability
            return
        ends: dict[tuple[Path, tuple[TargetShift, ...]], float] = defaultdict(float)
        for outcome in step(model_of(world, prefix, length, shifts)):
            ends[(*prefix, *outcome.accepted, outcome.next_token), outcome.shifts] += outcome.probability
        for (emitted, after), share in ends.items():
            go_on(emitted, after, probability * share)

    go_on((), (), 1.0)
    return law


def stream_distance(
    world: TabularModel, step: Step, num_tokens: int, length: int, model_of: ModelOf = from_prefix
) -> float:
    """Return the total variation between the emitted stream's law and the target's.

    model_of: as in `stream_law`.
    """
    law = stream_law(world, step, num_tokens, length, model_of)
    return 0.5 * sum(abs(law.get(path, 0.0) - joint(world.target, path)) for path in world.paths(num_tokens))


def emitted_law(model: TabularModel, outcomes: Sequence[RuleOutcome]) -> Law:
    """Law of the first L + 1 emitted tokens, an early stop being continued by the target."""
    law: Law = defaultdict(float)
    for outcome in outcomes:
        emitted = (*outcome.accepted, outcome.next_token)
        for rest in model.paths(model.length + 1 - len(emitted)):
            path = (*emitted, *rest)
            tail = np.prod([np.asarray(model.target[path[:i]])[path[i]] for i in range(len(emitted), len(path))])
            law[path] += outcome.probability * float(tail)
    return law


def distance_from_target(model: TabularModel, outcomes: Sequence[RuleOutcome]) -> float:
    """Return the total variation of the emitted law, for rules without later changes."""
    law = emitted_law(model, outcomes)
    return 0.5 * sum(abs(law[path] - joint(model.target, path)) for path in model.paths(model.length + 1))
