"""Text drafts are exact with every rule, useful if right, cheap if wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import pytest

from engine.control.controller import Controller
from engine.control.step_time import StepTimes
from engine.errors import RequestError
from engine.request import Request, Speculation
from engine.scheduling.text_drafters.answers import ClientAnswers
from engine.speculation.topology import Tree
from engine.speculation.verification.text_drafts import Walk, edges_of
from engine.start.loading import LoadedModel
from engine.step.engine import Engine
from tests.engine import test_output_distribution as output_distribution
from tests.engine import tiny
from tests.engine.test_output_distribution import ALPHA, SAMPLINGS, drafts, g_test, pair
from tests.grid import grid
from tests.scheduling.machine import Machine
from tests.wrong import calls_of, instead

__all__ = ["pair"]

BOTH = ("prompt_lookup", "prediction")
ALL = ("model", *BOTH)
SHAPES = {
    "text drafts alone": Speculation(drafters=BOTH),
    "token": drafts("token", 1, drafters=ALL),
    "block": drafts("block", 1, length=3, drafters=ALL),
    "bv_race": drafts("bv_race", 4, drafters=ALL),
    "traversal tree": drafts("traversal", 4, tree=(2, 2), drafters=ALL),
    "rrs_without_replacement": drafts("rrs_without_replacement", 3, drafters=ALL),
    "greedy late": drafts("greedy", 3, tree=(1, 3), drafters=ALL),
    "weighted_race": drafts("weighted_race", 3, drafters=ALL),
}
# The text repeats itself, so that there is something to look up; the prediction agrees with it in
# part.
REPEATING = (1, 3, 0, 2, 1, 3, 0, 2, 1, 3, 0)
PREDICTION = (2, 0, 2, 1, 3)
NUM_AFTER_ANSWERS = 2000
"""Answers that are drafted from earlier ones."""


sample = partial(output_distribution.sample, prompt=REPEATING)
exact_distribution = partial(output_distribution.exact_distribution, prompt=REPEATING)


@pytest.mark.sole("sampled answers with text drafts")
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "sampling"),
    grid(
        [
            *((name, "plain") for name in SHAPES),
            *((name, "edited and filtered") for name in ("text drafts alone", "bv_race")),
        ],
        {("block", "plain"), ("traversal tree", "plain"), ("bv_race", "edited and filtered")},
    ),
)
def test_joint_distribution_of_three_tokens(pair: tuple[LoadedModel, LoadedModel], name: str, sampling: str) -> None:
    counts = sample(pair, SHAPES[name], SAMPLINGS[sampling], prediction=PREDICTION)
    assert g_test(counts, exact_distribution(pair[0], SAMPLINGS[sampling])) > ALPHA


# Each of the last tokens occurred before several others.
BRANCHING = (1, 3, 0, 2, 1, 3, 1, 0, 1, 2, 3, 0, 1)
ADAPTIVE = {
    "text drafts alone": Speculation(drafters=BOTH, adaptive=True),
    "bv_race": drafts("bv_race", 2, drafters=ALL, adaptive=True),
    "traversal": drafts("traversal", 2, drafters=ALL, adaptive=True),
}
FREE = Machine(node_s=1e-9, row_s=1e-9)


def walk_by_single_children(
    _: Any, tree: Tree, first_text_draft: int, probability: dict[int, float], uniform_L: Sequence[float]
) -> Walk:
    """Wrong: of several children only the most probable one counts."""
    children = edges_of(tree, first_text_draft)
    path = [0]
    while taken := [one for one in children.get(path[-1], ()) if uniform_L[len(path) - 1] < probability[one]]:
        path.append(taken[0])
    refused = [tree.tokens[child - 1] for child in children.get(path[-1], ())]
    rank = next(i for i, nodes in enumerate(tree.paths) if i >= first_text_draft and nodes[: len(path)] == path)
    return Walk(path, rank, refused)


@pytest.mark.slow
@pytest.mark.parametrize("name", grid(ADAPTIVE, {"text drafts alone"}))
def test_trees_of_text_drafts_are_exact(pair: tuple[LoadedModel, LoadedModel], name: str) -> None:
    """Trees that the load decides on, by one kernel, and with penalties."""
    widest = 0

    def noted(right: Any, *operands: Any) -> Any:
        nonlocal widest
        widest = max(widest, *map(len, edges_of(operands[0], operands[1]).values()))
        return right(*operands)

    def p_value(sampling: str) -> float:
        settings = SAMPLINGS[sampling]
        exact = output_distribution.exact_distribution(pair[0], settings, BRANCHING)
        counts = output_distribution.sample(
            pair, ADAPTIVE[name], settings, prompt=BRANCHING, times=StepTimes(FREE.prices()), prediction=PREDICTION
        )
        return g_test(counts, exact)

    assert p_value("plain") > ALPHA
    with instead("engine.step.verify", "walk", noted):
        assert p_value("penalties") > ALPHA
    assert widest >= 2
    with instead("engine.step.verify", "walk", walk_by_single_children):
        assert p_value("penalties") < ALPHA


def with_answers_first(pair: tuple[LoadedModel, LoadedModel], same_seed: bool) -> tuple[Counter[tuple[int, ...]], int]:
    """Return (first three tokens of answers that draft from earlier ones, drafted nodes)."""
    engine = tiny.build(*pair, max_model_len=32, max_num_seqs=400, budget=8192, max_copied_tokens=8)
    engine.scheduler.times = StepTimes(FREE.prices())
    from_answers = Speculation(drafters=("earlier_answers",), adaptive=True)
    num_nodes = 0
    found: Counter[tuple[int, ...]] = Counter()
    for turn in range(2):
        requests = [
            msgspec.structs.replace(
                tiny.request(f"{turn} {n}", BRANCHING, from_answers, 6, temperature=1.0, seed=n + 10**6 * turn),
                cache_salt=str(n),
            )
            for n in range(NUM_AFTER_ANSWERS)
        ]
        if turn and same_seed:
            requests = [
                msgspec.structs.replace(one, sampling=msgspec.structs.replace(one.sampling, seed=number))
                for number, one in enumerate(requests)
            ]
        run = tiny.run(engine, requests)
        found = Counter(tuple(tokens[:3]) for tokens in run.tokens.values())
        num_nodes = sum(one.num_nodes for outcomes in run.outcomes.values() for one in outcomes)
    return found, num_nodes


@pytest.mark.slow
def test_drafts_from_earlier_answers_are_exact(
    pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of the same seed: their numbers would be compared with themselves."""
    exact = output_distribution.exact_distribution(pair[0], {"temperature": 1.0}, BRANCHING)
    monkeypatch.setattr("engine.scheduling.text_drafters.answers._MOST_CLIENTS", NUM_AFTER_ANSWERS)
    counts, num_nodes = with_answers_first(pair, same_seed=False)
    assert num_nodes
    assert g_test(counts, exact) > ALPHA
    counts, num_nodes = with_answers_first(pair, same_seed=True)
    assert not num_nodes
    assert g_test(counts, exact) > ALPHA
    with instead(ClientAnswers, "candidates", lambda right, one, text, _: right(one, text, None)):
        counts, num_nodes = with_answers_first(pair, same_seed=True)
    assert num_nodes
    assert g_test(counts, exact) < 1e-4


TARGET = tiny.llama(seed=1)
DRAFT = tiny.perturbed(TARGET, seed=2, amount=0.05)
PROMPT_TOKENS = tiny.prompts(101, [20])[0]
BV_RACE = Speculation(rule="bv_race", num_drafts=2, draft_length=3)


def build(**more: Any) -> Engine:
    return tiny.build(TARGET, DRAFT, **{"max_copied_tokens": 32, **more})


def answer(speculation: Speculation, prediction: Sequence[int] = (), **sampling: Any) -> tuple[list[int], list[Any]]:
    """(tokens, outcomes) of 60 tokens at temperature 0."""
    one = tiny.request("x", PROMPT_TOKENS, speculation, 60, **sampling)
    run = tiny.run(build(), [msgspec.structs.replace(one, prediction=tuple(prediction))])
    return run.tokens["x"], run.outcomes["x"]


def with_text_drafts(speculation: Speculation, *names: str) -> Speculation:
    return msgspec.structs.replace(speculation, drafters=names)


@pytest.mark.parametrize("base", [BV_RACE, Speculation()])
def test_right_prediction_takes_few_steps(base: Speculation) -> None:
    """Also with one token replaced, left out or added."""
    plain, steps = answer(base)
    names = ("model", "prediction") if base.num_drafts else ("prediction",)
    edits = {
        "right": plain,
        "replaced": [*plain[:20], 5, *plain[21:]],
        "left out": [*plain[:20], *plain[21:]],
        "added": [*plain[:20], 5, *plain[20:]],
    }
    for name, prediction in edits.items():
        tokens, outcomes = answer(with_text_drafts(base, *names), prediction)
        assert tokens == plain, name
        assert len(outcomes) <= len(steps) / 2.5, name
        foreseen = sum(outcome.num_predicted for outcome in outcomes)
        assert foreseen == 60 if name == "right" else 45 <= foreseen < 60, name
        for outcome in outcomes:
            num_from_text = sum(part.num_accepted for part in outcome.text_draft_counts)
            assert num_from_text <= outcome.num_accepted <= outcome.draft_length


def test_useless_prediction_stops_drafting() -> None:
    plain, steps = answer(BV_RACE)
    tokens, outcomes = answer(with_text_drafts(BV_RACE, "model", "prediction"), tiny.prompts(101, [60], seed=9)[0])
    assert tokens == plain
    assert len(outcomes) <= len(steps) + 1
    assert sum(outcome.num_nodes for outcome in outcomes) <= sum(outcome.num_nodes for outcome in steps) + 10


def test_tokens_of_a_prediction_are_not_taken_for_the_draft_models() -> None:
    """Else one client's predictions would make everybody's chains too long."""
    plain, _ = answer(BV_RACE)
    adaptive = msgspec.structs.replace(BV_RACE, adaptive=True)
    seen = {}
    for names in (("model",), ("model", "prediction")):
        engine = build()
        engine.scheduler.times = times = StepTimes(Machine(row_s=1e-6).prices())
        engine.scheduler.controller = controller = Controller(times, 5)
        one = tiny.request("x", PROMPT_TOKENS, with_text_drafts(adaptive, *names), 60)
        predicted = tuple(plain) if "prediction" in names else ()
        with calls_of(controller, "observe") as observed:
            run = tiny.run(engine, [msgspec.structs.replace(one, prediction=predicted)])
        taken = [sum(part.num_accepted for part in outcome.text_draft_counts) for outcome in run.outcomes["x"]]
        assert len(observed) <= taken.count(0)
        seen[names] = len(observed)
    assert seen["model",] > 5
    assert seen["model", "prediction"] < seen["model",]


def test_prompt_lookup_drafts_from_the_text() -> None:
    """With two tokens to say a text repeats itself, which the lookup finds."""
    plain, steps = answer(Speculation(), allowed_token_ids=(5, 6))
    tokens, outcomes = answer(Speculation(drafters=("prompt_lookup",)), allowed_token_ids=(5, 6))
    assert tokens == plain
    assert len(outcomes) < len(steps)
    assert {part.name for outcome in outcomes for part in outcome.text_draft_counts} == {"prompt_lookup"}


@pytest.mark.slow
def test_text_drafts_with_others_and_after_preemption() -> None:
    """The answer of a request depends neither on other requests nor on losing its blocks."""
    prompts = tiny.prompts(101, [40, 41, 42, 40])
    wishes = [
        msgspec.structs.replace(
            tiny.request(str(n), prompt, with_text_drafts(BV_RACE, *ALL), 80, temperature=1.0, seed=n),
            prediction=tuple(prompt[:30]),
        )
        for n, prompt in enumerate(prompts)
    ]
    plain = tiny.request("plain", prompts[0], tiny.OFF, 80, temperature=1.0)
    alone = [tiny.run(build(), [one]).tokens[one.request_id] for one in [*wishes, plain]]
    tight = tiny.run(build(num_blocks=26, max_model_len=128), [*wishes, plain])
    assert tight.num_preemptions, "the pool was not tight"
    assert [tight.tokens[one.request_id] for one in [*wishes, plain]] == alone


@pytest.mark.sampled
@pytest.mark.parametrize("names", [("prompt_lookup", "earlier_answers"), (*ALL, "earlier_answers")])
def test_text_draft_trees_under_preemption_equal_plain_decoding(names: tuple[str, ...]) -> None:
    """Requests lose their blocks, and draft from the answers of others."""
    shape = BV_RACE if "model" in names else Speculation()
    adaptive = msgspec.structs.replace(shape, drafters=names, adaptive=True)
    prompts = [*tiny.prompts(101, [40, 41, 42]), (7, 8) * 20] * 3
    wishes = [tiny.request(str(n), prompt, adaptive, 60) for n, prompt in enumerate(prompts)]
    plain = [msgspec.structs.replace(one, speculation=tiny.OFF) for one in wishes]
    engine = build(num_blocks=22, max_model_len=104, max_copied_tokens=8)
    engine.scheduler.times = times = StepTimes(FREE.prices())
    engine.scheduler.controller = Controller(times, 5)
    run = tiny.run(engine, wishes)
    assert run.num_preemptions, "the pool was not tight"
    found = {part.name for steps in run.outcomes.values() for step in steps for part in step.text_draft_counts}
    assert found == set(names) - {"model", "prediction"}
    assert run.tokens == tiny.run(build(), plain).tokens


@pytest.mark.parametrize(
    ("request_fields", "words"),
    [
        ({"speculation": Speculation(drafters=("model", "oracle"))}, "unknown drafter"),
        ({"speculation": BV_RACE, "prediction": (1,)}, "leave the prediction out"),
        ({"speculation": with_text_drafts(BV_RACE, "prediction"), "prediction": (1,) * 200}, "context"),
        ({"speculation": with_text_drafts(BV_RACE, "prediction"), "prediction": (101,)}, "outside the vocabulary"),
        ({"speculation": drafts("spectr_gbv", 2, drafters=ALL)}, "would be biased with prompt lookup"),
    ],
)
def test_text_drafts_that_cannot_be_used_are_refused(request_fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        build().submit(Request(request_id="x", prompt_token_ids=(1, 2), **request_fields))


def test_text_drafts_can_be_disabled() -> None:
    with pytest.raises(RequestError, match="switched"):
        build(max_copied_tokens=0).submit(tiny.request("x", (1, 2), with_text_drafts(BV_RACE, *ALL)))
