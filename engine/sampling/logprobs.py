"""Log probabilities of emitted tokens, from the target's raw logits. Not for: anything that is drawn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.request import TokenLogprob


def token_logprobs(logits_NV: Tensor, tokens: Sequence[int], num_top: int) -> tuple[TokenLogprob, ...]:
    """Each token's logprob under its row, and the `num_top` likeliest tokens of the row."""
    scores_NV = logits_NV.float().log_softmax(-1)
    token_N1 = torch.tensor(tokens, device=logits_NV.device).unsqueeze(1)
    chosen = scores_NV.gather(1, token_N1).squeeze(1).tolist()
    top = scores_NV.topk(min(num_top, scores_NV.shape[1]), dim=1)
    return tuple(
        TokenLogprob(score, tuple(zip(ids, values, strict=True)))
        for score, ids, values in zip(chosen, top.indices.tolist(), top.values.tolist(), strict=True)
    )
