"""Trees of drawn nodes in which all nodes of a depth have equally many children.

Nodes are numbered from 1 on, level by level; the root is node 0. Each leaf is the end of a chain,
and the chains are in the order of the leaves, so those through one node follow each other.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from operator import mul

Fanout = tuple[int, ...]
"""Children of drawn nodes by depth, from the root; empty if nothing is drawn."""


def chains(num_drafts: int, length: int) -> Fanout:
    """Return the children of every drawn node of this number of chains."""
    return (num_drafts, *(1,) * (length - 1)) if length else ()


@lru_cache(maxsize=1024)
def level_widths(fanout: Fanout) -> tuple[int, ...]:
    return tuple(accumulate(fanout, mul))


def num_nodes(fanout: Fanout) -> int:
    return sum(level_widths(fanout))


def num_chains(fanout: Fanout) -> int:
    """Return the number of chains; one of length 0 if nothing is drawn."""
    return level_widths(fanout)[-1] if fanout else 1


def width_at(fanout: Fanout, depth: int) -> int:
    """Return the number of nodes of a depth; the root has depth 0."""
    return level_widths(fanout)[depth - 1] if depth else 1


def chains_through(fanout: Fanout, depth: int) -> int:
    """Return the number of chains through each node of a depth."""
    return num_chains(fanout) // width_at(fanout, depth)


def node_of(fanout: Fanout, chain: int, depth: int) -> int:
    return 1 + sum(level_widths(fanout)[: depth - 1]) + chain // chains_through(fanout, depth)
