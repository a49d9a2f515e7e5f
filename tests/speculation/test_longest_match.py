"""Deterministic rows emit the target's own text, as far as the best draft matches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.kernels.protocol import ChainNoise, Chains, ChainVerdict, ProbsTable
from engine.kernels.torch_kernels import TORCH
from engine.speculation.verification import RULES
from engine.speculation.verification.chain_rules import verify_certain
from tests.engine import tiny
from tests.wrong import instead

VOCABULARY, LENGTH, NUM_REQUESTS, NUM_CHAINS = 3, 4, 300, 3


def world(path: tuple[int, ...]) -> int:
    """The target's token behind a path."""
    return (len(path) + sum((i + 2) * token for i, token in enumerate(path))) % VOCABULARY


def drawn(seed: int = 0) -> tuple[Chains, ProbsTable, ChainNoise]:
    """Random chains of random lengths, and the target's laws below all their prefixes."""
    chance = np.random.default_rng(seed)
    count = NUM_REQUESTS * NUM_CHAINS
    tokens_CL = chance.integers(0, VOCABULARY, (count, LENGTH))
    # Half of the tokens are what the target says.
    for chain in tokens_CL:
        for depth in range(LENGTH):
            if chance.random() < 0.6:
                chain[depth] = world(tuple(chain[:depth].tolist()))
    nodes = [tuple(chain[:depth].tolist()) for chain in tokens_CL for depth in range(LENGTH + 1)]
    laws_NV = torch.zeros(len(nodes), VOCABULARY)
    laws_NV[torch.arange(len(nodes)), torch.tensor([world(node) for node in nodes])] = 1.0
    number_C = torch.arange(count)
    draft = ProbsTable(
        torch.full((count * LENGTH, VOCABULARY), 1 / VOCABULARY), torch.arange(count * LENGTH).view(count, -1), TORCH
    )
    lengths = torch.from_numpy(chance.integers(0, LENGTH + 1, count))
    chains = Chains(
        torch.from_numpy(tokens_CL), lengths, number_C // NUM_CHAINS, draft, shape=(NUM_REQUESTS, NUM_CHAINS)
    )
    numbers = torch.from_numpy(chance.random((count, 2 * LENGTH + 3)))
    noise = ChainNoise(numbers[:, :LENGTH], numbers[:, -3], numbers[:, -2], numbers[:, LENGTH:-3], numbers[:, -1])
    return chains, ProbsTable(laws_NV, torch.arange(len(nodes)).view(count, LENGTH + 1), TORCH), noise


def texts(chains: Chains, verdict: ChainVerdict) -> list[tuple[int, ...]]:
    """Return the emitted tokens of each request."""
    parts = verdict.chain_B.tolist(), verdict.accepted_B.tolist(), verdict.next_token_B.tolist()
    return [
        (*chains.tokens_CL[chain, :accepted].tolist(), token) for chain, accepted, token in zip(*parts, strict=True)
    ]


def right(chains: Chains) -> list[tuple[int, ...]]:
    """The target's text, up to one token behind the longest draft that begins it."""
    emitted = []
    for request in range(NUM_REQUESTS):
        text: tuple[int, ...] = ()
        own = [
            tuple(chains.tokens_CL[c, : chains.length_C[c]].tolist())
            for c in range(request * NUM_CHAINS, (request + 1) * NUM_CHAINS)
        ]
        while True:
            text = (*text, world(text))
            if not any(chain[: len(text)] == text for chain in own):
                break
        emitted.append(text)
    return emitted


def test_longest_match_emits_the_target_text() -> None:
    chains, target, noise = drawn()
    emitted = texts(chains, verify_certain(chains, target, noise))
    assert emitted == right(chains)
    assert len({len(text) for text in emitted}) > 3
    by_any_rule = RULES["nss"].verify(chains, target, noise)
    assert texts(chains, by_any_rule) == emitted


WRONG: dict[str, Callable[[Chains, ProbsTable], tuple[Chains, ProbsTable]]] = {
    "drafts that are not there": lambda c, t: (replace(c, length_C=torch.full_like(c.length_C, LENGTH)), t),
    "laws of the prefix before": lambda c, t: (c, replace(t, row_CX=t.row_CX.roll(1, 1))),
    "chains of one request": lambda c, t: (replace(c, request_C=c.request_C * 0, shape=(1, c.num_chains)), t),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_variants_are_found_out(wrong: str) -> None:
    chains, target, noise = drawn()
    assert texts(chains, verify_certain(*WRONG[wrong](chains, target), noise)) != right(chains)


def test_the_shortest_match_is_found_out() -> None:
    chains, target, noise = drawn()
    with instead(TORCH, "winners", lambda winners, chains, score_C, *rest: winners(chains, -score_C, *rest)):
        assert texts(chains, verify_certain(chains, target, noise)) != right(chains)


def test_kernels_choose_the_same() -> None:
    pytest.importorskip("triton")
    from engine.cuda.kernels import TritonKernels

    chains, target, noise = drawn(1)
    few = torch.arange(24)
    chains, target = chains.select(few, (8, NUM_CHAINS)), target.select(few)
    if tiny.DEVICE.type != "cpu":
        pytest.skip("the plain operations are compared with the interpreter's")
    plain = verify_certain(chains, target, noise)
    verdict = verify_certain(chains, replace(target, kernels=TritonKernels()), noise)
    for name in ("chain_B", "accepted_B", "next_token_B"):
        assert torch.equal(getattr(verdict, name), getattr(plain, name))
