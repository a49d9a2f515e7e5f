"""Recorded steps of engines with a head: the head drafts apart, and the rest of a step is recorded.

Answers are those of eager steps, to the token (`tests/engine/test_recorded_steps.py` explains the comparison).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from engine.attention.tensors import KVTensors
from engine.drafting.draft import Layout
from engine.errors import NON_FINITE
from engine.models.loading import LoadedModel
from engine.plan import Plan
from engine.request import Request
from engine.step import building
from engine.step.engine import Engine
from engine.step.recorded import apart, steps
from engine.step.recorded.menu import menu
from engine.step.recorded.steps import RecordedStep, RecordedSteps
from tests.engine import test_drafters, tiny
from tests.engine.test_recorded_steps import asked, chains, compared, stands_in
from tests.engine.test_recording import FakeGraphs, serving
from tests.grid import grid
from tests.heads import folders
from tests.heads.recording import VOCABULARY
from tests.wrong import instead

BY_THE_KERNEL = "test_answers_are_those_of_eager_steps[dflash]"


RECORDED = [(0, 0), (1, 2), (4, 3)]
SIZES: dict[str, Any] = {"draft_vocabulary": 83, "scale": 0.3, "taps": (0, 1, 2)}
HEADS: dict[str, Callable[[Path], folders.Written]] = {
    "eagle3": lambda folder: folders.write_eagle(folder, **SIZES),
    "peagle": lambda folder: folders.write_eagle(folder, kind="peagle", **SIZES),
    "dflash": lambda folder: folders.write_block(folder, **SIZES),
    "dspark": lambda folder: folders.write_block(folder, kind="dspark", **SIZES),
    "dspark, recurrent": lambda folder: folders.write_block(folder, kind="dspark", markov_head_type="rnn", **SIZES),
    "dflash2": lambda folder: folders.write_block(folder, kind="dflash2", **SIZES),
    "mtp": lambda folder: folders.write_mtp(folder, VOCABULARY),
}
WISHES = [chains(4, 3), chains(1, 2), tiny.OFF, chains(2, 3)]

Both = tuple[Engine, Engine]
Machines = Callable[[str], Both]


@pytest.fixture(autouse=True)
def _attention(request: pytest.FixtureRequest) -> None:
    if request.node.name != BY_THE_KERNEL:
        request.getfixturevalue("attention_in_torch")


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Machines:
    """Return the engine of a head as it is on a CPU, and one with recorded steps."""
    target = folders.target(VOCABULARY, layers=2)

    @cache
    def of(name: str) -> Both:
        written = HEADS[name](tmp_path_factory.mktemp("head") / "head")
        own = folders.load_target(written) if name == "mtp" else target
        return built(own, written)

    return of


def built(target: LoadedModel, written: folders.Written) -> Both:
    plain = tiny.build(target, folders.load(written, target))
    plain.recorded.serves = False  # on a device it has some
    with tiny.with_recorded_steps(RECORDED):
        return plain, tiny.build(target, folders.load(written, target), max_num_seqs=4)


def mixed(**sampling: Any) -> list[Request]:
    """Requests that draft differently, fewer than a step has room for."""
    return asked(3, lambda number: WISHES[number], **{"temperature": 1.0, **sampling})


@pytest.mark.parametrize("name", grid(HEADS, {"eagle3", "peagle", "dspark"}))
def test_answers_are_those_of_eager_steps(machines: Machines, name: str) -> None:
    """Requests with several chains, with one, and without drafts share steps, and end at different times."""
    shapes = compared(machines(name), mixed())
    assert None not in shapes[1:]
    assert {shape[1:3] for shape in shapes if shape} >= {(4, 3), (0, 0)}


@pytest.mark.parametrize("name", grid(HEADS, {"dflash"}))
def test_plain_steps_are_recorded(machines: Machines, name: str) -> None:
    shapes = compared(machines(name), asked(2, lambda _: tiny.OFF, temperature=1.0))
    assert None not in shapes[1:]
    assert {shape.num_drafts for shape in shapes if shape} == {0}


@pytest.mark.parametrize("sampling", [{"top_p": 0.7, "temperature": 0.8}, {"temperature": 0.0}], ids=str)
@pytest.mark.parametrize("name", grid(HEADS, {"dflash2"}))
def test_filters_and_temperature_zero(machines: Machines, name: str, sampling: dict[str, Any]) -> None:
    assert None not in compared(machines(name), mixed(**sampling))[1:]


def states_left_out(target: Any, step: Any) -> None:
    with instead(KVTensors, "store", lambda *_: None):
        target(step)


def tokens_of_the_step_before(draft: Any, chains: Any, *operands: Any) -> None:
    before_CL = chains.tokens_CL.clone()
    draft(chains, *operands)
    chains.tokens_CL.copy_(before_CL)


def distributions_of_the_step_before(draft: Any, chains: Any, *operands: Any) -> None:
    before_NV = chains.draft.probs_NV.clone()
    draft(chains, *operands)
    chains.draft.probs_NV.copy_(before_NV)


def distributions_of_another_row(draft: Any, chains: Any, *operands: Any) -> None:
    draft(chains, *operands)
    chains.draft.probs_NV.copy_(chains.draft.probs_NV.roll(1, 0))


def numbers_of_another_chain(draft: Any, chains: Any, recorded: Any, uniform_LC: torch.Tensor, *operands: Any) -> None:
    draft(chains, recorded, uniform_LC.roll(1, 1), *operands)


WRONG: dict[str, tuple[Any, str, Callable[..., None]]] = {
    "states left out": (RecordedStep, "_target", states_left_out),
    "tokens of the step before": (steps, "draft_into", tokens_of_the_step_before),
    "distributions of the step before": (steps, "draft_into", distributions_of_the_step_before),
    "distributions of another row": (steps, "draft_into", distributions_of_another_row),
    "numbers of another chain": (steps, "draft_into", numbers_of_another_chain),
}


@pytest.mark.parametrize("wrong", grid(WRONG, {"states left out", "distributions of another row"}))
def test_wrong_variants_are_found_out(machines: Machines, wrong: str) -> None:
    if wrong == "states left out" and tiny.DEVICE.type != "cpu":
        pytest.skip("a graph that is recorded does not call it again")
    with instead(*WRONG[wrong]), pytest.raises(AssertionError):
        compared(machines("dspark"), mixed())


@stands_in
def test_two_graphs_are_replayed(machines: Machines) -> None:
    both, graphs = machines("dspark"), FakeGraphs()
    machine = both[1]
    assert machine.draft_runner is not None
    replayed = RecordedSteps(graphs, machine.drafter)
    shapes = menu(RECORDED, 4, drafts_apart=True)
    replayed.record([machine.target, machine.draft_runner], shapes, 20, lambda _: None)
    assert len(graphs.recordings) == 2 * len(shapes)
    with serving(machine, replayed):
        served = compared(both, mixed())
    assert sum(one.num_replays for one in graphs.recordings) == 2 * sum(shape is not None for shape in served)


@stands_in
def test_the_memory_of_graphs_is_planned(tmp_path: Path) -> None:
    """They are recorded next to a pool of one block first."""
    target, graphs = folders.target(VOCABULARY, layers=2), FakeGraphs(free_bytes=1 << 24, bytes_each=1000)
    head = folders.load(HEADS["dspark"](tmp_path / "head"), target)
    with tiny.with_recorded_steps(RECORDED), instead(building, "graphs_on", lambda *_: graphs):
        machine = tiny.build(target, head, max_num_seqs=2)
    num_recordings = 2 * len(menu(RECORDED, 2))
    assert len(graphs.recordings) == 2 * num_recordings
    assert machine.facts.memory_plan["graphs"] == 1000 * num_recordings


def test_a_request_whose_drafts_are_not_finite_ends_alone(machines: Machines) -> None:
    """Nor do its numbers reach what the others leave unused."""
    plain, machine = machines("dspark")
    expected = tiny.run(plain, mixed()).tokens
    seen: list[torch.Tensor] = []

    def broken(draw: Any, plan: Plan, drafter: Any, layout: Layout, *operands: Any) -> Any:
        tokens_CL, drawn_from = draw(plan, drafter, layout, *operands)
        if not seen:
            drawn_from.probs_NV[drawn_from.row_CX[0, 0]] = torch.nan
        return tokens_CL, drawn_from

    def noting(draft: Any, chains: Any, *operands: Any) -> None:
        draft(chains, *operands)
        seen.append(chains.draft.probs_NV.isnan().any(1))

    with instead(apart, "draw_plan", broken), instead(steps, "draft_into", noting):
        run = tiny.run(machine, mixed(), can_fail=True)
    assert {name: error.code for name, error in run.failed.items()} == {"0": NON_FINITE}
    assert {name: run.tokens[name] for name in "12"} == {name: expected[name] for name in "12"}
    assert [int(is_nan_N.sum()) for is_nan_N in seen][:2] == [1, 0]


def test_a_drafter_of_another_kind_drafts_apart() -> None:
    """It has a draft model and reads states; without drafts it catches up with the text."""
    target = tiny.llama(1, layers=max(test_drafters.TAPS))
    draft = tiny.perturbed(target, 2, 0.05)
    plain = tiny.build(target, draft, kind=test_drafters.KIND)
    plain.recorded.serves = False
    with tiny.with_recorded_steps(RECORDED):
        recorded = tiny.build(target, draft, kind=test_drafters.KIND, max_num_seqs=4)
    shapes = compared((plain, recorded), mixed())
    assert {shape.drafts_apart for shape in shapes[1:] if shape} == {True}
    assert None not in shapes[1:]
