"""Naive sampling (SpecInfer's "naive", NSS): draw from the target and check whether the token was drafted.

Exact for any drafts, including deterministic ones; does not use q. Acceptance for i.i.d. drafts: sum p (1 - (1 - q)^n).
"""

from __future__ import annotations

from torch import Tensor


def nss(target_NV: Tensor, draft_NV: Tensor, drafted_NK: Tensor, present_NK: Tensor) -> Tensor:  # noqa: ARG001
    """Return the target law for any drafts."""
    return target_NV
