"""Logits that a drafter proposes the next token from, after every prefix of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.attention.inputs import NO_NODES, SequenceInput
from engine.plan import Plan, Row
from engine.request import Sampling, Speculation
from engine.step.engine import Engine

_ONE = Speculation(rule="block", num_drafts=1, draft_length=1)


def drafts_by_head(engine: Engine) -> bool:
    """Whether a head drafts, and no language model."""
    return engine.scheduler.draft_prefill.by_head


def draft_logits(engine: Engine, text: Sequence[int], first: int) -> Tensor:
    """Return logits [N, V] after the tokens from `first` on.

    The target has computed the text, in the first blocks.
    """
    blocks = tuple(range(-(-len(text) // engine.facts.block_size)))
    if drafts_by_head(engine):
        return torch.cat(list(_of_head(engine, tuple(text), first, blocks)))
    assert engine.draft_runner is not None
    return engine.draft_runner.forward([SequenceInput(text, 0, blocks, NO_NODES, slice(first, None))])


def _of_head(engine: Engine, text: tuple[int, ...], first: int, blocks: tuple[int, ...]) -> Iterator[Tensor]:
    """Run one step after the other: a head drafts after a text's last token only."""
    assert engine.drafter is not None
    num_read = 0
    for index in range(first, len(text)):
        row = Row(
            sequence_id=0,
            input_ids=text[index : index + 1],
            first_index=index,
            draft_input_ids=text[num_read : index + 1],
            draft_first_index=num_read,
            block_ids=blocks,
            emits=True,
            sampling=Sampling(),
            speculation=_ONE,
            fanout=_ONE.fanout,
        )
        yield engine.drafter.begin(Plan((row,)))
        num_read = index + 1
