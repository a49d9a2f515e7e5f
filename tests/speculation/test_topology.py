"""Merging chains keeps every chain's path, and ancestry is exactly the prefix relation."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.topology import drawn_tree, merge_chains

chains = st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=5)


@given(chains)
def test_merged_tree_holds_every_prefix_once(drafted: list[list[int]]) -> None:
    tree = merge_chains(drafted)
    prefixes = {tuple(chain[: i + 1]) for chain in drafted for i in range(len(chain))}
    assert tree.num_nodes == len(prefixes)
    for chain, path in zip(drafted, tree.paths, strict=True):
        assert path[0] == 0
        assert [tree.tokens[node - 1] for node in path[1:]] == chain
        assert [tree.depths[node - 1] for node in path[1:]] == list(range(1, len(chain) + 1))
    if drafted:
        assert tree.paths[0] == list(range(len(drafted[0]) + 1))


@given(chains)
def test_ancestry_is_the_prefix_relation(drafted: list[list[int]]) -> None:
    tree = merge_chains(drafted)
    text: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, tree.num_nodes + 1):
        text[node] = (*text[tree.parents[node - 1]], tree.tokens[node - 1])
    mask = tree.ancestry()
    for i in range(1, tree.num_nodes + 1):
        for j in range(1, tree.num_nodes + 1):
            assert mask[i - 1, j - 1] == (text[i][: len(text[j])] == text[j])


@given(st.lists(st.integers(1, 3), max_size=4))
def test_the_tree_of_draws_is_that_of_tokens_that_all_differ(fanout: list[int]) -> None:
    """Its chains are the leaves in order, as a layout has them."""
    leaves = list(itertools.product(*(range(count) for count in fanout)))
    expected = merge_chains([[hash(leaf[:depth]) for depth in range(1, len(leaf) + 1)] for leaf in leaves])
    tree = drawn_tree(tuple(fanout))
    assert (tree.parents, tree.depths, tree.paths) == (expected.parents, expected.depths, expected.paths)
    assert tree.tokens == []
    assert tree.num_nodes == sum(len({leaf[:depth] for leaf in leaves}) for depth in range(1, len(fanout) + 1))
