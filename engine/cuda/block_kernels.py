"""Block verification and the score race in four launches (`torch_block.py` has the algorithm).

A request waits for the verdict of its step, and a verdict of plain operations takes some two
hundred launches of a few microseconds each. Here one launch walks every chain's prefixes, one sums
the surplus of all prefixes by tiles of the vocabulary, one decides (accepted length, next token,
score), and one lets the chains of each request race.

Runs compiled on CUDA, and on a CPU in Triton's interpreter (tests). The plain
operations are the oracle.
"""

# A kernel's arguments are pointers and numbers that Triton sees only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.row_kernels import ANYWHERE, TILE, draw_token, sum_tiles
from engine.kernels.protocol import ChainNoise, Chains, ChainVerdict, ProbsTable

# Each kernel has one specialisation (`row_kernels.ANYWHERE`), which depends on no number that
# changes between steps.
_CHANGING = ("length", "accept_stride", "num_chains", "num_requests")
_LEAST_BLOCK = 16
_USUAL_CHAINS = 1024
"""Most chains of a usual step; the race is compiled once for up to this number."""


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=ANYWHERE)
def _walk(
    tokens, target, target_rows, draft, draft_rows, log_ratios, log_ceilings, weights,
    width, length, block: tl.constexpr,
):  # fmt: skip
    """Write log R_i, log u_i and w_i of a chain, i = 0..L; place i - 1 of the block is prefix i."""
    chain = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, block)
    inside = place < length
    token = tl.load(tokens + chain * length + place, mask=inside, other=0)
    target_row = tl.load(target_rows + chain * (length + 1) + place, mask=inside, other=0)
    draft_row = tl.load(draft_rows + chain * length + place, mask=inside, other=0)
    p = tl.load(target + target_row * width + token, mask=inside, other=1.0).to(tl.float64)
    q = tl.load(draft + draft_row * width + token, mask=inside, other=1.0).to(tl.float64)
    never, free = (p <= 0).to(tl.int32), (q <= 0).to(tl.int32)
    dead = tl.cumsum(never, axis=0) + tl.cumsum(free, axis=0) - free > 0
    # A token without mass in the draft distribution makes the ratio 0. The logarithm of 0 is not
    # computed.
    step = tl.log(tl.where(dead | (q <= 0), 1.0, q)) - tl.log(tl.where(dead, 1.0, p))
    step = tl.where(dead, 0.0, tl.where(q <= 0, -float("inf"), step))
    log_ratio = tl.where(dead, float("inf"), tl.cumsum(step, axis=0))
    before = place[None, :] <= place[:, None]
    log_ceiling = tl.minimum(tl.min(tl.where(before, log_ratio[None, :], float("inf")), axis=1), 0.0)
    # Both are minus infinity if the ratio is 0: nothing is accepted there.
    weight = tl.where(dead, 0.0, tl.exp(log_ceiling - tl.where(dead | (q <= 0), 0.0, log_ratio)))
    at = chain * (length + 1)
    tl.store(log_ratios + at, 0.0)
    tl.store(log_ceilings + at, 0.0)
    tl.store(weights + at, 1.0)
    tl.store(log_ratios + at + 1 + place, log_ratio, mask=inside)
    tl.store(log_ceilings + at + 1 + place, log_ceiling, mask=inside)
    tl.store(weights + at + 1 + place, weight, mask=inside)


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=ANYWHERE)
def _decide(
    target, target_rows, draft, draft_rows, lengths, log_ratios, log_ceilings, weights, surplus_sums, target_sums,
    accept_numbers, residual_numbers, score_numbers, accepted, tokens, scores,
    width, num_tiles, length, accept_stride,
    block: tl.constexpr, tile: tl.constexpr, tiles: tl.constexpr,
):  # fmt: skip
    """Compute accepted length, next token and score of a chain."""
    chain = tl.program_id(0).to(tl.int64)
    own_length = tl.load(lengths + chain)
    depth, number = 1 + tl.arange(0, block), tl.arange(0, tiles)
    inside = depth <= own_length
    at = chain * (length + 1)
    sums = tl.load(
        surplus_sums + (at + depth)[:, None] * num_tiles + number[None, :],
        mask=inside[:, None] & (number < num_tiles)[None, :],
        other=0.0,
    )
    surplus = tl.sum(sums, axis=1)
    weight = tl.load(weights + at + depth, mask=inside, other=0.0)
    inner = tl.where(weight >= 1, 1.0, surplus / tl.where(weight >= 1, 1.0, surplus + 1 - weight))
    accept = tl.where(depth < own_length, inner, weight)
    uniform = tl.load(accept_numbers + chain * accept_stride + depth - 1, mask=inside, other=2.0)
    stop = tl.max(tl.where(inside & (uniform < accept), depth, 0), axis=0)
    row = target + tl.load(target_rows + at + stop) * width
    other = draft + tl.load(draft_rows + chain * length + tl.minimum(stop, length - 1)) * width
    token = draw_token(
        row, other, tl.load(weights + at + stop), stop < own_length,
        surplus_sums + (at + stop) * num_tiles, target_sums + (at + stop) * num_tiles,
        tl.load(residual_numbers + chain), width, num_tiles, tile, tiles, True,
    )  # fmt: skip
    upper = tl.exp(tl.load(log_ceilings + at + stop))
    p, q = tl.load(row + token).to(tl.float64), tl.load(other + token).to(tl.float64)
    log_extended = tl.load(log_ratios + at + stop) + tl.log(tl.where(q > 0, q, 1.0)) - tl.log(p)
    extended = tl.where(q > 0, tl.exp(log_extended), 0.0)
    lower = tl.where(stop < own_length, tl.minimum(upper, extended), 0.0)
    tl.store(accepted + chain, stop.to(tl.int64))
    tl.store(tokens + chain, token.to(tl.int64))
    tl.store(scores + chain, lower + (upper - lower) * (1 - tl.load(score_numbers + chain)))


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=ANYWHERE)
def _race(requests, scores, accepted, tokens, verdict, num_chains, num_requests, block: tl.constexpr):
    """Select the first of a request's chains with the smallest score; its chains are contiguous."""
    chain = tl.arange(0, block)
    is_chain = chain < num_chains
    request = tl.load(requests + chain, mask=is_chain, other=-1)
    before = tl.load(requests + chain - 1, mask=is_chain & (chain > 0), other=-1)
    number = tl.cumsum((is_chain & (request != before)).to(tl.int32), axis=0) - 1
    is_candidate = is_chain & (number == tl.program_id(0))
    score = tl.load(scores + chain, mask=is_candidate, other=float("inf"))
    smallest = tl.min(score, axis=0)
    winner = tl.min(tl.where(is_candidate & (score == smallest), chain, block), axis=0)
    # If all scores are NaN, none is the smallest.
    winner = tl.minimum(winner, tl.max(tl.where(is_candidate, chain, 0), axis=0))
    to = verdict + tl.program_id(0)
    tl.store(to, winner.to(tl.int64))
    tl.store(to + num_requests, tl.load(accepted + winner))
    tl.store(to + 2 * num_requests, tl.load(tokens + winner))


def race(chains: Chains, target: ProbsTable, noise: ChainNoise) -> ChainVerdict:
    num_chains, length = chains.num_chains, chains.max_length
    probs_NV, draft_NV = target.probs_NV, chains.draft.probs_NV
    assert probs_NV.is_contiguous(), "a distribution's rows must be contiguous"
    assert draft_NV.is_contiguous(), "a distribution's rows must be contiguous"
    device, width = probs_NV.device, probs_NV.shape[1]
    distributions = probs_NV, target.row_CX.contiguous(), draft_NV, chains.draft.row_CX.contiguous()
    num_tiles, block = triton.cdiv(width, TILE), max(_LEAST_BLOCK, triton.next_power_of_2(length))
    prefixes = torch.empty((3, num_chains, length + 1), dtype=torch.float64, device=device)
    sums = torch.empty((2, num_chains, length + 1, num_tiles), dtype=torch.float64, device=device)
    _walk[(num_chains,)](chains.tokens_CL.contiguous(), *distributions, *prefixes, width, length, block=block)
    sum_tiles[(num_chains * (length + 1), num_tiles)](
        *distributions, prefixes[2], *sums, width, num_tiles, length + 1, length, tile=TILE, has_draft=True
    )
    results = torch.empty((2, num_chains), dtype=torch.int64, device=device)
    score_C = torch.empty(num_chains, dtype=torch.float64, device=device)
    accept_CL = noise.accept_CL if noise.accept_CL.stride(-1) == 1 else noise.accept_CL.contiguous()
    _decide[(num_chains,)](
        *distributions, chains.length_C.contiguous(), *prefixes, sums[0], sums[1],
        accept_CL, noise.residual_C.contiguous(), noise.score_C.contiguous(), results[0], results[1], score_C,
        width, num_tiles, length, accept_CL.stride(0),
        block=block, tile=TILE, tiles=triton.next_power_of_2(num_tiles),
    )  # fmt: skip
    return winners(chains, score_C, results[0], results[1])


def winners(chains: Chains, score_C: Tensor, accepted_C: Tensor, next_token_C: Tensor) -> ChainVerdict:
    num_requests, block = chains.shape[0], max(_USUAL_CHAINS, triton.next_power_of_2(chains.num_chains))
    verdict_3B = torch.empty((3, num_requests), dtype=torch.int64, device=score_C.device)
    _race[(num_requests,)](
        chains.request_C.contiguous(), score_C.contiguous(), accepted_C.contiguous(), next_token_C.contiguous(),
        verdict_3B, chains.num_chains, num_requests, block=block,
    )  # fmt: skip
    return ChainVerdict(*verdict_3B)
