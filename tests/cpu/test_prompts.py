"""Prompts of many rows give transformers' numbers, however rows are grouped."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.inputs import NO_NODES, NodeInput, SequenceInput
from engine.cpu import decoder
from engine.cpu.compiled import pass_table
from engine.cpu.compiled.attention_loops import TILE, attend
from engine.cpu.compiled.dot_products import HAS_PAIRS
from engine.cpu.compiled.shared_work import TEAM
from engine.cpu.decoder import CpuDecoder
from engine.cpu.weights import Form, Forms
from engine.models.backend import Backend, TransformersBackend
from engine.models.runner import ModelRunner
from engine.speculation.topology import merge_chains
from engine.start.probe import find_kv_shape
from tests.cpu.test_decoder import MODELS
from tests.cuda.test_lean_decoder import randomised
from tests.engine import tiny
from tests.wrong import instead

pytestmark = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="a decoder of CPUs")
PAGE = 16
CHUNKS = [(0, 150), (150, 331), (331, 332)]
"""Rows of three passes of each prompt; their ends divide no tile, and the last one decodes."""


def logits_of(loaded: Any, backend: Backend) -> Tensor:
    """Return [N, V] logits of two prompts in scattered blocks, read in chunks."""
    chance = np.random.default_rng(0)
    length, blocks = CHUNKS[-1][1], chance.permutation(60).tolist()
    texts = [chance.integers(3, 101, length).tolist() for _ in range(2)]
    runs = ModelRunner(loaded.model, find_kv_shape(loaded), 60, PAGE, loaded.vocab_size, backend)
    found = []
    for first, last in CHUNKS:
        chunks = [
            SequenceInput(text[first:last], first, blocks[number * 30 :][:30], NO_NODES, slice(0, None))
            for number, text in enumerate(texts)
        ]
        found.append(runs.forward(chunks))
    return torch.cat(found)


def agree(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral, window", "qwen2, windows in some layers", "llama, odd sizes"])
def test_prompts_have_the_numbers_of_transformers(name: str) -> None:
    loaded = randomised(MODELS[name], seed=5)
    assert agree(logits_of(loaded, CpuDecoder(loaded.model)), logits_of(loaded, TransformersBackend(loaded.model)))


def test_results_do_not_depend_on_the_rows_that_attend_together() -> None:
    """To the bit, on one core and on several."""
    loaded = randomised(MODELS["llama"], seed=5)
    decoder = CpuDecoder(loaded.model)
    assert decoder._rows_together(CHUNKS[0][1]) == 64
    found = [logits_of(loaded, decoder)]
    for most_rows in (1, 16, 100):
        with instead(decoder, "_rows_together", lambda *_, most=most_rows: most):
            found.append(logits_of(loaded, decoder))
    if TEAM.grow(2) == 2:
        decoder.cores = 3, 3
        found += [logits_of(loaded, decoder) for _ in range(3)]
    assert all(torch.equal(one, found[0]) for one in found)


PATH = [7, 8, 9, 10, 11, 12]
OTHERS = [[7, 8, 20, 21, 22, 23], [30, 31, 32, 33, 34, 35]]


def logits_below(loaded: Any, decoder: CpuDecoder, text: list[int], chains: list[list[int]]) -> Tensor:
    """Return [7, V] logits below a text and each token of `PATH`."""
    tree = merge_chains(chains)
    runs = ModelRunner(loaded.model, find_kv_shape(loaded), 60, PAGE, loaded.vocab_size, decoder)
    blocks = list(range(60))
    cuts = [0, len(text) - 40, len(text) - 1] if chains else [0, 33, len(text) - 1]
    for first, last in itertools.pairwise(cuts):
        runs.forward([SequenceInput(text[first:last], first, blocks, NO_NODES, slice(0, 0))])
    if chains:
        nodes = NodeInput(tree.tokens, tree.depths, (), tree.ancestry())
        found = runs.forward([SequenceInput(text[-1:], len(text) - 1, blocks, nodes, slice(0, None))])
        return found[list(tree.paths[chains.index(PATH)])]
    tokens = [text[-1], *PATH]
    return torch.cat(
        [
            runs.forward([SequenceInput([token], len(text) - 1 + number, blocks, NO_NODES, slice(0, None))])
            for number, token in enumerate(tokens)
        ]
    )


TREES = {
    "one chain": [PATH],
    "the last of a tree": [*OTHERS, PATH],
    "more than a word": [*[[40 + chain] * 6 for chain in range(12)], *OTHERS, PATH],
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["llama", "mistral, window", "qwen2, windows in some layers"])
@pytest.mark.parametrize("length", [TILE - 3, TILE - 1, TILE, 2 * TILE + 5])
@pytest.mark.parametrize("form", ["float32", "int8", *(["pairs"] if HAS_PAIRS else [])])
def test_a_node_has_the_bits_of_its_token_in_the_text(form: Form, length: int, name: str) -> None:
    """Other bits would decide near ties of rounded rows."""
    loaded = randomised(MODELS[name], seed=5)
    decoder = CpuDecoder(loaded.model, Forms(form, form))
    text = np.random.default_rng(length).integers(3, 101, length).tolist()
    plain = logits_below(loaded, decoder, text, [])
    for chains in TREES.values():
        assert torch.equal(logits_below(loaded, decoder, text, chains), plain)


def test_passes_with_much_work_have_more_cores() -> None:
    """Many rows, or K/V as large as the weights; the choice of a pass does not last."""
    loaded = randomised(MODELS["llama"], seed=5)
    shape = find_kv_shape(loaded)
    decoder = CpuDecoder(loaded.model)
    decoder.cores = 1, min(2, 1 + TEAM.grow(1))
    per_token = shape.token_bytes(torch.float32)
    num_keys = -(-decoder.weight_bytes // per_token)
    runs = ModelRunner(loaded.model, shape, num_keys // PAGE + 2, PAGE, loaded.vocab_size, decoder)
    for rows, keys, cores in [(1, num_keys - 1, 0), (1, num_keys, 1), (15, 15, 0), (16, 16, 1), (1, 9, 0)]:
        blocks = range(-(-keys // PAGE))
        runs.forward([SequenceInput([3] * rows, keys - rows, blocks, NO_NODES, slice(0, None))])
        assert decoder._arrays[pass_table.SIZES][1] == decoder.cores[cores], (rows, keys)


@pytest.mark.parametrize("wrong", ["rows are left out", "keys beyond the first tile are left out"])
def test_wrong_parts_are_found_out(wrong: str) -> None:
    loaded = randomised(MODELS["llama"], seed=5)
    expected = logits_of(loaded, TransformersBackend(loaded.model))

    class OfFirstTile(CpuDecoder):
        def logits(self, token_ids_T: Tensor, positions_T: Tensor, metadata: Any, wanted_N: Tensor) -> Tensor:
            for bound in (metadata.layout.ends, metadata.layout.limits, metadata.layout.num_keys):
                bound[:] = np.minimum(bound, TILE)
            return super().logits(token_ids_T, positions_T, metadata, wanted_N)

    if wrong == "rows are left out":
        with instead(decoder, "parts_of", lambda parts_of, *operands: parts_of(*operands) - [0, 0, 1]):
            found = logits_of(loaded, CpuDecoder(loaded.model))
    else:
        found = logits_of(loaded, OfFirstTile(loaded.model))
    assert not agree(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("middle", [-300.0, 0.0, 300.0])
@pytest.mark.parametrize("num_keys", [TILE - 1, TILE, TILE + 6])
def test_scores_of_any_size_are_weighed_exactly(num_keys: int, middle: float) -> None:
    """Each weight is relative to the row's largest score."""
    chance = np.random.default_rng(num_keys)
    num_rows, width = 3, 8
    queries = np.ones((num_rows, 2 * width), np.float32) + chance.normal(0, 0.3, (num_rows, 2 * width))
    keys = (middle / width + chance.normal(0, 60, (num_keys, 1, width))).astype(np.float32)
    values = chance.normal(size=(num_keys, 1, width)).astype(np.float32)
    queries, found = queries.astype(np.float32), np.zeros((num_rows, 2 * width), np.float32)
    limits, positions = np.full(num_rows, num_keys, np.int32), np.full(num_rows, num_keys, np.int64)
    pages, words = np.arange(-(-num_keys // PAGE), dtype=np.int32), np.zeros((num_rows, 1), np.int64)
    text, one = (pages, 0, num_keys, num_keys, np.zeros(0, np.int32)), np.float32(1)
    heads_of_part = 0, 0, 2, width
    attend(queries, keys, values, heads_of_part, (0, num_rows), one, 0, PAGE, text, limits, positions, words, found)
    heads = torch.from_numpy(queries).double().view(num_rows, 2, width)
    weights = (heads @ torch.from_numpy(keys[:, 0]).double().T).softmax(-1)
    expected = (weights @ torch.from_numpy(values[:, 0]).double()).flatten(1)
    assert torch.allclose(torch.from_numpy(found).double(), expected, atol=1e-4, rtol=1e-4)
