"""Kernels over rows of the vocabulary, where there are any: `triton_rows.py` on CUDA, `numba_rows.py` on a CPU.

On every device they are tried once on made-up rows, beside the plain operations; where they fail, or give other
numbers, the plain ones serve. Not for: the operations themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.kernels import Compiler, usable
from engine.sampling.draw import categorical

if TYPE_CHECKING:
    from engine.sampling.triton_rows import Surplus

_WHAT = "rows of the vocabulary are computed"
# Of made-up rows: a width that 16 divides, which compilers treat apart, and another.
_WIDTHS = (4096, 9005)
_NUM_ROWS = 6


def compiler_for(rows_NV: Tensor) -> Compiler | None:
    """Whose kernels take these rows; None where the plain operations do."""
    if usable(_WHAT, find_fault, rows_NV.device):
        return "Triton"
    is_taken = rows_NV.dtype == torch.float32 and rows_NV.is_contiguous()
    if is_taken and usable(_WHAT, find_fault_on_cpu, rows_NV.device, compiler="Numba"):
        return "Numba"
    return None


def softmax(logits_NV: Tensor, temperature_N: Tensor, law_NV: Tensor | None = None) -> Tensor:
    """[N, V] float32 laws at positive temperatures, by kernels; written to `law_NV` where given."""
    if compiler_for(logits_NV) == "Numba":
        from engine.sampling import numba_rows  # Numba is there where its kernels are used

        return numba_rows.softmax(logits_NV, temperature_N, law_NV)
    from engine.sampling import triton_rows  # so is Triton

    return triton_rows.softmax(logits_NV, temperature_N, law_NV)


def draw(law_NV: Tensor, row_C: Tensor, uniform_C: Tensor) -> Tensor:
    """[C] a token from each of the law's rows, by kernels or by `categorical`."""
    compiler = compiler_for(law_NV) if law_NV.is_contiguous() else None
    if compiler == "Numba":
        from engine.sampling import numba_rows

        return numba_rows.draw(law_NV, row_C, uniform_C)
    if compiler == "Triton":
        return surplus(law_NV, row_C).draw(uniform_C)
    return categorical(law_NV[row_C], uniform_C)


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


def find_fault(device: torch.device) -> str | None:
    """What is wrong with Triton's kernels on a device; None where they give the plain operations' numbers."""
    from engine.sampling import triton_rows

    def draw_by_kernels(law_NV: Tensor, row_C: Tensor, uniform_C: Tensor) -> Tensor:
        return surplus(law_NV, row_C).draw(uniform_C)

    fault = _fault_in_nuclei(device)
    for width in _WIDTHS:
        law_NV = _made_up_law(width, device)
        fault = fault or _fault_in_laws(width, device, triton_rows.softmax, draw_by_kernels)
        fault = fault or _fault_in_surplus(law_NV)
    return fault


def find_fault_on_cpu(device: torch.device) -> str | None:
    """What is wrong with Numba's kernels; None where they give the plain operations' numbers."""
    from engine.sampling import numba_rows

    faults = (_fault_in_laws(width, device, numba_rows.softmax, numba_rows.draw) for width in _WIDTHS)
    return next((fault for fault in faults if fault is not None), None)


def _made_up_logits(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """([N, V] logits with masked tokens and tiles, [N] temperatures)."""
    logits_NV = 4 * torch.arange(_NUM_ROWS * width, device=device).sqrt().mul(9).sin().view(_NUM_ROWS, width)
    logits_NV[1, ::3] = -torch.inf
    logits_NV[2, : width // 2] = -torch.inf
    return logits_NV, torch.linspace(0.3, 2, _NUM_ROWS, device=device)


def _made_up_law(width: int, device: torch.device) -> Tensor:
    logits_NV, temperature_N = _made_up_logits(width, device)
    return (logits_NV / temperature_N.unsqueeze(1)).softmax(1)


def _fault_in_laws(
    width: int, device: torch.device, softmax: Callable[..., Tensor], draw: Callable[..., Tensor]
) -> str | None:
    law_NV = _made_up_law(width, device)
    if not torch.allclose(softmax(*_made_up_logits(width, device)), law_NV, rtol=1e-4, atol=1e-7):
        return "laws differ"
    row_C = torch.arange(_NUM_ROWS, device=device).flip(0)
    uniform_C = torch.linspace(0.05, 0.95, _NUM_ROWS, device=device).double()
    return (
        None if torch.equal(draw(law_NV, row_C, uniform_C), categorical(law_NV[row_C], uniform_C)) else "draws differ"
    )


def _fault_in_nuclei(device: torch.device) -> str | None:
    """Every row has four tokens of the same probability at its edge."""
    steps_NV = torch.tensor([0.4, 0.3, 0.2, 0.1], device=device).repeat_interleave(4).div(4).repeat(_NUM_ROWS, 1)
    top_p_N = torch.tensor([0.1, 0.45, 0.5, 0.75, 0.95, 1.0], device=device)
    kept_NV = nucleus(steps_NV.flip(1), top_p_N).flip(1)
    if ((kept_NV > 0).sum(1) != torch.tensor([4, 8, 8, 12, 16, 16], device=device)).any():
        return "nuclei differ"
    return None if torch.allclose(kept_NV.sum(1), torch.ones(_NUM_ROWS, device=device)) else "nuclei differ"


def _fault_in_surplus(law_NV: Tensor) -> str | None:
    row_C = torch.arange(_NUM_ROWS, device=law_NV.device)
    draft_MV, weight_C = law_NV.roll(1, 0), torch.linspace(0.4, 1, _NUM_ROWS, device=law_NV.device).double()
    mass_CV = (weight_C.float().unsqueeze(1) * law_NV - draft_MV).clamp(min=0)
    surplus_C = surplus(law_NV, row_C, weight_C, draft_MV, row_C)
    if not torch.allclose(surplus_C.sum(), mass_CV.sum(1, dtype=torch.float64), rtol=1e-4):
        return "sums differ"
    uniform_C = torch.linspace(0.05, 0.95, _NUM_ROWS, device=law_NV.device).double()
    wanted_C = row_C % 3 > 0
    expected_C = categorical(torch.where(wanted_C.unsqueeze(1), mass_CV, law_NV), uniform_C)
    return None if torch.equal(surplus_C.draw(uniform_C, wanted_C), expected_C) else "draws differ"
