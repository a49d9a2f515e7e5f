"""Distribution that a request samples from: logits in, probabilities out.

**The one function that computes a request's distribution** (`distribution`), for drafting,
verification and plain decoding. It is the specification of the compiled calls that include it
(`Kernels.decide`, `cpu/compiled/draw_loop.py`). Order of the filters, as in vLLM: temperature,
min-p, top-k, top-p. Every filter keeps ties at its edge, so the distribution is a function of the
logits and not of a sort's order.

Not for: drawing tokens (`kernels/draw.py`), penalties and masks (`edits.py` changes
the logits before this).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from engine.kernels.protocol import Filters
from engine.kernels.torch_kernels import Kernels
from engine.kernels.transfer import to_device_at_once
from engine.request import Sampling

FILTERS: Mapping[str, float] = MappingProxyType({"min_p": 0.0, "top_k": 0, "top_p": 1.0})
"""Filters in order: field of `Sampling`, and its neutral value.

A new one needs an entry here, its field of `Sampling`, and its place
in `Filters` and `Kernels.distribution`.
"""
_filtered = attrgetter(*FILTERS)


@dataclass(frozen=True, eq=False)
class DistributionParameters:
    """Sampling parameters of N rows, as tensors on the logits' device; compared by identity."""

    temperature_N: Tensor
    """0 for greedy."""
    any_greedy: bool
    all_greedy: bool
    filters: Filters
    kernels: Kernels

    @staticmethod
    def of(samplings: Sequence[Sampling], device: torch.device, kernels: Kernels) -> DistributionParameters:
        """Return the parameters of one row per entry of `samplings`."""
        return _parameters_of(
            tuple([(0.0 if s.is_greedy else s.temperature, *_filtered(s)) for s in samplings]), device, kernels
        )

    def select(self, index_N: Tensor | slice) -> DistributionParameters:
        """Return the parameters at `index_N`, one entry per row."""
        filters = self.filters.each(lambda value_N: value_N[index_N])
        return replace(self, temperature_N=self.temperature_N[index_N], filters=filters)


@lru_cache(maxsize=256)
def _parameters_of(
    rows: tuple[tuple[float, ...], ...], device: torch.device, kernels: Kernels
) -> DistributionParameters:
    """Return the parameters of these rows; cached, so read-only."""
    temperatures, *filter_values = zip(*rows, strict=True) if rows else ((), *((),) * len(FILTERS))
    arrays = [
        np.array(values, np.int64 if name == "top_k" else np.float32)
        for name, values in zip(FILTERS, filter_values, strict=True)
    ]
    temperature_N, *on_device = to_device_at_once([np.array(temperatures, np.float32), *arrays], device)
    min_p_N, top_k_N, top_p_N = (
        tensor if {*values} - {neutral} else None
        for neutral, values, tensor in zip(FILTERS.values(), filter_values, on_device, strict=True)
    )
    filters = Filters(min_p_N, top_k_N, top_p_N, most_k=int(max(filter_values[1], default=0)))
    return DistributionParameters(temperature_N, 0.0 in temperatures, not any(temperatures), filters, kernels)


def distribution(logits_NV: Tensor, parameters: DistributionParameters, probs_NV: Tensor | None = None) -> Tensor:
    """Return the distribution of each row's request (float32, same shape).

    probs_NV: output tensor, if given.
    """
    if parameters.all_greedy:
        probs_NV = torch.empty_like(logits_NV, dtype=torch.float32) if probs_NV is None else probs_NV
        return probs_NV.zero_().scatter_(-1, logits_NV.argmax(-1, keepdim=True), 1.0)
    scale_N = parameters.temperature_N
    if parameters.any_greedy:
        scale_N = torch.where(scale_N == 0, 1.0, scale_N)
    result_NV = parameters.kernels.distribution(logits_NV, scale_N, parameters.filters, probs_NV)
    if parameters.any_greedy:
        peak_NV = torch.zeros_like(result_NV).scatter_(-1, logits_NV.argmax(-1, keepdim=True), 1.0)
        result_NV = torch.where((parameters.temperature_N == 0).unsqueeze(-1), peak_NV, result_NV)
    return result_NV if probs_NV is None or result_NV is probs_NV else probs_NV.copy_(result_NV)
