"""Chains of drafted tokens, and the tree that results from merging equal prefixes.

Words: a *chain* is a sequence of drafted tokens below the root (the last known token). Chains of
one request with equal prefixes share *nodes*. Merging only saves target rows; the rules still see
every chain. Node 0 is the root. Drafted nodes follow chain by chain, so the first chain's nodes are
1, 2, ..., and a chain's accepted prefix is a path of nodes.

Merging needs the tokens on the host. Without merging, the tree is that of the draws
(`drawn_tree`). Its nodes are known before the tokens are, so the host need not wait for the device
between draft and target.

Pure Python and numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.fanout import Fanout, chains_through, num_chains


class Tree(NamedTuple):
    """Chains of one request, merged or as drawn."""

    tokens: list[int]
    """Tokens of nodes 1, 2, ...; empty if the host does not know them."""
    parents: list[int]
    """Parents of nodes 1, 2, ...; 0 is the root."""
    depths: list[int]
    """Depths of nodes 1, 2, ...; the root has depth 0."""
    paths: list[list[int]]
    """Nodes of each chain, from the root."""

    @property
    def num_nodes(self) -> int:
        """Return the number of drafted nodes, without the root."""
        return len(self.parents)

    def tokens_of(self, path: Sequence[int]) -> tuple[int, ...]:
        """Return the drafted tokens of a path of nodes, which begins at the root."""
        return tuple([self.tokens[node - 1] for node in path[1:]])

    def ancestry(self) -> npt.NDArray[np.bool_]:
        """Return [N, N] over nodes 1, 2, ...: whether j is i or its ancestor. Read-only."""
        return _ancestry(tuple(self.parents))


@lru_cache(maxsize=1024)
def _ancestry(parents: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    mask = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent > 0:
            mask[node] |= mask[parent - 1]
    mask.flags.writeable = False
    return mask


def merge_chains(chains: Sequence[Sequence[int]]) -> Tree:
    """Merge equal prefixes of one request's chains (lists of token ids, any lengths)."""
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    paths: list[list[int]] = []
    children: dict[tuple[int, int], int] = {}
    for chain in chains:
        node = 0
        path = [0]
        for depth, token in enumerate(chain, start=1):
            child = children.get((node, token))
            if child is None:
                tokens.append(token)
                parents.append(node)
                depths.append(depth)
                child = children[node, token] = len(tokens)
            node = child
            path.append(node)
        paths.append(path)
    return Tree(tokens, parents, depths, paths)


@lru_cache(maxsize=1024)
def drawn_tree(fanout: Fanout) -> Tree:
    """Return the tree of draws, without tokens; equal ones are not merged."""
    depths = range(1, 1 + len(fanout))
    # All nodes of a depth have distinct numbers in place of tokens.
    tree = merge_chains(
        [[chain // chains_through(fanout, depth) for depth in depths] for chain in range(num_chains(fanout))]
    )
    return Tree([], tree.parents, tree.depths, tree.paths)
