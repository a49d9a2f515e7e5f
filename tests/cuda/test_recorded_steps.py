"""Recorded steps give the tokens of the same steps launched operation by operation.

Without a device nothing is recorded, and what is tested is all but the recording: shapes, numbers,
padding, and the work that is recorded, on the arrays that a recording would read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from engine.cuda.recorded import inputs
from engine.cuda.recorded.inputs import DISTRIBUTIONS, StepInputs, StepShape
from engine.cuda.recorded.menu import shape_of
from engine.cuda.recorded.steps import RecordedSteps
from engine.errors import NON_FINITE
from engine.models.runner import ModelRunner
from engine.plan import Plan, Row
from engine.request import Request, Speculation, TextDraft
from engine.step.engine import Engine
from tests.cuda.in_torch import attention_in_torch
from tests.engine import tiny
from tests.grid import grid
from tests.wrong import calls_of, instead

RECORDED = [(0, 0), (1, 2), (1, 5), (2, 3), (4, 3)]
stands_in = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="stands in for a device")
SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "top-p": {"temperature": 0.8, "top_p": 0.7},
    "all filters": {"temperature": 1.3, "top_k": 7, "min_p": 0.02, "top_p": 0.9},
    "greedy": {"temperature": 0.0},
}


def chains(num_drafts: int, length: int, **more: Any) -> Speculation:
    return Speculation(rule="bv_race", num_drafts=num_drafts, draft_length=length, **more)


@contextlib.contextmanager
def noted() -> Iterator[list[StepShape | None]]:
    """The shapes that steps run as; None for steps that are not recorded."""
    shapes: list[StepShape | None] = []
    with calls_of(RecordedSteps, "find") as calls:
        yield shapes
    shapes += [None if found is None else found.shape for _, found in calls]


def machines(**options: Any) -> tuple[Engine, Engine]:
    """An engine as it is on a CPU, and one with recorded steps."""
    target = tiny.llama(1, layers=1)
    draft = tiny.perturbed(target, 2, 0.05)
    plain = tiny.build(target, draft, **options)
    plain.recorded.serves = False  # on a device it has some
    with tiny.with_recorded_steps(RECORDED):
        return plain, tiny.build(target, draft, **options)


@pytest.fixture(scope="module")
def both() -> tuple[Engine, Engine]:
    return machines()


@pytest.fixture(autouse=True)
def _attention(request: pytest.FixtureRequest) -> None:
    """Attend by the kernel in plain steps and in those with padding, else in torch."""
    is_plain = "callspec" in vars(request.node) and request.node.callspec.params.get("sampling") == "plain"
    if not is_plain and "padding" not in request.node.name:
        request.getfixturevalue("attention_in_torch")


def asked(count: int, speculation: Callable[[int], Speculation], **sampling: Any) -> list[Request]:
    """Requests with prompts and answers of different lengths."""
    return [
        tiny.request(str(i), range(5 + i, 15 + 3 * i), speculation(i), 8 + 3 * i, **{"seed": i, **sampling})
        for i in range(count)
    ]


def compared(both: tuple[Engine, Engine], requests: list[Request]) -> list[StepShape | None]:
    """The answers are the same, to the token; the shapes of the steps."""
    try:
        expected = tiny.run(both[0], requests)
        with noted() as shapes:
            found = tiny.run(both[1], requests)
    finally:
        for machine in both:
            for one in requests:
                machine.abort(one.request_id)
    assert found.tokens == expected.tokens
    assert found.num_steps == expected.num_steps
    return shapes


@pytest.mark.sole("recorded steps next to eager ones")
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("shape", "count", "sampling"),
    grid(
        [
            *(((2, 3), 3, sampling) for sampling in SAMPLING),
            *((shape, 1, "plain") for shape in ((0, 0), (1, 2), (1, 5), (2, 3), (4, 3))),
            *(((0, 0), 3, sampling) for sampling in ("top-p", "greedy")),
            ((1, 5), 2, "greedy"),
        ],
        {((0, 0), 3, "greedy"), ((1, 5), 2, "greedy")},
    ),
)
def test_every_decode_step_gives_the_same_tokens(
    both: tuple[Engine, Engine], shape: tuple[int, int], count: int, sampling: str
) -> None:
    shapes = compared(both, asked(count, lambda _: chains(*shape), **SAMPLING[sampling]))
    assert None in shapes[:1], "the prompts are read as they are"
    assert None not in shapes[1:]
    assert {one.sequences for one in shapes if one} <= {1, 2, 4}


def test_requests_of_different_shapes_share_a_recorded_step(both: tuple[Engine, Engine]) -> None:
    """Fewer chains, shorter ones, none; and in the end of an answer all that there is room for."""
    wishes = [chains(4, 3), chains(1, 2), tiny.OFF, chains(2, 3), chains(3, 1)]
    shapes = compared(both, asked(4, lambda i: wishes[i], temperature=1.0))
    assert (4, 4, 3) in {one[:3] for one in shapes if one}
    shapes = compared(both, asked(3, lambda i: wishes[i + 2], temperature=1.0, top_p=0.8))
    assert {one.distributions for one in shapes if one} == {DISTRIBUTIONS[1]}
    assert sum(one is None for one in shapes) == 1


def test_a_step_runs_as_the_smallest_shape_with_room_for_it(both: tuple[Engine, Engine]) -> None:
    shapes = compared(both, asked(1, lambda _: chains(1, 3), temperature=1.0))
    assert {one[1:3] for one in shapes[1:] if one} >= {(1, 5), (1, 2)}
    shapes = compared(both, asked(1, lambda _: chains(3, 4), temperature=1.0))
    assert shapes[1] is None, "no shape has three chains of this length"


FILTERED = [{"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.1}, {}]


@pytest.mark.parametrize("wishes", [FILTERED, FILTERED[::-1]], ids=["the last does not", "the first does not"])
def test_one_request_may_ask_for_filters_and_the_others_not(
    both: tuple[Engine, Engine], wishes: list[dict[str, Any]]
) -> None:
    requests = [
        tiny.request(str(i), range(5 + i, 15), chains(2, 3), 16, temperature=0.7 + i / 4, seed=i, **wish)
        for i, wish in enumerate(wishes)
    ]
    assert DISTRIBUTIONS[-1] in {one.distributions for one in compared(both, requests) if one}


def test_logprobs_and_drafts_are_reported(both: tuple[Engine, Engine]) -> None:
    requests = [
        msgspec.structs.replace(one, num_logprobs=2, reports_drafts=True)
        for one in asked(3, lambda i: chains(2, 3) if i else chains(1, 2), temperature=1.0)
    ]
    expected, found = (tiny.run(machine, requests) for machine in both)
    for name, outcomes in expected.outcomes.items():
        for one, other in zip(outcomes, found.outcomes[name], strict=True):
            assert [top for top, _ in _tops(one)] == [top for top, _ in _tops(other)]
            np.testing.assert_allclose([p for _, p in _tops(one)], [p for _, p in _tops(other)], atol=1e-4)
            assert one.drafts == other.drafts


def _tops(outcome: Any) -> list[tuple[int, float]]:
    return [pair for one in outcome.logprobs for pair in ((-1, one.logprob), *one.top)]


UNUSUAL: dict[str, tuple[Speculation, dict[str, Any]]] = {
    "another rule": (Speculation(rule="token", num_drafts=1, draft_length=2), {}),
    "another way to draw": (Speculation(rule="nss", num_drafts=2, draft_length=2, draft_method="greedy"), {}),
    "penalties": (chains(1, 2), {"presence_penalty": 0.5}),
    "a bias": (chains(1, 2), {"logit_bias": ((3, 1.0),)}),
    "a stable seed": (chains(1, 2), {"seed_stable": True}),
}


@pytest.mark.parametrize("name", grid(UNUSUAL, {"another rule", "penalties"}))
def test_an_unrecorded_request_runs_eagerly(both: tuple[Engine, Engine], name: str) -> None:
    speculation, wish = UNUSUAL[name]
    shapes = compared(both, asked(2, lambda _: speculation, **{"temperature": 1.0, **wish}))
    assert {one for one in shapes if one is None or one.num_drafts} == {None}


@pytest.mark.parametrize("shape", grid([((0, 0),), ((1, 2),), ((4, 3),)], {((1, 2),)}), ids=str)
def test_greedy_and_sampled_requests_share_a_recorded_step(both: tuple[Engine, Engine], shape: tuple[int, int]) -> None:
    """A temperature so low that float32 could not scale by it is 0."""
    requests = [
        tiny.request(str(i), range(5 + i, 15), chains(*shape), 9 + 2 * i, temperature=temperature, seed=i, top_p=0.8)
        for i, temperature in enumerate((0.0, 1.0, 1e-7))
    ]
    shapes = compared(both, requests)
    assert None not in shapes[1:]
    assert {one.distributions for one in shapes if one} == {DISTRIBUTIONS[1]}


def drafting_row(machine: Engine) -> Row:
    """The row of a request that drafts one chain."""
    with calls_of(RecordedSteps, "find") as calls:
        tiny.run(machine, asked(1, lambda _: chains(1, 2), temperature=1.0))
    (row,) = calls[2].operands[1].rows
    return row


def test_text_drafts_and_changed_targets_run_eagerly(both: tuple[Engine, Engine]) -> None:
    row = drafting_row(both[1])
    assert shape_of(Plan((row,))) == StepShape(1, 1, 2, DISTRIBUTIONS[0])
    for change in (
        {"text_drafts": (TextDraft("prompt_lookup", (5, 6)),)},
        {"emits": False},
        {"prompt_next": (5,)},
        {"input_ids": (5, 6)},
        {"draft_input_ids": (5, 6, 7)},
        {"draft_first_index": row.draft_first_index - 1, "fanout": ()},
        {"shifts": (MagicMock(),)},
        {"fanout": (2, 2)},
        {"speculation": msgspec.structs.replace(row.speculation, over_acceptance=0.1)},
    ):
        assert shape_of(Plan((row, msgspec.structs.replace(row, **change)))) is None, change
    assert shape_of(Plan(())) is None


def test_a_draft_model_that_only_reads_computes_its_keys(both: tuple[Engine, Engine]) -> None:
    """A request that drafts nothing in this step, whose draft model keeps up with the text."""
    reading = msgspec.structs.replace(drafting_row(both[1]), fanout=())
    slot = reading.block_ids[reading.draft_first_index // 8] * 8 + reading.draft_first_index % 8
    found = []
    for machine in both:
        runner = machine.draft_runner
        assert runner is not None
        with torch.inference_mode():
            runner.storage.keys[:, slot] = 0
        with noted() as shapes:  # as a measurement carries out a plan
            machine.carry_out(Plan((reading,)))
        found.append(runner.storage.keys[:, slot].clone())
    assert shapes == [StepShape(1, 1, 2, DISTRIBUTIONS[0])]
    assert found[0].abs().sum() > 0
    torch.testing.assert_close(*found)


def test_recorded_steps_keep_the_draft_window() -> None:
    both = machines(draft_window=8)
    shapes = compared(both, asked(2, lambda _: chains(2, 3), temperature=1.0))
    assert None not in shapes[3:]


def test_recorded_steps_write_to_own_blocks_only(both: tuple[Engine, Engine]) -> None:
    """Padding, and unused rows of a request, write to the spare block."""
    machine = both[1]
    wishes = [chains(2, 3), tiny.OFF, chains(1, 1)]
    for one in asked(3, lambda i: wishes[i], temperature=1.0):
        machine.submit(one)
    machine.run_step()
    spare = machine.target.storage.keys.shape[1] // 8 - 1
    runners = [machine.target, machine.draft_runner]
    for _ in range(4):
        before = [runner.storage.keys.clone() for runner in runners if runner]
        machine.run_step()
        held = {spare, *(block for row in machine.scheduler.last_plan.rows for block in row.block_ids)}
        for runner, keys in zip(runners, before, strict=True):
            assert runner is not None
            changed = (runner.storage.keys != keys).any(-1).any(-1).any(0).nonzero().squeeze(1)
            assert set((changed // 8).tolist()) <= held
    for name in "012":
        machine.abort(name)


@stands_in
@pytest.mark.parametrize(
    ("shape", "is_draft"),
    grid(
        [((0, 0), False), ((1, 2), False), ((1, 2), True), ((2, 3), False), ((2, 3), True)],
        {((2, 3), True)},
    ),
)
def test_a_request_whose_numbers_are_not_finite_ends_alone(shape: tuple[int, int], is_draft: bool) -> None:
    plain, machine = machines()
    requests = asked(3, lambda _: chains(*shape), temperature=1.0)
    expected = tiny.run(plain, requests).tokens
    runner, calls = (machine.draft_runner if is_draft else machine.target), 0

    def broken(run: Any, of: ModelRunner, *operands: Any) -> torch.Tensor:
        nonlocal calls
        logits_NV: torch.Tensor = run(of, *operands)
        is_counted = of is runner and operands[2].paged.is_padded
        calls += is_counted
        if calls == 2 and is_counted:
            logits_NV[len(logits_NV) // 4] = torch.nan  # of the second of four
        return logits_NV

    for one in requests:
        machine.submit(one)
    errors: dict[str, Any] = {}
    answers: dict[str, list[int]] = {one.request_id: [] for one in requests}
    with instead(ModelRunner, "_compute", broken):
        while machine.scheduler.has_work:
            result = machine.run_step()
            errors |= dict(result.failed)
            for outcome in result.outcomes:
                answers[outcome.request_id] += outcome.token_ids
    assert {name: error.code for name, error in errors.items()} == {"1": NON_FINITE}
    assert answers.pop("1") != expected.pop("1")
    assert answers == expected


def test_a_chain_that_no_request_has_cannot_win(both: tuple[Engine, Engine]) -> None:
    """A plain request has one chain of no tokens; the second has undefined numbers."""
    machine, num_plain = both[1], 3
    for number in range(num_plain + 1):
        speculation = tiny.OFF if number < num_plain else chains(2, 3)
        machine.submit(tiny.request(str(number), range(5, 15), speculation, 60, seed=number, temperature=1.0))
    won = []
    for _ in range(6):
        machine.run_step()
        plan = machine.scheduler.last_plan
        step = machine.recorded.find(plan)
        if step is None or not step.shape.num_drafts:
            continue
        with torch.inference_mode():
            draft = step.draw(plan)
            logits_NV = step.forward(plan, draft)
            step._logits_NV.view(step.shape.sequences, -1, logits_NV.shape[1])[:num_plain, 1:] = torch.nan
            verdict = step.verify(plan, draft, logits_NV)
        assert not verdict.broken
        won += step._result[:num_plain].tolist()
    for number in range(num_plain + 1):
        machine.abort(str(number))
    assert len(won) > 3 * num_plain
    assert set(won) == {0, 2, 4}, "first chains of two each"


def test_a_verdict_about_non_finite_numbers_names_a_chain_of_the_request(both: tuple[Engine, Engine]) -> None:
    """Kernels differ in which chain they choose then, so the chains here are not theirs."""
    machine = both[1]
    for one in asked(2, lambda i: chains(2, 3) if i else tiny.OFF, temperature=1.0):
        machine.submit(one)
    for _ in range(2):
        machine.run_step()
    plan = machine.scheduler.last_plan
    step = machine.recorded.find(plan)
    assert step is not None
    with torch.inference_mode():
        draft = step.draw(plan)
        step.verify(plan, draft, step.forward(plan, draft))
        step._result[:2] = torch.tensor([1, 3])  # operands of what is tested, `_read`
        assert step._read(draft).chains == [0, 3]
    for name in "01":
        machine.abort(name)


WRONG: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "chains that are not drafted race too": ("is_dead", np.zeros_like),
    "shorter chains are taken for longer ones": ("lengths", lambda lengths: np.full_like(lengths, 3)),
    "nodes see no other nodes": ("words", np.zeros_like),
    "nodes see all nodes": ("words", lambda words: np.full_like(words, (1 << 12) - 1)),
    "the target reads the tokens of other nodes": ("tokens", lambda tokens: np.roll(tokens, 1, axis=1)),
    "chains find the distributions of other nodes": ("nodes", lambda nodes: np.roll(nodes, 1, axis=1)),
    "keys of nodes are not read": ("num_seen", np.zeros_like),
    "all nodes are of the first level": ("depths", lambda depths: depths.clip(max=1)),
    "nodes lie where their parents do": ("offsets", lambda offsets: offsets.clip(max=0)),
    "a row without use writes to the text": ("is_used", np.ones_like),
}


@pytest.mark.parametrize("wrong", grid(WRONG, {"nodes see all nodes"}))
def test_the_comparison_finds_wrong_numbers(both: tuple[Engine, Engine], wrong: str) -> None:
    name, change = WRONG[wrong]
    wishes = [chains(4, 3), chains(1, 2), tiny.OFF, chains(2, 3)]
    requests = asked(4, lambda i: wishes[i], temperature=1.0)

    def spoilt(right: Any, *operands: Any) -> Any:
        tables = right(*operands)
        return tables._replace(**{name: change(getattr(tables, name))})

    with instead(inputs, "tables_of", spoilt), pytest.raises((AssertionError, IndexError)):
        compared(both, requests)


WRONG_LAWS: dict[str, Callable[[dict[str, np.ndarray]], None]] = {
    "noise of the neighbour": lambda v: v["noise"].__setitem__(slice(None), np.roll(v["noise"], 1, axis=1)),
    "temperature of the neighbour": lambda v: v["temperature"].__setitem__(slice(None), np.roll(v["temperature"], 1)),
    "top_p is forgotten": lambda v: v["top_p"].fill(1),
    "one token of the text too few": lambda v: v["counts 0"].fill(1),
    "logits of another token": lambda v: v["wanted"].fill(0),
}


@pytest.mark.parametrize("wrong", grid(WRONG_LAWS, {"noise of the neighbour"}))
def test_the_comparison_finds_wrong_distributions(both: tuple[Engine, Engine], wrong: str) -> None:
    requests = [
        tiny.request(str(i), range(5 + i, 15), chains(2, 3), 16, temperature=0.5 + i, top_p=0.7, seed=i)
        for i in range(3)
    ]

    def spoilt(of: Any, step: StepInputs, rows: Any) -> Any:
        result = of(step, rows)
        if step.shape.num_drafts:
            WRONG_LAWS[wrong](step._views)
        return result

    with instead(StepInputs, "of", spoilt), pytest.raises((AssertionError, IndexError)):
        compared(both, requests)


@pytest.mark.slow
@stands_in
def test_padding_has_defined_numbers(both: tuple[Engine, Engine]) -> None:
    """Non-finite numbers of rows that are not computed would go through all layers."""

    def unset(empty: Any, *size: Any, **kind: Any) -> torch.Tensor:
        found: torch.Tensor = empty(*size, **kind)
        return found.fill_(torch.nan) if found.is_floating_point() else found

    attention = pytest.importorskip("engine.cuda.attention_kernel")
    requests = [tiny.request(str(i), range(5, 9), chains(1, 2 - i % 2), 4, seed=i, temperature=1.0) for i in range(3)]
    with attention_in_torch():
        expected = tiny.run(both[0], requests)
    with noted() as shapes, calls_of(attention, "attend_paged") as attended, instead(torch, "empty", unset):
        assert tiny.run(both[1], requests).tokens == expected.tokens
    assert {one.sequences for one in shapes if one} >= {4}
    assert attended
    assert all(output.isfinite().all() for _, output in attended)


def test_unused_rows_read_no_text(both: tuple[Engine, Engine]) -> None:
    """A request that drafts nothing has no rows in the draft model's passes."""
    machine = both[1]
    wishes = [chains(2, 3), tiny.OFF, chains(1, 2)]
    seen: list[dict[str, Any]] = []

    def noting(of: Any, step: StepInputs, rows: Any) -> Any:
        result = of(step, rows)
        seen.append({name: step._views[f"counts {name}"].tolist() for name in range(len(step.sizes))})
        return result

    with instead(StepInputs, "of", noting):
        tiny.run(machine, asked(3, lambda i: wishes[i], temperature=1.0))
    assert {0: [1, 0, 1], 1: [2, 0, 1], 2: [2, 0, 0], 3: [7, 1, 3]} in [
        {name: counts[:3] for name, counts in one.items()} for one in seen
    ]
