"""Recurrent layers and short convolutions, whose tokens read inputs of earlier tokens.

The modelling code calls a convolution and a recurrence by name, over all rows of a pass as if they
were one text. They are replaced here, as attention is: every row reads the inputs along its own
path (`paths.py`), which starts from a stored state of its text (`states.py`). So a drafted node
never meets a sibling's inputs. The calls of a pass are known by their order. transformers' own
function is the specification: every start compares a pass with it (`start/probe.py`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.attention.paths import Paths
from engine.attention.states import CallShape
from engine.attention.tensors import KVTensors

_REPLACED = "_polydraft_replaced"
_LINEAR_SOFTPLUS = 20
"""Number above which torch's softplus is the number itself."""


class Operands(NamedTuple):
    """Operands of a recurrence over the rows of a pass, in float32.

    A head's state S [D_k, D_v] becomes exp(scale rate) S + k u^T, and is read as S^T q. u is v, or
    beta (v - S^T k) of the decayed state.
    """

    key: Tensor
    """[T, H_k, D_k] Each for H / H_k heads."""
    value: Tensor
    """[T, H, D_v]"""
    rate: Tensor
    """[T, H, 1 or D_k]"""
    beta: Tensor | None
    """[T, H]"""
    query: Tensor
    """[T, H_k, D_k]"""
    scale: Tensor
    """[H, 1 or D_k]"""

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Return (H, D_k, D_v)."""
        return self.value.shape[1], self.key.shape[2], self.value.shape[2]

    def packed(self) -> Tensor:
        """Return what is stored of each token [T, W]."""
        parts = (self.key, self.value, self.rate, self.beta)
        return torch.cat([part.flatten(1) for part in parts if part is not None], dim=1)


class Calls(Protocol):
    """Computes the calls of one pass of a model, in order."""

    def convolve(self, rows_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, activation: Any) -> Tensor:
        """Return [T, C] the convolution of each row with the rows before it on its path."""

    def recur(self, operands: Operands) -> Tensor:
        """Return [T, H, D_v] what each row reads of its state."""


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
    """Records the shapes of calls, and computes nothing."""

    def __init__(self) -> None:
        self.shapes: list[CallShape] = []

    def convolve(self, rows_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, activation: Any) -> Tensor:  # noqa: ARG002
        self.shapes.append(CallShape(rows_TC.shape[1], (weight_CK.shape[1] - 1, rows_TC.shape[1])))
        return rows_TC

    def recur(self, operands: Operands) -> Tensor:
        self.shapes.append(CallShape(operands.packed().shape[1], operands.state_shape, torch.float32))
        return torch.zeros_like(operands.value)


class PathCalls:
    """Computes the calls of a pass along each row's path."""

    def __init__(self, storage: KVTensors, paths: Paths) -> None:
        self._kernels = storage.kernels
        self._calls = iter(storage.states.calls)
        self._paths = paths

    def convolve(self, rows_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, activation: Any) -> Tensor:
        from transformers.activations import ACT2FN

        nodes, states = next(self._calls)
        weight_KC = weight_CK.T.float()
        windows = self._paths.windows(len(weight_KC))
        before = states[self._paths.sources_B].flatten(0, 1)
        inputs = torch.cat([rows_TC.to(nodes.dtype), nodes[self._paths.stored_S], before])
        # The terms are added in one order, so that a row's bits do not depend on other rows.
        start_C = weight_KC.new_zeros(1) if bias_C is None else bias_C.float()
        result_TC = start_C.expand(rows_TC.shape).clone()
        for number_T, is_text_T, weight_C in zip(windows.numbers_TK.T, windows.is_text_TK.T, weight_KC, strict=True):
            result_TC.addcmul_(inputs[number_T].float() * is_text_T[:, None], weight_C)
        result_TC = result_TC.to(weight_CK.dtype)
        if activation is not None:
            activate = _silu if activation in ("silu", "swish") else ACT2FN[activation]
            result_TC = activate(result_TC)
        states[windows.places_P] = inputs[windows.stored_PW]
        self._store(nodes, inputs)
        return result_TC.to(rows_TC.dtype)

    def recur(self, operands: Operands) -> Tensor:
        nodes, states = next(self._calls)
        inputs = torch.cat([operands.packed(), nodes[self._paths.stored_S]])
        has_beta = operands.beta is not None
        steps = self._paths.steps
        output = self._kernels.recur(inputs, operands.query, operands.scale, has_beta, states, steps)
        self._store(nodes, inputs)
        return output

    def _store(self, nodes: Tensor, inputs: Tensor) -> None:
        """Store the inputs of the pass's drafted nodes."""
        nodes[self._paths.node_slots_N] = inputs[self._paths.node_rows_N]


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
        k, v, q, rate = (part[0].float() for part in (key, value, query, g))
        if more.get("use_qk_l2norm_in_kernel"):
            k, q = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + 1e-6) for part in (k, q))
        scale = rate.new_ones(v.shape[1], 1)
        rate = rate.view(*v.shape[:2], -1)
        output = calls.recur(Operands(k, v, rate, beta[0].float(), q * q.shape[-1] ** -0.5, scale))
        return output.to(query.dtype).unsqueeze(0), None

    return rule


def _state_space(right: Callable[..., Any]) -> Callable[..., Any]:
    """Return the scan of Mamba 2."""

    def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, **more: Any) -> Any:
        calls = _CALLS.get()
        if calls is None:
            return right(x, dt, A, B, C, chunk_size, **more)
        limits = more.get("dt_limit", (0.0, math.inf))
        rate = _time_step(dt[0], more.get("dt_bias"), more.get("dt_softplus", False)).clamp(*limits).unsqueeze(-1)
        rows = x[0].float()
        output = calls.recur(Operands(B[0].float(), rate * rows, rate, None, C[0].float(), A.float().unsqueeze(-1)))
        return _with_skip(output, rows, more.get("D")).unsqueeze(0)

    return scan


def _selective(right: Callable[..., Any]) -> Callable[..., Any]:
    """Return the scan of Mamba 1, whose operands are [B, channels, T]; a channel is a head."""

    def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **more: Any) -> Any:
        calls = _CALLS.get()
        if calls is None:
            return right(x, dt, A, B, C, **more)
        rate = _time_step(dt[0].T, more.get("delta_bias"), more.get("delta_softplus", False)).unsqueeze(-1)
        rows = x[0].T.float().unsqueeze(-1)
        key, query = (part[0].T.float().unsqueeze(1) for part in (B, C))
        output = calls.recur(Operands(key, rate * rows, rate, None, query, A.float()))
        gate = more.get("z")
        result = _with_skip(output, rows, more.get("D")).squeeze(-1).T.unsqueeze(0)
        return result if gate is None else result * _silu(gate)

    return scan


def _time_step(dt: Tensor, bias: Tensor | None, is_softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return (_softplus(dt) if is_softplus else dt).float()


# Torch's SiLU and softplus compute the numbers that fill no vector by other instructions: the last
# numbers of a tensor, and of the part of each thread. So a row's bits would depend on the number of
# rows. The operations below have the same bits for all numbers.


def _silu(numbers: Tensor) -> Tensor:
    if numbers.device.type != "cpu":
        return torch.nn.functional.silu(numbers)
    wide = numbers.float()
    return (wide / wide.neg().exp_().add_(1)).to(numbers.dtype)


def _softplus(numbers: Tensor) -> Tensor:
    if numbers.device.type != "cpu":
        return torch.nn.functional.softplus(numbers)
    wide = numbers.float()
    is_linear = wide > _LINEAR_SOFTPLUS
    return torch.where(is_linear, wide, wide.exp().log1p()).to(numbers.dtype)


def _with_skip(output: Tensor, rows: Tensor, skip: Tensor | None) -> Tensor:
    """Return [T, H, D_v] outputs plus the rows, by a weight of each head."""
    return output if skip is None else output + skip.float().unsqueeze(-1) * rows


_FUNCTIONS = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba_selective_scan": _selective,
}
"""Functions of transformers' code for recurrent layers, by name."""
