"""Whether rows of the vocabulary go through the Triton kernels (`triton_rows.py`): on CUDA, where they are right.

On every device they are tried once on made-up rows, beside the plain operations; where they fail, or give other
numbers, the plain ones serve. Not for: the operations themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.kernels import usable
from engine.sampling.draw import categorical

if TYPE_CHECKING:
    from engine.sampling.triton_rows import Surplus


def use_kernels(rows_NV: Tensor) -> bool:
    """Whether the kernels take these rows."""
    return usable("rows of the vocabulary are computed", find_fault, rows_NV.device)


def softmax(logits_NV: Tensor, temperature_N: Tensor, law_NV: Tensor | None = None) -> Tensor:
    """`triton_rows.softmax`."""
    from engine.sampling import triton_rows  # Triton is there where kernels are used

    return triton_rows.softmax(logits_NV, temperature_N, law_NV)


def nucleus(law_NV: Tensor, top_p_N: Tensor) -> Tensor:
    """`triton_nucleus.nucleus`."""
    from engine.sampling import triton_nucleus

    return triton_nucleus.nucleus(law_NV, top_p_N)


def surplus(
    target_NV: Tensor,
    target_row_C: Tensor,
    weight_C: Tensor | None = None,
    draft_MV: Tensor | None = None,
    draft_row_C: Tensor | None = None,
) -> Surplus:
    """`triton_rows.Surplus`."""
    from engine.sampling import triton_rows

    return triton_rows.Surplus(target_NV, target_row_C, weight_C, draft_MV, draft_row_C)


def draw(law_NV: Tensor, row_C: Tensor, uniform_C: Tensor) -> Tensor:
    """[C] a token from each of the law's rows, by the kernels or by `categorical`."""
    if use_kernels(law_NV) and law_NV.is_contiguous():
        return surplus(law_NV, row_C).draw(uniform_C)
    return categorical(law_NV[row_C], uniform_C)


def find_fault(device: torch.device) -> str | None:
    """What is wrong with the kernels on a device; None where they give the plain operations' numbers.

    Rows of a width that 16 divides, which the compiler treats apart, and of another; masked tokens and tiles.
    """
    return next((fault for width in (4096, 9005) if (fault := _fault_of_width(width, device)) is not None), None)


def _fault_of_width(width: int, device: torch.device) -> str | None:
    num_rows = 6
    logits_NV = 4 * torch.arange(num_rows * width, device=device).sqrt().mul(9).sin().view(num_rows, width)
    logits_NV[1, ::3] = -torch.inf
    logits_NV[2, : width // 2] = -torch.inf
    temperature_N = torch.linspace(0.3, 2, num_rows, device=device)
    law_NV = softmax(logits_NV, temperature_N)
    if not torch.allclose(law_NV, (logits_NV / temperature_N.unsqueeze(1)).softmax(1), rtol=1e-4, atol=1e-7):
        return "laws differ"
    # Every row has four tokens of the same probability at its edge.
    steps_NV = torch.tensor([0.4, 0.3, 0.2, 0.1], device=device).repeat_interleave(4).div(4).repeat(num_rows, 1)
    top_p_N = torch.tensor([0.1, 0.45, 0.5, 0.75, 0.95, 1.0], device=device)
    kept_NV = nucleus(steps_NV.flip(1), top_p_N).flip(1)
    if ((kept_NV > 0).sum(1) != torch.tensor([4, 8, 8, 12, 16, 16], device=device)).any():
        return "nuclei differ"
    if not torch.allclose(kept_NV.sum(1), torch.ones(num_rows, device=device)):
        return "nuclei differ"
    row_C = torch.arange(num_rows, device=device)
    draft_MV, weight_C = law_NV.roll(1, 0), torch.linspace(0.4, 1, num_rows, device=device).double()
    mass_CV = (weight_C.float().unsqueeze(1) * law_NV - draft_MV).clamp(min=0)
    surplus_C = surplus(law_NV, row_C, weight_C, draft_MV, row_C)
    if not torch.allclose(surplus_C.sum(), mass_CV.sum(1, dtype=torch.float64), rtol=1e-4):
        return "sums differ"
    uniform_C = torch.linspace(0.05, 0.95, num_rows, device=device).double()
    wanted_C = row_C % 3 > 0
    drawn_C = surplus_C.draw(uniform_C, wanted_C)
    expected_C = categorical(torch.where(wanted_C.unsqueeze(1), mass_CV, law_NV), uniform_C)
    plain_C = surplus(law_NV, row_C).draw(uniform_C)
    if not (torch.equal(drawn_C, expected_C) and torch.equal(plain_C, categorical(law_NV, uniform_C))):
        return "draws differ"
    return None
