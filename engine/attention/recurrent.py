"""Recurrent layers and short convolutions, whose tokens read inputs of earlier tokens.

The modelling code calls a convolution and a recurrence by name, over all rows of a pass as if they
were one text. They are replaced here, as attention is: a call stores the inputs of the pass's rows
by slot, next to K and V, and every row reads the inputs along its own path (`paths.py`). So a
drafted node never meets a sibling's inputs, and whatever moves or shares K and V moves and shares
inputs. The calls of a pass are known by their order.

Recurrences are computed here by transformers' function, from the first token of the text in every
pass. This is the specification: it is exact and slow.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.attention.paths import Paths
from engine.attention.tensors import KVTensors, LayerShape

_REPLACED = "_polydraft_replaced"

Recurrence = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
"""Returns outputs [B, L, ...] from the tokens' inputs, and what the outputs are read by."""


class Calls(Protocol):
    """Computes the calls of one pass of a model, in order."""

    def convolve(self, rows_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, activation: Any) -> Tensor:
        """Return [T, C] the convolution of each row with the rows before it on its path."""

    def recur(self, inputs: Sequence[Tensor], readers: Sequence[Tensor], recurrence: Recurrence) -> Tensor:
        """Return [1, T, ...] outputs; inputs, readers: [1, T, ...]."""


_CALLS: ContextVar[Calls | None] = ContextVar("calls", default=None)


@contextmanager
def computing(calls: Calls | None) -> Iterator[None]:
    """Let these calls compute the recurrent layers of a pass; None: transformers' functions."""
    token = _CALLS.set(calls)
    try:
        yield
    finally:
        _CALLS.reset(token)


class ShapeCalls:
    """Records the shapes of stored inputs, and computes nothing."""

    def __init__(self) -> None:
        self.shapes: list[LayerShape] = []

    def convolve(self, rows_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, activation: Any) -> Tensor:  # noqa: ARG002
        self.shapes.append(LayerShape(1, rows_TC.shape[1], rows_TC.shape[1], is_latent=True))
        return rows_TC

    def recur(self, inputs: Sequence[Tensor], readers: Sequence[Tensor], recurrence: Recurrence) -> Tensor:
        width = _packed(inputs).shape[1]
        self.shapes.append(LayerShape(1, width, width, is_latent=True, dtype=torch.float32))
        return recurrence(inputs, readers)


class PathCalls:
    """Computes the calls of a pass along each row's path."""

    def __init__(self, storage: KVTensors, slots_T: Tensor | slice, paths: Paths) -> None:
        self._storage = storage
        self._slots_T = slots_T
        self._paths = paths
        self._number = 0

    def _stored(self, rows_TC: Tensor) -> Tensor:
        """Store the inputs of the next call's rows; return the inputs [slots, C] of all slots."""
        stored, _ = self._storage.layers[input_layer(self._number)]
        self._number += 1
        stored[self._slots_T] = rows_TC.to(stored.dtype).unsqueeze(1)
        return stored.squeeze(1)

    def convolve(self, rows_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, activation: Any) -> Tensor:
        from transformers.activations import ACT2FN

        inputs = self._stored(rows_TC)
        weight_KC = weight_CK.T.float()
        slots_TK, is_text_TK = self._paths.windows(len(weight_KC))
        # The terms are added in one order, so that a row's bits do not depend on other rows.
        result_TC = torch.zeros(rows_TC.shape) if bias_C is None else bias_C.float().expand(rows_TC.shape).clone()
        for slots_T, is_text_T, weight_C in zip(slots_TK.T, is_text_TK.T, weight_KC, strict=True):
            result_TC.addcmul_(inputs[slots_T].float() * is_text_T[:, None], weight_C)
        result_TC = result_TC.to(weight_CK.dtype)
        if activation is not None:
            result_TC = ACT2FN[activation](result_TC)
        return result_TC.to(rows_TC.dtype)

    def recur(self, inputs: Sequence[Tensor], readers: Sequence[Tensor], recurrence: Recurrence) -> Tensor:
        stored = self._stored(_packed(inputs))
        outputs: Tensor | None = None
        for rows_R, slots_RL, ends_R in self._paths.texts():
            along = _unpacked(stored[slots_RL], inputs)
            # A row reads at its own place; other places of its path read nothing.
            path_R, places = _reading(slots_RL, ends_R)
            read = [part.new_zeros(*slots_RL.shape, *part.shape[2:]) for part in readers]
            for zeros, part in zip(read, readers, strict=True):
                zeros[path_R, places] = part[0, rows_R]
            result = recurrence(along, read)[path_R, places]
            if outputs is None:
                outputs = result.new_empty(inputs[0].shape[1], *result.shape[1:])
            outputs[rows_R] = result
        assert outputs is not None
        return outputs.unsqueeze(0)


def _reading(slots_RL: Tensor, ends_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return (number of the path, place in it) of each row; one path may have several rows."""
    is_shared = len(slots_RL) == 1
    return torch.zeros_like(ends_R) if is_shared else torch.arange(len(ends_R)), ends_R


def input_layer(number: int) -> int:
    """Return the key of a call's inputs among the layers of K and V, which count from 0."""
    return -1 - number


def input_shapes(calls: ShapeCalls) -> dict[int, LayerShape]:
    """Return the shapes of all inputs, as further layers."""
    return {input_layer(number): shape for number, shape in enumerate(calls.shapes)}


def _packed(inputs: Sequence[Tensor]) -> Tensor:
    """Return the inputs of a pass's rows [T, all numbers of a token]."""
    return torch.cat([part[0].reshape(part.shape[1], -1).float() for part in inputs], dim=1)


def _unpacked(flat_RLW: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    sizes = [math.prod(part.shape[2:]) for part in inputs]
    parts = torch.split(flat_RLW, sizes, dim=-1)
    return [
        part.reshape(*part.shape[:2], *like.shape[2:]).to(like.dtype) for part, like in zip(parts, inputs, strict=True)
    ]


def replace_recurrences(modules: Iterable[Any]) -> None:
    """Replace the functions that a model's code calls for its recurrent layers (idempotent).

    Outside of a pass they are transformers' own.
    """
    for code in {sys.modules[type(module).__module__] for module in modules}:
        for name, replaced in _FUNCTIONS.items():
            right = getattr(code, name, None)
            if right is not None and not hasattr(right, _REPLACED):
                function = replaced(right)
                setattr(function, _REPLACED, True)
                setattr(code, name, function)


def _convolution(right: Callable[..., Any]) -> Callable[..., Any]:
    def convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **more: Any) -> Any:
        calls = _CALLS.get()
        if calls is None:
            return right(x, weight, bias, activation, **more)
        return calls.convolve(x[0].T, weight, bias, activation).T.unsqueeze(0)

    return convolution


def _delta_rule(right: Callable[..., Any]) -> Callable[..., Any]:
    """Return the gated delta rule, whose decay is a number of a head (GDN) or a vector (KDA)."""

    def rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **more: Any) -> Any:
        calls = _CALLS.get()
        if calls is None:
            return right(query, key, value, g=g, beta=beta, **more)

        def recurrence(inputs: Sequence[Tensor], readers: Sequence[Tensor]) -> Tensor:
            key, value, g, beta = inputs
            output: Tensor = right(readers[0], key, value, g=g, beta=beta, **more)[0]
            return output

        return calls.recur((key, value, g, beta), (query,), recurrence), None

    return rule


def _state_space(right: Callable[..., Any]) -> Callable[..., Any]:
    """Return the scan of Mamba 2."""

    def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, **more: Any) -> Any:
        calls = _CALLS.get()
        if calls is None:
            return right(x, dt, A, B, C, chunk_size, **more)

        def recurrence(inputs: Sequence[Tensor], readers: Sequence[Tensor]) -> Tensor:
            x, dt, B = inputs
            output: Tensor = right(x, dt, A, B, readers[0], chunk_size, **more)
            return output

        return calls.recur((x, dt, B), (C,), recurrence)

    return scan


def _selective(right: Callable[..., Any]) -> Callable[..., Any]:
    """Return the scan of Mamba 1, whose operands are [B, C, T]."""

    def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, z: Tensor, **more: Any) -> Any:
        calls = _CALLS.get()
        if calls is None:
            return right(x, dt, A, B, C, z=z, **more)

        def recurrence(inputs: Sequence[Tensor], readers: Sequence[Tensor]) -> Tensor:
            x, dt, B, C, z = (part.transpose(1, 2) for part in (*inputs, *readers))
            output: Tensor = right(x, dt, A, B, C, z=z, **more)
            return output.transpose(1, 2)

        inputs = [part.transpose(1, 2) for part in (x, dt, B)]
        readers = [part.transpose(1, 2) for part in (C, z)]
        return calls.recur(inputs, readers, recurrence).transpose(1, 2)

    return scan


_FUNCTIONS = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba_selective_scan": _selective,
}
"""Functions of transformers' code for recurrent layers, by name."""
