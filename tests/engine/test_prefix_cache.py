"""Shared K/V changes no answer, and never crosses salts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.request import Limits, Request, Sampling, Speculation
from engine.scheduling.outcome import read_logprobs
from engine.step.engine import Engine
from tests.engine import tiny
from tests.wrong import instead

SHAPES = {
    "off": tiny.OFF,
    "block": Speculation(rule="block", num_drafts=1, draft_length=4),
    "bv_race": Speculation(rule="bv_race", num_drafts=3, draft_length=3),
    "tree": Speculation(rule="traversal", num_drafts=4, draft_length=2, tree=(2, 2)),
}
TARGET = tiny.llama(seed=1)
DRAFT = tiny.perturbed(TARGET, seed=2, amount=0.05)
BLOCK = 8


def engine(**more: int) -> Engine:
    return tiny.build(TARGET, DRAFT, **{"block_size": BLOCK, "max_model_len": 256, **more})


def answer(
    machine: Engine, name: str, prompt: Sequence[int], speculation: Speculation, salt: str = "", max_tokens: int = 12
) -> tiny.Run:
    one = Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=Sampling(temperature=1.0, seed=3),
        limits=Limits(max_tokens=max_tokens),
        speculation=speculation,
        cache_salt=salt,
    )
    return tiny.run(machine, [one])


@pytest.mark.parametrize("first", SHAPES)
@pytest.mark.parametrize("second", SHAPES)
def test_answer_does_not_depend_on_who_computed_its_prompt(first: str, second: str) -> None:
    """Also where a plain request left no K/V of the draft model."""
    prompt = tiny.prompts(101, [45])[0]
    fresh = answer(engine(), "x", prompt, SHAPES[second])
    shared = engine()
    answer(shared, "w", [*prompt[:36], 5, 6, 7], SHAPES[first])
    again = answer(shared, "x", prompt, SHAPES[second])
    assert again.tokens == fresh.tokens
    assert again.outcomes["x"][0].num_cached == 32
    accepted = [sum(outcome.num_accepted for outcome in run.outcomes["x"]) for run in (fresh, again)]
    assert accepted[0] == accepted[1], "the draft model drafted something else"


def test_keys_that_forget_what_came_before_are_found_out() -> None:
    """The wrong variant: equal blocks after unequal texts."""
    first, second = tiny.prompts(101, [8, 8])
    tail = tiny.prompts(101, [20], seed=5)[0]
    fresh = answer(engine(), "x", second + tail, SHAPES["bv_race"])
    with instead("engine.scheduling.sequence", "next_key", lambda next_key, _, tokens: next_key(b"", tokens)):
        shared = engine()
        answer(shared, "v", second, SHAPES["bv_race"])
        answer(shared, "w", first + tail, SHAPES["bv_race"])
        assert answer(shared, "x", second + tail, SHAPES["bv_race"]).tokens != fresh.tokens


def test_requests_admitted_together_share_what_is_being_computed() -> None:
    """The choices of one call are admitted together: the prompt is computed once."""
    prompt = tiny.prompts(101, [100])[0]
    wishes = [
        Request(
            request_id=str(seed),
            prompt_token_ids=tuple(prompt),
            sampling=Sampling(temperature=1.0, seed=seed),
            limits=Limits(max_tokens=6),
            speculation=SHAPES["bv_race"],
        )
        for seed in range(4)
    ]
    machine = engine()
    together = tiny.run(machine, wishes)
    assert machine.scheduler.num_cache_hits == 3 * 96
    assert machine.scheduler.num_cache_queries == 4 * 100
    for one in wishes:
        assert tiny.run(engine(), [one]).tokens[one.request_id] == together.tokens[one.request_id]


def test_a_full_pool_evicts_and_preempts_and_answers_the_same() -> None:
    prompts = tiny.prompts(101, [40, 41, 42, 40])
    prompts[3] = prompts[0]
    wishes = [tiny.request(str(n), prompt, SHAPES["bv_race"], 50, temperature=1.0) for n, prompt in enumerate(prompts)]
    roomy = tiny.run(engine(), wishes).tokens
    machine = engine(num_blocks=19, max_model_len=128)
    for _ in range(3):
        tight = tiny.run(machine, wishes)
        assert tight.tokens == roomy
    assert tight.num_preemptions, "the pool was not tight"


def hits_of_a_conversation(speculation: Speculation) -> list[int]:
    """Cached tokens of each of 20 turns; answers are part of the next prompt."""
    machine = engine(num_blocks=200)
    text: list[int] = []
    hits = []
    for turn in range(20):
        text += tiny.prompts(101, [5], seed=turn)[0]
        run = answer(machine, str(turn), text, speculation, max_tokens=6)
        text += run.tokens[str(turn)]
        hits.append(run.outcomes[str(turn)][0].num_cached)
    return hits


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "off"])
def test_a_conversation_finds_as_much_with_speculation_as_without(shape: str) -> None:
    plain = hits_of_a_conversation(tiny.OFF)
    assert sum(plain) > 1500, "nearly all of each prompt"
    assert hits_of_a_conversation(SHAPES[shape]) == plain


def test_salts_and_prompt_logprobs() -> None:
    """Another salt finds nothing; prompts whose tokens are reported are computed whole."""
    prompt = tiny.prompts(101, [40])[0]
    machine = engine()
    answer(machine, "a", prompt, SHAPES["bv_race"], salt="mine")
    assert answer(machine, "b", prompt, SHAPES["bv_race"]).outcomes["b"][0].num_cached == 0
    assert answer(machine, "c", prompt, SHAPES["bv_race"], salt="mine").outcomes["c"][0].num_cached == 32
    reported = Request(request_id="d", prompt_token_ids=tuple(prompt), num_prompt_logprobs=0)
    outcome = tiny.run(machine, [reported]).outcomes["d"][0]
    assert outcome.num_cached == 0
    assert len(list(read_logprobs(outcome.prompt_logprobs))) == 39
