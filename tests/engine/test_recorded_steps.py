"""Recorded steps give, to the token, what the same steps give when they are launched operation by operation.

Without a device nothing is recorded, and what is tested is all but the recording: shapes, numbers, padding, and the
work that is recorded, on the arrays that a recording would read.
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

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.errors import NON_FINITE, LoadError
from engine.kernels import transfer
from engine.kernels.torch_kernels import TORCH
from engine.kernels.triton_kernels import TritonKernels
from engine.models.runner import ModelRunner
from engine.plan import Plan, Row
from engine.request import Request, Speculation, TextDraft
from engine.step import building
from engine.step.engine import Engine
from engine.step.recorded import inputs, steps
from engine.step.recorded.inputs import LAWS, StepInputs, StepShape
from engine.step.recorded.menu import buffer_bytes, distributions_on, menu
from engine.step.recorded.recorder import recorder
from engine.step.recorded.steps import RecordedStep, RecordedSteps
from tests.engine import tiny
from tests.engine.test_host_reads import counted_reads
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


@pytest.mark.parametrize(
    ("shape", "count", "sampling"),
    grid(
        [
            *(((2, 3), 3, sampling) for sampling in SAMPLING),
            *((shape, 1, "plain") for shape in ((0, 0), (1, 2), (1, 5), (2, 3), (4, 3))),
            *(((0, 0), 3, sampling) for sampling in ("top-p", "greedy")),
            ((1, 5), 2, "greedy"),
        ],
        {((2, 3), 3, "all filters"), ((1, 2), 1, "plain"), ((0, 0), 3, "greedy")},
    ),
)
def test_every_decode_step_gives_the_same_tokens(
    both: tuple[Engine, Engine], shape: tuple[int, int], count: int, sampling: str
) -> None:
    shapes = compared(both, asked(count, lambda _: chains(*shape), **SAMPLING[sampling]))
    assert None in shapes[:1], "the prompts are read as they are"
    assert None not in shapes[1:]
    assert {one.sequences for one in shapes if one} <= {1, 2, 4}


def test_requests_that_draft_differently_share_a_step(both: tuple[Engine, Engine]) -> None:
    """Fewer chains, shorter ones, none; and in the end of an answer all that there is room for."""
    wishes = [chains(4, 3), chains(1, 2), tiny.OFF, chains(2, 3), chains(3, 1)]
    shapes = compared(both, asked(4, lambda i: wishes[i], temperature=1.0))
    assert (4, 4, 3) in {one[:3] for one in shapes if one}
    shapes = compared(both, asked(3, lambda i: wishes[i + 2], temperature=1.0, top_p=0.8))
    assert {one.distributions for one in shapes if one} == {LAWS[1]}
    assert sum(one is None for one in shapes) == 1


def test_a_step_runs_as_the_smallest_shape_with_room_for_it(both: tuple[Engine, Engine]) -> None:
    shapes = compared(both, asked(1, lambda _: chains(1, 3), temperature=1.0))
    assert {one[1:3] for one in shapes[1:] if one} >= {(1, 5), (1, 2)}
    shapes = compared(both, asked(1, lambda _: chains(3, 4), temperature=1.0))
    assert shapes[1] is None, "no shape has three chains of this length"


def test_one_request_may_ask_for_filters_and_the_others_not(both: tuple[Engine, Engine]) -> None:
    wishes = [{"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.1}, {}]
    requests = [
        tiny.request(str(i), range(5 + i, 15), chains(2, 3), 16, temperature=0.7 + i / 4, seed=i, **wish)
        for i, wish in enumerate(wishes)
    ]
    assert LAWS[-1] in {one.distributions for one in compared(both, requests) if one}


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
def test_what_is_not_recorded_runs_as_it_is(both: tuple[Engine, Engine], name: str) -> None:
    speculation, wish = UNUSUAL[name]
    shapes = compared(both, asked(2, lambda _: speculation, **{"temperature": 1.0, **wish}))
    assert {one for one in shapes if one is None or one.num_drafts} == {None}


@pytest.mark.parametrize("shape", grid([((0, 0),), ((1, 2),), ((4, 3),)], {((1, 2),)}), ids=str)
def test_certain_and_uncertain_requests_share_a_step(both: tuple[Engine, Engine], shape: tuple[int, int]) -> None:
    """A temperature so low that float32 could not scale by it is 0."""
    requests = [
        tiny.request(str(i), range(5 + i, 15), chains(*shape), 9 + 2 * i, temperature=temperature, seed=i, top_p=0.8)
        for i, temperature in enumerate((0.0, 1.0, 1e-7))
    ]
    shapes = compared(both, requests)
    assert None not in shapes[1:]
    assert {one.distributions for one in shapes if one} == {LAWS[1]}


def drafting_row(machine: Engine) -> Row:
    """The row of a request that drafts one chain."""
    with calls_of(RecordedSteps, "find") as calls:
        tiny.run(machine, asked(1, lambda _: chains(1, 2), temperature=1.0))
    (row,) = calls[2].operands[1].rows
    return row


def test_text_drafts_and_changed_targets_run_as_they_are(both: tuple[Engine, Engine]) -> None:
    row = drafting_row(both[1])
    assert inputs.shape_of(Plan((row,))) == StepShape(1, 1, 2, LAWS[0])
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
        assert inputs.shape_of(Plan((row, msgspec.structs.replace(row, **change)))) is None, change
    assert inputs.shape_of(Plan(())) is None


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
    assert shapes == [StepShape(1, 1, 2, LAWS[0])]
    assert found[0].abs().sum() > 0
    torch.testing.assert_close(*found)


def test_a_draft_window_is_kept_to() -> None:
    both = machines(draft_window=8)
    shapes = compared(both, asked(2, lambda _: chains(2, 3), temperature=1.0))
    assert None not in shapes[3:]


def test_nothing_is_written_but_to_the_requests_own_blocks(both: tuple[Engine, Engine]) -> None:
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
        calls += of is runner
        if calls == 2 and of is runner:
            logits_NV[len(logits_NV) // 4] = torch.nan  # of the second of four
        return logits_NV

    for one in requests:
        machine.submit(one)
    errors: dict[str, Any] = {}
    answers: dict[str, list[int]] = {one.request_id: [] for one in requests}
    with instead(ModelRunner, "run_on_device", broken):
        while machine.scheduler.has_work:
            result = machine.run_step()
            errors |= dict(result.failed)
            for outcome in result.outcomes:
                answers[outcome.request_id] += outcome.token_ids
    assert {name: error.code for name, error in errors.items()} == {"1": NON_FINITE}
    assert answers.pop("1") != expected.pop("1")
    assert answers == expected


def test_a_chain_that_no_request_has_cannot_win(both: tuple[Engine, Engine]) -> None:
    """Its undefined numbers may not be finite."""
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
        step._result[:2] = torch.tensor([1, 3])
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


@stands_in
def test_what_is_recorded_looks_at_no_number() -> None:
    """A recording repeats what was launched, whatever the host would have decided from a step's numbers."""
    with instead(building, "choose", lambda *_: TORCH):
        machine = machines()[1]
    with (
        instead(transfer, "are_here", lambda *_: False),
        instead("engine.attention.triton_attention", "attend_paged", lambda *operands: operands[4].transpose(1, 2)),
        torch.inference_mode(),
    ):
        for step in machine.recorded.steps.values():
            with counted_reads() as counts:
                for work in step.parts().values():
                    work()
            assert counts == {}, step.shape


@stands_in
def test_a_recording_reads_the_numbers_that_each_step_writes(both: tuple[Engine, Engine]) -> None:
    """Between two steps of a shape no input of the recorded work is moved or replaced."""
    machine = both[1]
    requests = asked(3, lambda _: chains(2, 3), temperature=1.0)
    seen: dict[StepShape, set[tuple[int, ...]]] = {}

    def noting(logits: Any, step: RecordedStep, *operands: Any) -> Any:
        parts = [*vars(step).values(), *step._views.values(), *vars(step._chains).values()]
        seen.setdefault(step.shape, set()).add(tuple(one.data_ptr() for one in parts if isinstance(one, torch.Tensor)))
        return logits(step, *operands)

    with instead(RecordedStep, "_logits", noting):
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
    """Recordings of a device that is not there, each of some bytes; after `most` of them it raises an error.

    runs: runs work when it is recorded; ends_badly: the end of a recording that fails raises another error.
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


def recorded_again(machine: Engine, graphs: FakeGraphs | None = None, most_pages: int = 20) -> RecordedSteps:
    found = RecordedSteps(graphs)
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
    assert len(graphs.recordings) == sum(3 if shape.num_drafts else 2 for shape in shapes)
    with serving(both[1], replayed):
        served = compared(both, asked(2, lambda _: chains(2, 3), temperature=1.0))
    assert sum(one.num_replays for one in graphs.recordings) == sum(
        3 if shape.num_drafts else 2 for shape in served if shape is not None
    )


@stands_in
@pytest.mark.parametrize("ends_badly", [False, True])
def test_an_operation_that_cannot_be_recorded_stops_the_start(both: tuple[Engine, Engine], ends_badly: bool) -> None:
    """The line that names it is not that of the end of the recording, which fails after it."""
    graphs = FakeGraphs(runs=True, ends_badly=ends_badly)

    def failing(*_: Any) -> None:
        raise RuntimeError("this operation cannot be recorded")

    with (
        instead(steps, "bits", failing),
        pytest.raises(LoadError, match=r"steps\.py, line \d+ \(found = .*bits.*\): this operation") as found,
    ):
        recorded_again(both[1], graphs)
    assert "--enforce-eager" in str(found.value)


def test_a_failure_outside_the_project_is_named_too() -> None:
    assert steps._operation(RuntimeError("nowhere")) == "recording"


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
    """Graphs are recorded next to a pool of one block first, and their memory is kept back from the pool. A pool of a
    given size needs no trial.
    """
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
def test_memory_that_the_trial_found_is_recorded_into(both: tuple[Engine, Engine]) -> None:
    """The pool leaves little more than the graphs need: the share that recording leaves must not stop them again."""
    shapes = menu(RECORDED, 4)
    assert both[1].draft_runner is not None
    runners = [both[1].target, both[1].draft_runner]
    counts = []
    for least_free in (0.6, 0.0):
        found = RecordedSteps(FakeGraphs(free_bytes=50 * 3 * len(shapes), bytes_each=50))
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
def test_padding_gets_numbers_and_not_what_lies_in_memory(both: tuple[Engine, Engine]) -> None:
    """Non-finite numbers of rows that are not computed would go through all layers."""

    def unset(empty: Any, *size: Any, **kind: Any) -> torch.Tensor:
        found: torch.Tensor = empty(*size, **kind)
        return found.fill_(torch.nan) if found.is_floating_point() else found

    attention = pytest.importorskip("engine.attention.triton_attention")
    with calls_of(attention, "attend_paged") as attended, instead(torch, "empty", unset):
        shapes = [one for one in compared(both, asked(3, lambda i: chains(2, 3 - i), temperature=1.0)) if one]
    assert {one.sequences for one in shapes} >= {4}
    assert attended
    assert all(output.isfinite().all() for _, output in attended)


@stands_in
def test_recording_stops_where_memory_is_short(both: tuple[Engine, Engine]) -> None:
    """The rest of what is free is for the activations of prompts. What was recorded serves."""
    graphs = FakeGraphs(free_bytes=1000, bytes_each=50)
    some = recorded_again(both[1], graphs)
    assert 0 < some.num_recorded < len(menu(RECORDED, 4))
    assert graphs.left == 500  # three recordings of 50 after the last look, at 650
    with serving(both[1], some):
        compared(both, asked(1, lambda _: chains(1, 2), temperature=1.0))


def test_a_text_of_more_blocks_than_the_table_has_runs_as_it_is(both: tuple[Engine, Engine]) -> None:
    with serving(both[1], recorded_again(both[1], most_pages=2)):
        shapes = compared(both, asked(1, lambda _: chains(1, 2), temperature=1.0))
    assert None in shapes[1:]
    assert any(shapes)


def test_rows_without_use_read_no_text(both: tuple[Engine, Engine]) -> None:
    """A request that drafts nothing has no rows in the draft model's passes, and one in the target's."""
    machine = both[1]
    wishes = [chains(2, 3), tiny.OFF, chains(1, 2)]
    seen: list[dict[str, Any]] = []

    def noting(of: Any, step: StepInputs, rows: Any) -> Any:
        result = of(step, rows)
        seen.append({name: step._views[f"counts {name}"].tolist() for name in range(len(step.passes))})
        return result

    with instead(StepInputs, "of", noting):
        tiny.run(machine, asked(3, lambda i: wishes[i], temperature=1.0))
    assert {0: [1, 0, 1], 1: [2, 0, 1], 2: [2, 0, 0], 3: [7, 1, 3]} in [
        {name: counts[:3] for name, counts in one.items()} for one in seen
    ]


@pytest.mark.parametrize("ends_badly", [False, True])
def test_recordings_before_memory_ran_out_serve(
    both: tuple[Engine, Engine], caplog: pytest.LogCaptureFixture, ends_badly: bool
) -> None:
    error = torch.cuda.OutOfMemoryError("no memory")
    some = recorded_again(both[1], FakeGraphs(most=6, error=error, ends_badly=ends_badly))
    assert 0 < some.num_recorded < 6
    assert "memory is short" in caplog.text


def test_a_device_without_the_kernels_records_no_filters() -> None:
    assert (
        distributions_on(torch.device("cpu"), TORCH) == distributions_on(torch.device("cuda"), TritonKernels()) == LAWS
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
def test_what_default_requests_draft_is_recorded(wish: dict[str, Any], recorded: int) -> None:
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
