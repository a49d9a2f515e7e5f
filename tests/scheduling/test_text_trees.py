"""Trees of text drafts: what is found, how probable it is, what is worth its time."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from engine.config import EARLIER_ANSWERS
from engine.control.step_time import StepTimes
from engine.control.step_work import StepWork
from engine.control.text_acceptance import TextAcceptance, usual_acceptance
from engine.control.text_choice import NOTHING, TextChoice, TextOption
from engine.request import Request, Sampling, Speculation
from engine.scheduling.text_drafters.answers import AnswersDrafter, AnswerStore
from engine.scheduling.text_drafters.candidate import LONGEST_MATCH, Candidate
from engine.scheduling.text_drafters.index import TextIndex
from engine.scheduling.text_drafters.tree import TextTree, grow
from tests.scheduling.machine import Machine


def ends_by_hand(text: Sequence[int]) -> dict[int, int]:
    """Return the latest 8 ends of the last tokens, with how many agree before each."""
    agreeing_by_end = {}
    for length in (4, 1):
        ends = [end for end in range(length, len(text)) if text[end - length : end] == text[-length:]]
        for end in ends[::-1][:8] if len(text) >= length else []:
            agree = itertools.takewhile(lambda n: text[end - n - 1] == text[len(text) - n - 1], range(end))  # noqa: B023
            agreeing_by_end[end] = min(LONGEST_MATCH, sum(1 for _ in agree))
    return agreeing_by_end


@pytest.mark.parametrize("vocabulary", [2, 5, 40])
def test_the_index_finds_earlier_places_of_the_last_tokens(vocabulary: int) -> None:
    """Read token by token or at once, of a text and of another one."""
    random = np.random.default_rng(vocabulary)
    text = random.integers(vocabulary, size=150).tolist()
    growing = TextIndex()
    for end in range(1, len(text) + 1):
        growing.read(text[:end])
        assert growing.own_ends(text[:end]) == ends_by_hand(text[:end])
    at_once = TextIndex()
    at_once.read(text)
    assert at_once.own_ends(text) == growing.own_ends(text)
    ends = at_once.ends_in(text, [vocabulary + 1, *text[60:64]])
    assert 64 in ends or len(ends) >= 8
    for end, count in ends.items():
        assert count <= 4
        assert text[end - count : end] == text[64 - count : 64]


@pytest.mark.slow
def test_a_long_text_takes_bounded_memory() -> None:
    text = np.random.default_rng(1).integers(5000, size=100_000).tolist()
    index = TextIndex()
    tracemalloc.start()
    index.read(text)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < 200 * len(text)
    assert len(index.own_ends([*text])) <= 16


def agreeing(source: str, tokens: Sequence[int], evidence: int) -> Candidate:
    return Candidate(source, tokens, 0, len(tokens), evidence)


def estimate(source: str, num_agreeing: int) -> float:
    """0.5 after one token, and more after each further one."""
    return min(0.9, 0.4 + 0.1 * num_agreeing)


def test_a_tree_has_the_most_probable_continuations() -> None:
    """A deeper match is trusted more."""
    candidates = [agreeing("a", (1, 2, 3), 2), agreeing("b", (1, 5), 1), agreeing("a", (4,), 1)]
    tree = grow(candidates, estimate, 0.01, 10, 3)
    odds = {2: 0.6 / 0.4, 1: 1.0}
    first = 0.6 * (odds[2] + odds[1]) / (odds[2] + 2 * odds[1])
    sources = {draft.tokens: draft.source for draft in tree.chains(range(len(tree)))}
    assert sources == {(1, 2, 3): "a", (1, 5): "b", (4,): "a"}
    assert tree.tokens[0] == 1
    assert tree.probabilities[0] == pytest.approx(first)
    assert tree.probabilities == sorted(tree.probabilities, reverse=True)
    assert all(parent < number for number, parent in enumerate(tree.parents))
    second = first * 0.7 * (0.7 / 0.3) / (0.7 / 0.3 + 0.6 / 0.4)
    assert tree.probabilities[tree.tokens.index(2)] == pytest.approx(second)


def test_a_tree_stops_at_its_bounds() -> None:
    repeated = Candidate("a", (1, 2, 9), 0, 2, 1, repeats=True)
    assert [draft.tokens for draft in grow([repeated], estimate, 0.01, 5, 9).chains(range(5))] == [(1, 2, 1, 2, 1)]
    assert len(grow([repeated], estimate, 0.01, 50, 3)) == 3
    assert len(grow([repeated], estimate, 0.01, 50, 0)) == 0
    assert all(share >= 0.4 for share in grow([repeated], estimate, 0.4, 50, 50).probabilities)
    assert not len(grow([], estimate, 0.01, 5, 5))


def test_emitted_tokens_show_the_acceptance_of_the_nodes_that_they_passed() -> None:
    candidates = [agreeing("a", (1, 2, 3), 2), agreeing("b", (1, 5), 1)]
    tree = grow(candidates, estimate, 0.01, 10, 3)
    assert tree.outcomes((1, 5, 6)) == [(("a", 2), True), (("a", 3), True)]
    assert tree.outcomes((1, 2, 4)) == [(("a", 2), True), (("a", 3), True), (("a", 4), False)]
    assert tree.outcomes((7,)) == [(("a", 2), False)]
    # Of a node whose children did not fit the tree nothing is learned, but of the first tokens all
    # are known.
    small = grow([*candidates, agreeing("c", (8,), 1)], estimate, 0.01, 1, 3)
    assert small.outcomes((1, 2)) == [(("a", 2), True)]
    assert small.outcomes((8, 2)) == [(("a", 2), True)]


def test_acceptance_is_learned_by_kind() -> None:
    acceptance = TextAcceptance()
    assert acceptance.estimate("prompt_lookup", 3) == usual_acceptance("prompt_lookup", 3)
    for _ in range(300):
        acceptance.observe("prompt_lookup", 3, is_right=False)
        acceptance.observe("prompt_lookup", 16, is_right=True)
    assert acceptance.estimate("prompt_lookup", 3) < 0.05
    assert 0.95 < acceptance.estimate("prompt_lookup", 16) < 1
    assert acceptance.estimate("prompt_lookup", 1) == usual_acceptance("prompt_lookup", 1)
    assert acceptance.estimate("prediction", 3) == usual_acceptance("prediction", 3)


def test_answers_are_kept_by_client_and_bounded() -> None:
    store = AnswerStore()

    def request(client: str, salt: str, seed: int, temperature: float = 1.0, drafter: str = EARLIER_ANSWERS) -> Request:
        speculation = Speculation(drafters=(drafter,), adaptive=True)
        sampling = Sampling(seed=seed, temperature=temperature)
        return Request(
            request_id="x",
            prompt_token_ids=(1,),
            client=client,
            cache_salt=salt,
            sampling=sampling,
            speculation=speculation,
        )

    store.add(request("a", "", 1), (1, 2, 3, 4, 5))
    store.add(request("a", "", 2), (1, 2, 3, 4, 6))
    store.add(request("a", "", 3, drafter="prompt_lookup"), (1, 2, 3, 4, 7))

    def next_tokens(asking: Request, text: Sequence[int]) -> set[int | None]:
        return {candidate.token(0) for candidate in AnswersDrafter(asking, store.of(asking)).candidates(text)}

    assert next_tokens(request("a", "", 9), (8, 1, 2, 3, 4)) == {5, 6}
    assert next_tokens(request("a", "", 1), (8, 1, 2, 3, 4)) == {6}
    assert next_tokens(request("a", "", 1, temperature=0.0), (8, 1, 2, 3, 4)) == {5, 6}
    for other in (request("b", "", 9), request("a", "salt", 9)):
        assert next_tokens(other, (8, 1, 2, 3, 4)) == set()
    # Nothing goes on beyond the end of an answer.
    assert next_tokens(request("a", "", 9), (4, 5)) == set()
    answers = store.of(request("a", "", 9))
    for number in range(300):
        answers.add([number] * 100, number)
        assert len(answers.tokens) <= 1 << 14
    assert next_tokens(request("a", "", 9), (299,)) == {299}
    assert next_tokens(request("a", "", 9), (1, 2)) == set()
    for number in range(40):
        store.of(request(str(number), "", 1))
    assert next_tokens(request("a", "", 9), (299,)) == set()


def option(tree: TextTree, reached: Sequence[float] = ()) -> TextOption:
    shadow = np.array(reached) if reached else NOTHING
    return TextOption(tree.parents, tree.probabilities, shadow, tree.depths)


TREES = (
    grow([agreeing("a", (1, 2, 3), 4), agreeing("a", (1, 5), 1)], estimate, 0.01, 4, 3),
    grow([agreeing("a", (4, 2), 1), agreeing("b", (6,), 1)], estimate, 0.01, 3, 3),
)


@pytest.mark.parametrize("node_s", [1e-5, 0.001, 0.002, 0.004, 0.02])
def test_the_choice_is_the_best_of_all_sets_of_nodes(node_s: float) -> None:
    """The wrong variants take all nodes, or those of the first tree alone."""
    machine = Machine(row_s=node_s, node_s=node_s)
    times = StepTimes(machine.prices())
    base = StepWork(rows=2, text=2)

    def rate(chosen: Sequence[Sequence[int]]) -> float:
        pairs = list(zip(TREES, chosen, strict=True))
        gain = sum(tree.probabilities[node] for tree, nodes in pairs for node in nodes)
        return (2 + gain) / machine.step_s(StepWork(rows=2, text=2, nodes=sum(map(len, chosen))))

    def closed(tree: TextTree) -> list[list[int]]:
        every = itertools.chain.from_iterable(itertools.combinations(range(len(tree)), n) for n in range(len(tree) + 1))
        return [list(nodes) for nodes in every if all(tree.parents[node] in (-1, *nodes) for node in nodes)]

    best = max(rate(pair) for pair in itertools.product(*map(closed, TREES)))
    chosen = TextChoice().choose(times, base, 2.0, [option(tree) for tree in TREES])
    assert rate(chosen) >= best / 1.02
    wrong = [list(range(len(tree))) for tree in TREES], [list(range(len(TREES[0]))), []]
    if node_s > 0.001:
        assert all(rate(one) < rate(chosen) for one in wrong)


@pytest.mark.parametrize("node_s", [0.001, 0.004, 0.02])
def test_prompts_in_the_step_change_nothing(node_s: float) -> None:
    """They take their time with any drafts; counted in, it would make every draft cheap."""
    times = StepTimes(Machine(row_s=node_s).prices())
    base = StepWork(rows=2, text=2)
    options = [option(tree) for tree in TREES]
    beside = replace(base, prompt=2000, prompt_text=2_000_000)
    chosen = TextChoice().choose(times, base, 2.0, options)
    assert TextChoice().choose(times, beside, 2.0, options) == chosen


def test_drafts_of_the_model_take_the_gain_of_text_drafts_away() -> None:
    """A token that the model's drafts would add anyway is no reason for a text draft."""
    times = StepTimes(Machine(row_s=0.002).prices())
    base = StepWork(rows=1, text=1)
    (alone,) = TextChoice().choose(times, base, 1.0, [option(TREES[0])])
    (beside,) = TextChoice().choose(times, base, 1.0, [option(TREES[0], reached=(0.95, 0.9, 0.9))])
    assert len(beside) < len(alone)


def test_choices_that_find_nothing_become_seldom() -> None:
    """Until fewer requests run."""
    times = StepTimes(Machine(row_s=0.1).prices())
    choice = TextChoice()

    def num_due(num_requests: int, num_steps: int) -> int:
        count = 0
        for _ in range(num_steps):
            if choice.is_due(num_requests):
                count += 1
                assert choice.choose(times, StepWork(rows=1, text=1), 1.0, [option(TREES[0])]) == [[]]
        return count

    assert num_due(4, 8) == 8
    assert num_due(4, 1000) < 250
    assert choice.is_due(3)
