"""How long a verification rule takes on made-up laws, by chains and vocabulary.

Laws are softmax rows of random logits, the draft's a noisy copy of the target's. Not for: deciding anything while
serving; it answers what a rule costs beside the target pass.
"""

from __future__ import annotations

import statistics
import time

import torch

from engine.speculation.drafting import ChainNoise, Chains, LawTable, children
from engine.speculation.verification import RULES


def made_up_chains(
    num_requests: int, num_chains: int, length: int, vocab_size: int, method: str, seed: int = 0
) -> tuple[Chains, LawTable, ChainNoise]:
    """Drafted chains, target laws and noise of one step."""
    generator = torch.Generator().manual_seed(seed)
    total = num_requests * num_chains
    logits_NV = 3 * torch.randn((num_requests * (length + 1), vocab_size), generator=generator)
    noisy_NV = logits_NV + 0.7 * torch.randn(logits_NV.shape, generator=generator)
    target_NV, draft_NV = logits_NV.softmax(-1), noisy_NV.softmax(-1)
    # All chains of a request share one law per depth: what is timed does not depend on it.
    request_C = torch.arange(num_requests).repeat_interleave(num_chains)
    row_CX = request_C.unsqueeze(1) * (length + 1) + torch.arange(length + 1)
    draws = torch.rand((length, num_requests, num_chains), generator=generator, dtype=torch.float64)
    rows_NL = torch.arange(num_requests).unsqueeze(1) * (length + 1) + torch.arange(length)
    tokens = [
        children(method if depth == 0 else "iid", draft_NV[rows_NL[:, depth]], draws[depth]).reshape(total)
        for depth in range(length)
    ]
    chains = Chains(
        torch.stack(tokens, 1),
        torch.full((total,), length),
        request_C,
        torch.arange(num_chains).repeat(num_requests),
        LawTable(draft_NV, row_CX[:, :length]),
    )
    numbers = torch.rand((total, 2 * length + 3), generator=generator, dtype=torch.float64)
    noise = ChainNoise(
        numbers[:, :length],
        numbers[:, length],
        numbers[:, length + 1],
        numbers[:, length + 2 : -1],
        numbers[:, -1],
    )
    return chains, LawTable(target_NV, row_CX), noise


@torch.inference_mode()
def rule_seconds(rule: str, num_requests: int, num_chains: int, length: int, vocab_size: int, repeats: int) -> float:
    """Median duration of one verification of `num_requests` requests."""
    known = RULES[rule]
    inputs = made_up_chains(num_requests, num_chains, length, vocab_size, known.draft_methods[0])
    known.verify(*inputs)
    durations = []
    for _ in range(repeats):
        began = time.perf_counter()
        known.verify(*inputs)
        durations.append(time.perf_counter() - began)
    return statistics.median(durations)
