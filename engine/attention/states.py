"""States of texts in recurrent layers, and inputs of drafted nodes.

A *state* is what a call of a recurrent layer needs of a text: the recurrence's numbers, or the
window of a convolution. Each running sequence has a *seat*: a place for its state at the end of the
text that its last pass read, and room for the inputs of its nodes. Other places have states that
later requests start from. The scheduler chooses places (`scheduling/states.py`).

Inputs of accepted nodes stay in the seat until the next pass repeats them. Inputs of all earlier
tokens are dropped, so the memory does not depend on the length of texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.zeros import zeros
from engine.kernels.transfer import to_device


class CallShape(NamedTuple):
    """Shapes of a call of recurrent layers."""

    width: int
    """Numbers of a token's input."""
    state: tuple[int, ...]
    dtype: torch.dtype | None = None
    """None is the type of the model's K and V."""

    def input_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a node's input; dtype: of the model's K and V."""
        return self.width * (self.dtype or dtype).itemsize

    def state_bytes(self, dtype: torch.dtype) -> int:
        return math.prod(self.state) * (self.dtype or dtype).itemsize


class StateSizes(NamedTuple):
    """Sizes of the storage of a model's states."""

    num_seats: int = 4
    num_cached: int = 4
    """Places besides the seats."""
    num_nodes: int = 64
    """Nodes of a seat."""


FEW_STATES = StateSizes()


class States:
    """States and inputs of nodes of all recurrent calls of a model."""

    def __init__(
        self, shapes: Sequence[CallShape], sizes: StateSizes, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.sizes = sizes
        num_places = sizes.num_seats + sizes.num_cached
        num_slots = sizes.num_seats * sizes.num_nodes
        self.calls: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(inputs [seats * nodes, width], states [places, ...]) of each call of a pass."""
        for shape in shapes:
            inputs = zeros((num_slots, shape.width), shape.dtype or dtype, device)
            states = zeros((num_places, *shape.state), shape.dtype or dtype, device)
            self.calls.append((inputs, states))

    def keep(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Move inputs of nodes. moves: (seat, from node, to node)."""
        if not (moves and self.calls):
            return
        seat, source, destination = to_device(np.array(moves), self.calls[0][0].device).unbind(1)
        first = seat * self.sizes.num_nodes
        for inputs, _ in self.calls:
            inputs[first + destination] = inputs[first + source]
