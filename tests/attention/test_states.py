"""States of recurrent layers: outputs to the bit of plain decoding, whatever the passes are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.inputs import NO_NODES, NodeInput, SequenceInput, build
from engine.attention.paths import Paths
from engine.attention.recurrent import Operands, PathCalls, input_layer
from engine.attention.states import States
from engine.attention.tensors import KVShape, KVTensors, LayerShape
from engine.speculation.topology import merge_chains
from engine.start.choosing import choose
from tests.wrong import instead

BLOCK_SIZE = 4
TEXT = list(range(22))
OTHER = list(range(40, 62))
BLOCKS, OTHER_BLOCKS = [5, 0, 3, 1, 7, 2, 8, 9], [15, 10, 13, 11, 17, 12, 18, 19]
WRONG_DRAFTS = merge_chains([[70, 71, 72], [70, 73, 74], [75, 76, 77]])


def table(size: int = 80) -> Operands:
    """Operands of each token, of a gated delta net with two value heads for a key head."""
    generator = torch.Generator().manual_seed(1)
    key, query = (torch.nn.functional.normalize(torch.randn(size, 2, 8, generator=generator), dim=-1) for _ in "kq")
    value, rate = torch.randn(size, 4, 6, generator=generator), -torch.rand(size, 4, 1, generator=generator)
    return Operands(key, value, rate, torch.rand(size, 4, generator=generator), query, torch.ones(4, 1))


class Model:
    """One recurrent call with its storage."""

    def __init__(self, num_states: int = 8) -> None:
        self.table = table()
        width = self.table.packed().shape[1]
        shape = KVShape({input_layer(0): LayerShape(1, width, width, is_latent=True, dtype=torch.float32)})
        device = torch.device("cpu")
        self.storage = KVTensors(shape, 20 * BLOCK_SIZE, torch.float32, device, choose(device), num_states)

    def outputs(self, sequences: Sequence[SequenceInput]) -> torch.Tensor:
        layout = build(sequences, BLOCK_SIZE)
        calls = PathCalls(self.storage, torch.from_numpy(layout.slots_T), Paths(layout, BLOCK_SIZE))
        ids_T = torch.from_numpy(layout.token_ids_T)
        *rows, scale = self.table
        return calls.recur(Operands(*(part[ids_T] for part in rows if part is not None), scale))


def part(text: Sequence[int], first: int, stop: int, blocks: Sequence[int], is_drafted: bool = False) -> SequenceInput:
    tree = WRONG_DRAFTS
    nodes = NodeInput(tree.tokens, tree.depths, (), tree.ancestry()) if is_drafted else NO_NODES
    return SequenceInput(text[first:stop], first, blocks, nodes, slice(0, None))


def decoded(
    model: Model,
    cuts: Sequence[int],
    is_drafted: bool = False,
    in_company: bool = False,
    blocks: Sequence[int] = BLOCKS,
) -> torch.Tensor:
    """Return the outputs at all tokens of the text, which is cut into passes."""
    outputs = []
    for first, stop in zip([0, *cuts], [*cuts, len(TEXT)], strict=True):
        sequences = [part(TEXT, first, stop, blocks, is_drafted)]
        if in_company:
            sequences.insert(0, part(OTHER, first, stop, OTHER_BLOCKS, is_drafted))
        rows = model.outputs(sequences)
        begin = (stop - first + len(WRONG_DRAFTS.tokens) * is_drafted) * in_company
        outputs.append(rows[begin : begin + stop - first])
    return torch.cat(outputs)


PASSES: dict[str, Callable[[], torch.Tensor]] = {
    "chunks": lambda: decoded(Model(), (5, 6, 13)),
    "wrong drafts": lambda: decoded(Model(), range(1, 22), is_drafted=True),
    "company": lambda: decoded(Model(), (3, 4, 9, 20), is_drafted=True, in_company=True),
    "one state": lambda: decoded(Model(num_states=1), (3, 4, 9, 20), in_company=True),
    "other blocks": lambda: again((7, 20), OTHER_BLOCKS),
    "cached prefix": lambda: cached_prefix(),
    "blocks of another text": lambda: again((4, 20), [0, 7, 3, 1, 5, 2, 8, 9]),
}


def again(cuts: Sequence[int], blocks: Sequence[int]) -> torch.Tensor:
    """Read the text again, on blocks that had other tokens."""
    model = Model()
    decoded(model, (9,), in_company=True)
    return decoded(model, cuts, blocks=blocks)


def cached_prefix() -> torch.Tensor:
    """Continue after twelve tokens, whose state was stored on the way and not at the last block."""
    model = Model()
    before = decoded(model, (12,))
    return torch.cat([before[:12], model.outputs([part(TEXT, 12, 22, [*BLOCKS[:3], *OTHER_BLOCKS])])])


@pytest.mark.parametrize("passes", PASSES)
def test_outputs_are_those_of_plain_decoding_to_the_bit(passes: str) -> None:
    assert torch.equal(PASSES[passes](), decoded(Model(), range(1, 22)))


def test_decoding_repeats_no_token() -> None:
    """The steps of a pass do not grow with the text, and one place moves on with its end."""
    model = Model(num_states=2)
    model.outputs([part(TEXT, 0, 5, BLOCKS)])
    for first in range(5, 22):
        layout = build([part(TEXT, first, first + 1, BLOCKS)], BLOCK_SIZE)
        steps = model.storage.states.steps(layout, BLOCK_SIZE)
        assert steps.steps.shape[1] == 1
        assert steps.first_states[0] >= 0


def another_place(right: Callable[..., Any], states: States, *operands: Any) -> tuple[int, int]:
    """A wrong variant: the state of another block."""
    count, place = right(states, *operands)
    return count, place if place < 0 else (place + 1) % 8


def over_nodes(right: Callable[..., Any], *operands: Any) -> Any:
    """A wrong variant: drafted nodes advance stored states."""
    steps = right(*operands)
    steps[4] = np.arange(steps.shape[1])
    return steps


@pytest.mark.parametrize(
    ("passes", "owner", "name", "variant"),
    [
        ("company", States, "_deepest", another_place),
        ("wrong drafts", "engine.attention.states", "_node_steps", over_nodes),
        ("blocks of another text", States, "forget", lambda *_: None),
    ],
)
def test_wrong_state_is_noticed(passes: str, owner: Any, name: str, variant: Callable[..., Any]) -> None:
    right = decoded(Model(), range(1, 22))
    with instead(owner, name, variant):
        assert not torch.equal(PASSES[passes](), right)


def test_drafted_nodes_have_the_bits_of_plain_decoding() -> None:
    """Each node of a tree, next to its own path as text; some nodes are of an earlier pass."""
    chains = [[70, 71, 72], [70, 73, 74], [75, 76, 77]]
    tree = merge_chains(chains)
    ancestry = tree.ancestry()
    model = Model()
    model.outputs([part(TEXT, 0, 9, BLOCKS)])
    num_first = 1 + max(tree.depths.index(1), 2)
    outputs = []
    for begin, stop in ((0, num_first), (num_first, tree.num_nodes)):
        nodes = NodeInput(
            tree.tokens[begin:stop], tree.depths[begin:stop], tree.depths[:begin], ancestry[begin:stop, :stop]
        )
        outputs.append(model.outputs([SequenceInput((), 9, BLOCKS, nodes, slice(0, None))]))
    drafted = torch.cat(outputs)
    for chain, path in zip(chains, tree.paths, strict=True):
        alone = Model().outputs([SequenceInput([*TEXT[:9], *chain], 0, BLOCKS, NO_NODES, slice(0, None))])
        assert torch.equal(drafted[np.array(path[1:]) - 1], alone[9:])
