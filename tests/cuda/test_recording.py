"""Recording of steps: what is recorded, what stops it, its memory, and that recordings serve.

A stand-in takes the place of a device's graphs, which replay the work that they were given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("triton")


from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.cuda.kernels import TritonKernels
from engine.cuda.recorded import steps
from engine.cuda.recorded.inputs import DISTRIBUTIONS, StepShape
from engine.cuda.recorded.menu import buffer_bytes, distributions_on, menu
from engine.cuda.recorded.obstacles import find_wait, operation_of
from engine.cuda.recorded.passes import pass_rooms
from engine.cuda.recorded.recorder import CudaGraphs, recorder
from engine.cuda.recorded.steps import RecordedStep, RecordedSteps
from engine.errors import LoadError
from engine.kernels.torch_kernels import TORCH
from engine.start import building
from engine.step.engine import Engine
from tests.cuda.test_recorded_steps import RECORDED, asked, chains, compared, machines, stands_in
from tests.engine import tiny
from tests.wrong import instead

pytestmark = pytest.mark.usefixtures("attention_in_torch")


@pytest.fixture(autouse=True)
def _no_step_is_tried() -> Iterator[None]:
    """Try no steps; `test_dry_run.py` finds waits on a device."""
    with instead(steps, "find_wait", lambda *_: None):
        yield


@pytest.fixture(scope="module")
def both() -> tuple[Engine, Engine]:
    return machines()


@pytest.mark.slow
@stands_in
def test_a_recording_reads_the_numbers_that_each_step_writes(both: tuple[Engine, Engine]) -> None:
    """Between two steps of a shape no input of the recorded work is moved or replaced."""
    machine = both[1]
    requests = asked(3, lambda _: chains(2, 3), temperature=1.0)
    seen: dict[StepShape, set[tuple[int, ...]]] = {}

    def noting(work: Any, step: RecordedStep) -> Any:
        paged = [one.metadata.paged for one in (*step._work.passes, step._target_pass)]
        parts = [*vars(step).values(), *step._views.values(), *vars(step._chains).values()]
        parts += [operand for one in paged for operand in one or ()]
        seen.setdefault(step.shape, set()).add(tuple(one.data_ptr() for one in parts if isinstance(one, torch.Tensor)))
        return work(step)

    with instead(RecordedStep, "_draft", noting):
        tiny.run(machine, requests)
    assert len(seen) > 1
    assert all(len(pointers) == 1 for pointers in seen.values())


class Recording:
    """Stands in for a CUDA graph: it replays what it was given."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work, self.num_replays = work, 0

    def replay(self) -> None:
        self.num_replays += 1
        self.work()


class FakeGraphs:
    """Recordings of a device that is not there, which has room for `most` of them.

    runs: runs work when it is recorded; ends_badly: the end of a recording that
    fails raises another error.
    """

    def __init__(
        self,
        free_bytes: int = 1 << 30,
        bytes_each: int = 0,
        most: int = 1000,
        error: Exception | None = None,
        runs: bool = False,
        ends_badly: bool = False,
    ) -> None:
        self.left, self._bytes_each, self._most, self._error = free_bytes, bytes_each, most, error
        self._runs, self._ends_badly = runs, ends_badly
        self.recordings: list[Recording] = []

    def free_bytes(self) -> int:
        return self.left

    @contextlib.contextmanager
    def recorder(self) -> Iterator[Any]:
        yield self._record

    @contextlib.contextmanager
    def without_waits(self) -> Iterator[None]:
        yield

    def _record(self, work: Callable[[], None]) -> Recording:
        try:
            if self._runs:
                work()
            if self._error is not None and len(self.recordings) == self._most:
                raise self._error
        except Exception:
            if self._ends_badly:
                raise RuntimeError("a capture is underway") from None
            raise
        self.left -= self._bytes_each
        self.recordings.append(Recording(work))
        return self.recordings[-1]


NUM_PASSES = 2 * len(pass_rooms(4))
"""Recorded passes of target and draft model, for up to four requests."""


def recorded_again(machine: Engine, graphs: FakeGraphs | None = None, most_pages: int = 20) -> RecordedSteps:
    found = RecordedSteps(graphs, machine.recorded._kind)
    assert machine.draft_runner is not None
    found.record([machine.target, machine.draft_runner], menu(RECORDED, 4), most_pages, lambda _: None)
    return found


@contextlib.contextmanager
def serving(machine: Engine, steps: RecordedSteps) -> Iterator[None]:
    """Let an engine serve with other recorded steps, temporarily."""
    own, machine.recorded = machine.recorded, steps
    try:
        yield
    finally:
        machine.recorded = own


@stands_in
def test_replays_are_what_serves(both: tuple[Engine, Engine]) -> None:
    graphs = FakeGraphs()
    replayed = recorded_again(both[1], graphs)
    shapes = menu(RECORDED, 4)
    assert list(replayed.steps) == shapes
    of_passes, of_steps = graphs.recordings[:NUM_PASSES], graphs.recordings[NUM_PASSES:]
    assert len(of_steps) == sum(3 if shape.num_drafts else 2 for shape in shapes)
    with serving(both[1], replayed):
        served = compared(both, asked(2, lambda _: chains(2, 3), temperature=1.0))
    num_graphs = [3 if shape.num_drafts else 2 for shape in served if shape is not None]
    assert sum(one.num_replays for one in of_steps) == sum(num_graphs)
    # The prompts' step: the target's pass, and three of the draft model.
    assert served[0] is None
    assert sum(one.num_replays for one in of_passes) == 4 * served.count(None)


@stands_in
@pytest.mark.parametrize("ends_badly", [False, True])
def test_an_operation_that_cannot_be_recorded_stops_the_start(both: tuple[Engine, Engine], ends_badly: bool) -> None:
    """The line that names it is not that of the end of the recording, which fails after it."""
    graphs = FakeGraphs(runs=True, ends_badly=ends_badly)

    def failing(*_: Any) -> None:
        raise RuntimeError("this operation cannot be recorded")

    with (
        instead(steps, "bits", failing),
        pytest.raises(LoadError, match=r"steps\.py, line \d+ \(results = .*bits.*\): this operation") as found,
    ):
        recorded_again(both[1], graphs)
    assert "--enforce-eager" in str(found.value)


def test_a_failure_outside_the_project_is_named_too() -> None:
    assert operation_of(RuntimeError("nowhere")) == "recording"


def test_only_a_wait_is_a_reason_to_serve_without_recordings() -> None:
    runs: list[int] = []

    def work(said: str) -> None:
        runs.append(1)
        if len(runs) % 2 == 0:
            raise RuntimeError(said)

    assert find_wait(FakeGraphs(), [lambda: None]) is None
    assert find_wait(FakeGraphs(), [lambda: work("called a synchronizing CUDA operation")]) is not None
    with pytest.raises(RuntimeError, match="illegal"):
        find_wait(FakeGraphs(), [lambda: work("an illegal memory access")])


def test_waits_are_errors_for_as_long_as_a_step_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str | int] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with pytest.raises(RuntimeError, match="a wait"), CudaGraphs(torch.device("cuda")).without_waits():
        raise RuntimeError("a wait")
    assert modes == ["error", 0]


@stands_in
def test_an_operator_may_leave_graphs_out() -> None:
    target, graphs = tiny.llama(1, layers=1), FakeGraphs(bytes_each=1)
    with tiny.with_recorded_steps([(0, 0)]), instead(building, "graphs_on", lambda *_: graphs):
        for is_eager in (False, True):
            config = EngineConfig(model=ModelConfig(target="t", enforce_eager=is_eager))
            machine = building.assemble(config, target, None)
            assert (machine.recorded.num_recorded == 0) == is_eager
            assert (machine.facts.memory_plan["graphs"] == 0) == is_eager


@stands_in
@pytest.mark.parametrize("is_sized", [False, True])
def test_the_pool_gets_what_graphs_leave(is_sized: bool) -> None:
    """Graphs are recorded next to a pool of one block first, unless the pool is sized."""
    target, graphs, pools = tiny.llama(1, layers=1), FakeGraphs(free_bytes=1 << 20, bytes_each=1000), []

    def noting(record: Any, steps: RecordedSteps, runners: Any, *more: Any) -> None:
        pools.append(runners[0].storage.keys.shape[1] // runners[0].block_size - 1)
        record(steps, runners, *more)
        graphs.left = 1 << 20 if len(pools) == 1 else graphs.left  # the trial's graphs are gone

    config = EngineConfig(
        model=ModelConfig(target="t"),
        scheduler=SchedulerConfig(max_num_seqs=4),
        cache=CacheConfig(num_blocks=80 if is_sized else 0),
    )
    with (
        tiny.with_recorded_steps([(0, 0)]),
        instead(building, "graphs_on", lambda *_: graphs),
        instead(RecordedSteps, "record", noting),
    ):
        machine = building.assemble(config, target, None)
    num_shapes = machine.recorded.num_recorded
    num_recordings = len(graphs.recordings)
    assert pools == ([80] if is_sized else [1, machine.facts.num_blocks])
    assert machine.facts.num_blocks > 1
    assert num_shapes == len(menu([(0, 0)], 4))
    measured = 1000 * num_recordings // len(pools)
    assert machine.recorded.num_bytes == measured
    assert (machine.facts.memory_plan["graphs"] == measured) != is_sized


@stands_in
def test_a_trial_without_memory_leaves_recording_out() -> None:
    target, graphs = tiny.llama(1, layers=1), FakeGraphs(most=0, error=torch.OutOfMemoryError("no memory"))
    config = EngineConfig(model=ModelConfig(target="t"), scheduler=SchedulerConfig(max_num_seqs=4))
    with tiny.with_recorded_steps([(0, 0)]), instead(building, "graphs_on", lambda *_: graphs):
        machine = building.assemble(config, target, None)
    assert machine.recorded.num_recorded == 0
    assert machine.facts.num_blocks > 1


@stands_in
def test_memory_that_the_trial_found_is_recorded_into(both: tuple[Engine, Engine]) -> None:
    """The share that recording leaves must not stop the graphs again."""
    shapes = menu(RECORDED, 4)
    assert both[1].draft_runner is not None
    runners = [both[1].target, both[1].draft_runner]
    counts = []
    for least_free in (0.6, 0.0):
        graphs = FakeGraphs(free_bytes=50 * (3 * len(shapes) + NUM_PASSES), bytes_each=50)
        found = RecordedSteps(graphs, both[1].recorded._kind)
        found.record(runners, shapes, 20, lambda _: None, least_free)
        counts.append(found.num_recorded)
    assert counts[0] < counts[1] == len(shapes)


class FailingGraph:
    """Stands in for `torch.cuda.graph`: a recording that fails leaves its stream in use."""

    def __init__(self, _graph: object, pool: object, stream: object) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        torch.cuda.set_stream(self.stream)  # type: ignore[arg-type]

    def __exit__(self, *_: object) -> None:
        raise RuntimeError("this operation cannot be recorded")


@stands_in
def test_a_recording_that_fails_gives_the_stream_back(monkeypatch: pytest.MonkeyPatch) -> None:
    in_use = [current := MagicMock()]
    for name, stand_in in {
        "current_stream": lambda: in_use[0],
        "set_stream": lambda stream: in_use.__setitem__(0, stream),
        "Stream": MagicMock,
        "stream": lambda _: contextlib.nullcontext(),
        "graph_pool_handle": lambda: 0,
        "CUDAGraph": MagicMock,
        "graph": FailingGraph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    done: list[int] = []
    with pytest.raises(RuntimeError, match="cannot be recorded"), recorder() as record:
        record(lambda: done.append(1))
    assert done == [1, 1]
    assert in_use == [current]


@stands_in
def test_recording_stops_where_memory_is_short(both: tuple[Engine, Engine]) -> None:
    """The rest of what is free is for the activations of prompts. What was recorded serves."""
    free_bytes = 3 * NUM_PASSES
    graphs = FakeGraphs(free_bytes=free_bytes, bytes_each=1)
    some = recorded_again(both[1], graphs)
    assert 0 < some.num_recorded < len(menu(RECORDED, 4))
    assert 0.6 * free_bytes - 3 <= graphs.left < 0.6 * free_bytes
    with serving(both[1], some):
        compared(both, asked(1, lambda _: chains(1, 2), temperature=1.0))


def test_text_beyond_the_recorded_table_runs_eagerly(both: tuple[Engine, Engine]) -> None:
    with serving(both[1], recorded_again(both[1], most_pages=2)):
        shapes = compared(both, asked(1, lambda _: chains(1, 2), temperature=1.0))
    assert None in shapes[1:]
    assert any(shapes)


@pytest.mark.parametrize("ends_badly", [False, True])
def test_recordings_before_memory_ran_out_serve(
    both: tuple[Engine, Engine], caplog: pytest.LogCaptureFixture, ends_badly: bool
) -> None:
    error = torch.cuda.OutOfMemoryError("no memory")
    some = recorded_again(both[1], FakeGraphs(most=NUM_PASSES + 6, error=error, ends_badly=ends_badly))
    assert 0 < some.num_recorded < 6
    assert "memory is short" in caplog.text


def test_a_device_without_the_kernels_records_no_filters() -> None:
    assert (
        distributions_on(torch.device("cpu"), TORCH)
        == distributions_on(torch.device("cuda"), TritonKernels())
        == DISTRIBUTIONS
    )
    assert [distributions.filters for distributions in distributions_on(torch.device("cuda"), TORCH)] == [()]


@pytest.mark.parametrize(
    ("wish", "recorded"),
    [
        ({}, 4 * 5),
        ({"rule": "block"}, 5),
        ({"rule": "traversal"}, 0),
        ({"draft_method": "without_replacement"}, 0),
        ({"tree": (2, 2), "rule": "bv_race"}, 0),
        ({"rule": "off"}, 0),
    ],
)
def test_drafts_of_default_requests_are_recorded(wish: dict[str, Any], recorded: int) -> None:
    config = EngineConfig(model=ModelConfig(target="t"), speculation=SpeculationConfig(**wish))
    drafts = building.recorded_drafts(config, MagicMock())
    assert drafts[0] == (0, 0)
    assert max(count * length for count, length in drafts) == recorded
    assert building.recorded_drafts(config, None) == [(0, 0)]


def test_the_menu_is_of_steps_of_up_to_256_rows() -> None:
    shapes = menu([(0, 0), (1, 5), (4, 5), (8, 4), (8, 8), (13, 5)], 64)
    assert max(shape.num_rows for shape in shapes) <= 256
    assert {shape.sequences for shape in shapes if not shape.num_drafts} == {1, 2, 4, 8, 16, 32, 64}
    assert {shape.sequences for shape in shapes if shape.num_drafts == 1} == {1, 2, 4, 8, 16, 32, 42}
    assert {shape.sequences for shape in shapes if shape.num_drafts == 4} == {1, 2, 4, 8, 12}
    assert {shape.sequences for shape in shapes if shape.num_nodes == 64} == {1, 2, 3}
    assert not [shape for shape in shapes if shape.num_nodes > 64], "a row's word has 64 bits"
    assert len(set(shapes)) == len(shapes) == 2 * (7 + 7 + 5 + 4 + 3)
    assert shapes == sorted(shapes, key=lambda shape: shape.sequences), "those of few requests come first"
    assert {shape.sequences for shape in menu([(0, 0)], 5)} == {1, 2, 4, 5}
    assert buffer_bytes(menu([(4, 5)], 64), 1000) == 4000 * (2 * 252 + 12 * 17)
