"""The controller: what it chooses for given costs and acceptance, how soon it gives a useless drafter up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import Limits, Request, Speculation
from engine.scheduling.controller import PLAIN, Acceptance, Controller, menu, with_chains
from engine.scheduling.costs import Curve, StepCosts
from engine.scheduling.sequence import Sequence

FREE = StepCosts(Curve([(1, 1.0), (64, 1.0)]), Curve([(0, 0.0), (100, 0.001)]), Curve([(1, 0.001)]))
DEAR = StepCosts(Curve([(1, 1.0), (64, 1.0)]), Curve([(0, 0.0), (1, 5.0), (100, 500.0)]), Curve([(1, 1.0)]))
# A node costs a tenth of a plain step, a draft pass a twentieth.
USUAL = StepCosts(Curve([(1, 1.0), (2, 1.1)]), Curve([(0, 0.0), (10, 1.0)]), Curve([(1, 0.05), (64, 0.05)]))


def sequence(number: int, num_drafts: int = 4, draft_length: int = 5) -> Sequence:
    speculation = Speculation(num_drafts=num_drafts, draft_length=draft_length, adaptive=True)
    request = Request(
        request_id=str(number), prompt_token_ids=(1,), limits=Limits(max_tokens=99), speculation=speculation
    )
    return Sequence(number, request, 0.0)


def run(
    controller: Controller,
    sequences: list[Sequence],
    num_steps: int,
    accepted: dict[int, float],
    turns: dict[int, float] | None = None,
) -> list[int]:
    """Steps in which sequences accept drafts at a steady rate, position by position; how many drafted in each."""
    drafted: list[int] = []
    turns = dict.fromkeys(accepted, 0.0) if turns is None else turns
    for _ in range(num_steps):
        controller.choose(sequences, 0)
        drafted.append(0)
        for one in sequences:
            branching = controller.branching(one)
            if not branching:
                continue
            drafted[-1] += 1
            rate, count = accepted[one.sequence_id], 0
            while count < len(branching):
                turns[one.sequence_id] += rate
                if turns[one.sequence_id] < 1:
                    break
                turns[one.sequence_id] -= 1
                count += 1
            controller.observe(one, branching[0], len(branching), count)
    return drafted


def test_free_nodes_are_drafted_and_dear_ones_are_not() -> None:
    for costs, most in ((FREE, True), (DEAR, False)):
        controller = Controller(costs, 16)
        controller.choose([sequence(1)], 0)
        assert (controller.choice.shape != PLAIN) == most
        assert bool(controller.branching(sequence(1))) == most


def test_a_useless_drafter_is_given_up_soon_and_for_the_next_request_too() -> None:
    controller = Controller(USUAL, 16)
    first = run(controller, [sequence(1)], 64, {1: 0.0})
    assert first[0], "it is never tried"
    assert sum(first) <= 20
    assert not any(first[32:])
    assert sum(run(controller, [sequence(2)], 64, {2: 0.0})) <= 3


def test_a_useful_one_is_kept_and_tried_again_after_a_long_while() -> None:
    controller = Controller(USUAL, 16)
    assert all(run(controller, [sequence(1)], 100, {1: 0.9}))
    run(controller, [sequence(2)], 100, {2: 0.0})
    assert sum(run(controller, [sequence(3)], 3000, {3: 0.9})) > 1000


def test_requests_whose_drafts_fail_decode_plainly_beside_others() -> None:
    controller = Controller(USUAL, 16)
    good, bad = sequence(1), sequence(2)
    run(controller, [good, bad], 80, {1: 0.95, 2: 0.0})
    assert controller.branching(good)
    assert not controller.branching(bad)


def test_shapes_stay_within_the_requests_own_limits() -> None:
    controller = Controller(FREE, 5)
    one_chain, many = sequence(1, num_drafts=1), sequence(2)
    run(controller, [one_chain, many], 20, {1: 0.9, 2: 0.9})
    assert controller.branching(one_chain)[0] == 1
    assert controller.branching(many)[0] > 1


def test_a_choice_is_kept_until_another_is_clearly_better() -> None:
    """Times that wobble by two per cent change nothing."""
    controller = Controller(USUAL, 16)
    one = sequence(1)
    run(controller, [one], 600, {1: 0.8})
    shape = controller.choice.shape
    shapes, turns = set(), {1: 0.0}
    for step in range(100):
        controller.note_time(1, 1, shape, controller.costs.step_s(1, 1, *shape) * (1.02 if step % 2 else 0.98))
        run(controller, [one], 1, {1: 0.8}, turns)
        shapes.add(controller.choice.shape)
    assert shapes == {shape}


def test_steps_that_take_longer_than_measured_end_speculation() -> None:
    controller = Controller(USUAL, 16)
    one = sequence(1)
    run(controller, [one], 10, {1: 0.7})
    assert controller.choice.shape != PLAIN
    for _ in range(100):
        shape = controller.choice.shape
        controller.note_time(1, int(shape != PLAIN), shape, controller.costs.step_s(1, 1, *shape) * 3)
        run(controller, [one], 1, {1: 0.7})
    assert controller.choice.shape == PLAIN


@given(num_drafts=st.integers(1, 16), draft_length=st.integers(1, 16))
def test_the_menu_never_drafts_more_nodes_than_asked(num_drafts: int, draft_length: int) -> None:
    shapes = menu(num_drafts, draft_length, 16)
    assert (num_drafts, draft_length) in shapes
    assert all(k <= num_drafts and k * n <= num_drafts * draft_length for k, n in shapes)


def test_acceptance_is_learned_by_position_and_spreads_to_other_numbers_of_chains() -> None:
    acceptance = Acceptance(8)
    before = acceptance.by_position(4)[0]
    for _ in range(300):
        acceptance.observe(1, 2, 1)
        acceptance.fade()
    assert acceptance.by_position(1)[0] > 0.9
    assert acceptance.by_position(1)[1] < 0.2
    assert acceptance.by_position(4)[0] < before, "half of one chain's tokens fail"
    assert with_chains(0.5, 4) > with_chains(0.5, 1) == 0.5


@pytest.mark.parametrize("size", [0, 1, 2.5, 4, 9])
def test_curves_are_linear_between_points_and_never_fall(size: float) -> None:
    curve = Curve([(4, 3.0), (1, 1.0), (2, 0.5), (4, 5.0)])
    assert curve.at(size) == pytest.approx({0: 1.0, 1: 1.0, 2.5: 1.75, 4: 4.0, 9: 11.5}[size])
