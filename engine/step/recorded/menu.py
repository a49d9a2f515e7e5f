"""Shapes for which decode steps are recorded, and the memory that their buffers take."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.kernels.protocol import Kernels
from engine.step.recorded.inputs import DISTRIBUTIONS, MOST_NODES, Distributions, StepShape

MOST_ROWS = 256
"""Rows of the target's pass in the largest step that is recorded."""


def work(shape: StepShape) -> tuple[int, int, int]:
    """Return the order of the shapes that have room for a step."""
    return shape.num_rows, shape.draft_length, DISTRIBUTIONS.index(shape.distributions)


def distributions_on(device: torch.device, kernels: Kernels) -> Sequence[Distributions]:
    """Return the distributions for which steps are recorded: without the kernels, filters on a device need the host."""
    return DISTRIBUTIONS if device.type != "cuda" or kernels.by_tiles else DISTRIBUTIONS[:1]


def menu(
    drafts: Sequence[tuple[int, int]], most_sequences: int, distributions: Sequence[Distributions] = DISTRIBUTIONS
) -> list[StepShape]:
    """Return the shapes that are recorded, with few requests first, because launches weigh most there.

    drafts: (chains, their length); (0, 0) is plain decoding. Each is recorded for powers of two of requests, and for
    the largest number that fits.
    """
    shapes = []
    for chains, length in drafts:
        nodes = chains * length
        most = min(most_sequences, MOST_ROWS // (1 + nodes)) if nodes <= MOST_NODES else 0
        counts = {*(1 << power for power in range(most.bit_length())), most} if most else set()
        shapes += [
            StepShape(count, chains, length, of_distributions) for count in counts for of_distributions in distributions
        ]
    return sorted(shapes, key=lambda shape: (shape.sequences, *work(shape)))


def buffer_bytes(shapes: Sequence[StepShape], vocab_size: int) -> int:
    """Return the bytes of logits and draft distributions, shared by recorded steps, and of one step's distributions."""
    return vocab_size * 4 * (2 * max(shape.num_rows for shape in shapes) + max(shape.num_probs for shape in shapes))
