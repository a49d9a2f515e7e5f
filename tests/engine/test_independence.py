"""Answers are the same alone, in a crowd, in chunks and after preemption (float32)."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

import engine.step.verify as verifying
from engine.config import MODEL, PROMPT_LOOKUP, Weights
from engine.plan import LogitContext
from engine.request import Limits, Request, Sampling, Speculation
from engine.scheduling import rows
from engine.scheduling.sequence import Sequence
from engine.text_counts import TextCounts
from tests.engine import tiny
from tests.wrong import instead

RACE = Speculation(rule="bv_race", num_drafts=4, draft_length=5)


def crowd(count: int) -> list[Request]:
    """Requests that differ in prompt, seed, distribution, rule and length."""
    speculations = [
        RACE,
        Speculation(rule="block", num_drafts=1, draft_length=3),
        tiny.OFF,
        Speculation(rule="spectr_gbv", num_drafts=3, draft_length=4),
        Speculation(rule="traversal", num_drafts=4, draft_length=3, tree=(2, 1, 2)),
        Speculation(rule="greedy", num_drafts=4, draft_length=2),
        Speculation(rule="weighted_race", num_drafts=4, draft_length=2, tree=(1, 4)),
    ]
    texts = tiny.prompts(101, [3 + (7 * i) % 40 for i in range(count)], seed=9)
    requests = [
        tiny.request(
            str(i), text, speculations[i % 7], max_tokens=12 + i % 9, temperature=1.0, seed=i, top_p=1 - 0.1 * (i % 2)
        )
        for i, text in enumerate(texts)
    ]
    return [msgspec.structs.replace(one, priority=i % 3 - 1) for i, one in enumerate(requests)]


@pytest.fixture(scope="module")
def pair():  # type: ignore[no-untyped-def]
    target = tiny.llama(seed=5)
    return target, tiny.perturbed(target, seed=6, amount=0.05)


@pytest.mark.sole("seeded answers in a crowd")
def test_same_seed_same_tokens_alone_or_among_fifteen_others(pair) -> None:  # type: ignore[no-untyped-def]
    requests = crowd(16)
    together = tiny.run(tiny.build(*pair), requests)
    for one in requests:
        alone = tiny.run(tiny.build(*pair), [one])
        assert alone.tokens[one.request_id] == together.tokens[one.request_id]


@pytest.mark.slow
@pytest.mark.parametrize("crowding", [{"budget": 40}, {"num_blocks": 19}, {"max_num_seqs": 2}, {"block_size": 5}])
def test_limits_do_not_change_answers(pair, crowding) -> None:  # type: ignore[no-untyped-def]
    requests = crowd(16)
    free = tiny.run(tiny.build(*pair), requests)
    crowded = tiny.run(tiny.build(*pair, **crowding), requests)
    assert crowded.tokens == free.tokens
    if "num_blocks" in crowding:
        assert crowded.num_preemptions > 0


@pytest.mark.slow
def test_penalties_count_each_token_once(pair) -> None:  # type: ignore[no-untyped-def]
    """Counts that go on from step to step equal those of the whole text."""
    penalties = {"frequency_penalty": 1.1, "presence_penalty": 0.4, "repetition_penalty": 1.3}
    requests = [
        msgspec.structs.replace(one, sampling=msgspec.structs.replace(one.sampling, **penalties)) for one in crowd(16)
    ]
    grown = tiny.run(tiny.build(*pair, num_blocks=12, max_model_len=70), requests)
    assert grown.num_preemptions > 0

    def counted_from_the_start(text_of: Any, sequence: Sequence) -> LogitContext | None:
        return dataclasses.replace(text, counts=TextCounts(text.num_prompt)) if (text := text_of(sequence)) else None

    with instead(rows, "text_of", counted_from_the_start):
        assert tiny.run(tiny.build(*pair), requests).tokens == grown.tokens


def test_verifying_in_small_parts_changes_nothing(pair) -> None:  # type: ignore[no-untyped-def]
    requests = crowd(16)
    whole = tiny.run(tiny.build(*pair), requests)
    with instead(verifying, "verified_together", lambda right, *operands: right(*operands, most_bytes=1)):
        assert tiny.run(tiny.build(*pair), requests).tokens == whole.tokens


def test_at_temperature_0_several_drafts_accept_more(pair) -> None:  # type: ignore[no-untyped-def]
    """The children of a node are then the most likely tokens."""
    texts = tiny.prompts(101, [9] * 12, seed=4)
    runs = {}
    for name, speculation in {
        "off": tiny.OFF,
        "chain": Speculation(rule="block", num_drafts=1, draft_length=3),
        "chains": Speculation(rule="greedy", num_drafts=4, draft_length=3),
        "tree": Speculation(rule="traversal", num_drafts=16, draft_length=3, tree=(4, 2, 2)),
    }.items():
        engine = tiny.build(*pair, max_num_drafts=16)
        runs[name] = tiny.run(engine, [tiny.request(str(i), text, speculation) for i, text in enumerate(texts)])
        assert runs[name].tokens == runs["off"].tokens
    assert runs["tree"].num_accepted > runs["chains"].num_accepted > runs["chain"].num_accepted


@pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="a CPU's decoder sums a row in one order")
@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_logprobs_with_drafts_equal_plain_decoding(pair, weights: Weights) -> None:  # type: ignore[no-untyped-def]
    """To the bit, in trees and below text drafts, where rows of products are rounded, too."""
    texts = [
        (text * 4)[:length] for length, text in zip((50, 61, 64), tiny.prompts(101, [17] * 3, seed=4), strict=True)
    ]
    found = {}
    for name, speculation in {
        "off": tiny.OFF,
        "chains": Speculation(rule="greedy", num_drafts=4, draft_length=3),
        "tree": Speculation(rule="traversal", num_drafts=16, draft_length=3, tree=(4, 2, 2)),
        "text": Speculation(rule="block", num_drafts=1, draft_length=2, drafters=(MODEL, PROMPT_LOOKUP)),
    }.items():
        engine = tiny.build(*pair, max_num_drafts=16, weights=weights, max_copied_tokens=12)
        requests = [tiny.request(str(i), text, speculation, 20) for i, text in enumerate(texts)]
        ended = tiny.run(engine, [msgspec.structs.replace(one, num_logprobs=3) for one in requests])
        found[name] = {
            key: [one for outcome in outcomes for one in outcome.logprobs] for key, outcomes in ended.outcomes.items()
        }
        assert (ended.num_accepted > 10) is (name != "off")
        assert found[name] == found["off"]


def test_another_seed_gives_other_tokens(pair) -> None:  # type: ignore[no-untyped-def]
    text = tiny.prompts(101, [10])[0]
    requests = [tiny.request(str(s), text, RACE, temperature=1.0, seed=s) for s in range(8)]
    answers = tiny.run(tiny.build(*pair), requests).tokens.values()
    assert len({tuple(tokens) for tokens in answers}) == 8


@pytest.mark.slow
def test_stop_tokens_and_max_tokens_cut_an_accepted_run(pair) -> None:  # type: ignore[no-untyped-def]
    """A stop token is the last token; max_tokens cuts exactly; EOS can be ignored."""
    text = tiny.prompts(101, [10])[0]
    whole = tiny.run(tiny.build(*pair), [tiny.request("0", text, RACE, temperature=1.0, seed=3)]).tokens["0"]
    for at in range(len(whole)):
        stop = whole[at]
        request = Request(
            request_id="0",
            prompt_token_ids=tuple(text),
            sampling=Sampling(temperature=1.0, seed=3),
            limits=Limits(max_tokens=24, stop_token_ids=(stop,)),
            speculation=RACE,
        )
        result = tiny.run(tiny.build(*pair), [request])
        assert result.tokens["0"] == whole[: whole.index(stop) + 1]
        assert result.finish_reasons["0"] == "stop"
    for count in range(1, 9):
        result = tiny.run(tiny.build(*pair), [tiny.request("0", text, RACE, count, temperature=1.0, seed=3)])
        assert len(result.tokens["0"]) == count
        assert result.finish_reasons["0"] == "length"


def test_abort_frees_blocks_at_once(pair) -> None:  # type: ignore[no-untyped-def]
    engine = tiny.build(*pair)
    for one in crowd(6):
        engine.submit(one)
    engine.run_step()
    for name in range(6):
        assert engine.abort(str(name))
    assert engine.scheduler.tables.target.num_used == 0
    assert not engine.scheduler.has_work
    assert not engine.abort("0")
    engine.scheduler.check_invariants()
