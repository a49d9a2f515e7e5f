"""Recorded passes with padding give the logits of passes of their own size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

attention_kernel = pytest.importorskip("engine.cuda.attention_kernel")

from engine.attention.inputs import NO_NODES, NodeInput, SequenceInput, StepLayout, build  # noqa: E402
from engine.cuda.recorded.passes import MOST_WANTED, RecordedPass, RecordedPasses, pass_rooms  # noqa: E402
from engine.models.runner import ModelRunner  # noqa: E402
from engine.start.probe import find_kv_shape  # noqa: E402
from tests.attention.test_groups import CONFIGS  # noqa: E402
from tests.attention.test_groups import passes as passes_of_nine  # noqa: E402
from tests.cuda.in_torch import attention_in_torch  # noqa: E402
from tests.cuda.test_lean_decoder import randomised  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.grid import grid  # noqa: E402
from tests.wrong import calls_of, instead  # noqa: E402

BLOCK_SIZE, NUM_BLOCKS, MOST_PAGES = 4, 200, 24
_ANCESTRY = ((1, 0, 0, 0), (0, 1, 0, 0), (1, 0, 1, 0), (0, 1, 0, 1))
DRAWN = NodeInput((), (1, 1, 2, 2), (), np.array(_ANCESTRY, dtype=np.bool_))
"""A tree of two chains whose tokens are on the device only."""


def make_runner(name: str, most_sequences: int = 0) -> ModelRunner:
    """Return a runner with recorded passes for a number of requests, or without them."""
    loaded = randomised(CONFIGS[name], seed=5)
    shape = find_kv_shape(loaded)
    runner = ModelRunner(
        loaded.model,
        shape,
        NUM_BLOCKS,
        BLOCK_SIZE,
        loaded.vocab_size,
        paged_kernel=attention_kernel,
        has_spare_block=True,
    )
    if most_sequences:
        recorded = RecordedPasses(runner, most_sequences, MOST_PAGES, NUM_BLOCKS)
        with torch.inference_mode():
            deque(recorded.record(None), maxlen=0)
        runner.recorded_passes = recorded
    return runner


def outputs(runner: ModelRunner) -> list[torch.Tensor]:
    """Return logits and K/V of consecutive passes: prompts, trees, drawn tokens."""
    prompts, steps = passes_of_nine()
    found = [runner.forward(prompts), runner.forward(steps)]
    drawn = [
        SequenceInput([7], 30, steps[0].block_ids, DRAWN, slice(0, None)),
        SequenceInput(list(range(3, 40)), 0, steps[1].block_ids, NO_NODES, slice(-2, None)),
    ]
    found.append(runner.forward(drawn, torch.tensor([11, 5, 60, 8], device=tiny.DEVICE)))
    num_slots = NUM_BLOCKS * BLOCK_SIZE
    return [*found, runner.storage.keys[:, :num_slots], runner.storage.values[:, :num_slots]]


def are_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Whether all numbers are the same, but for rounding."""
    return all(torch.allclose(*pair, atol=1e-4, rtol=1e-4) for pair in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", grid(CONFIGS, {"llama"}))
def test_padding_changes_no_number(name: str) -> None:
    """Nor the K/V of any block but the spare one."""
    with calls_of(RecordedPass, "logits") as replayed:
        found = outputs(make_runner(name, most_sequences=12))
    assert len(replayed) == 3
    with attention_in_torch():
        assert are_equal(found, outputs(make_runner(name)))


def without_pages(logits: Any, one: RecordedPass, num_wanted: int, tensors: Any, drawn_M: Any) -> Any:
    other = tensors._replace(paged=tensors.paged._replace(pages=tensors.paged.pages[:1]))
    return logits(one, num_wanted, other, drawn_M)


def into_used_blocks(padded: Any, one: RecordedPass, layout: StepLayout) -> StepLayout:
    found = padded(one, layout)
    slots_T = found.slots_T.copy()
    slots_T[len(layout.slots_T) :] = layout.slots_T[0]
    return replace(found, slots_T=slots_T)


def over_the_last_row(padded: Any, one: RecordedPass, layout: StepLayout) -> StepLayout:
    found = padded(one, layout)
    starts = found.starts.copy()
    starts[len(layout.starts)] -= 1
    return replace(found, starts=starts)


def without_tokens(logits: Any, one: RecordedPass, num_wanted: int, tensors: Any, _: Any) -> Any:
    return logits(one, num_wanted, tensors, None)


WRONG: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "pages of an earlier pass": (RecordedPass, "logits", without_pages),
    "padding in a block that is used": (RecordedPass, "padded", into_used_blocks),
    "padding over the last row": (RecordedPass, "padded", over_the_last_row),
    "drawn tokens are left out": (RecordedPass, "logits", without_tokens),
}


@pytest.mark.usefixtures("attention_in_torch")
@pytest.mark.parametrize("wrong", WRONG)
def test_the_comparison_finds_wrong_padding(wrong: str) -> None:
    expected = outputs(make_runner("llama"))
    with instead(*WRONG[wrong]):
        assert not are_equal(outputs(make_runner("llama", most_sequences=12)), expected)


def test_pass_without_a_recorded_room_runs_unpadded() -> None:
    """More sequences, pages, rows or nodes than a recorded pass has room for."""
    runner = make_runner("llama", most_sequences=3)
    prompts, _ = passes_of_nine()
    long = SequenceInput([3], 100, list(range(26)), NO_NODES, slice(None))
    chain = NodeInput((5,) * 70, tuple(range(1, 71)), (), torch.ones(70, 70).tril().bool().numpy())
    drafting = SequenceInput([3], 9, list(range(20)), chain, slice(None))
    assert runner.recorded_passes is not None
    for inputs in (prompts[:4], [long], [drafting], [SequenceInput([3] * 2049, 0, [0], NO_NODES, slice(0))]):
        layout = build_one(inputs)
        assert runner.recorded_passes.fitted(layout) == (layout, None)
    layout, replay = runner.recorded_passes.fitted(build_one(prompts[:3]))
    assert replay is not None
    assert len(layout.token_ids_T) == 48


def build_one(inputs: list[SequenceInput]) -> StepLayout:
    """Lay out a pass; a block table that is too short serves a pass that is never computed."""
    longest = max(len(one.input_ids) for one in inputs)
    return build(inputs, longest if longest > 2048 else BLOCK_SIZE)


@pytest.mark.parametrize("most_sequences", [1, 64, 200])
def test_rooms_hold_a_step_of_all_requests(most_sequences: int) -> None:
    rooms = pass_rooms(most_sequences)
    assert rooms == sorted(rooms)
    assert max(room.num_wanted for room in rooms) <= MOST_WANTED
    assert any(room.num_wanted >= most_sequences and room.rows == 2048 for room in rooms)
    assert len(rooms) <= 40
