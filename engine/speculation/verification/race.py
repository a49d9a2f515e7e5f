"""Block verification of one chain, and the score race of several: exact (`docs/speculation-rules.md`).

Not for: the algorithm (`engine.kernels.torch_block`).
"""

from __future__ import annotations

from engine.kernels.protocol import ChainNoise, Chains, ChainVerdict, LawTable


def verify_block(chains: Chains, target: LawTable, noise: ChainNoise) -> ChainVerdict:
    """One chain per request: accept its longest prefix that block verification allows. It wins its race."""
    return target.kernels.race(chains, target, noise)


def verify_bv_race(chains: Chains, target: LawTable, noise: ChainNoise) -> ChainVerdict:
    """Race the chains of each request; the winner's accepted prefix and next token are emitted."""
    return target.kernels.race(chains, target, noise)
