"""The law a request samples from: logits in, probabilities out.

**The one function that makes a request's law**: for drafting, for verification and for plain
decoding. Order of the filters (as vLLM has it): temperature, min-p, top-k, top-p. Every filter
keeps ties at its edge, so the law is a function of the logits and not of a sort's order.

Not for: drawing (`draw.py`), penalties and masks (`edits.py` changes the logits before this).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.request import Sampling
from engine.sampling import fused

# Top-p looks for its edge among this many largest probabilities first.
_TOP_P_WINDOW = 1024


@dataclass(frozen=True)
class LawParameters:
    """Sampling parameters of N law rows, as tensors on the logits' device."""

    temperature_N: Tensor
    top_k_N: Tensor
    top_p_N: Tensor
    min_p_N: Tensor
    any_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool

    @staticmethod
    def of(samplings: Sequence[Sampling], device: torch.device) -> LawParameters:
        """Parameters of one row per entry of `samplings`."""
        temperatures = [0.0 if s.is_greedy else s.temperature for s in samplings]
        return LawParameters(
            temperature_N=_moved(torch.tensor(temperatures, dtype=torch.float32), device),
            top_k_N=_moved(torch.tensor([s.top_k for s in samplings]), device),
            top_p_N=_moved(torch.tensor([s.top_p for s in samplings], dtype=torch.float32), device),
            min_p_N=_moved(torch.tensor([s.min_p for s in samplings], dtype=torch.float32), device),
            any_greedy=0.0 in temperatures,
            any_top_k=any(s.top_k > 0 for s in samplings),
            any_top_p=any(s.top_p < 1 for s in samplings),
            any_min_p=any(s.min_p > 0 for s in samplings),
        )

    def select(self, index_N: Tensor | slice) -> LawParameters:
        """The parameters at `index_N`, one entry per law row."""
        return LawParameters(
            self.temperature_N[index_N],
            self.top_k_N[index_N],
            self.top_p_N[index_N],
            self.min_p_N[index_N],
            self.any_greedy,
            self.any_top_k,
            self.any_top_p,
            self.any_min_p,
        )


def _moved(values: Tensor, device: torch.device) -> Tensor:
    """Values of the host on `device`, without waiting for the copy."""
    return values if device.type == "cpu" else values.to(device, non_blocking=True)


def law(logits_NV: Tensor, parameters: LawParameters) -> Tensor:
    """Probabilities (float32, same shape) of the law that each row's request samples from."""
    if fused.applies(logits_NV) and not (parameters.any_greedy or parameters.any_min_p or parameters.any_top_k):
        law_NV = fused.softmax(logits_NV, parameters.temperature_N)
        return _top_p(law_NV, parameters.top_p_N) if parameters.any_top_p else law_NV
    logits_NV = logits_NV.to(torch.float32)
    greedy_N1 = (parameters.temperature_N == 0).unsqueeze(-1)
    scale_N1 = torch.where(greedy_N1, 1.0, parameters.temperature_N.unsqueeze(-1))
    # Subtracting the maximum first keeps tiny temperatures from overflowing.
    scaled_NV = (logits_NV - logits_NV.amax(-1, keepdim=True)) / scale_N1
    if parameters.any_min_p:
        floor_N1 = parameters.min_p_N.log().unsqueeze(-1)
        scaled_NV = scaled_NV.masked_fill(scaled_NV < floor_N1, -torch.inf)
    if parameters.any_top_k:
        scaled_NV = _top_k(scaled_NV, parameters.top_k_N)
    law_NV = scaled_NV.softmax(-1)
    if parameters.any_top_p:
        law_NV = _top_p(law_NV, parameters.top_p_N)
    if parameters.any_greedy:
        peak_NV = torch.zeros_like(law_NV).scatter_(-1, logits_NV.argmax(-1, keepdim=True), 1.0)
        law_NV = torch.where(greedy_N1, peak_NV, law_NV)
    return law_NV


def _top_k(scaled_NV: Tensor, top_k_N: Tensor) -> Tensor:
    num_tokens = scaled_NV.shape[-1]
    wanted_N = torch.where(top_k_N > 0, top_k_N, num_tokens).clamp(max=num_tokens)
    widest = int(torch.where(wanted_N < num_tokens, wanted_N, 1).max())
    largest_NK = scaled_NV.topk(widest, dim=-1).values
    edge_N1 = largest_NK.gather(-1, (wanted_N.clamp(max=widest) - 1).unsqueeze(-1))
    edge_N1 = edge_N1.masked_fill((wanted_N >= num_tokens).unsqueeze(-1), -torch.inf)
    return scaled_NV.masked_fill(scaled_NV < edge_N1, -torch.inf)


def _top_p(law_NV: Tensor, top_p_N: Tensor) -> Tensor:
    """Keep the smallest set of most likely tokens with mass >= top_p; renormalise."""
    num_tokens = law_NV.shape[-1]
    window = min(_TOP_P_WINDOW, num_tokens)
    largest_NW = law_NV.topk(window, dim=-1).values
    active_N = top_p_N < 1
    reached_N = largest_NW.sum(-1, dtype=torch.float64) >= top_p_N
    if window < num_tokens and not bool((reached_N | ~active_N).all()):
        largest_NW = law_NV.sort(dim=-1, descending=True).values
    before_NW = largest_NW.cumsum(-1, dtype=torch.float64) - largest_NW
    # The last token whose predecessors do not yet hold top_p; the most likely one always stays.
    num_kept_N = (before_NW < top_p_N.unsqueeze(-1)).sum(-1).clamp(min=1)
    edge_N1 = largest_NW.gather(-1, (num_kept_N - 1).unsqueeze(-1))
    kept_NV = law_NV.masked_fill(law_NV < edge_N1, 0.0)
    kept_mass_N1 = kept_NV.sum(-1, keepdim=True)
    return torch.where(active_N.unsqueeze(-1), kept_NV / kept_mass_N1, law_NV)
