"""Log probabilities of emitted tokens, from the target's raw logits. Not for: anything that is drawn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.request import TokenLogprob


def token_logprobs(logits_NV: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """Each token's logprob under its row, and the likeliest tokens of the row, so many as its `num_top`.

    All of it comes to the host in one copy.
    """
    scores_NV = logits_NV.float().log_softmax(-1)
    token_N1 = torch.tensor(tokens, dtype=torch.int64).to(logits_NV.device, non_blocking=True).unsqueeze(1)
    most = min(max(num_top, default=0), scores_NV.shape[1])
    top = scores_NV.topk(most, dim=1)
    # Token ids and float32 numbers are exact in float64.
    found = torch.cat([scores_NV.gather(1, token_N1).double(), top.values.double(), top.indices.double()], 1).tolist()
    result = []
    for (score, *rest), count in zip(found, num_top, strict=True):
        values, ids = rest[:most], rest[most:]
        result.append(TokenLogprob(score, tuple(zip(map(int, ids[:count]), values[:count], strict=True))))
    return result
