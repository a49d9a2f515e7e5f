"""Naive sampling (SpecInfer's "naive", NSS): draw from the target and see whether it was drafted.

Exact for any drafts, deterministic ones too, and never looks at q.
Acceptance for i.i.d. drafts: sum p (1 - (1 - q)^n).
"""

from __future__ import annotations

from torch import Tensor


def nss(target_NV: Tensor, draft_NV: Tensor, drafted_NK: Tensor, present_NK: Tensor) -> Tensor:  # noqa: ARG001
    """The target law, whatever was drafted."""
    return target_NV
