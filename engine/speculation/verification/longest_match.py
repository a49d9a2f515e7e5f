"""Verification of deterministic rows (temperature 0, or a seed that fixes the answer): the longest exact match.

Every rule then accepts exactly the tokens that the target would emit; this one accepts any set of drafts.
"""

from __future__ import annotations

from engine.kernels.protocol import ChainNoise, Chains, ChainVerdict, ProbsTable
from engine.kernels.torch_block import longest_match


def verify_certain(chains: Chains, target: ProbsTable, _noise: ChainNoise) -> ChainVerdict:
    """Follow each request's chain with the longest match (of several the first), and emit the target's next token.

    target: laws with one token each.
    """
    accepted_C, next_token_C = longest_match(chains, target.probs_NV.argmax(1)[target.row_CX])
    return target.kernels.winners(chains, -accepted_C.double(), accepted_C, next_token_C)
