"""Recorded steps of engines with a head, whose drafting is recorded like a draft model's.

Answers are those of eager steps, to the token
(`tests/cuda/test_recorded_steps.py` explains the comparison).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from engine.attention.tensors import KVTensors
from engine.cuda.recorded import inputs
from engine.cuda.recorded.inputs import StepInputs, StepShape
from engine.cuda.recorded.menu import menu
from engine.cuda.recorded.passes import pass_rooms
from engine.cuda.recorded.steps import RecordedStep
from engine.drafting.head import HeadDrafter
from engine.drafting.one_pass import OnePassDrafter
from engine.errors import NON_FINITE
from engine.request import Request
from engine.start import building
from engine.start.loading import LoadedModel
from engine.step.engine import Engine
from tests.cuda.test_recorded_steps import asked, chains, compared, stands_in
from tests.cuda.test_recording import FakeGraphs
from tests.drafting import test_drafters
from tests.engine import tiny
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


@pytest.mark.sampled
@pytest.mark.parametrize("name", grid(HEADS, {"eagle3", "peagle"}))
def test_answers_are_those_of_eager_steps(machines: Machines, name: str) -> None:
    """Requests with several chains, one, and none share steps."""
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


def of_the_step_before(name: str) -> Callable[..., Any]:
    """Return a variant in which an array of drafting steps is that of the step before."""
    kept: dict[StepInputs, Any] = {}

    def of(right: Any, step: StepInputs, rows: Any) -> Any:
        result = right(step, rows)
        if (own := step._views.get(name)) is not None:
            before = kept.get(step, np.zeros_like(own))
            kept[step] = own.copy()
            own[:] = before
        return result

    return of


def distributions_of_another_row(draft: Any, step: RecordedStep) -> None:
    draft(step)
    step._probs_NV.copy_(step._probs_NV.roll(1, 0))


def masks_that_read_states(right: Any, step: StepInputs, rows: Any) -> Any:
    result = right(step, rows)
    if "before" in step._views:
        step._views["before"].clip(min=0, out=step._views["before"])
    return result


WRONG: dict[str, tuple[str, Any, str, Callable[..., Any]]] = {
    "states left out": ("dspark", RecordedStep, "_target", states_left_out),
    "distributions of another row": ("dspark", RecordedStep, "_draft", distributions_of_another_row),
    "text of the step before": ("eagle3", StepInputs, "of", of_the_step_before("text")),
    "states of the step before": ("dflash", StepInputs, "of", of_the_step_before("before")),
    "masks after the token of the step before": ("dflash", StepInputs, "of", of_the_step_before("block")),
    "outputs of other rows": ("peagle", StepInputs, "of", of_the_step_before("wanted")),
    "masks that read states": ("peagle", StepInputs, "of", masks_that_read_states),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", grid(WRONG, {"states left out", "text of the step before"}))
def test_wrong_variants_are_found_out(machines: Machines, wrong: str) -> None:
    name, *variant = WRONG[wrong]
    if variant[0] is RecordedStep and tiny.DEVICE.type != "cpu":
        pytest.skip("a graph that is recorded does not call it again")
    with instead(*variant), pytest.raises(AssertionError):
        compared(machines(name), mixed())


def num_graphs(shape: StepShape) -> int:
    return 3 if shape.num_drafts else 2


@stands_in
def test_the_memory_of_graphs_is_planned(tmp_path: Path) -> None:
    """They are recorded next to a pool of one block first."""
    target, graphs = folders.target(VOCABULARY, layers=2), FakeGraphs(free_bytes=1 << 24, bytes_each=1000)
    head = folders.load(HEADS["dspark"](tmp_path / "head"), target)
    with tiny.with_recorded_steps(RECORDED), instead(building, "graphs_on", lambda *_: graphs):
        machine = tiny.build(target, head, max_num_seqs=2)
    num_recordings = len(pass_rooms(2)) + sum(map(num_graphs, menu(RECORDED, 2)))
    assert len(graphs.recordings) == 2 * num_recordings
    assert machine.facts.memory_plan["graphs"] == 1000 * num_recordings


@stands_in
def test_a_request_whose_drafts_are_not_finite_ends_alone(machines: Machines) -> None:
    plain, machine = machines("dspark")
    expected, calls = tiny.run(plain, mixed()).tokens, 0

    def broken(start: Any, *operands: Any) -> torch.Tensor:
        nonlocal calls
        logits_NV: torch.Tensor = start(*operands)
        calls += 1
        if calls == 1:
            logits_NV[0] = torch.nan
        return logits_NV

    with instead(OnePassDrafter, "start", broken):
        run = tiny.run(machine, mixed(), can_fail=True)
    assert {name: error.code for name, error in run.failed.items()} == {"0": NON_FINITE}
    assert {name: run.tokens[name] for name in "12"} == {name: expected[name] for name in "12"}


def room_for_one_token(draft_passes: Any, *operands: Any) -> Any:
    nodes_of, *num_text = operands or (lambda *_: (),)
    return draft_passes(nodes_of, 1 if num_text else 0)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "is_wrong"), [("eagle3", False), ("dflash", False), ("dflash", True)])
def test_missing_tokens_beyond_the_buffers_are_read_before(tmp_path: Path, name: str, is_wrong: bool) -> None:
    """Long text drafts leave that much; here nothing but the last token has room."""
    with instead(inputs, "DraftPasses", room_for_one_token):
        both = built(folders.target(VOCABULARY, layers=2), HEADS[name](tmp_path / "head"))
    variant = instead(HeadDrafter, "read_before", lambda *_: None) if is_wrong else nullcontext()
    with variant, pytest.raises(AssertionError) if is_wrong else nullcontext():
        assert None not in compared(both, mixed())[1:]


def test_a_drafter_that_is_not_recorded_drafts_in_eager_steps() -> None:
    target = tiny.llama(1, layers=max(test_drafters.TAPS))
    draft = tiny.perturbed(target, 2, 0.05)
    plain = tiny.build(target, draft, kind=test_drafters.KIND)
    plain.recorded.serves = False
    with tiny.with_paged_models():
        engine = tiny.build(target, draft, kind=test_drafters.KIND, max_num_seqs=4)
    assert {shape.num_drafts for shape in engine.recorded.steps} == {0}
    assert None in compared((plain, engine), asked(2, lambda _: chains(1, 2), temperature=1.0))[1:]
    assert None not in compared((plain, engine), asked(2, lambda _: tiny.OFF, temperature=1.0))[1:]
