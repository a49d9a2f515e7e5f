"""Passes padded into fixed shapes give the numbers of the passes as they are.

Without a device nothing is recorded, and what is tested is all but the recording: shapes, buffers that are used again,
padding that nobody sees, tokens that come from the device.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from engine.execution import graphs
from engine.execution.graphs import Graphs, Shape, logit_bytes, menu, pad, rows_of
from engine.execution.inputs import NO_NODES, SequenceInput, build
from engine.execution.paged import PagedInput, pages_of
from engine.execution.probe import find_kv_shape
from engine.execution.runner import ModelRunner
from tests.engine import tiny
from tests.execution.test_groups import CONFIGS, passes
from tests.execution.test_lean import randomised
from tests.grid import grid

PAGE = 4


def few_passes() -> tuple[list[SequenceInput], list[SequenceInput]]:
    """Prompts and steps of four sequences: Triton's interpreter takes milliseconds for every row and head."""
    prompts, steps = passes()
    return prompts[:4], steps[:4]


def runners(name: str) -> tuple[ModelRunner, ModelRunner]:
    loaded = randomised(CONFIGS[name], seed=5)
    shape = find_kv_shape(loaded)
    plain = ModelRunner(loaded.model, shape, 200, PAGE, loaded.vocab_size)
    replayed = ModelRunner(loaded.model, shape, 200, PAGE, loaded.vocab_size, paged=True, replayed=True, most_blocks=20)
    replayed.record(16, lambda _: None)
    return plain, replayed


@contextlib.contextmanager
def noted_replays() -> Iterator[list[Shape]]:
    """The shapes that passes run as."""
    shapes: list[Shape] = []
    shape_of = Graphs._shape_of

    def noting(self: Graphs, host: Any) -> Shape | None:
        shape = shape_of(self, host)
        shapes.extend([] if shape is None else [shape])
        return shape

    with patch.object(Graphs, "_shape_of", noting):
        yield shapes


def agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", grid(CONFIGS, {"sinks", "window and softcap"}))
def test_padded_passes_give_the_same_numbers(name: str) -> None:
    """Prompts, a step of trees, and the same buffers again for other sequences in another order."""
    plain, replayed = runners(name)
    prompts, steps = few_passes()
    with noted_replays() as shapes:
        for sequences in (prompts, steps, steps[::-1], steps[1:4], steps[:2]):
            assert agree(replayed.forward(sequences), plain.forward(sequences))
    assert len(set(shapes)) < len(shapes) == 5, "no shape was used twice"


def test_a_shape_recorded_with_few_queries_serves_as_many_as_it_has_room_for() -> None:
    """The wrong variant keeps the first pass's number of queries: the last rows of the next are not computed."""
    plain, replayed = runners("llama")
    prompts, _ = few_passes()
    for runner in (plain, replayed):
        runner.forward(prompts)
    blocks, length = prompts[0].block_ids, len(prompts[0].input_ids)
    with noted_replays() as shapes:
        for count in (3, 4, 13, 16):
            part = SequenceInput(list(range(5, 5 + count)), length, blocks, NO_NODES, slice(None))
            assert agree(replayed.forward([part]), plain.forward([part]))
    assert [shape.queries for shape in shapes] == [4, 4, 16, 16]


def test_a_prompt_runs_as_it_is() -> None:
    plain, replayed = runners("llama")
    long = [SequenceInput(list(range(3, 80)), 0, list(range(20)), NO_NODES, slice(None))]
    behind_many_blocks = [SequenceInput([5], 80, list(range(21)), NO_NODES, slice(None))]
    with noted_replays() as shapes:
        for sequences in (long, behind_many_blocks):
            assert agree(replayed.forward(sequences), plain.forward(sequences))
    assert shapes == []


def test_nothing_is_recorded_while_requests_are_served() -> None:
    """Whatever comes runs as a shape that was there from the start, or as it is."""
    _, replayed = runners("llama")
    assert replayed._graphs is not None
    shapes = set(replayed._graphs._recorded)
    prompts, steps = few_passes()
    for count in range(1, 5):
        replayed.forward(prompts[:count])
        replayed.forward(steps[:count])
    assert set(replayed._graphs._recorded) == shapes == set(menu(16, 101))


def test_tokens_drawn_on_the_device_take_the_place_of_the_hosts() -> None:
    plain, replayed = runners("llama")
    prompts, steps = few_passes()
    for runner in (plain, replayed):
        runner.forward(prompts)
    known = [token for part in steps for token in part.nodes.tokens]
    unknown = [replace(part, nodes=replace(part.nodes, tokens=())) for part in steps]
    others = torch.randint(3, 101, (len(known),), generator=torch.Generator().manual_seed(3)).tolist()
    for runner in (plain, replayed):
        right, wrong = (runner.forward(unknown, torch.tensor(drawn, device=tiny.DEVICE)) for drawn in (known, others))
        assert agree(right, runner.forward(steps))
        assert not agree(wrong, right)


WRONG: dict[str, Callable[[PagedInput], None]] = {
    "rows behind each other": lambda host: host.starts.__setitem__(slice(None), np.arange(len(host.starts))),
    "nodes see nothing": lambda host: host.words.fill(0),
    "texts of the neighbour": lambda host: host.pages.__setitem__(slice(None), np.roll(host.pages, 1, axis=0)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_comparison_has_teeth(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, replayed = runners("llama")
    prompts, steps = few_passes()
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
    prompts, steps = few_passes()
    replayed.forward(prompts)
    before = replayed.storage.keys.clone()
    replayed.forward(steps[:3])
    changed = (replayed.storage.keys != before).any(-1).any(-1).any(0).nonzero().squeeze(1).tolist()
    held = {block * PAGE + i for part in steps[:3] for block in part.block_ids for i in range(PAGE)}
    assert set(changed) - held <= {200 * PAGE}


def test_padding_gets_numbers_and_not_what_lies_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is not written, not a number would remain, and go through all layers."""
    attention = pytest.importorskip("engine.execution.triton_attention")
    _, replayed = runners("llama")
    prompts, steps = few_passes()
    replayed.forward(prompts)
    assert replayed._graphs is not None
    for recorded in replayed._graphs._recorded.values():
        recorded.graph = None  # a recorded pass calls nothing of this
    outputs = []
    attend_paged = attention.attend_paged

    def attend(*operands: Any) -> torch.Tensor:
        outputs.append(attend_paged(*operands))
        return outputs[-1]

    monkeypatch.setattr(attention, "attend_paged", attend)
    empty = torch.empty
    monkeypatch.setattr(attention.torch, "empty", lambda *size, **kind: empty(*size, **kind).fill_(torch.nan))
    for parts in (1, 2):
        monkeypatch.setattr(attention, "num_parts_of", lambda *_, parts=parts: parts)
        replayed.forward(steps[1:4])
    assert outputs
    assert all(output.shape[1] == 4 * 12 for output in outputs)
    assert all(output.isfinite().all() for output in outputs)


def test_the_menu_has_room_for_every_decode_step_whose_logits_are_not_too_many() -> None:
    vocabulary = 151_936
    shapes = menu(64, vocabulary)
    assert len(shapes) < 70, "each takes some 50 ms to record"
    assert shapes[0].rows * vocabulary * 4 <= logit_bytes(64, vocabulary) <= 256 << 20
    for num_sequences, most_queries in ((1, 1), (1, 33), (3, 21), (64, 5), (33, 6), (16, 21)):
        best = min((s for s in shapes if s.has_room(num_sequences, most_queries)), key=lambda s: s.rows)
        assert best.rows <= 4 * num_sequences * most_queries
    assert not any(shape.has_room(64, 21) for shape in shapes)
    assert menu(1, 1 << 30) == []
    assert logit_bytes(1, 1 << 30) == 0


def test_rows_of_a_pass_have_places_of_their_own() -> None:
    _, steps = few_passes()
    host = pages_of(build(steps[:3], PAGE))
    shape = Shape(4, 24)
    rows = rows_of(host, shape)
    assert len(set(rows)) == len(rows) == host.counts.sum()
    assert set(rows // shape.queries) == {0, 1, 2}


def test_a_runner_that_is_gone_holds_no_memory() -> None:
    """A second engine of the process finds it free: no cycle keeps the pool until the garbage is searched."""
    _, replayed = runners("llama")
    storage = weakref.ref(replayed.storage)
    gc.disable()
    try:
        del replayed
        assert storage() is None
    finally:
        gc.enable()


class Recording:
    """Stands in for `torch.cuda.graph`: a recording that fails leaves its stream in use."""

    def __init__(self, _graph: object, pool: object, stream: object) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        torch.cuda.set_stream(self.stream)  # type: ignore[arg-type]

    def __exit__(self, *_: object) -> None:
        raise RuntimeError("this operation cannot be recorded")


@pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="stands in for a device")
def test_passes_that_cannot_be_recorded_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, replayed = runners("llama")
    assert replayed._graphs is not None
    in_use = [current := MagicMock()]
    for name, stand_in in {
        "current_stream": lambda: in_use[0],
        "set_stream": lambda stream: in_use.__setitem__(0, stream),
        "Stream": MagicMock,
        "stream": lambda _: contextlib.nullcontext(),
        "graph_pool_handle": lambda: 0,
        "CUDAGraph": MagicMock,
        "graph": Recording,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(replayed._graphs, "_device", MagicMock(type="cuda"))
    monkeypatch.setattr(graphs, "moved", lambda values, _: torch.from_numpy(values))
    monkeypatch.setattr(torch, "zeros", functools.partial(_on_the_host, torch.zeros))
    monkeypatch.setattr(torch, "arange", functools.partial(_on_the_host, torch.arange))
    replayed.record(16, lambda _: None)
    assert in_use == [current]
    assert "without CUDA graphs: this operation cannot be recorded" in caplog.text
    monkeypatch.undo()
    prompts, steps = few_passes()
    with noted_replays() as shapes:
        for sequences in (prompts, steps):
            assert agree(replayed.forward(sequences), plain.forward(sequences))
    assert shapes == []


def _on_the_host(make: Callable[..., torch.Tensor], *arguments: Any, **options: Any) -> torch.Tensor:
    return make(*arguments, **{**options, "device": "cpu"})
