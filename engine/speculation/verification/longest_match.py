"""Verification where laws are certain (temperature 0, or a seed that names the answer): the longest exact match.

Every rule accepts then what the target would emit, and nothing else; this one takes any set of drafts.
"""

from __future__ import annotations

import torch

from engine.speculation.drafting import ChainNoise, Chains, LawTable
from engine.speculation.verification.race import winners
from engine.speculation.verification.rule import ChainVerdict


def verify_certain(chains: Chains, target: LawTable, _noise: ChainNoise) -> ChainVerdict:
    """Each request follows its chain with the longest match (of several the first), and emits the target's next token.

    target: laws with one token each.
    """
    certain_CX = target.law_NV.argmax(1)[target.row_CX]
    depth_L = torch.arange(chains.max_length, device=certain_CX.device)
    matches_CL = (chains.tokens_CL == certain_CX[:, : chains.max_length]) & (depth_L < chains.length_C.unsqueeze(1))
    accepted_C = matches_CL.cumprod(1).sum(1)
    next_token_C = certain_CX.gather(1, accepted_C.unsqueeze(1)).squeeze(1)
    return winners(chains, -accepted_C.double(), accepted_C, next_token_C)
