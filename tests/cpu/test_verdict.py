"""Verdicts of one kernel: their distribution, and the general path's verdicts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

import engine.step.verify as verifying
from engine.cpu.compiled import block_loops, row_loops
from engine.drafting.draft import Draft
from engine.plan import Plan, StepVerdict
from engine.request import Speculation
from tests.cpu.test_kernel_mutants import BLOCK, ROWS, kernels_with
from tests.engine import tiny
from tests.oracles.enumeration import Path
from tests.speculation import test_served_steps as served
from tests.speculation.served import Fit, fit
from tests.speculation.test_served_steps import ALPHA, NUM_TOKENS, VOCABULARY, drafts, row_of, step
from tests.wrong import calls_of, instead

pytestmark = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="kernels of a CPU")

OFF = {"speculation": Speculation(), "fanout": ()}
KINDS: dict[str, dict[str, Any]] = {
    "block": drafts("block", 1, 1, 1),
    "warm": {**drafts("bv_race", 2, 1), "sampling": {"temperature": 0.6}},
    "race": drafts("bv_race", 3, 1, 1),
    "nothing": OFF,
    "cool": {**OFF, "sampling": {"temperature": 1.6}},
    "one token": drafts("bv_race", 1),
    "filtered": {**drafts("bv_race", 2, 1), "sampling": {"temperature": 0.7, "top_k": 3, "top_p": 0.9}},
    "no unlikely ones": {**drafts("block", 1, 1), "sampling": {"min_p": 0.3}},
    "text drafts alone": served.ROWS["text drafts alone"],
    "filtered text drafts": {**served.ROWS["text drafts alone"], "sampling": {"temperature": 0.8, "top_p": 0.9}},
    "race with text drafts": served.ROWS["bv_race with text drafts"],
    "block with text drafts": served.ROWS["block with text drafts"],
}
GREEDY = {
    "greedy": {**drafts("rrs", 3, 1), "sampling": {"temperature": 0.0}},
    "greedy plain": {**OFF, "sampling": {"temperature": 0.0}},
    "greedy text drafts": {**served.ROWS["text drafts alone"], "sampling": {"temperature": 0.0}},
    "greedy race with text drafts": {**served.ROWS["bv_race with text drafts"], "sampling": {"temperature": 0.0}},
}
NUM_ROWS = 3000
"""Rows of every type."""


def fits(seed: int = 0, num_rows: int = NUM_ROWS) -> dict[str, Fit]:
    """Return, by type of row, the fit of the texts to the target's law."""
    names = tuple(KINDS)
    emissions = step([row_of(seed + i, KINDS[names[i % len(names)]]) for i in range(num_rows * len(names))])[1]
    chance = np.random.default_rng(seed)
    fit_by_row = {}
    for i, name in enumerate(names):
        sampling = KINDS[name].get("sampling", {})
        laws: dict[Path, Any] = {}
        expected: dict[Path, float] = {(): 1.0}
        for _ in range(NUM_TOKENS):
            laws |= {path: served.law_below(path, sampling) for path in expected}
            expected = {(*path, x): p * laws[path][x] for path, p in expected.items() for x in range(VOCABULARY)}
        texts = []
        for emission in emissions[i :: len(names)]:
            text = (*emission.accepted, emission.next_token)
            while len(text) < NUM_TOKENS:
                text = (*text, int(chance.choice(VOCABULARY, p=laws[text])))
            texts.append(text[:NUM_TOKENS])
        fit_by_row[name] = fit(texts, expected)
    return fit_by_row


@pytest.mark.sole("the compiled verdict")
def test_rows_have_the_target_s_law() -> None:
    with calls_of(verifying, "target_distributions") as calls:
        assert {name for name, found in fits().items() if found.p_value < ALPHA} == set()
    assert calls == [], "the kernel makes the laws"


Operands = dict[str, np.ndarray]
"""Operands of `decide` by their names."""


def one_number_for_two_decisions(operands: Operands) -> Operands:
    numbers = operands["uniforms"].copy()
    numbers[block_loops._RESIDUAL] = numbers[block_loops._ACCEPT]
    return {"uniforms": numbers}


def one_number_for_all_depths(operands: Operands) -> Operands:
    numbers = operands["walk_uniforms"].copy()
    numbers[:] = numbers[:, :1]
    return {"walk_uniforms": numbers}


def without_filters(operands: Operands) -> Operands:
    return {"top_ks": np.zeros_like(operands["top_ks"]), "top_ps": np.ones_like(operands["top_ps"])}


def of_the_first(name: str) -> Callable[[Operands], Operands]:
    """Give all requests the first request's number."""
    return lambda operands: {name: np.full_like(operands[name], operands[name][0])}


WRONG_OPERANDS: dict[str, Callable[[Operands], Operands]] = {
    "the first request's temperature": of_the_first("temperatures"),
    "the first request's min_p": of_the_first("least_logs"),
    "one number for two decisions": one_number_for_two_decisions,
    "one number for all depths": one_number_for_all_depths,
    "no filters": without_filters,
    "a token more": lambda operands: {"top_ks": operands["top_ks"] + 1},
}
WRONG = {
    "laws of the next node": (
        BLOCK,
        "node_rows[chain, walked + depth] - first",
        "min(node_rows[chain, walked + depth] - first + 1, last - first - 1)",
    ),
    "each child by itself": (BLOCK, "mass += np.float64(nodes", "mass = np.float64(nodes"),
    "refused tokens stay": (BLOCK, "if total > 0:\n", "if total > 2:\n"),
    "no temperature": (ROWS, "log = (logits[column] - most) / temperature", "log = logits[column] - most"),
}


@pytest.mark.sole("wrong operands of the compiled verdict")
@pytest.mark.sampled
@pytest.mark.parametrize("wrong", WRONG_OPERANDS)
def test_wrong_operands_are_rejected(wrong: str) -> None:
    names = tuple(inspect.signature(block_loops.decide.py_func).parameters)

    def decide(right: Any, *arrays: np.ndarray) -> Any:
        operands = dict(zip(names, arrays, strict=True))
        return right(*{**operands, **WRONG_OPERANDS[wrong](operands)}.values())

    with instead(block_loops, "decide", decide):
        assert min(found.p_value for found in fits(num_rows=1000).values()) < ALPHA


@pytest.mark.slow  # compiles the kernel
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_kernels_are_rejected(wrong: str) -> None:
    kernels = kernels_with(*WRONG[wrong])
    with instead(block_loops, "decide", lambda _, *operands: kernels.decide(*operands)):
        assert min(found.p_value for found in fits().values()) < ALPHA


def both(rows: Sequence[Any], change: Callable[[torch.Tensor], None] = lambda _: None) -> list[tuple[Any, ...]]:
    """Return (emissions, broken ids) of the kernel and of the general path."""
    results: list[tuple[Any, ...]] = []

    def verify(at_once: Any, plan: Plan, draft: Draft, logits_NV: torch.Tensor) -> StepVerdict:
        change(logits_NV)
        verdicts = [at_once(plan, draft, logits_NV.clone()), verifying.verify_chains(plan, draft, logits_NV.clone())]
        results.extend((list(verdict.emissions), verdict.broken) for verdict in verdicts)
        return verdicts[0]

    with instead(served, "verify_at_once", verify):
        step(rows)
    return results


def test_verdicts_are_those_of_the_general_path() -> None:
    """The last of equal scores, and the longest match of a later chain, too."""
    kinds = list({**KINDS, **GREEDY}.values())
    by_kernel, generally = both([row_of(i, kinds[i % len(kinds)]) for i in range(800)])
    assert by_kernel[0] == generally[0]
    assert len({len(emission.accepted) for emission in by_kernel[0]}) > 2


def near_a_border() -> tuple[np.ndarray, float]:
    """(logits, uniform number) whose token changes if the distribution is divided by its sum."""
    chance = np.random.default_rng(0)
    while True:
        logits = chance.normal(size=(1, VOCABULARY)).astype(np.float32)
        law = np.empty_like(logits)
        one = np.ones(1, np.float32)
        row_loops.distributions(logits, one, -np.inf * one, np.zeros(1, np.int64), one, law)
        scaled = (law / law.sum(dtype=np.float64)).astype(np.float32)
        borders = [np.cumsum(row[0], dtype=np.float64) / row.sum(dtype=np.float64) for row in (law, scaled)]
        place = int(np.argmax(abs(borders[0] - borders[1])))
        if abs(borders[0][place] - borders[1][place]) > 1e-9:
            return logits[0], float(borders[0][place] + borders[1][place]) / 2


@pytest.mark.parametrize("neighbour", ["nothing", "text drafts alone", "race with text drafts"])
def test_neighbours_change_no_bit_of_a_distribution(neighbour: str) -> None:
    """A row without text drafts draws from the same bits next to rows that have some."""
    logits, number = near_a_border()
    names = tuple(inspect.signature(block_loops.decide.py_func).parameters)
    verdicts = []

    def decide(right: Any, *arrays: np.ndarray) -> None:
        operands = dict(zip(names, arrays, strict=True))
        operands["logits"][0] = logits
        numbers = operands["uniforms"].copy()
        numbers[block_loops._RESIDUAL, 0, 0] = number
        right(*{**operands, "uniforms": numbers}.values())
        verdicts.append(operands["verdict"][:3, 0].tolist())

    with instead(block_loops, "decide", decide):
        step([row_of(0, OFF)])
        step([row_of(0, OFF), row_of(1, KINDS[neighbour])])
    assert verdicts[0] == verdicts[1]


@pytest.mark.parametrize("number", [torch.nan, -torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["race", "nothing", "greedy"])
def test_numbers_that_are_not_finite_are_found(number: float, kind: str) -> None:
    rows = [row_of(0, {**KINDS, **GREEDY}[kind]), row_of(1, KINDS["block"])]

    def break_one(logits_NV: torch.Tensor) -> None:
        logits_NV[0, 2] = number

    by_kernel, generally = both(rows, break_one)
    assert by_kernel[1] == generally[1] == {0}


@pytest.mark.parametrize(
    "fields",
    [
        drafts("token", 1, 1),
        {**OFF, "sampling": {"seed_stable": True}},
        served.ROWS["one text draft"],
    ],
    ids=["another rule", "seed-stable", "another rule with text drafts"],
)
def test_other_rows_take_the_general_path(fields: dict[str, Any]) -> None:
    with (
        calls_of(block_loops, "decide") as decisions,
        calls_of(verifying, "target_distributions") as laws,
    ):
        step([row_of(0, KINDS["block"]), row_of(1, fields)])
    assert (len(decisions), len(laws)) == (0, 1)
