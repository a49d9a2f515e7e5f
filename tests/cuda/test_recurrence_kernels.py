"""The kernels of recurrent layers have the numbers of plain operations in float64.

They run in Triton's interpreter on a CPU, compiled on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.cuda import recurrence_kernels, recurrence_turns
from engine.cuda.kernels import TritonKernels
from engine.cuda.recurrence_turns import MOST_TOGETHER, Turns, turns_of
from engine.kernels.protocol import RecurrentSteps
from engine.kernels.torch_kernels import TORCH
from tests.attention import test_states
from tests.engine import tiny
from tests.grid import grid
from tests.wrong import instead

NUM_PLACES = 6
ON_CPU = tiny.DEVICE.type == "cpu"
KINDS = {
    # Key heads, heads, lines, columns, rates, scales, whether there is a beta.
    "GDN": (1, 2, 20, 6, 1, 1, True),
    "KDA": (2, 2, 8, 6, 8, 1, True),
    "Mamba 2": (1, 2, 8, 6, 1, 1, False),
    "Mamba 1": (1, 3, 4, 1, 1, 4, False),
}
if not ON_CPU:
    # Sizes of served models; the interpreter would take minutes.
    KINDS = {
        "GDN": (16, 32, 128, 128, 1, 1, True),
        "KDA": (32, 32, 128, 128, 128, 1, True),
        "Mamba 2": (8, 128, 128, 64, 1, 1, False),
        "Mamba 1": (1, 4096, 16, 1, 1, 16, False),
    }


class Text(NamedTuple):
    """A sequence of a pass."""

    first_state: int
    seat: int
    num_tokens: int
    parents: Sequence[int] = ()
    """Parents of drafted nodes."""
    kept: tuple[int, int] = (-1, -1)
    """(Token, place) of another state."""


def steps_of(texts: Sequence[Text]) -> RecurrentSteps:
    """Return the steps of a pass, whose inputs are its rows in reverse order."""
    columns, begins = [], [0]
    num_rows = sum(text.num_tokens + len(text.parents) for text in texts)
    for text in texts:
        for token in range(text.num_tokens):
            row = len(columns)
            seat = text.seat if token == text.num_tokens - 1 else -1
            place = text.kept[1] if token == text.kept[0] else -1
            columns.append((num_rows - 1 - row, -1, -1, row, seat, place))
        for node, parent in enumerate(text.parents):
            row = len(columns)
            columns.append((num_rows - 1 - row, parent, node, row, -1, -1))
        begins.append(len(columns))
    first_states = np.array([text.first_state for text in texts])
    return RecurrentSteps(np.array(columns, dtype=np.int64).T.copy(), np.array(begins), first_states)


PASSES = {
    # The second sequence starts from a state that the first one stores on its way; the third
    # sequence has nodes alone, the fourth one starts with zeros.
    "together": [
        Text(0, 1, 3, (-1, 0, 0, 2, -1), kept=(1, 2)),
        Text(2, 3, 1),
        Text(4, 4, 0, (-1, 0)),
        Text(-1, 5, 1, (-1,)),
    ],
    # Turns that the kernels walk.
    "few": [Text(0, 1, 2, (-1, -1), kept=(0, 2)), Text(2, 2, 1, (-1, 0))],
    "prompt": [Text(0, 1, 150, range(-1, 11), kept=(80, 2)), Text(3, 3, 1)],
}
CASES = [(kind, name) for kind in KINDS for name in PASSES]


def operands(kind: str, num_rows: int) -> tuple[Any, ...]:
    """Return operands of `recur` without its steps, in float64."""
    groups, heads, lines, columns, rates, scales, has_beta = KINDS[kind]
    chance = torch.Generator().manual_seed(3)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=chance, dtype=torch.float64).to(tiny.DEVICE)

    key = torch.nn.functional.normalize(numbers(num_rows, groups, lines), dim=-1)
    rate = numbers(num_rows, heads, rates).abs()
    parts = [key, numbers(num_rows, heads, columns), rate, *([numbers(num_rows, heads).sigmoid()] if has_beta else [])]
    inputs_SW = torch.cat([part.flatten(1) for part in parts], 1)
    states = numbers(NUM_PLACES, heads, lines, columns)
    return inputs_SW, numbers(num_rows, groups, lines), -numbers(heads, scales).abs(), has_beta, states


def compute(kernels: Any, dtype: torch.dtype, given: tuple[Any, ...], steps: RecurrentSteps) -> tuple[Tensor, Tensor]:
    """Return (outputs, all states)."""
    mine = [one.to(dtype, copy=True) if isinstance(one, Tensor) else one for one in given]
    return kernels.recur(*mine, deepcopy(steps)), mine[-1]


def agrees(kind: str, texts: Sequence[Text]) -> bool:
    """Return whether outputs and states differ by rounding alone."""
    steps = steps_of(texts)
    given = operands(kind, steps.steps.shape[1])
    found = compute(TritonKernels(), torch.float32, given, steps)
    expected = compute(TORCH, torch.float64, given, steps)
    pairs = zip(found, expected, strict=True)
    return all((one - other).abs().max() <= 2e-6 * other.abs().max() for one, other in pairs)


@pytest.mark.sole("kernels of recurrent layers")
@pytest.mark.parametrize(("kind", "name"), grid(CASES, {("GDN", "together"), ("KDA", "few")} if ON_CPU else CASES))
def test_outputs_and_states_are_those_of_plain_operations(kind: str, name: str) -> None:
    assert agrees(kind, PASSES[name])


def siblings(right: Callable[..., Any], turn: Any, num_text: int) -> Any:
    """A wrong variant: all tokens before a node are on its path."""
    return right([step._replace(source=step.node - 1) for step in turn], num_text)


def over_nodes(right: Callable[..., Any], *given: Any) -> Turns:
    """A wrong variant: the last node of a turn advances the state."""
    found = right(*given)
    found.turns[:, 3] = np.where(found.turns[:, 3] >= 0, found.turns[:, 1] - 1, -1)
    return found


@pytest.mark.parametrize(
    ("owner", "name", "variant"),
    [(recurrence_turns, "_bits", siblings), (recurrence_kernels, "turns_of", over_nodes)],
    ids=["siblings", "rejected nodes"],
)
def test_wrong_turns_are_noticed(owner: Any, name: str, variant: Callable[..., Any]) -> None:
    texts = [Text(0, 1, 2, (-1, -1, 0))]
    assert agrees("Mamba 2", texts)
    with instead(owner, name, variant):
        assert not agrees("Mamba 2", texts)


def test_a_node_without_finite_numbers_changes_no_state() -> None:
    steps = steps_of([Text(0, 1, 2, (-1, 0, -1))])
    given = operands("GDN", 5)
    _, expected = compute(TritonKernels(), torch.float32, given, steps)
    given[0][steps.steps[0, 3]] = torch.nan
    _, states = compute(TritonKernels(), torch.float32, given, steps)
    assert torch.equal(states, expected)


@pytest.mark.slow
@pytest.mark.skipif(not ON_CPU, reason="states on a CPU")
@pytest.mark.parametrize("name", test_states.PASSES)
def test_outputs_do_not_depend_on_passes(name: str) -> None:
    """Also of accepted drafts, company and cached prefixes; the convolution has the same bits."""
    with instead(test_states, "choose", lambda *_: TritonKernels()):
        found = test_states.PASSES[name]()
    expected = test_states.decoded(test_states.Model(), range(1, 22))
    assert not torch.equal(found, expected), "the kernels did not run"
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


# -- turns -----------------------------------------------------------------------------------------


def random_texts(chance: np.random.Generator) -> list[Text]:
    """Return texts of up to 150 tokens and 90 nodes; some begin where an earlier one ends."""
    texts: list[Text] = []
    for seat in chance.permutation(4)[: chance.integers(1, 5)].tolist():
        num_tokens = int(chance.choice([0, 1, 3, 63, 64, 65, 150]))
        num_nodes = int(chance.choice([0, 2, 12, 90]))
        parents = [int(chance.integers(-1, node)) if node else -1 for node in range(num_nodes)]
        kept = (int(chance.integers(0, num_tokens)), 4) if num_tokens and chance.random() < 0.5 else (-1, -1)
        first_state = int(chance.choice([-1, 4, 5, seat])) if num_tokens else seat
        if num_tokens or num_nodes:
            texts.append(Text(first_state, seat, num_tokens, parents, kept))
    return texts


def by_steps(steps: RecurrentSteps) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return (inputs on the path of each row, of each state): the specification."""
    rows: dict[int, Any] = {}
    states: dict[int, Any] = {place: (f"state {place}",) for place in range(NUM_PLACES)} | {-1: ()}
    for number, first in enumerate(steps.first_states.tolist()):
        paths = {-1: states[first]}
        for token, source, node, row, *places in steps.steps[:, slice(*steps.begins[number : number + 2])].T.tolist():
            paths[node] = rows[row] = (*paths[source], token)
            states |= {place: paths[node] for place in places if place >= 0}
    return rows, states


def by_turns(turns: Turns, is_product: bool) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the same of programs that run at once: what another one stores is not seen."""
    rows: dict[int, Any] = {}
    states: dict[int, Any] = {place: (f"state {place}",) for place in range(NUM_PLACES)} | {-1: ()}
    stored: dict[int, Any] = {}
    for begin, end in zip(turns.begins, turns.begins[1:], strict=False):
        seen = dict(states)
        for first, count, source, last, *places in turns.turns[begin:end].tolist():
            tokens = turns.tokens[first : first + count].tolist()
            paths = []
            for place, (_, _, bits) in enumerate(tokens):
                on_path = [one for one in range(place + 1) if bits >> one & 1] if is_product else range(place + 1)
                paths.append((*seen[source], *(tokens[one][0] for one in on_path)))
            read = [(row, path) for (_, row, _), path in zip(tokens, paths, strict=True) if row >= 0]
            assert not rows.keys() & dict(read), "a row is read once"
            rows |= dict(read)
            if last >= 0:
                seen |= {place: paths[last] for place in places if place >= 0}
        stored |= {place: path for place, path in seen.items() if path != states[place]}
    return rows, states | stored


@pytest.mark.parametrize("is_product", [False, True])
def test_turns_walk_the_path_of_every_row(is_product: bool) -> None:
    chance = np.random.default_rng(2)
    longest = 0
    for _ in range(30):
        texts = random_texts(chance)
        if not texts:
            continue
        steps = steps_of(texts)
        turns = turns_of(steps, is_product)
        assert by_turns(turns, is_product) == by_steps(steps)
        longest = max(longest, turns.longest)
    assert longest == MOST_TOGETHER if is_product else longest > MOST_TOGETHER


def test_a_path_that_is_longer_than_a_turn_is_walked() -> None:
    for num_nodes in (MOST_TOGETHER, MOST_TOGETHER + 1):
        steps = steps_of([Text(0, 1, 1, range(-1, num_nodes - 1))])
        turns = recurrence_kernels.turns_on(steps, True, tiny.DEVICE)
        assert (turns.num_rows == 0) == (num_nodes > MOST_TOGETHER)
