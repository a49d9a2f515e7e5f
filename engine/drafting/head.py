"""ChainSource with any head: it reads texts, and reads accepted tokens again.

A step begins after the tokens that the target has accepted: the rows of accepted tokens are
computed from the target's states, and overwrite the drafted rows in their slots. So nothing of a
rejected branch reaches the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.attention.inputs import NodeInput, SequenceInput
from engine.drafting.chains import draw_by_level
from engine.drafting.draft import Layout
from engine.drafting.drafter import DraftWork, HeadInputs, HeadPlaces
from engine.drafting.reading import readings, slots_before, states_at
from engine.fanout import Fanout, width_at
from engine.heads.runner import HeadRunner
from engine.kernels.protocol import ProbsTable
from engine.kernels.transfer import to_device
from engine.models.runner import ModelRunner, Pass
from engine.plan import Emission, Plan, Row
from engine.sampling.distribution import DistributionParameters


class HeadDrafter:
    """Base of drafters with a head."""

    pass_nodes: Callable[[Fanout, int], Sequence[NodeInput]]
    _wants_ends = True
    """Whether the pass over texts has needed outputs."""

    def __init__(self, runner: ModelRunner, target: ModelRunner) -> None:
        assert isinstance(runner, HeadRunner)
        self.runner: HeadRunner = runner
        self._target = target

    @torch.inference_mode()
    def begin(self, plan: Plan) -> Tensor:
        """Read the missing states of the texts that draft; return [N, V] logits below the roots."""
        rows = [row for row in plan.rows if row.fanout]
        if not rows:
            return torch.empty((0, self.runner.vocab_size), device=self.runner.device)
        return self.start(self._prepared(rows))

    def start(self, work: DraftWork) -> Tensor:
        """Carry out the work up to the roots; return [N, V] logits below them."""
        raise NotImplementedError

    def below(self, depth: int, token_N: Tensor) -> Tensor:
        """Return [N, V] logits below the nodes of a depth."""
        raise NotImplementedError

    @torch.inference_mode()
    def draw(
        self, plan: Plan, layout: Layout, parameters: DistributionParameters, uniform_LC: Tensor
    ) -> tuple[Tensor, ProbsTable]:
        return draw_by_level(self, plan, layout, parameters, uniform_LC)

    @torch.inference_mode()
    def keep(self, plan: Plan, emissions: Sequence[Emission]) -> None:  # noqa: ARG002
        """Read the target's states of texts that did not draft in this step.

        Accepted drafts are read again in the next step.
        """
        rows = [row for row in plan.rows if not row.fanout]
        self._read_all(readings(rows, ends_wanted=False))

    @torch.inference_mode()
    def read_before(self, plan: Plan, num_text: int) -> None:
        """Read the missing tokens before the last `num_text` tokens, for texts that draft."""
        earlier = []
        for row in plan.rows:
            if row.fanout and len(row.draft_input_ids) > num_text:
                missing = row.draft_input_ids[:-num_text]
                earlier.append(msgspec.structs.replace(row, draft_input_ids=missing))
        self._read_all(readings(earlier, ends_wanted=False))

    def table_of(self, row: Row, number: int) -> tuple[int, ...]:  # noqa: ARG002
        """Return the blocks in which the K/V of a row's text and nodes lies."""
        return row.block_ids

    def work_of(
        self, passes: Sequence[Pass], fanouts: tuple[Fanout, ...], before_T: Tensor | None, last_R: Tensor
    ) -> DraftWork:
        assert before_T is not None
        places = places_of(fanouts, self.runner.device)
        return DraftWork(passes, HeadInputs(before_T, last_R, places, self._rows_of(places.lengths)))

    def _rows_of(self, lengths: Sequence[int]) -> Tensor | None:  # noqa: ARG002
        """Return the rows of mask blocks that are needed, if the head has blocks."""
        return None

    def _prepared(self, rows: Sequence[Row]) -> DraftWork:
        *earlier, last = readings(rows, self._wants_ends)
        passes = self._inputs(last, rows)
        prepared = self.runner.prepare([*earlier, *passes])
        for prepared_pass, parts in zip(prepared, earlier, strict=False):
            self._read(prepared_pass, self._states_before(parts))
        last_R = to_device(np.array([row.input_ids[-1] for row in rows]), self.runner.device)
        fanouts = tuple(row.fanout for row in rows)
        before_T = slots_before(passes[0], self._target)
        return self.work_of(prepared[len(earlier) :], fanouts, before_T, last_R)

    def _inputs(self, last: Sequence[SequenceInput], rows: Sequence[Row]) -> list[list[SequenceInput]]:
        """Return the inputs of the last pass that reads the rows' texts, and of later passes.

        last: inputs of the last pass that reads, without nodes.
        """
        nodes_by_row = [self.pass_nodes(row.fanout, row.input_ids[-1]) for row in rows]
        passes = [list(last)]
        if self._wants_ends:  # otherwise the pass has no nodes, and may be of fewer rows
            pairs = zip(last, nodes_by_row, strict=True)
            passes = [[replace(part, nodes=nodes[0]) for part, nodes in pairs]]
        for number in range(1, max(map(len, nodes_by_row))):
            inputs = []
            for i, (row, nodes) in enumerate(zip(rows, nodes_by_row, strict=True)):
                if number < len(nodes):
                    table = self.table_of(row, i)
                    first_key = max(1, row.first_draft_key)
                    inputs.append(SequenceInput((), row.end, table, nodes[number], slice(None), first_key))
            passes.append(inputs)
        return passes

    def _read_all(self, reading: Sequence[Sequence[SequenceInput]]) -> None:
        if not reading:
            return
        for prepared, parts in zip(self.runner.prepare(reading), reading, strict=True):
            self._read(prepared, self._states_before(parts))

    def _read(self, prepared: Pass, taps_TX: Tensor) -> Any:
        """Read texts; return the head's output at the wanted rows, if it has any."""
        return self.runner.read(prepared, taps_TX)

    def _states_before(self, parts: Sequence[SequenceInput]) -> Tensor:
        """Return [T, taps * D] the target's states before each token of a pass."""
        return states_at(slots_before(parts, self._target), self._target)


@lru_cache(maxsize=128)
def places_of(fanouts: tuple[Fanout, ...], device: torch.device) -> HeadPlaces:
    """Return the places of the nodes of texts that draft these shapes."""
    depths = range(max(map(len, fanouts)))
    return HeadPlaces(
        tuple(map(len, fanouts)),
        tuple(to_device(_parents(fanouts, depth), device) for depth in depths[1:]),
        tuple(to_device(_draft_rows(fanouts, depth), device) for depth in depths),
    )


def _parents(fanouts: Sequence[Fanout], depth: int) -> Any:
    """Return [N] the index of each node's parent among the nodes of the level above that draft."""
    indices = []
    start = 0
    for fanout in fanouts:
        if len(fanout) < depth:
            continue
        if len(fanout) > depth:
            node_N = np.arange(width_at(fanout, depth))
            indices.append(start + node_N // fanout[depth - 1])
        start += width_at(fanout, depth - 1)
    return np.concatenate(indices)


def _draft_rows(fanouts: Sequence[Fanout], depth: int) -> Any:
    """Return [N] the draft row of each node of a depth: the draft rows of a text are contiguous."""
    indices = []
    start = 0
    for fanout in fanouts:
        if len(fanout) > depth:
            indices.append(np.full(width_at(fanout, depth), start + depth))
        start += len(fanout)
    return np.concatenate(indices)
