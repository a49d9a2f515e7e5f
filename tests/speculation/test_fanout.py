"""Numbers that follow from a fanout, compared with a tree that is grown node by node."""

from __future__ import annotations

import itertools

import pytest

from engine.fanout import Fanout, chains_through, level_widths, node_of, num_chains, num_nodes, width_at
from engine.speculation.topology import drawn_tree


@pytest.mark.parametrize("fanout", [(), (1,), (3, 1, 1), (2, 3), (1, 4, 1, 2), (2, 1, 2)])
def test_numbers_are_those_of_the_tree(fanout: Fanout) -> None:
    paths: list[tuple[int, ...]] = [()]
    levels = [paths]
    for count in fanout:
        paths = [(*path, child) for path in paths for child in range(count)]
        levels.append(paths)
    numbers = {path: number for number, path in enumerate(itertools.chain.from_iterable(levels))}
    assert level_widths(fanout) == tuple(map(len, levels[1:]))
    assert num_nodes(fanout) == len(numbers) - 1
    assert num_chains(fanout) == len(levels[-1])
    for depth, level in enumerate(levels):
        assert width_at(fanout, depth) == len(level)
        for path in level:
            assert chains_through(fanout, depth) == sum(chain[:depth] == path for chain in levels[-1])
    tree = drawn_tree(fanout)
    for chain, path in enumerate(levels[-1]):
        nodes = [numbers[path[:depth]] for depth in range(1, 1 + len(fanout))]
        assert [node_of(fanout, chain, depth) for depth in range(1, 1 + len(fanout))] == nodes
        # A merged tree numbers its nodes chain by chain, but has as many of them above each chain's
        # end.
        assert len(tree.paths[chain]) == 1 + len(nodes)
    assert tree.num_nodes == num_nodes(fanout)
