"""Drafted chains, the laws they were drawn from, and the noise that decides about them.

A request's chains are the leaves of a tree: below every node some children are drawn together, by
one of the draft methods (`engine.speculation.rule_facts`), from the draft distribution below the
node's prefix. In the usual tree only the root has several children, and every chain continues alone
below its first token. With `iid` such chains are independent given the context; block rules need
this. A chain *leads* a node if it is the first of the chains through it. Rules over nodes see every
drawn node once, through its leader (equal tokens of different draws stay different nodes). A row
that does not speculate has one chain of length 0, so that it can be verified in one batch with rows
that do. (A step in which no row drafts draws its tokens directly: `engine.step.verify`.)

Not for: running the draft model (`engine.drafting`).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from engine.kernels.draw import categorical
from engine.kernels.torch_kernels import Kernels
from engine.speculation.rule_facts import MOST_LIKELY


def method_below(method: str, num_children: int) -> str:
    """Return the method for one node: a single drawn child comes from the draft law itself."""
    return method if num_children > 1 or method == MOST_LIKELY else "iid"


def children(kernels: Kernels, method: str, weights_NV: Tensor, uniform_NK: Tensor) -> Tensor:
    """Return [N, K] children below each node, a function of weights and noise.

    weights_NV: draft law, or for `most_likely` any scores. Where fewer than K tokens have mass, the
    rest get a token of probability 0 in the rest of the law, by which rules recognise them.
    `greedy` and `spechub` children are always distinct: their rules expect one node for each, and
    one draw below it.
    """
    num_children = uniform_NK.shape[1]
    if method == MOST_LIKELY:
        return weights_NV.topk(num_children, dim=1).indices
    if method == "iid" or num_children == 1:
        row_C = _parents(len(weights_NV), num_children, weights_NV.device)
        return kernels.draw(weights_NV, row_C, uniform_NK.reshape(-1)).reshape(uniform_NK.shape)
    if method == "greedy":
        likeliest_NK = weights_NV.topk(num_children, dim=1).indices
        rest_NV = weights_NV.scatter(1, likeliest_NK[:, :-1], 0.0)
        return torch.cat([likeliest_NK[:, :-1], _drawn_or(rest_NV, uniform_NK[:, -1], likeliest_NK[:, -1])], 1)
    if method == "spechub":
        hub_N1 = weights_NV.argmax(1, keepdim=True)
        first_N1 = categorical(weights_NV, uniform_NK[:, 0]).unsqueeze(1)
        another_N = (hub_N1.squeeze(1) + 1) % weights_NV.shape[1]
        other_N1 = _drawn_or(weights_NV.scatter(1, hub_N1, 0.0), uniform_NK[:, 1], another_N)
        return torch.cat([first_N1, torch.where(first_N1 == hub_N1, other_N1, hub_N1)], 1)
    assert method == "without_replacement", method
    tokens = []
    for k in range(num_children):
        tokens.append(categorical(weights_NV, uniform_NK[:, k]))
        weights_NV = weights_NV.scatter(1, tokens[-1].unsqueeze(1), 0.0)
    return torch.stack(tokens, 1)


@cache
def _parents(num_parents: int, num_children: int, device: torch.device) -> Tensor:
    """Return [N * K] the parent of every child.

    Cached indefinitely: recorded steps read it at its address.
    """
    return torch.arange(num_parents, device=device).repeat_interleave(num_children)


def _drawn_or(weights_NV: Tensor, uniform_N: Tensor, otherwise_N: Tensor) -> Tensor:
    """Return [N, 1] a token drawn from each row, or `otherwise_N` if the row has no mass."""
    drawn_N = torch.where(weights_NV.sum(1) > 0, categorical(weights_NV, uniform_N), otherwise_N)
    return drawn_N.unsqueeze(1)
