"""Sequences that attend together get the numbers they get alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.execution import batches, runner
from engine.execution.batches import BatchInput, group
from engine.execution.inputs import NO_NODES, Nodes, SegmentInput, SequenceInput
from engine.execution.probe import find_kv_shape
from engine.execution.runner import ModelRunner
from engine.speculation.topology import merge_chains
from tests.execution.test_architectures import COMMON
from tests.execution.test_lean import randomised

BLOCK_SIZE = 4
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**COMMON),
    "window and softcap": transformers.Gemma2Config(
        **COMMON, head_dim=8, sliding_window=6, query_pre_attn_scalar=8, attn_logit_softcapping=5.0
    ),
    "window": transformers.MistralConfig(**COMMON, head_dim=8, sliding_window=6),
    "sinks": transformers.GptOssConfig(
        **COMMON, head_dim=8, sliding_window=6, num_local_experts=2, num_experts_per_tok=1
    ),
}


def passes(seed: int = 0) -> tuple[list[SequenceInput], list[SequenceInput]]:
    """Prompts of nine sequences in scattered blocks, then a decode step of them: single tokens and trees."""
    chance = np.random.default_rng(seed)
    blocks = chance.permutation(200).tolist()
    lengths = [*chance.integers(14, 19, 7).tolist(), 50, 5]
    prompts, steps = [], []
    for number, length in enumerate(lengths):
        mine = blocks[number * 20 : number * 20 + 20]
        prompts.append(SequenceInput(chance.integers(3, 101, length).tolist(), 0, mine, NO_NODES, slice(0, 0)))
        tree = merge_chains(chance.integers(3, 6, (number % 4, 3)).tolist())
        nodes = Nodes(tree.tokens, tree.depths, (), tree.ancestry()) if number % 4 else NO_NODES
        steps.append(SequenceInput([int(chance.integers(3, 101))], length, mine, nodes, slice(0, None)))
    return prompts, steps


def logits(loaded: Any, alone: bool, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    made: list[BatchInput] = []

    def grouped(segments: list[SegmentInput], token_bytes: int) -> Any:
        found, rest = ([], list(segments)) if alone else group(segments, token_bytes)
        made.extend(found)
        return found, rest

    monkeypatch.setattr(runner, "group", grouped)
    model = ModelRunner(loaded.model, find_kv_shape(loaded), 200, BLOCK_SIZE, loaded.vocab_size)
    prompts, steps = passes()
    model.forward(prompts)
    result = model.forward(steps)
    assert bool(made) is not alone
    return result


@pytest.mark.parametrize("name", CONFIGS)
def test_attending_together_changes_no_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = randomised(CONFIGS[name], seed=5)
    alone = logits(loaded, True, monkeypatch)
    together = logits(loaded, False, monkeypatch)
    assert torch.allclose(alone, together, atol=1e-4, rtol=1e-4)


WRONG = {
    "padding keys are seen": lambda batch: replace(batch, visible=np.ones_like(batch.visible)),
    "slots of the neighbour": lambda batch: replace(batch, slots=np.roll(batch.slots, batch.shape[2])),
    "positions by index": lambda batch: replace(
        batch, query_positions=batch.query_positions * 0 + np.arange(batch.shape[1])
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_comparison_has_teeth(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = randomised(CONFIGS["window"], seed=5)
    alone = logits(loaded, True, monkeypatch)
    pad = batches._pad
    monkeypatch.setattr(batches, "_pad", lambda members: WRONG[wrong](pad(members)))
    assert not torch.allclose(alone, logits(loaded, False, monkeypatch), atol=1e-4, rtol=1e-4)


def segment(start: int, num_queries: int, num_keys: int) -> SegmentInput:
    return SegmentInput(
        slice(start, start + num_queries),
        np.arange(num_keys),
        None,
        np.arange(num_keys - num_queries, num_keys),
        np.arange(num_keys),
    )


def test_what_attends_together_is_alike_and_fits_the_buffer() -> None:
    sizes = [(1, 100)] * 5 + [(1, 90), (1, 1000), (6, 100), (7, 100), (200, 300), (1, 40)]
    segments = [segment(i, *size) for i, size in enumerate(sizes)]
    found, alone = group(segments, token_bytes=8)
    assert sorted(batch.shape for batch in found) == [(2, 7, 100), (6, 1, 100)]
    assert sorted(len(s.key_positions) for s in alone) == [40, 300, 1000]
    found, _ = group(segments[:5], token_bytes=(4 << 20) // 250)
    assert [batch.shape[0] for batch in found] == [2, 2]
