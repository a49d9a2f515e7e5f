"""Which requests draft: their neighbours, prompts, lags, limits and ends decide about what drafting
is worth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.control.controller import Controller
from engine.control.step_work import PLAIN, StepWork
from engine.fanout import Fanout
from engine.plan import Plan
from tests.control.test_controller import DEAR, FREE, controller_of
from tests.control.test_step_time import row
from tests.scheduling.machine import sequence
from tests.wrong import instead


def test_free_nodes_are_drafted_and_dear_ones_are_not() -> None:
    for costs, drafts in ((FREE, True), (DEAR, False)):
        controller = controller_of(**costs)
        controller.choose([sequence(1)])
        assert (controller.choice.shape != PLAIN) == drafts == bool(controller.fanout(sequence(1)))
        assert controller.reads == drafts


def with_acceptance(controller: Controller, accepted: dict[int, float]) -> Controller:
    """Return the controller after steps with this acceptance of first tokens, by number of
    chains.
    """
    for num_drafts, share in accepted.items():
        for number in range(400):
            controller.acceptance.observe(num_drafts, 1, int(number % 10 < 10 * share))
    return controller


def test_the_nodes_of_neighbours_with_a_shape_of_their_own_take_room() -> None:
    """Few nodes are free and more are not: alone a request drafts, with its neighbours' trees it
    does not. The wrong variant counts the neighbours as requests without nodes, of which any number
    is free here.
    """
    chosen = []
    for others in ([], [(4, 1, 1, 1, 1)] * 2, [()] * 2):
        controller = with_acceptance(controller_of(node_s=0.01, free_tokens=32), {1: 0.4, 4: 0.8})
        controller.choose([sequence(1, 1, 5)], others)
        chosen.append(controller.choice.shape != PLAIN)
    assert chosen == [True, False, True]


@pytest.mark.parametrize("others", [[], [()], [(4, 1, 1)], [(2, 1), (2, 1), ()], [(1, 1), (3,)], [(2, 2)]])
def test_a_step_is_predicted_as_the_work_from_which_the_model_learns(others: list[Fanout]) -> None:
    """Shapes are parts of works: what is learned of one shape says nothing of others."""
    options: list[Any] = []

    def noted(options_of: Any, *asked: Any) -> Any:
        options.append(options_of(*asked))
        return options[-1]

    with instead(Controller, "_options", noted):
        controller_of(**FREE).choose([sequence(1)], others, other_text=len(others))
    (chosen,) = options
    for (num_drafts, length), work in zip(chosen.shapes, chosen.works, strict=True):
        adaptive = (num_drafts, *(1,) * (length - 1)) if length else ()
        rows = [
            row(number, first_index=0, fanout=fanout, draft_input_ids=bool(fanout))
            for number, fanout in enumerate([adaptive, *others])
        ]
        assert work == StepWork.of(Plan(tuple(rows)))


def test_gains_of_neighbours_by_their_drafts_count() -> None:
    """A node more makes the step longer by nearly a fifth: too much where all wait for it, if a
    neighbour emits two tokens a step. The wrong variant takes it to emit one.
    """
    for accepted, drafts in ((1.0, False), (0.0, True)):
        controller = with_acceptance(controller_of(row_s=1e-6, node_s=0.0082), {1: 0.5, 4: accepted})
        controller.choose([sequence(1, 1, 1)], [(4,)])
        assert (controller.choice.shape != PLAIN) == drafts


def test_reading_the_prompts_is_a_part_of_what_drafting_costs() -> None:
    """Enough is gained for long answers, but not where every answer begins with a long prompt to be
    read.
    """
    for num_prompt, num_emitted, drafts in ((0, 20, True), (200, 20, False), (200, 2000, True)):
        controller = controller_of(node_s=0.004, read_s=0.0003)
        assert controller.reads, "nothing is known yet"
        for _ in range(10):
            controller.acceptance.note_answer(num_prompt, num_emitted)
        controller.choose([sequence(1)])
        assert (controller.choice.shape != PLAIN) == drafts == controller.reads


def test_catching_up_is_charged_to_the_tokens_that_are_still_to_come() -> None:
    """Plain decoding does not stay the choice because prompts were left unread: many that are far
    behind draft, if their answers are long enough. The wrong variant charges all that is behind to
    a few steps.
    """
    for num_emitted, drafts in ((1000, True), (10, False)):
        controller = controller_of(node_s=0.004, read_s=0.0003)
        for _ in range(40):
            controller.acceptance.note_answer(500, num_emitted)
        for number, lag in enumerate((0, 500, 500)):
            controller.choose([sequence(number, max_tokens=2000)], (), [lag])
            assert (controller.choice.shape != PLAIN) == drafts
    controller = controller_of(node_s=0.004, read_s=0.0003)
    controller.choose([sequence(1, max_tokens=20)], (), [500])
    assert controller.choice.shape == PLAIN, "what is left of the answer does not pay for the reading"


def test_requests_far_behind_decode_plainly_next_to_drafting_requests() -> None:
    controller = controller_of(read_s=0.0005, **FREE)
    controller.choose([sequence(1), sequence(2), sequence(3)], (), [0, 9000, 1])
    assert controller.choice.drafting_ids == {1, 3}


def test_longer_texts_make_drafts_worth_more() -> None:
    """More tokens share the cost that is added to every step; texts of other requests count,
    too.
    """
    for num_text, drafts in ((9, False), (4000, True)):
        controller, request = controller_of(node_s=0.015, text_s=1e-5), sequence(1)
        request.tokens += [1] * num_text
        controller.choose([request])
        assert (controller.choice.shape != PLAIN) == drafts
        controller = controller_of(node_s=0.012, text_s=1e-5)
        controller.choose([sequence(1)], [()], other_text=num_text)
        assert (controller.choice.shape != PLAIN) == drafts


def test_shapes_stay_within_the_requests_own_limits() -> None:
    controller = controller_of(**FREE)
    one_chain, many = sequence(1, num_drafts=1), sequence(2)
    controller.choose([one_chain, many])
    assert controller.fanout(one_chain)[0] == 1
    # Eight tokens, which the other's limits allow, are more than this one asked for.
    assert controller.choice.shape[1] * controller.choice.shape[0] > 5 >= len(controller.fanout(one_chain))
    assert controller.fanout(many)[0] > 1


def test_every_shape_that_a_request_allows_is_offered() -> None:
    """Long chains are the best here; only the request that may draft one chain allows them."""
    controller = with_acceptance(controller_of(**FREE), {1: 1.0, 4: 1.0})
    short, long = sequence(1, 4, 3), sequence(2, 1, 16)
    controller.choose([short, long])
    assert len(controller.fanout(long)) == 16
    assert len(controller.fanout(short)) == 12, "as many tokens as its own limits allow"


def test_drafts_beyond_the_end_of_an_answer_count_for_nothing() -> None:
    """If two tokens are left, one is drafted; with more room the same controller drafts more."""
    for max_tokens, is_right in (
        (2, lambda shape: shape == (1, 1)),
        (1, lambda shape: shape == PLAIN),
        (99, lambda shape: shape[1] > 1),
    ):
        controller = controller_of()
        controller.choose([sequence(1, max_tokens=max_tokens)])
        assert is_right(controller.choice.shape)


def test_the_end_of_one_answer_does_not_stop_the_reading_of_the_next_prompt() -> None:
    """If no drafted token has room, plain decoding is chosen, but not for its speed."""
    controller = controller_of(**FREE)
    controller.choose([sequence(1)])
    controller.choose([sequence(2, max_tokens=1)])
    assert controller.choice.shape == PLAIN
    assert controller.reads


def test_a_request_rests_only_where_its_drafts_are_clearly_not_worth_it() -> None:
    """Drafts worth a little less than they take are kept: who stops, and starts again, must be
    caught up with.
    """
    drafting: Callable[[Controller], set[int]] = lambda controller: controller.choice.drafting_ids & {2, 3}  # noqa: E731
    good, weak, bad = sequence(1, 1, 1), sequence(2, 1, 1), sequence(3, 1, 1)
    for request, num_taken in ((good, 400), (weak, 150), (bad, 20)):
        request.note_drafts(num_taken, 300.0)
    controller = controller_of(node_s=0.0018)
    controller.choose([good, weak, bad])
    assert drafting(controller) == {2}
    controller = controller_of(node_s=0.0018)
    useless = sequence(2, 1, 1)
    useless.note_drafts(0, 300.0)
    controller.choose([good, useless])
    assert not drafting(controller)
    for _ in range(9):
        controller.choose([good, weak])
    assert not drafting(controller), "who rests begins again only where that pays"


def test_few_that_come_or_go_wait_for_the_next_choice() -> None:
    """One of sixteen requests that ends does not make a choice necessary, which takes time."""
    controller = controller_of(**FREE)
    requests = [sequence(number) for number in range(16)]
    choices = []

    def choose(adaptive: list, others: tuple = ()) -> bool:  # type: ignore[type-arg]
        controller.choose(adaptive, others)
        choices.append(controller.choice)
        return len(choices) < 2 or choices[-1] is not choices[-2]

    assert choose(requests)
    requests = [*requests[2:], sequence(100), sequence(101)]
    assert not choose(requests), "four of sixteen are others"
    assert controller.fanout(requests[0])
    assert controller.fanout(requests[-1]), "those that have come draft like the others"
    assert choose(requests[1:]), "five"
    assert choose(requests[1:], ((1, 1),)), "the other requests have changed"
    assert [choose(requests[2:], ((1, 1),)) for _ in range(8)] == [False] * 7 + [True], "after eight steps in any case"
    assert all(choose(requests[:number]) for number in (4, 3, 4)), "one more of four is as much as one less"


def test_requests_that_replace_others_wait_for_the_next_choice_while_all_decode_plainly() -> None:
    """Short answers follow each other; more requests are another load."""
    controller = controller_of(**DEAR)
    kept = []
    for number in range(64):
        before = controller.choice
        controller.choose([sequence(number // 8)])
        kept.append(controller.choice is before)
    assert controller.choice.shape == PLAIN
    assert kept.count(False) < 64 // 8, "fewer choices than answers"
    before = controller.choice
    controller.choose([sequence(7), sequence(100)])
    assert controller.choice is not before
