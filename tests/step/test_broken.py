"""A request with non-finite numbers ends alone."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch

from engine.cpu.levels import Levels
from engine.errors import NON_FINITE
from engine.models.runner import ModelRunner
from engine.request import Speculation
from engine.scheduling.block_tables import BlockTables
from engine.step.engine import Engine
from tests.engine import tiny
from tests.models import families
from tests.wrong import instead, level_by_level

SHAPES = {
    "plain": Speculation(),
    "block": Speculation(rule="block", num_drafts=1, draft_length=3),
    "bv_race": Speculation(rule="bv_race", num_drafts=3, draft_length=3),
    "tree": Speculation(rule="traversal", num_drafts=4, draft_length=3, tree=(2, 2, 1)),
    "kseq": Speculation(rule="kseq", num_drafts=2, draft_length=3),
}
STEP, BAD = 3, "1"


def engine(**options: Any) -> Engine:
    target = tiny.llama(1)
    return tiny.build(target, tiny.perturbed(target, 2, 0.05), **options)


def requests(speculation: Speculation, **sampling: Any) -> list[Any]:
    wanted = {"temperature": 1.0, **sampling}
    return [tiny.request(str(i), range(5 + i, 12 + i), speculation, 20, seed=i, **wanted) for i in range(4)]


def run(machine: Engine, asked: list[Any]) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """(tokens, errors) by request."""
    tokens: dict[str, list[int]] = {one.request_id: [] for one in asked}
    errors = {}
    for one in asked:
        machine.submit(one)
    while machine.scheduler.has_work:
        result = machine.run_step()
        for outcome in result.outcomes:
            tokens[outcome.request_id] += outcome.token_ids
        errors |= dict(result.failed)
        machine.scheduler.check_invariants()
    assert machine.scheduler.tables.target.num_used == 0
    return tokens, errors


def breaking(number: float, step: int = STEP) -> AbstractContextManager[Any]:
    """The target's logits of one request have such a number, once, at this step."""
    steps = 0

    def broken(split_prompts: Any, plan: Any, draft: Any, logits_NV: torch.Tensor) -> Any:
        nonlocal steps
        steps += 1
        logits = split_prompts(plan, draft, logits_NV)
        if steps == step:
            (place,) = [i for i, row in enumerate(plan.sampling_rows) if row.request_id == BAD]
            first, end = draft.starts[place : place + 2].tolist()
            logits.node_NV[(first + end) // 2, 7] = number
        return logits

    return instead("engine.step.engine", "split_prompts", broken)


@pytest.mark.sampled
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("most_unmerged", [0, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_only_the_broken_request_ends(shape: str, most_unmerged: int, temperature: float, number: float) -> None:
    asked = requests(SHAPES[shape], temperature=temperature)
    expected, _ = run(engine(), asked)
    machine = engine()
    machine.unrecorded.most_unmerged = most_unmerged
    with breaking(number):
        tokens, errors = run(machine, asked)
    assert {name: error.code for name, error in errors.items()} == {BAD: NON_FINITE}
    assert expected[BAD][: len(tokens[BAD])] == tokens[BAD]
    assert len(tokens[BAD]) < 20
    del expected[BAD], tokens[BAD]
    assert tokens == expected


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("shape", "at_once"),
    [("block", True), ("bv_race", True), ("block", False), ("bv_race", False), ("tree", False)],
)
def test_a_draft_models_numbers_count_too(shape: str, at_once: bool) -> None:
    """With NaN in the draft's distribution the rule's own sums would mean nothing."""
    num_drawn = 0

    def broken_distribution(draw: Any, *operands: Any) -> Any:
        nonlocal num_drawn
        tokens_CL = draw(*operands)
        probs_NV = operands[-1].probs_NV
        num_drawn += 1
        if num_drawn == 2:
            probs_NV[1] = float("nan")  # below the second request's root
        return tokens_CL

    asked = requests(SHAPES[shape])
    expected, _ = run(engine(), asked)
    machine = engine()
    runner = machine.draft_runner
    assert runner is not None
    calls = 0

    def broken(run: Any, of: ModelRunner, *operands: Any) -> Any:
        nonlocal calls
        logits_NV = run(of, *operands)
        if of is runner:
            calls += 1
            if calls == 2:
                logits_NV[len(logits_NV) // 4] = float("nan")  # of the second request's chains
        return logits_NV

    with ExitStack() as stack:
        if at_once:
            stack.enter_context(instead(Levels, "draw", broken_distribution))
        else:
            stack.enter_context(level_by_level())
            stack.enter_context(instead(ModelRunner, "run", broken))
        tokens, errors = run(machine, asked)
    assert {name: error.code for name, error in errors.items()} == {BAD: NON_FINITE}
    del expected[BAD], tokens[BAD]
    assert tokens == expected


@pytest.mark.parametrize(
    ("names", "draft_window"),
    [(("keys", "values"), 0), (("keys",), 0), (("values",), 0), (("keys", "values"), 12)],
)
def test_broken_keys_and_values_are_wiped(names: tuple[str, ...], draft_window: int) -> None:
    """The next owner of the blocks answers as if nothing had been there."""
    asked = requests(SHAPES["bv_race"])
    sizes = {"num_blocks": 32, "draft_window": draft_window, "max_num_seqs": 4}
    expected, _ = run(engine(**sizes), asked)
    machine = engine(**sizes)
    steps = 0

    def poisoned(carry_out: Any, plan: Any, *rest: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == STEP:
            (row,) = [row for row in plan.rows if row.request_id == BAD]
            held = row.draft_table[row.first_draft_key // machine.facts.block_size :]
            for runner, blocks in ((machine.target, row.block_ids), (machine.draft_runner, held)):
                assert runner is not None
                for block in blocks:
                    slots = slice(block * runner.block_size, (block + 1) * runner.block_size)
                    for name in names:
                        getattr(runner.storage, name)[:, slots] = float("nan")
        return carry_out(plan, *rest)

    with instead(machine, "carry_out", poisoned):
        tokens, errors = run(machine, asked)
    assert list(errors) == [BAD]
    assert {name: tokens[name] for name in "023"} == {name: expected[name] for name in "023"}
    for runner in (machine.target, machine.draft_runner):
        assert runner is not None
        assert bool(torch.isfinite(runner.storage.keys).all())
        assert bool(torch.isfinite(runner.storage.values).all())
    assert run(machine, asked)[0] == expected


@pytest.mark.parametrize("shape", ["plain", "bv_race"])
def test_a_shared_beginning_of_a_broken_request_stays(shape: str) -> None:
    """Neighbours hold the same blocks, and later requests find or compute them."""
    beginning = range(5, 45)
    asked = [tiny.request(str(i), [*beginning, 50 + i], SHAPES[shape], 20, seed=i, temperature=1.0) for i in range(3)]
    expected = {one.request_id: run(engine(), [one])[0][one.request_id] for one in asked}
    machine = engine()
    run(machine, [tiny.request("first", beginning, SHAPES[shape], 2)])
    with breaking(float("nan")):
        tokens, errors = run(machine, asked)
    assert list(errors) == [BAD]
    assert {name: tokens[name] for name in "02"} == {name: expected[name] for name in "02"}
    assert run(machine, asked)[0] == expected


def test_broken_request_with_shared_blocks_ends_alone() -> None:
    """Nothing of it can be wiped."""
    machine = engine()
    size = machine.facts.block_size
    short = tiny.request("1", range(5, 5 + 2 * size), SHAPES["plain"], 4, temperature=1.0)
    longer = tiny.request("0", range(5, 10 + 2 * size), SHAPES["plain"], 4, temperature=1.0)
    expected = run(engine(), [longer])[0]
    with breaking(float("nan"), step=1):
        tokens, errors = run(machine, [short, longer])
    assert list(errors) == [BAD]
    assert tokens["0"] == expected["0"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_broken_state_is_not_cached() -> None:
    """The second step of the request stores its state at the end of a block."""
    target = families.family("qwen3_5_text")
    asked = requests(SHAPES["plain"])
    expected, _ = run(tiny.build(target, None), asked)

    def cached_are_finite() -> bool:
        machine = tiny.build(target, None)
        steps = 0

        def poisoned(carry_out: Any, plan: Any, *rest: Any) -> Any:
            nonlocal steps
            steps += 1
            for row in plan.rows:
                if steps == 2 and row.request_id == BAD:
                    assert row.state.kept
                    machine.target.storage.states.calls[1][1][row.state.seat] = float("nan")
            return carry_out(plan, *rest)

        with instead(machine, "carry_out", poisoned):
            tokens, errors = run(machine, asked)
        assert list(errors) == [BAD]
        assert {name: tokens[name] for name in "023"} == {name: expected[name] for name in "023"}
        places = list(machine.scheduler.tables.states._place_of.values())
        assert places
        return all(bool(torch.isfinite(states[places]).all()) for _, states in machine.target.storage.states.calls)

    assert cached_are_finite()
    with instead(BlockTables, "forget_states", lambda *_: None):
        assert not cached_are_finite()
