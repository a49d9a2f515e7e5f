"""Verification of text drafts (prompt lookup, predictions), before any rule.

A text draft is deterministic: its draft law is the token itself. The text drafts of a request form
a tree. Walk down that tree: at a node with target law p and children D, continue to x in D with
probability p(x). With the remaining probability stop; the next token is then not in D, so its law
is p without D, scaled to 1. There the request's own rule takes over, with that law at the root,
for the drawn chains that begin with the path so far (given this prefix, the rest of them has its
usual law). Every emitted token has the target's law given the tokens before it, so this is
lossless with every rule that is lossless for any target law. Rules that change the targets of
later steps are excluded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from engine.kernels.protocol import ChainNoise, Chains, ProbsTable
from engine.kernels.transfer import to_device_at_once
from engine.speculation.topology import Tree


@dataclass(frozen=True)
class Walk:
    """Accepted part of a request's text drafts."""

    path: list[int]
    rank: int
    """First chain of the tree that begins with these nodes."""
    refused: list[int]
    """Tokens that the next one cannot be."""

    @property
    def depth(self) -> int:
        """Return the number of accepted tokens."""
        return len(self.path) - 1


def edges_of(tree: Tree, first_text_draft: int) -> dict[int, list[int]]:
    """Return the children of inner nodes; chains from `first_text_draft` are text drafts."""
    children: dict[int, set[int]] = {}
    for path in tree.paths[first_text_draft:]:
        for node, child in pairwise(path):
            children.setdefault(node, set()).add(child)
    return {node: sorted(below) for node, below in children.items()}


def walk_to(tree: Tree, first_text_draft: int, node: int) -> Walk:
    """Return the walk that ended at a node."""
    path = [node]
    while path[-1]:
        path.append(tree.parents[path[-1] - 1])
    path.reverse()
    rank = next(i for i, nodes in enumerate(tree.paths) if i >= first_text_draft and nodes[: len(path)] == path)
    refused = edges_of(tree, first_text_draft).get(node, ())
    return Walk(path, rank, [tree.tokens[child - 1] for child in refused])


def walk(tree: Tree, first_text_draft: int, probability: dict[int, float], uniform_L: Sequence[float]) -> Walk:
    """Follow the text drafts.

    probability: the target's, of each node's token; uniform_L decides at each depth.
    """
    children = edges_of(tree, first_text_draft)
    node, depth = 0, 0
    while node in children:
        mass = 0.0
        for child in children[node]:
            mass += probability[child]
            if uniform_L[depth] < mass:
                node, depth = child, depth + 1
                break
        else:
            break
    return walk_to(tree, first_text_draft, node)


def refuse(probs_NV: Tensor, rows: Sequence[int], refused: Sequence[Sequence[int]]) -> None:
    """Set the probability of some tokens to zero in some laws, in place.

    A law without any other token is unchanged (this has probability zero), and so is a law without
    refused tokens, in every bit.
    """
    changed = [(row, tokens) for row, tokens in zip(rows, refused, strict=True) if tokens]
    if not changed:
        return
    pairs = [(number, token) for number, (_, tokens) in enumerate(changed) for token in tokens]
    arrays = np.array([row for row, _ in changed]), *np.array(pairs, dtype=np.int64).T
    row_M, number_P, token_P = to_device_at_once(arrays, probs_NV.device)
    rest_MV = probs_NV[row_M].double()
    rest_MV[number_P, token_P] = rest_MV.new_zeros(())  # a number of the host would be waited for
    total_M1 = rest_MV.sum(1, keepdim=True)
    probs_NV[row_M] = torch.where(total_M1 > 0, rest_MV / total_M1, probs_NV[row_M].double()).to(probs_NV.dtype)


@dataclass(frozen=True)
class Below:
    """Chains that remain to be verified below the walks."""

    chains: Chains
    target: ProbsTable
    noise: ChainNoise
    origin_C: np.ndarray
    """Index of each chain among the drafted ones."""


def below(
    chains: Chains,
    target: ProbsTable,
    noise: ChainNoise,
    request_C: np.ndarray,
    offset_C: np.ndarray,
    lives_C: np.ndarray,
    root_C: np.ndarray,
) -> Below:
    """Return the chains from `offset_C` tokens on.

    request_C: request of each chain. lives_C: whether it continues; a request without any keeps its
    first chain, with length 0. root_C: law row of the node at which each request stopped.
    """
    lively = np.isin(request_C, request_C[lives_C])
    first = np.concatenate([[True], request_C[1:] != request_C[:-1]])
    origin_C = np.flatnonzero(lives_C | (first & ~lively))
    device = chains.length_C.device
    arrays = origin_C, np.where(lives_C, offset_C, 0)[origin_C], lives_C[origin_C], root_C[origin_C]
    index, offset, lives, root = to_device_at_once(arrays, device)
    counts = np.bincount(request_C[origin_C])
    kept = chains.select(index, (int(np.count_nonzero(counts)), int(counts.max())))
    laws = target.select(index)

    def shifted(values_CX: Tensor) -> Tensor:
        column_X = torch.arange(values_CX.shape[1], device=device)
        return values_CX.gather(1, (column_X + offset.unsqueeze(1)).clamp(max=values_CX.shape[1] - 1))

    row_CX = shifted(laws.row_CX)
    row_CX[:, 0] = root
    moved = replace(
        kept,
        tokens_CL=shifted(kept.tokens_CL),
        length_C=torch.where(lives, kept.length_C - offset, 0),
        draft=replace(kept.draft, row_CX=shifted(kept.draft.row_CX)),
        leads_CL=None if kept.leads_CL is None else shifted(kept.leads_CL),
    )
    return Below(moved, replace(laws, row_CX=row_CX), noise.select(index), origin_C)
