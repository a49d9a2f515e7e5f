"""Shapes of recorded decode steps, the shape of a plan, and the memory of buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.cuda.recorded.inputs import DISTRIBUTIONS, MOST_NODES, NUM_TEXT, Distributions, StepShape
from engine.fanout import num_chains
from engine.kernels.torch_kernels import Kernels
from engine.plan import Plan, Row
from engine.request import Sampling
from engine.sampling.distribution import FILTERS

MOST_ROWS = 256
"""Rows of the target's pass in the largest recorded step."""


def work(shape: StepShape) -> tuple[int, int, int]:
    """Return the order of the shapes that have room for a step."""
    return shape.num_rows, shape.draft_length, DISTRIBUTIONS.index(shape.distributions)


def distributions_on(device: torch.device, kernels: Kernels) -> Sequence[Distributions]:
    """Return the distributions for which steps are recorded.

    On CUDA, filters read numbers on the host unless the kernels have their own.
    """
    if device.type != "cuda" or kernels.reads_no_filter:
        return DISTRIBUTIONS
    return DISTRIBUTIONS[:1]


def menu(
    drafts: Sequence[tuple[int, int]],
    most_sequences: int,
    distributions: Sequence[Distributions] = DISTRIBUTIONS,
) -> list[StepShape]:
    """Return the recorded shapes, from few to many requests, where launches weigh most.

    drafts: (chains, length of a chain); (0, 0) is plain decoding. Each pair is recorded for powers
    of two of requests, and for the largest number that fits.
    """
    shapes = []
    for chains, length in drafts:
        num_nodes = chains * length
        most = min(most_sequences, MOST_ROWS // (1 + num_nodes))
        if not most or num_nodes > MOST_NODES:
            continue
        for count in {*(1 << power for power in range(most.bit_length())), most}:
            shapes += [StepShape(count, chains, length, kind) for kind in distributions]
    return sorted(shapes, key=lambda shape: (shape.sequences, *work(shape)))


def buffer_bytes(shapes: Sequence[StepShape], vocab_size: int) -> int:
    """Return the bytes of shared logits and draft distributions, and of a step's distributions."""
    most_rows = max(shape.num_rows for shape in shapes)
    most_probs = max(shape.num_probs for shape in shapes)
    return vocab_size * 4 * (2 * most_rows + most_probs)


def shape_of(plan: Plan, by_head: bool = False) -> StepShape | None:
    """Return the smallest shape that has room for a step; None if such steps are not recorded.

    by_head: whether a head drafts; it reads texts that do not draft after the step.
    """
    rows = plan.rows
    if not rows or not all(map(_is_usual, rows)):
        return None
    if not by_head and not all(map(_is_read_at_once, rows)):
        return None
    # The draft model's first pass is needed even if it only reads.
    least = int(not by_head and any(row.draft_input_ids for row in rows))
    fanouts = {row.fanout for row in rows}
    num_drafts = max([least, *[num_chains(fanout) for fanout in fanouts if fanout]])
    draft_length = max([least, *map(len, fanouts)])
    distributions = _distributions_of([row.sampling for row in rows])
    return StepShape(len(rows), num_drafts, draft_length, distributions)


def _distributions_of(samplings: Sequence[Sampling]) -> Distributions:
    drawn = [sampling for sampling in samplings if not sampling.is_greedy]
    filters = []
    for name, neutral in FILTERS.items():
        if any(getattr(sampling, name) != neutral for sampling in drawn):
            filters.append(name)
    return Distributions(len(drawn) < len(samplings), tuple(filters))


def _is_usual(row: Row) -> bool:
    """Whether the row's results follow from its logits and the numbers of a step."""
    return row.emits and len(row.input_ids) == 1 and not row.prompt_next and not row.needs


def _is_read_at_once(row: Row) -> bool:
    """Whether the missing draft K/V is that of few tokens up to the text's end.

    A recorded pass of the draft model can then compute it.
    """
    missing = len(row.draft_input_ids)
    return missing <= NUM_TEXT and (not missing or row.draft_first_index + missing == row.end)
