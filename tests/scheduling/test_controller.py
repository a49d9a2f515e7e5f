"""The controller: what it chooses for given costs and acceptance, how soon it gives a useless drafter up."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import levels
from engine.metrics import PlainTimes
from engine.request import Limits, Request, Speculation
from engine.scheduling import controller as controller_module
from engine.scheduling import corrections
from engine.scheduling.acceptance import Acceptance, with_chains
from engine.scheduling.controller import Controller, menu
from engine.scheduling.corrections import PLAIN, Shape
from engine.scheduling.costs import Curve, NodeCosts, StepCosts
from engine.scheduling.sequence import Sequence

PASS_TIME = levels.Levels.pass_time


@pytest.fixture(autouse=True)
def _as_fast_as_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are in plain steps; what time adds to doubts is that of steps of 10 ms."""
    monkeypatch.setattr(levels.Levels, "pass_time", lambda self, plain_steps: PASS_TIME(self, 0.010 * plain_steps))


def nodes_s(points: list[tuple[float, float]]) -> NodeCosts:
    """Seconds by nodes, whatever the number of requests."""
    return NodeCosts({1: Curve(points)})


READ = Curve([(0, 0.0)])
FREE = StepCosts(PlainTimes((1,), (1,), ((1.0,),)), nodes_s([(0, 0.0), (100, 0.001)]), Curve([(1, 0.001)]), READ)
DEAR = StepCosts(
    PlainTimes((1,), (1,), ((1.0,),)), nodes_s([(0, 0.0), (1, 5.0), (100, 500.0)]), Curve([(1, 1.0)]), READ
)
# A node costs a tenth of a plain step, a draft pass a twentieth.
USUAL = StepCosts(
    PlainTimes((1, 2), (1,), ((1.0,), (1.1,))), nodes_s([(0, 0.0), (10, 1.0)]), Curve([(1, 0.05), (64, 0.05)]), READ
)


# A gain of a tenth, and a draft model that takes a fortieth of a plain step for a token.
SLOW_READER = replace(USUAL, nodes=nodes_s([(0, 0.0), (10, 4.0)]), reading=Curve([(0, 0.0), (64, 1.6)]))


def sequence(number: int, num_drafts: int = 4, draft_length: int = 5, max_tokens: int = 99) -> Sequence:
    speculation = Speculation(num_drafts=num_drafts, draft_length=draft_length, adaptive=True)
    request = Request(
        request_id=str(number), prompt_token_ids=(1,), limits=Limits(max_tokens=max_tokens), speculation=speculation
    )
    return Sequence(number, request, 0.0)


def nodes_of(shape: Shape) -> tuple[int, ...]:
    """Nodes by depth of one request's chains."""
    return (shape[0],) * shape[1]


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
        controller.choose(sequences)
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
        controller.choose([sequence(1)])
        assert (controller.choice.shape != PLAIN) == most
        assert bool(controller.branching(sequence(1))) == most


def test_the_nodes_of_neighbours_with_a_shape_of_their_own_take_room() -> None:
    """Twenty nodes are free and more are not: alone a request drafts, beside a neighbour's tree of twenty it does not.

    The wrong variant counts the neighbour's nodes as requests, of which any number is free here.
    """
    costs = replace(FREE, nodes=nodes_s([(0, 0.0), (20, 0.001), (60, 40.0)]))
    chosen = []
    for others in ([], [(4, 1, 1, 1, 1)], [()] * 21):
        controller = Controller(costs, 16)
        controller.choose([sequence(1)], others)
        chosen.append(controller.choice.shape != PLAIN)
    assert chosen == [True, False, True]


def test_what_neighbours_gain_by_their_drafts_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes more cost half of a step: too much when all wait for it, but not for the wrong variant, to which a
    neighbour that emits three tokens emits one."""
    costs = replace(FREE, nodes=nodes_s([(0, 0.0), (20, 0.001), (25, 1.2), (60, 40.0)]))
    for tokens_of, drafts in ((Controller._tokens_of, False), (lambda *_: 1.0, True)):
        monkeypatch.setattr(Controller, "_tokens_of", tokens_of)
        controller = Controller(costs, 16)
        controller.choose([sequence(1)], [(4, 1, 1, 1, 1)])
        assert (controller.choice.shape != PLAIN) == drafts


def test_reading_the_prompts_is_a_part_of_what_drafting_costs() -> None:
    """A gain of a tenth: enough for long answers, not where every answer begins with a long prompt to be read."""
    for num_prompt, num_emitted, drafts in ((0, 20, True), (200, 20, False), (200, 2000, True)):
        controller = Controller(SLOW_READER, 16)
        assert controller.reads, "nothing is known yet"
        for _ in range(10):
            controller.note_answer(num_prompt, num_emitted)
        controller.choose([sequence(1)])
        assert (controller.choice.shape != PLAIN) == drafts == controller.reads


def test_catching_up_is_charged_to_the_tokens_that_are_still_to_come() -> None:
    """Plain decoding does not stay the choice because prompts were left unread: many that are far behind draft, if
    their answers are long enough. The wrong variant charges all that is behind to a few steps."""
    for num_emitted, drafts in ((1000, True), (10, False)):
        controller = Controller(SLOW_READER, 16)
        for _ in range(40):
            controller.note_answer(500, num_emitted)
        for number, lag in enumerate((0, 500, 500)):
            controller.choose([sequence(number, max_tokens=2000)], (), [lag])
            assert (controller.choice.shape != PLAIN) == drafts
    controller = Controller(SLOW_READER, 16)
    controller.choose([sequence(1, max_tokens=20)], (), [500])
    assert controller.choice.shape == PLAIN, "what is left of the answer does not pay for the reading"


def test_longer_texts_make_all_steps_dearer() -> None:
    """And so drafts worth more: what is added to every step is shared by more tokens."""
    plain = PlainTimes((1, 2), (10, 1010), ((1.0, 11.0), (1.1, 21.1)))
    costs = replace(USUAL, plain=plain, nodes=nodes_s([(0, 0.0), (10, 20.0)]))
    assert costs.step_s(2, 0, (), 520) == pytest.approx(1.1 + 5.0)
    assert costs.step_s(2, 2, (2,), 520) == pytest.approx(1.1 + 5.0 + 4.0 + 0.05)
    for num_text, drafts in ((9, False), (900, True)):
        controller, one = Controller(costs, 16), sequence(1, max_tokens=1000)
        one.tokens += [1] * num_text
        controller.choose([one])
        assert (controller.choice.shape != PLAIN) == drafts
        # Texts of requests beside it count too.
        controller = Controller(costs, 16)
        controller.choose([sequence(1)], [()], text_beside=num_text)
        assert (controller.choice.shape != PLAIN) == drafts
    controller = Controller(costs, 16)
    for _ in range(9):
        controller.choose([])
        controller.note_time(2, 0, (), 6.1, 520)
    assert controller._corrections.factor(PLAIN, 2) == pytest.approx(1.0), "it took what such texts take"


def test_many_that_come_at_once_do_not_draft_what_was_chosen_for_few() -> None:
    controller = Controller(FREE, 16)
    first = sequence(0)
    run(controller, [first], 12, {0: 0.9})
    assert controller.choice.shape != PLAIN
    ids = iter(range(100, 1000))
    for num_decoding, num_coming, num_drafting in ((0, 1, 1), (0, 9, 1), (1, 9, 1)):
        controller.choose([first][:num_decoding])
        new = [sequence(next(ids)) for _ in range(num_coming)]
        # As often as it is asked, a step's answer stays.
        drafting = [[one.sequence_id for one in new if controller.branching(one)] for _ in range(2)]
        assert drafting[0] == drafting[1]
        assert len(drafting[0]) == num_drafting
    for num_far, num_decoding, num_drafting in (
        (0, 16, 4),
        (0, 15, 4),
        (0, 11, 2),
        (0, 0, 16),
        (15, 16, 1),
        (15, 0, 1),
    ):
        controller = Controller(replace(SLOW_READER, nodes=FREE.nodes), 16)
        many = [sequence(number) for number in range(16)]
        controller.choose(many, (), [3000] * num_far + [0] * (16 - num_far))
        assert len(controller.choice.drafting) == 16 - num_far
        if num_decoding < 16:
            controller.choose(many[:num_decoding], (), [0] * num_decoding)
        new = [sequence(next(ids)) for _ in range(20)]
        assert sum(bool(controller.branching(one)) for one in new) == num_drafting


def test_who_is_far_behind_decodes_plainly_beside_those_who_draft() -> None:
    controller = Controller(replace(SLOW_READER, nodes=FREE.nodes), 16)
    controller.choose([sequence(1), sequence(2), sequence(3)], (), [0, 3000, 1])
    assert controller.choice.drafting == {1, 3}


def test_a_useless_drafter_is_given_up_soon_and_for_the_next_request_too() -> None:
    controller = Controller(USUAL, 16)
    first = run(controller, [sequence(1)], 64, {1: 0.0})
    assert first[0], "it is never tried"
    assert sum(first) <= 20
    assert not any(first[32:])
    assert sum(run(controller, [sequence(2)], 64, {2: 0.0})) <= 3


def test_a_useful_one_is_kept_and_tried_again_after_a_long_while() -> None:
    controller = Controller(USUAL, 16)
    assert sum(run(controller, [sequence(1)], 100, {1: 0.9})) > 80, "more than the probes"
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
    run(controller, [one_chain, many], 16, {1: 0.9, 2: 0.9})
    assert controller.branching(one_chain)[0] == 1
    # Eight tokens, which the other's limits allow, are more than this one asked for.
    assert controller.choice.shape[1] * controller.choice.shape[0] > 5 >= len(controller.branching(one_chain))
    assert controller.branching(many)[0] > 1


def test_a_choice_is_kept_until_another_is_clearly_better() -> None:
    """Times that wobble by two per cent change nothing."""
    controller = Controller(USUAL, 16)
    one = sequence(1)
    run(controller, [one], 600, {1: 0.8})
    shape = controller.choice.kept  # whatever is being tried
    shapes, turns = [], {1: 0.0}
    for step in range(100):
        nodes = nodes_of(shape)
        controller.note_time(1, 1, nodes, controller.costs.step_s(1, 1, nodes) * (1.02 if step % 2 else 0.98))
        run(controller, [one], 1, {1: 0.8}, turns)
        shapes.append(controller.choice.shape)
    assert shapes.count(PLAIN) < 12, "more than the probes"
    assert sum(one not in (PLAIN, shape) for one in shapes) <= 6, "more than two rivals' steps"


def times(
    controller: Controller, num_steps: int, plain: float, drafting: float, until: bool | None = None
) -> list[bool]:
    """Steps of one request that take so many times what was measured; whether each drafted. Ends after `until`."""
    one, drafted, turns = sequence(1), [], {1: 0.0}
    while len(drafted) < num_steps and until not in drafted[-1:]:
        run(controller, [one], 1, {1: 0.8}, turns)
        shape = controller.choice.shape
        drafted.append(shape != PLAIN)
        nodes = nodes_of(shape)
        predicted_s = controller.costs.step_s(1, int(drafted[-1]), nodes)
        controller.note_time(1, int(drafted[-1]), nodes, predicted_s * (drafting if drafted[-1] else plain))
    return drafted


def shapes_where(factors: dict[Shape, float], at_first: dict[Shape, float] | None = None) -> list[Shape]:
    """Shapes of 3,000 steps of one request, where these take so many times what was measured, and others at first."""
    controller, one, turns, shapes = Controller(USUAL, 16), sequence(1), {1: 0.0}, []
    for step in range(3000):
        run(controller, [one], 1, {1: 0.8}, turns)
        shape = controller.choice.shape
        shapes.append(shape)
        drafts, nodes = int(shape != PLAIN), nodes_of(shape)
        factor = (at_first if at_first and step < 40 else factors).get(shape, 1.0)
        controller.note_time(1, drafts, nodes, factor * controller.costs.step_s(1, drafts, nodes))
    return shapes


@pytest.mark.parametrize("wanders", [True, False])
def test_what_the_machine_does_is_not_booked_to_a_shape(wanders: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps become slower while only one shape is drafted. The wrong variant takes the machine to be as it was."""
    if not wanders:
        monkeypatch.setattr(levels, "_WANDERS", 0.0)
    found = corrections.Corrections()
    for step in range(1, 400):
        found.note(step, [PLAIN, PLAIN, (1, 3), (1, 5)][step % 4], 1, 10.0, 10.0)
    for step in range(400, 1000):
        found.note(step, (1, 3), 1, 15.0, 10.0)
    assert found.factor((1, 3), 1) == pytest.approx(1.5, rel=0.02)
    for shape in (PLAIN, (1, 5), (4, 5)):
        assert 1.0 <= found.factor(shape, 1) < 1.5
        assert (found.factor(shape, 1) > 1.25) == wanders


def test_rivals_take_turns_whether_or_not_their_steps_have_told_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with prompts tell nothing. And a rival is tried with those it was chosen for, or not at all."""
    monkeypatch.setattr(controller_module, "_DOUBTS", 9.0)
    controller, rivals = Controller(FREE, 16), []
    one, turns = sequence(1), {1: 0.0}
    for _ in range(1500):
        run(controller, [one], 1, {1: 0.7}, turns)
        choice = controller.choice
        rivals.append(choice.shape if choice.shape not in (choice.kept, PLAIN) else None)
    tried = [rival for rival, _ in groupby(rivals) if rival is not None]
    assert len(set(tried[-6:])) == 6
    for number in range(400):
        controller.choose([sequence(1000 + number)])
        assert controller.choice.shape == PLAIN or controller.choice.drafting


@pytest.mark.parametrize("doubts", [controller_module._DOUBTS, 0.0])
def test_a_shape_that_met_a_busy_machine_is_tried_again(doubts: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within an hour or so. The wrong variant never tries another shape than the one it takes for the best."""
    monkeypatch.setattr(levels.Levels, "pass_time", PASS_TIME)
    monkeypatch.setattr(controller_module, "_DOUBTS", doubts)
    shapes = shapes_where({(1, 3): 0.85}, {(1, 3): 1.5})
    assert shapes[20:40].count((1, 5)) > 10
    assert (shapes[-300:].count((1, 3)) > 250) == (doubts > 0)


def test_a_shape_that_is_slower_than_measured_gives_way_to_another_not_to_plain_decoding() -> None:
    assert shapes_where({})[-200:].count((1, 5)) > 180
    found = shapes_where({(1, 5): 1.3})[-200:]
    assert found.count((1, 3)) > 180


def test_steps_that_take_longer_than_measured_end_speculation() -> None:
    controller = Controller(USUAL, 16)
    assert all(times(controller, 10, 1.0, 1.0))
    assert sum(times(controller, 400, 1.0, 3.0)[200:]) <= 20, "but for what is tried again"


def test_a_machine_that_becomes_slower_for_all_steps_changes_nothing_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding seems faster at first, as nobody has seen it slow: a few plain steps tell.

    The wrong variant takes it that drafting alone has become slower.
    """
    costs = replace(USUAL, nodes=nodes_s([(0, 0.0), (10, 4.0)]))
    num_plain = {}
    for wanders in (levels._WANDERS, 0.0):
        monkeypatch.setattr(levels, "_WANDERS", wanders)
        controller = Controller(costs, 16)
        for _ in range(50):
            controller.choose([])
            controller.note_time(1, 0, (), costs.step_s(1, 0, ()))
        assert sum(times(controller, 100, 1.0, 1.0)) > 90
        num_plain[wanders > 0] = times(controller, 200, 2.5, 2.5).count(False)
    assert num_plain[True] <= 12 < 16 <= num_plain[False], num_plain


@pytest.mark.parametrize("retry", [corrections._RETRY, 1.0])
def test_drafting_is_tried_again_when_its_slow_steps_are_long_ago(
    retry: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disturbance that ended with the last drafting step. The wrong variant never forgets what it has seen last."""
    monkeypatch.setattr(corrections, "_RETRY", retry)
    controller = Controller(replace(USUAL, nodes=nodes_s([(0, 0.0), (10, 2.0)])), 16)
    assert not any(times(controller, 100, 1.0, 3.0)[-32:])
    assert times(controller, 3000, 1.0, 1.0, until=True)[-1] == (retry < 1)
    assert (times(controller, 50, 1.0, 1.0).count(True) > 40) == (retry < 1)


@pytest.mark.parametrize("probes", [True, False])
def test_plain_steps_are_made_to_see_what_they_take(probes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All was measured on a busy machine, plain decoding most of all: speculation looked like a gain of a half and is a
    loss. The wrong variant trusts what was measured, as nothing contradicts it while it drafts."""
    if not probes:
        monkeypatch.setattr(controller_module, "_FIRST_PROBE", 10**9)
    costs = replace(USUAL, nodes=nodes_s([(0, 0.0), (10, 4.0)]))
    drafted = times(Controller(costs, 16), 100, 0.4, 0.8)
    assert all(drafted[:16])
    assert any(drafted[40:]) != probes


def test_a_probe_goes_on_while_requests_come_and_go() -> None:
    controller = Controller(FREE, 16)
    drafted = []
    for step in range(400):
        controller.choose([sequence(1), sequence(10 + step)])
        drafted.append(controller.choice.shape != PLAIN)
        nodes = nodes_of(controller.choice.shape)
        controller.note_time(2, 2 * int(drafted[-1]), nodes, controller.costs.step_s(2, 2 * int(drafted[-1]), nodes))
    plain = "".join("D" if one else "." for one in drafted).replace("D", " ").split()
    assert plain == ["..."] * len(plain)
    assert 3 <= len(plain) <= 6


def test_a_probe_that_told_nothing_is_made_again_soon() -> None:
    """Steps with prompts are not timed: a probe waits for three others, but not for long."""
    controller = Controller(FREE, 16)
    plain = []
    for step in range(1, 420):
        controller.choose([sequence(1)])
        shape = controller.choice.shape
        if shape == PLAIN:
            plain.append(step)
        if shape != PLAIN or step in (59, 61, 63):
            nodes = nodes_of(shape)
            controller.note_time(1, int(bool(nodes)), nodes, controller.costs.step_s(1, int(bool(nodes)), nodes))
    after_nothing, after_three = [*range(17, 25)], [*range(57, 64)]
    again = [*range(129, 137), *range(265, 273), *range(401, 409)]
    assert plain == after_nothing + after_three + again
    assert controller._corrections.learned_plain == 63


def test_numbers_of_requests_near_a_power_of_two_are_corrected_together() -> None:
    """Sixteen requests are fifteen for a while whenever one is read, and eight are nine."""
    seen = corrections.Corrections()
    for step in range(200):
        seen.note(step, (1, 1), 15 + step % 2, 1.0, 1.0)
        seen.note(step, (1, 3), 15 + step % 2, 1.5, 1.0)
    for num_rows in (14, 16, 17):
        ratio = seen.factor((1, 3), num_rows) / seen.factor((1, 1), num_rows)
        assert ratio == pytest.approx(1.5, abs=0.1)
        assert seen.doubt((1, 3), (1, 1), num_rows) < 0.1
    assert seen.factor((1, 3), 8) == seen.factor((1, 1), 8)
    assert seen.doubt((1, 3), (1, 1), 8) > 0.14


def test_drafts_beyond_the_end_of_an_answer_count_for_nothing() -> None:
    """Where two tokens are left, one is drafted; with more room the same controller drafts more."""
    costs = replace(USUAL, nodes=nodes_s([(0, 0.0), (10, 1.0)]))
    for max_tokens, shape in ((2, (1, 1)), (1, PLAIN)):
        controller = Controller(costs, 16)
        controller.choose([sequence(1, max_tokens=max_tokens)])
        assert controller.choice.shape == shape
    controller = Controller(costs, 16)
    controller.choose([sequence(1)])
    assert controller.choice.shape[1] > 1


def test_the_end_of_one_answer_does_not_stop_the_reading_of_the_next_prompt() -> None:
    """Where no drafted token has room, plain decoding is chosen, but not for its speed."""
    controller = Controller(FREE, 16)
    controller.choose([sequence(1)])
    assert controller.reads
    controller.choose([sequence(2, max_tokens=1)])
    assert controller.choice.shape == PLAIN
    assert controller.reads
    controller = Controller(DEAR, 16)
    controller.choose([sequence(1)])
    assert not controller.reads


def test_rivals_whose_steps_all_have_prompts_are_tried_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed: after the first try the next is made after as many steps as plain ones at most."""
    monkeypatch.setattr(controller_module, "_FIRST_PROBE", 10**6)
    monkeypatch.setattr(controller_module, "_DOUBTS", 99.0)
    controller = Controller(USUAL, 16)
    tries = []
    for _ in range(900):
        controller.choose([sequence(1)])
        tries.append(not controller._probes_plain and controller._step <= controller._probe_end)
    assert 0 < sum(tries) <= 8 * (1 + 900 // 256)


def test_a_request_rests_only_where_its_drafts_are_clearly_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts worth a little less than they take are kept: who stops, and starts again, must be caught up with."""
    for hold, rests in ((0.7, False), (1.0, True)):
        monkeypatch.setattr(controller_module, "_HOLD", hold)
        controller = Controller(replace(USUAL, nodes=nodes_s([(0, 0.0), (10, 2.5)])), 16)
        good, weak = sequence(1, 1, 1), sequence(2, 1, 1)
        for one, num_taken in ((good, 400), (weak, 160)):
            one.note_drafts(num_taken, 300.0, 1.0)
        controller.choose([good, weak])
        assert controller.choice.drafting >= {1}
        assert (2 in controller.choice.rests) == rests
    # Who rests begins again only where that pays.
    monkeypatch.setattr(controller_module, "_HOLD", 0.7)
    for _ in range(16):
        controller.choose([good, weak])
        assert 2 not in controller.choice.drafting or controller.choice.shape == PLAIN


def test_one_slow_step_of_a_probe_is_not_believed() -> None:
    controller, num_plain = Controller(FREE, 16), 0
    for _ in range(40):
        controller.choose([sequence(1)])
        nodes = nodes_of(controller.choice.shape)
        num_plain += not nodes
        slow = 10.0 if num_plain == 2 and not nodes else 1.0
        controller.note_time(1, int(bool(nodes)), nodes, slow * controller.costs.step_s(1, int(bool(nodes)), nodes))
    assert controller._corrections.learned_plain > 0
    assert controller._corrections.factor(PLAIN, 1) < 1.15


def test_probes_are_few() -> None:
    drafted = times(Controller(USUAL, 16), 4000, 1.0, 1.0)
    assert 10 < drafted.count(False) < 60


@pytest.mark.parametrize("slow", [3.0, 2.0])
def test_trying_costs_little(slow: float) -> None:
    """Drafting is slower than was measured, by little or by much; a drafting step gives 4.9 tokens."""
    costs = replace(USUAL, nodes=nodes_s([(0, 0.0), (10, {3.0: 1.0, 2.0: 4.0}[slow])]))
    drafted = times(Controller(costs, 16), 6000, 1.0, slow)[1000:]
    num_tried, step_s = sum(drafted), slow * costs.step_s(1, 1, nodes_of((1, 5)))
    assert step_s > 4.9
    assert num_tried > 0
    assert (len(drafted) + 3.9 * num_tried) / (len(drafted) + (step_s - 1) * num_tried) > 0.985


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
    eight = copy.deepcopy(acceptance)
    eight.fade(8)
    for _ in range(8):
        acceptance.fade()
    assert eight.by_position(1) == pytest.approx(acceptance.by_position(1))
    assert acceptance.by_position(1)[0] > 0.9
    assert acceptance.by_position(1)[1] < 0.2
    assert acceptance.by_position(4)[0] < before, "half of one chain's tokens fail"
    assert with_chains(0.5, 4) > with_chains(0.5, 1) == 0.5


@pytest.mark.parametrize("size", [0, 1, 2.5, 4, 9])
def test_curves_are_linear_between_points_and_never_fall(size: float) -> None:
    curve = Curve([(4, 3.0), (1, 1.0), (2, 0.5), (4, 5.0)])
    assert curve.at(size) == pytest.approx({0: 1.0, 1: 1.0, 2.5: 1.75, 4: 4.0, 9: 11.5}[size])


def test_few_that_come_or_go_wait_for_the_next_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing takes as long as a tenth of some steps: one of sixteen requests that ends does not make it necessary."""
    chosen: list[int] = []
    choose = Controller._choose

    def noted(controller: Controller, adaptive: list[Sequence], load: object) -> None:
        chosen.append(len(adaptive))
        choose(controller, adaptive, load)  # type: ignore[arg-type]

    monkeypatch.setattr(Controller, "_choose", noted)
    controller = Controller(USUAL, 16)
    requests = [sequence(number) for number in range(16)]
    controller.choose(requests)
    assert chosen == [16]
    requests = [*requests[2:], sequence(100), sequence(101)]
    controller.choose(requests)
    assert chosen == [16], "four of sixteen are others"
    assert controller.branching(requests[0])
    assert controller.branching(requests[-1]), "those that have come draft like the others"
    controller.choose(requests[1:])
    assert chosen == [16, 15], "five"
    controller.choose(requests[1:], [(1, 1)])
    assert chosen == [16, 15, 15], "what is beside them has changed"
    for _ in range(7):
        controller.choose(requests[2:], [(1, 1)])
    assert chosen == [16, 15, 15]
    controller.choose(requests[2:], [(1, 1)])
    assert chosen == [16, 15, 15, 14], "after eight steps in any case"
    for num_requests in (4, 3, 4):
        controller.choose(requests[:num_requests])
    assert chosen[4:] == [4, 3, 4], "one more of four is as much as one less"


@pytest.mark.parametrize(("costs", "at_most"), [(DEAR, 5), (USUAL, 20)], ids=["plain", "drafting"])
def test_choices_are_seldom_where_nothing_is_drafted(
    costs: StepCosts, at_most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain decoding beside a useless drafter pays for every choice, and learns nothing that would change one."""
    chosen: list[Shape] = []
    choose = Controller._choose

    def noted(controller: Controller, adaptive: list[Sequence], load: object) -> None:
        choose(controller, adaptive, load)  # type: ignore[arg-type]
        chosen.append(controller.choice.shape)

    monkeypatch.setattr(Controller, "_choose", noted)
    run(Controller(costs, 16), [sequence(1)], 128, {1: 0.9})
    assert at_most // 2 < len(chosen) <= at_most
    assert {shape == PLAIN for shape in chosen} == {costs is DEAR}
