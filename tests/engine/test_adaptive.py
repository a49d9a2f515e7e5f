"""The distribution under a controller that changes shapes at every step."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import engine.step.verify as verifying
from engine.config import SpeculationConfig
from engine.control.controller import Controller
from engine.control.step_time import StepTimes
from engine.plan import Plan
from engine.request import Limits, Request, Sampling, Speculation
from engine.scheduling.request_checks import with_fixed_shape
from engine.scheduling.sequence import Sequence
from engine.start.loading import LoadedModel
from engine.step.engine import Engine
from tests.engine import tiny
from tests.engine.test_output_distribution import (
    ALPHA,
    NUM_TOKENS,
    PROMPT,
    SAMPLINGS,
    drafts,
    exact_distribution,
    g_test,
    pair,
    sample,
)
from tests.grid import grid
from tests.scheduling.machine import Machine
from tests.wrong import by_distributions, instead

__all__ = ["pair"]

TIMES = StepTimes(Machine().prices())


class Restless(Controller):
    """Another shape at every step, by last token and load; not all texts are read."""

    def __init__(self) -> None:
        super().__init__(TIMES, 16)
        self.num_steps = self.num_emitting = 0
        self.pauses = False

    def choose(self, *asked: Any) -> None:
        super().choose(*asked)
        self.num_steps, self.num_emitting = self.num_steps + 1, len(asked[0])
        self.reads = self.num_steps % 3 > 0
        self.pauses = asked[2] and self.num_steps % 2 == 0

    def fanout(self, sequence: Sequence) -> tuple[int, ...]:
        most = sequence.request.speculation.num_drafts
        if self.pauses:
            return ()
        shapes = [(), (1, 1), (most, 1), (most,), (1,), (most, 1, 1)]
        return shapes[(sequence.tokens[-1] + len(sequence.tokens) + self.num_emitting) % len(shapes)]


def adaptive(rule: str, num_drafts: int) -> Speculation:
    return Speculation(rule=rule, num_drafts=num_drafts, draft_length=3, adaptive=True)


def sample_adaptively(
    models: tuple[LoadedModel, LoadedModel], speculation: Speculation, sampling: dict[str, Any], num_answers: int = 2000
) -> Counter[tuple[int, ...]]:
    engine = tiny.build(*models, max_model_len=32, max_draft_length=3, max_num_seqs=40, budget=400)
    engine.scheduler.controller = Restless()
    requests = [
        tiny.request(str(seed), PROMPT, speculation, max_tokens=NUM_TOKENS + 3, **{**sampling, "seed": seed})
        for seed in range(num_answers)
    ]
    answers = tiny.run(engine, requests, enough=NUM_TOKENS).tokens.values()
    return Counter(tuple(tokens[:NUM_TOKENS]) for tokens in answers)


@pytest.mark.sole("sampled answers whose shapes a controller changes")
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("rule", "num_drafts", "sampling"),
    grid(
        [
            ("bv_race", 3, "plain"),
            ("block", 1, "plain"),
            ("weighted_race", 2, "plain"),
            ("spechub", 2, "plain"),
            ("bv_race", 3, "filtered"),
        ],
        {("weighted_race", 2, "plain"), ("bv_race", 3, "filtered")},
    ),
)
def test_joint_distribution_of_three_tokens(
    pair: tuple[LoadedModel, LoadedModel], rule: str, num_drafts: int, sampling: str
) -> None:
    counts = sample_adaptively(pair, adaptive(rule, num_drafts), SAMPLINGS[sampling])
    assert g_test(counts, exact_distribution(pair[0], SAMPLINGS[sampling])) > ALPHA


@pytest.mark.sole("a choice of shapes that looks at drafts")
def test_a_choice_that_looks_at_the_drafts_is_rejected(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """The wrong variant: chains that begin with a certain token are not verified."""

    def anticipating(target_distributions: Any, rows: Any, draft: Any, logits_NV: Any) -> Any:
        if draft.layout.max_length:
            length_C = draft.chains.length_C.masked_fill(draft.chains.tokens_CL[:, 0] == 1, 0)
            object.__setattr__(draft, "chains", dataclasses.replace(draft.chains, length_C=length_C))
        return target_distributions(rows, draft, logits_NV)

    with by_distributions(), instead(verifying, "target_distributions", anticipating):
        counts = sample(pair, drafts("block", 1), SAMPLINGS["plain"], num_answers=4000)
    assert g_test(counts, exact_distribution(pair[0], SAMPLINGS["plain"])) < ALPHA


TARGET = tiny.llama(seed=1)
DRAFT = tiny.perturbed(TARGET, seed=2, amount=0.05)


def build(**more: Any) -> Engine:
    engine = tiny.build(TARGET, DRAFT, **more)
    engine.scheduler.controller = Restless()
    return engine


def wishes(count: int, **more: Any) -> list[Request]:
    lengths = [5 + 17 * (i % 4) for i in range(count)]
    return [
        Request(
            request_id=str(i),
            prompt_token_ids=tuple(prompt),
            sampling=Sampling(temperature=0.0 if i % 2 else 1.0, seed=i, seed_stable=True),
            limits=Limits(max_tokens=40),
            speculation=adaptive("bv_race", 3),
            **more,
        )
        for i, prompt in enumerate(tiny.prompts(101, lengths))
    ]


@pytest.mark.slow
def test_certain_answers_do_not_depend_on_the_shapes() -> None:
    """With chunked prompts, shared prefixes, preemption and neighbours."""
    plain = tiny.run(tiny.build(TARGET, None), [
        Request(request_id=one.request_id, prompt_token_ids=one.prompt_token_ids, sampling=one.sampling,
                limits=one.limits) for one in wishes(8)
    ])  # fmt: skip
    roomy = tiny.run(build(), wishes(8))
    tight = build(budget=40, num_blocks=25, max_model_len=128)
    assert roomy.tokens == plain.tokens
    for _ in range(2):
        run = tiny.run(tight, wishes(8))
        assert run.tokens == plain.tokens
    assert run.num_preemptions, "the pool was not tight"
    assert len({(outcome.num_chains, outcome.draft_length) for outcome in chain(*roomy.outcomes.values())}) >= 5


@pytest.mark.slow
def test_a_seed_gives_the_same_answer_alone_in_a_crowd_and_after_preemption() -> None:
    """The wrong variant leaves the shape to the controller."""

    def asked(keeps_shape: bool) -> list[Request]:
        limits = SpeculationConfig(seed_shape=(1, 3) if keeps_shape else None)
        requests = []
        for one in wishes(12):
            sampling = replace(one.sampling, temperature=1.0, seed_stable=False)
            seeded = int(one.request_id) % 2 == 0
            shape = with_fixed_shape(one.speculation, limits, "cpu") if seeded and keeps_shape else one.speculation
            requests.append(replace(one, sampling=sampling, speculation=shape))
        return requests

    def answers(keeps_shape: bool, **more: Any) -> tuple[list[list[int]], int]:
        found = tiny.run(build(**more), asked(keeps_shape))
        return [tokens for name, tokens in found.tokens.items() if int(name) % 2 == 0], found.num_preemptions

    alone = [tiny.run(build(), [one]).tokens[one.request_id] for one in asked(True)[::2]]
    assert answers(True)[0] == alone
    tight, num_preemptions = answers(True, budget=40, num_blocks=25, max_model_len=128)
    assert num_preemptions, "the pool was not tight"
    assert tight == alone
    assert answers(False)[0] != [tiny.run(build(), [one]).tokens[one.request_id] for one in asked(False)[::2]]


def test_drafts_after_plain_steps_are_accepted_as_before() -> None:
    """The drafts are those of a model that has read everything."""

    class Late(Restless):
        def fanout(self, sequence: Sequence) -> tuple[int, ...]:
            return (1, 1, 1) if sequence.num_emitted >= 20 else ()

    def accepted(controller: Controller | None) -> int:
        engine = tiny.build(TARGET, DRAFT)
        engine.scheduler.controller = controller
        outcomes = chain(*tiny.run(engine, wishes(8)).outcomes.values())
        return sum(outcome.num_accepted for outcome in outcomes)

    late, whole = accepted(Late()), accepted(None)
    assert 0.3 < late / whole < 0.8


def test_unread_prompts_are_read_in_pieces_before_anything_is_drafted() -> None:
    """Every draft of a model that is the target is accepted once it has read all.

    The wrong variant reads on as if it had read the rest.
    """

    class Told(Controller):
        num_steps = 0

        def choose(self, *_: Any) -> None:
            self.num_steps += 1
            self.reads = self.num_steps > 12

        def fanout(self, sequence: Sequence) -> tuple[int, ...]:
            return (1, 1, 1) if self.reads else ()

    def run(begins: Any) -> list[bool]:
        engine = tiny.build(TARGET, TARGET, budget=64)
        engine.scheduler.controller = Told(TIMES, 16)
        requests = [tiny.request(str(n), range(5, 5 + n), adaptive("block", 1), 80) for n in (12, 33)]
        with instead(Sequence, "next_draft_read", begins):
            found = tiny.run(engine, requests)
        plain = tiny.run(tiny.build(TARGET, None), [replace(one, speculation=tiny.OFF) for one in requests])
        assert found.tokens == plain.tokens
        drafting = [outcome for outcome in chain(*found.outcomes.values()) if outcome.draft_length]
        # The last step of an answer emits no more than was asked for.
        return [one.num_accepted == one.draft_length for one in drafting if one.finish_reason is None]

    right, wrong = run(lambda next_draft_read, one: next_draft_read(one)), run(lambda _, one: one.num_target_computed)
    assert len(right) > 20
    assert all(right)
    assert not all(wrong)


def test_the_controller_of_a_running_engine_learns(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """With free nodes it drafts, with dear ones it stops."""
    for node_s, drafts_much in ((1e-6, True), (0.5, False)):
        engine = tiny.build(TARGET, DRAFT)
        # Without `scheduler.times` no step is measured.
        engine.scheduler.controller = Controller(StepTimes(Machine(row_s=node_s).prices()), 5)
        outcomes = chain(*tiny.run(engine, wishes(4)).outcomes.values())
        share = np.mean([outcome.draft_length > 0 for outcome in outcomes])
        assert (share > 0.8) if drafts_much else (share < 0.2)


def test_without_a_controller_requests_draft_their_maximum() -> None:
    engine = tiny.build(TARGET, DRAFT)
    engine.submit(wishes(1)[0])
    plan: Plan = engine.scheduler.plan()
    assert plan.rows[0].fanout == (3, 1, 1)
