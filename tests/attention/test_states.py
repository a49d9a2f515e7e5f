"""States of recurrent layers: outputs to the bit of plain decoding, whatever the passes are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.inputs import NO_NODES, NodeInput, SequenceInput, build
from engine.attention.paths import Paths
from engine.attention.recurrent import Operands, PathCalls, _time_step
from engine.attention.states import CallShape, States, StateSizes
from engine.attention.tensors import KVShape, KVTensors, node_moves
from engine.plan import StatePlaces
from engine.speculation.topology import merge_chains
from engine.start.choosing import choose
from engine.start.probe import find_kv_shape
from tests.models import families
from tests.wrong import instead

TEXT = list(range(22))
OTHER = list(range(40, 62))
CPU = torch.device("cpu")
CHAINS = [[70, 71, 72], [70, 73, 74], [75, 76, 77]]
CACHED = 4
"""Place of a cached state."""


def table(size: int = 80) -> Operands:
    """Operands of each token, of a gated delta net with two value heads for a key head."""
    generator = torch.Generator().manual_seed(1)
    key, query = (torch.nn.functional.normalize(torch.randn(size, 2, 8, generator=generator), dim=-1) for _ in "kq")
    value, rate = torch.randn(size, 4, 6, generator=generator), -torch.rand(size, 4, 1, generator=generator)
    return Operands(key, value, rate, torch.rand(size, 4, generator=generator), query, torch.ones(4, 1))


class Model:
    """A convolution of four tokens and a recurrence, with their storage."""

    def __init__(self) -> None:
        self.table = table()
        width = self.table.packed().shape[1]
        calls = CallShape(width, (3, width)), CallShape(width, self.table.state_shape, torch.float32)
        self.storage = KVTensors(KVShape({}, calls=calls), 8, torch.float32, CPU, choose(CPU), StateSizes(4, 2, 12))

    def outputs(self, sequences: Sequence[SequenceInput]) -> torch.Tensor:
        layout = build(sequences, 4)
        calls = PathCalls(self.storage, Paths(layout, self.storage.states.sizes, CPU))
        ids_T = torch.from_numpy(layout.token_ids_T)
        *rows, scale = self.table
        inputs_TC = self.table.packed()[ids_T]
        weight_CK = torch.linspace(-1, 1, 4 * inputs_TC.shape[1]).view(-1, 4)
        convolved = calls.convolve(inputs_TC, weight_CK, None, None)
        output = calls.recur(Operands(*(part[ids_T] for part in rows if part is not None), scale))
        return torch.cat([convolved, output.flatten(1)], dim=1)


def part(
    text: Sequence[int], first: int, stop: int, state: StatePlaces | None = None, chains: Sequence[list[int]] = ()
) -> SequenceInput:
    tree = merge_chains(chains)
    nodes = NodeInput(tree.tokens, tree.depths, (), tree.ancestry()) if chains else NO_NODES
    return SequenceInput(text[first:stop], first, range(8), nodes, slice(0, None), state=state)


def decoded(
    model: Model, cuts: Sequence[int], chains: Sequence[list[int]] = (), in_company: bool = False
) -> torch.Tensor:
    """Return the outputs at all tokens of the text, which is cut into passes."""
    outputs = []
    for first, stop in zip([0, *cuts], [*cuts, len(TEXT)], strict=True):
        sequences = [part(TEXT, first, stop, chains=chains)]
        if in_company:
            sequences.insert(0, part(OTHER, first, stop, chains=chains))
        rows = model.outputs(sequences)
        begin = len(rows) // 2 if in_company else 0
        outputs.append(rows[begin : begin + stop - first])
    return torch.cat(outputs)


def accepted() -> torch.Tensor:
    """Accept a chain of three right tokens, which is not the first, in every pass."""
    model = Model()
    outputs = [model.outputs([part(TEXT, 0, 1, StatePlaces(2, -1, 0))])]
    for end in range(2, len(TEXT) + 1, 4):
        covered = max(1, end - 4)
        chains = [CHAINS[0], TEXT[end : end + 3]]
        rows = model.outputs([part(TEXT, end - 1, end, StatePlaces(2, 2, covered), chains)])
        tree = merge_chains(chains)
        path = tree.paths[1][1 : 1 + len(TEXT) - end]
        outputs.append(rows[[0, *path]])
        pairs = [(end + node - 1, end + depth) for depth, node in enumerate(path)]
        model.storage.states.keep(node_moves(pairs, end, StatePlaces(2, 2, covered)))
    return torch.cat(outputs)


def from_cache() -> torch.Tensor:
    """Continue from a cached state, which a pass of another sequence has stored on its way."""
    model = Model()
    before = model.outputs([part(TEXT, 0, 22, StatePlaces(0, -1, 0, ((12, CACHED),)))])
    model.outputs([part(OTHER, 0, 22, StatePlaces(0, -1, 0))])
    return torch.cat([before[:12], model.outputs([part(TEXT, 12, 22, StatePlaces(1, CACHED, 12))])])


def within_a_pass(end: int = 12) -> torch.Tensor:
    """Continue from a state that another sequence stores in the same pass."""
    first = part(TEXT, 0, end, StatePlaces(0, -1, 0, ((12, CACHED),)))
    rows = Model().outputs([first, part(TEXT, 12, 22, StatePlaces(1, CACHED, 12))])
    return torch.cat([rows[:12], rows[end:]])


PASSES: dict[str, Callable[[], torch.Tensor]] = {
    "chunks": lambda: decoded(Model(), (5, 6, 13)),
    "wrong drafts": lambda: decoded(Model(), range(1, 22), CHAINS),
    "accepted drafts": accepted,
    "company": lambda: decoded(Model(), (3, 4, 9, 20), CHAINS, in_company=True),
    "cached prefix": from_cache,
    "prefix of the same pass": within_a_pass,
    "state on the way of the same pass": lambda: within_a_pass(17),
}


@pytest.mark.parametrize("passes", PASSES)
def test_outputs_are_those_of_plain_decoding_to_the_bit(passes: str) -> None:
    assert torch.equal(PASSES[passes](), decoded(Model(), range(1, 22)))


@pytest.mark.parametrize("name", ["convolution", "time step"])
def test_bits_do_not_depend_on_threads(name: str) -> None:
    """A thread computes a third of ten rows of 8,192 channels, or all."""
    passes = torch.randn(6, 10, 8192, generator=torch.Generator().manual_seed(2))
    threads = torch.get_num_threads()
    outputs = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            outputs.append(torch.stack([activated(name, rows) for rows in passes]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*outputs)


def activated(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Return the numbers of one-token texts after a convolution, or time steps."""
    if name == "time step":
        return _time_step(rows, None, True)
    width = rows.shape[1]
    storage = KVTensors(KVShape({}, calls=(CallShape(width, (1, width)),)), 1, torch.float32, CPU)
    layout = build([part([0], 0, 1, StatePlaces(0, -1, 0)) for _ in rows], 4)
    calls = PathCalls(storage, Paths(layout, storage.states.sizes, CPU))
    return calls.convolve(rows, torch.ones(width, 2), None, "silu")


def test_room_does_not_grow_with_texts() -> None:
    """A pass repeats no token, and storage has inputs of nodes alone."""
    layout = build([SequenceInput([7], 32_000, range(2001), NO_NODES, slice(0, None))], 16)
    assert Paths(layout, StateSizes(), CPU).steps.steps.shape[1] == 1
    shape = find_kv_shape(families.family("mamba2"))
    few, many = (KVTensors(shape, num_slots, torch.float32, CPU) for num_slots in (16, 32_000))
    assert stored_bytes(few) == stored_bytes(many) > 0


def stored_bytes(storage: KVTensors) -> int:
    pairs = [*storage.layers.values(), *storage.states.calls]
    return sum(part.nbytes for pair in pairs for part in pair)


def another_place(right: Callable[..., Any], *operands: Any) -> StatePlaces:
    """A wrong variant: the state of another sequence."""
    places = right(*operands)
    return places._replace(source=places.source if places.source < 0 else (places.source + 1) % 6)


def over_nodes(right: Callable[..., Any], *operands: Any) -> Any:
    """A wrong variant: drafted nodes advance stored states."""
    steps = right(*operands)
    steps[4] = 0
    return steps


def early(right: Callable[..., Any], *operands: Any) -> StatePlaces:
    """A wrong variant: the inputs of accepted nodes are given up one token too early."""
    places = right(*operands)
    first = int(operands[0].ends[0] - operands[0].num_inputs_B[0])
    return places._replace(covered=min(first, places.covered + 1))


def siblings(_right: Callable[..., Any], _states: States, _moves: Any) -> None:
    """A wrong variant: the inputs of siblings stay in the place of accepted nodes."""


@pytest.mark.parametrize(
    ("passes", "owner", "name", "variant"),
    [
        ("company", "engine.attention.paths", "_places_of", another_place),
        ("cached prefix", "engine.attention.paths", "_places_of", another_place),
        ("wrong drafts", Paths, "_node_steps", over_nodes),
        ("accepted drafts", "engine.attention.paths", "_places_of", early),
        ("accepted drafts", States, "keep", siblings),
    ],
)
def test_wrong_state_is_noticed(passes: str, owner: Any, name: str, variant: Callable[..., Any]) -> None:
    right = decoded(Model(), range(1, 22))
    with instead(owner, name, variant):
        assert not torch.equal(PASSES[passes](), right)


def test_drafted_nodes_have_the_bits_of_plain_decoding() -> None:
    """Each node of a tree, next to its own path as text; some nodes are of an earlier pass."""
    tree = merge_chains(CHAINS)
    ancestry = tree.ancestry()
    model = Model()
    model.outputs([part(TEXT, 0, 9)])
    num_first = 1 + max(tree.depths.index(1), 2)
    outputs = []
    for begin, stop in ((0, num_first), (num_first, tree.num_nodes)):
        nodes = NodeInput(
            tree.tokens[begin:stop], tree.depths[begin:stop], tree.depths[:begin], ancestry[begin:stop, :stop]
        )
        outputs.append(model.outputs([SequenceInput((), 9, range(8), nodes, slice(0, None))]))
    drafted = torch.cat(outputs)
    for chain, path in zip(CHAINS, tree.paths, strict=True):
        alone = Model().outputs([part([*TEXT[:9], *chain], 0, 12)])
        assert torch.equal(drafted[np.array(path[1:]) - 1], alone[9:])
