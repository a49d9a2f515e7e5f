"""Passes padded into fixed shapes give the numbers of the passes as they are.

Without a device nothing is recorded, and what is tested is all but the recording: shapes, buffers that are used again,
padding that nobody sees, tokens that come from the device.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from engine.execution import graphs
from engine.execution.graphs import Graphs, Shape, pad, rows_of, shape_of
from engine.execution.inputs import NO_NODES, SequenceInput, build
from engine.execution.paged import PagedInput, pages_of
from engine.execution.probe import find_kv_shape
from engine.execution.runner import ModelRunner, Pass
from tests.engine import tiny
from tests.execution.test_groups import CONFIGS, passes
from tests.execution.test_lean import randomised

PAGE = 4


def runners(name: str) -> tuple[ModelRunner, ModelRunner]:
    loaded = randomised(CONFIGS[name], seed=5)
    shape = find_kv_shape(loaded)
    plain = ModelRunner(loaded.model, shape, 200, PAGE, loaded.vocab_size)
    return plain, ModelRunner(loaded.model, shape, 200, PAGE, loaded.vocab_size, paged=True, replayed=True)


def replays(runner: ModelRunner) -> list[Shape]:
    assert runner._graphs is not None
    return list(runner._graphs._recorded)


def agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_padded_passes_give_the_same_numbers(name: str) -> None:
    """Prompts, a step of trees, and the same buffers again for other sequences in another order."""
    plain, replayed = runners(name)
    prompts, steps = passes()
    for sequences in (prompts, steps, steps[::-1], steps[2:5], steps[:8], steps[1:6]):
        assert agree(replayed.forward(sequences), plain.forward(sequences))
    assert len(replays(replayed)) < 6, "no shape was used twice"


def test_a_shape_recorded_with_few_queries_serves_as_many_as_it_has_room_for() -> None:
    """The wrong variant keeps the first pass's number of queries: the last rows of the next are not computed."""
    plain, replayed = runners("llama")
    prompts, _ = passes()
    for runner in (plain, replayed):
        runner.forward(prompts)
    blocks, length = prompts[0].block_ids, len(prompts[0].input_ids)
    for count in (3, 4, 13, 16):
        part = SequenceInput(list(range(5, 5 + count)), length, blocks, NO_NODES, slice(None))
        assert agree(replayed.forward([part]), plain.forward([part]))
    assert [shape.queries for shape in replays(replayed)][1:] == [4, 16]


def test_shapes_that_were_recorded_first_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MOST_SHAPES", 2)
    plain, replayed = runners("llama")
    prompts, steps = passes()
    for sequences in (prompts, steps, steps[:1], steps[:3], steps):
        assert agree(replayed.forward(sequences), plain.forward(sequences))
        assert len(replays(replayed)) <= 2


def test_a_prompt_runs_as_it_is() -> None:
    plain, replayed = runners("llama")
    prompt = [SequenceInput(list(range(3, 80)), 0, list(range(30)), NO_NODES, slice(None))]
    assert agree(replayed.forward(prompt), plain.forward(prompt))
    assert replays(replayed) == []


def test_tokens_drawn_on_the_device_take_the_place_of_the_hosts() -> None:
    plain, replayed = runners("llama")
    prompts, steps = passes()
    for runner in (plain, replayed):
        runner.forward(prompts)
    count = sum(len(part.input_ids) + len(part.nodes.tokens) for part in steps)
    drawn = torch.randint(3, 101, (count,), generator=torch.Generator().manual_seed(3)).to(tiny.DEVICE)
    assert agree(replayed.run(Pass(build(steps, PAGE)), drawn), plain.run(Pass(build(steps, PAGE)), drawn))
    assert not agree(replayed.run(Pass(build(steps, PAGE)), drawn), replayed.forward(steps))


WRONG: dict[str, Callable[[PagedInput], None]] = {
    "rows behind each other": lambda host: host.starts.__setitem__(slice(None), np.arange(len(host.starts))),
    "nodes see nothing": lambda host: host.words.fill(0),
    "texts of the neighbour": lambda host: host.pages.__setitem__(slice(None), np.roll(host.pages, 1, axis=0)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_comparison_has_teeth(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, replayed = runners("llama")
    prompts, steps = passes()
    expected = [plain.forward(sequences) for sequences in (prompts, steps)][1]
    replayed.forward(prompts)

    def spoilt(*arguments: object) -> PagedInput:
        host = pad(*arguments)  # type: ignore[arg-type]
        WRONG[wrong](host)
        return host

    monkeypatch.setattr(graphs, "pad", spoilt)
    assert not agree(replayed.forward(steps), expected)


def test_padding_writes_where_nobody_reads() -> None:
    _, replayed = runners("llama")
    prompts, steps = passes()
    replayed.forward(prompts)
    before = replayed.storage.keys.clone()
    replayed.forward(steps[:3])
    changed = (replayed.storage.keys != before).any(-1).any(-1).any(0).nonzero().squeeze(1).tolist()
    held = {block * PAGE + i for part in steps[:3] for block in part.block_ids for i in range(PAGE)}
    assert set(changed) - held <= {200 * PAGE}


def test_shapes_are_few() -> None:
    _, steps = passes()
    shapes = {shape_of(pages_of(build(steps[:count], PAGE))) for count in range(1, 10)}
    assert {shape.sequences for shape in shapes if shape} == {1, 2, 4, 8, 16}
    assert all(shape.keys == 512 and shape.words == 1 for shape in shapes if shape)
    host = pages_of(build(steps[:3], PAGE))
    shape = shape_of(host)
    assert shape is not None
    rows = rows_of(host, shape)
    assert len(set(rows)) == len(rows) == host.counts.sum()
    assert set(rows // shape.queries) == {0, 1, 2}


def test_steps_with_too_many_logits_are_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, replayed = runners("llama")
    prompts, steps = passes()
    monkeypatch.setattr(graphs, "_LOGIT_BYTES", 1000)
    for sequences in (prompts, steps):
        assert agree(replayed.forward(sequences), plain.forward(sequences))
    assert replays(replayed) == []
    assert isinstance(replayed._graphs, Graphs)
