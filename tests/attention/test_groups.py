"""Sequences that attend together get the numbers they get alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.attention.groups import Group, groups_of
from engine.attention.inputs import NO_NODES, NodeInput, SequenceInput, StepLayout, build
from engine.models import runner
from engine.models.runner import ModelRunner
from engine.speculation.topology import merge_chains
from engine.start.probe import find_kv_shape
from tests.cuda.test_lean_decoder import randomised
from tests.models.test_architectures import COMMON
from tests.wrong import instead

BLOCK_SIZE = 4
Spoil = Callable[[Group], Group]
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**COMMON),
    "window and softcap": transformers.Gemma2Config(
        **COMMON, head_dim=8, sliding_window=6, query_pre_attn_scalar=24, attn_logit_softcapping=5.0
    ),
    "window": transformers.MistralConfig(**COMMON, head_dim=8, sliding_window=6),
    "sinks": transformers.GptOssConfig(
        **COMMON, head_dim=8, sliding_window=6, num_local_experts=2, num_experts_per_tok=1
    ),
}


def passes(seed: int = 0) -> tuple[list[SequenceInput], list[SequenceInput]]:
    """Prompts of nine sequences in scattered blocks, then a step of single tokens and trees.

    Some see no key before the sixth.
    """
    chance = np.random.default_rng(seed)
    blocks = chance.permutation(200).tolist()
    lengths = [*chance.integers(14, 19, 7).tolist(), 50, 5]
    prompts, steps = [], []
    for number, length in enumerate(lengths):
        mine = blocks[number * 20 : number * 20 + 20]
        prompts.append(SequenceInput(chance.integers(3, 101, length).tolist(), 0, mine, NO_NODES, slice(0, 0)))
        tree = merge_chains(chance.integers(3, 6, (number % 4, 3)).tolist())
        nodes = NodeInput(tree.tokens, tree.depths, (), tree.ancestry()) if number % 4 else NO_NODES
        token = int(chance.integers(3, 101))
        steps.append(SequenceInput([token], length, mine, nodes, slice(0, None), first_key=5 * (number % 3 == 1)))
    return prompts, steps


def logits(loaded: Any, alone: bool, spoil: Spoil = lambda group: group) -> torch.Tensor:
    made: list[Group] = []

    def grouped(
        groups_of: Any, batch: StepLayout, block_size: int, token_bytes: int, device: torch.device
    ) -> list[Group]:
        if alone:
            groups = groups_of(batch, block_size, 1 << 60, device)
            assert all(group.shape[0] == 1 for group in groups)
            return groups
        groups = groups_of(batch, block_size, token_bytes, device)
        made.extend(group for group in groups if group.shape[0] > 1)
        return [spoil(group) if group.shape[0] > 1 else group for group in groups]

    model = ModelRunner(loaded.model, find_kv_shape(loaded), 200, BLOCK_SIZE, loaded.vocab_size)
    prompts, steps = passes()
    with instead(runner, "groups_of", grouped):
        model.forward(prompts)
        result = model.forward(steps)
    assert bool(made) is not alone
    return result


@pytest.mark.parametrize("name", CONFIGS)
def test_grouped_attention_equals_single_attention(name: str) -> None:
    loaded = randomised(CONFIGS[name], seed=5)
    alone = logits(loaded, True)
    together = logits(loaded, False)
    assert torch.allclose(alone, together, atol=1e-4, rtol=1e-4)


def rolled(group: Group) -> Group:
    assert isinstance(group.slots, torch.Tensor)
    return replace(group, slots=group.slots.roll(group.shape[2]))


WRONG: dict[str, Spoil] = {
    "padding keys are seen": lambda group: replace(group, visible=None),
    "slots of the neighbour": rolled,
    "positions by index": lambda group: replace(
        group, positions=lambda: (torch.arange(group.shape[1]).expand(group.shape[:2]), group.positions()[1])
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_variants_fail_the_comparison(wrong: str) -> None:
    loaded = randomised(CONFIGS["window"], seed=5)
    alone = logits(loaded, True)
    assert not torch.allclose(alone, logits(loaded, False, WRONG[wrong]), atol=1e-4, rtol=1e-4)


def sequence(num_queries: int, num_keys: int) -> SequenceInput:
    return SequenceInput([0] * num_queries, num_keys - num_queries, range(num_keys), NO_NODES, slice(0))


def test_a_group_is_alike_and_fits_the_buffer() -> None:
    sizes = [(1, 100)] * 5 + [(1, 90), (1, 1000), (6, 100), (7, 100), (200, 300), (1, 40)]
    sequences = [sequence(*size) for size in sizes]
    found = groups_of(build(sequences, 1), 1, 8, torch.device("cpu"))
    assert sorted(group.shape for group in found) == [(1, 1, 40), (1, 1, 1000), (1, 200, 300), (2, 7, 100), (6, 1, 100)]
    found = groups_of(build(sequences[:5], 1), 1, (4 << 20) // 250, torch.device("cpu"))
    assert sorted(group.shape[0] for group in found) == [1, 2, 2]


def test_lone_sequence_is_read_without_a_copy() -> None:
    nodes = NodeInput((1, 1), (1, 2), (), np.tri(2, dtype=np.bool_))
    for blocks, expected in (([3, 4, 5], slice(12, 21)), ([3, 5, 4], [12, 13, 14, 15, 20, 21, 22, 23, 16])):
        batch = build([SequenceInput([1], 6, blocks, nodes, slice(0))], 4)
        (group,) = groups_of(batch, 4, 8, torch.device("cpu"))
        assert group.shape == (1, 3, 9)
        assert group.rows == slice(0, 3)
        slots = group.slots if isinstance(group.slots, slice) else group.slots.tolist()
        assert slots == expected


def by_hand(part: SequenceInput) -> list[tuple[int, dict[int, int]]]:
    """Return each row's position, and the positions of the keys that it sees, by slot."""

    def slot(index: int) -> int:
        return part.block_ids[index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE

    end, depths = part.first_index + len(part.input_ids), [*part.nodes.cached_depths, *part.nodes.depths]
    rows = [(index, {slot(i): i for i in range(part.first_key, index + 1)}) for index in range(part.first_index, end)]
    for depth, sees in zip(part.nodes.depths, part.nodes.ancestry, strict=True):
        seen = {slot(end + node): end - 1 + depths[node] for node in np.flatnonzero(sees).tolist()}
        rows.append((end - 1 + depth, {slot(i): i for i in range(part.first_key, end)} | seen))
    return rows


def numbers(part: torch.Tensor | slice) -> list[int]:
    return list(range(part.start, part.stop)) if isinstance(part, slice) else part.tolist()


def seen_in(groups: list[Group]) -> dict[int, tuple[int, dict[int, int]]]:
    """Return the same of groups, by row of the pass."""
    found = {}
    for group in groups:
        count, queries, keys = group.shape
        query_BQ, key_BK = (positions.tolist() for positions in group.positions())
        rows, slots = numbers(group.rows), np.array(numbers(group.slots)).reshape(count, keys).tolist()
        real = list(range(count * queries)) if group.real is None else group.real.tolist()
        assert numbers(group.real_rows) == [rows[place] for place in real]
        for place in range(count * queries):
            of, query = divmod(place, queries)
            sees = [True] * keys if group.visible is None else group.visible[of, query].tolist()
            seen = [(slots[of][key], key_BK[of][key]) for key in range(keys) if sees[key]]
            if place in real:
                assert len(dict(seen)) == len(seen), "a key is seen twice"
                found[rows[place]] = query_BQ[of][query], dict(seen)
            else:
                assert len(seen) == 1
    return found


def test_rows_see_the_keys_of_their_layout() -> None:
    """Chunks, single tokens and trees, in blocks in order and scattered, together and alone."""
    chance = np.random.default_rng(3)
    blocks, parts = chance.permutation(400).tolist(), []
    for number in range(16):
        mine = blocks[number * 20 : number * 20 + 20] if number % 2 else range(number * 20, number * 20 + 20)
        first_index, first_key = int(chance.integers(30, 36)), int(chance.integers(1, 12)) * (number % 3 > 0)
        tree = merge_chains(chance.integers(3, 6, (3, 3)).tolist())
        num_inputs, num_cached = (((1, 0), (3, 0), (1, 0), (0, 2)))[number // 4]
        nodes = NO_NODES
        if number >= 8:
            depths = tree.depths[:num_cached], tree.depths[num_cached:]
            nodes = NodeInput(tree.tokens[num_cached:], depths[1], depths[0], tree.ancestry()[num_cached:])
        parts.append(SequenceInput([1] * num_inputs, first_index, mine, nodes, slice(0), first_key))
    for some in (parts, parts[3:5], parts[4:6], *([part] for part in parts)):
        groups = groups_of(build(some, BLOCK_SIZE), BLOCK_SIZE, 8, torch.device("cpu"))
        assert seen_in(groups) == dict(enumerate(row for part in some for row in by_hand(part)))
    sizes = {group.shape[0] for group in groups_of(build(parts, BLOCK_SIZE), BLOCK_SIZE, 8, torch.device("cpu"))}
    assert max(sizes) >= 3
