"""Block verification of one chain, and the score race of several: exact (`docs/speculation-rules.md`).

Not for: the algorithm (`engine.kernels.torch_block`).
"""

from __future__ import annotations

from engine.kernels.protocol import ChainNoise, Chains, ChainVerdict, ProbsTable


def verify_block(chains: Chains, target: ProbsTable, noise: ChainNoise) -> ChainVerdict:
    """Accept the longest prefix of each request's single chain that block verification allows."""
    return target.kernels.race(chains, target, noise)


def verify_bv_race(chains: Chains, target: ProbsTable, noise: ChainNoise) -> ChainVerdict:
    """Race the chains of each request, and emit the winner's accepted prefix and next token."""
    return target.kernels.race(chains, target, noise)
