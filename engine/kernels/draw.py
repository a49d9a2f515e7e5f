"""One token from a row of weights and one uniform number: the inverse of the cumulative sum.

Not for: making the weights (`distribution.py`, the rules) or the number (`noise.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def categorical(weights_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Draw one index per row with probability proportional to its weight.

    weights_NV: non-negative, with some mass in each row (sums in float64). uniform_N: in [0, 1). No
    index of zero weight is returned, even if a number is so close to 1 that it reaches the end. For
    non-finite weights the index is arbitrary.
    """
    cumulative_NV = weights_NV.cumsum(-1, dtype=torch.float64)
    total_N1 = cumulative_NV[:, -1:]
    wanted_N1 = uniform_N.to(torch.float64).unsqueeze(-1) * total_N1
    index_N1 = torch.searchsorted(cumulative_NV, wanted_N1, right=True)
    last_N1 = torch.searchsorted(cumulative_NV, total_N1.contiguous(), right=False)
    return torch.minimum(index_N1, last_N1).squeeze(-1).clamp_(max=weights_NV.shape[1] - 1)
