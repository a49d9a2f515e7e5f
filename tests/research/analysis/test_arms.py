"""`analyze arms`: arms in turns on one pair of models, each with its own blocks."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tqdm import tqdm

from engine.errors import ConfigError
from engine.request import Request
from engine.start.measuring import measure_prices
from engine.step.engine import Engine, StepResult
from loadtest.arms import ADAPTIVE, AGAIN, OFF
from research.analysis.__main__ import main
from research.analysis.arms import (
    Arm,
    Durations,
    check_room,
    compared,
    make_arms,
    measure,
    same_greedy_answers,
    speculation_of,
)
from research.analysis.load import Load
from research.analysis.turns import (
    Turn,
    chart,
    markdown,
    price,
    ratio,
    works,
)
from tests.engine import tiny
from tests.server.tiny_models import write_pair

NAMES = [OFF, ADAPTIVE, AGAIN, "block:1x3", "bv_race:2.1"]


def engine_of(num_blocks: int = 320) -> Engine:
    target = tiny.llama(1)
    return tiny.build(target, tiny.perturbed(tiny.llama(1), 2, 0.02), num_blocks=num_blocks)


def answers_of(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    return {name: list(answer) for name, answer in tiny.run(engine, requests).tokens.items()}


def arms_of(engine: Engine, load: Load) -> dict[str, Arm]:
    return make_arms(engine, NAMES, measure_prices(engine, speculation_of(ADAPTIVE)), load)


@pytest.mark.slow
def test_arms_do_not_touch_each_others_blocks() -> None:
    """An arm answers as it does alone, whichever arms run in between.

    At temperature 0, so that all answers are equal.
    """
    load = Load([tuple(prompt) for prompt in tiny.prompts(101, [9, 30, 17])], 12, 0.0)
    arms = arms_of(engine_of(), load)
    told: dict[str, dict[str, list[int]]] = {name: {} for name in NAMES}
    for name, arm in arms.items():
        step = arm.engine.run_step

        def note(name: str = name, step: Callable[[], StepResult] = step) -> StepResult:
            result = step()
            for outcome in result.outcomes:
                told[name].setdefault(outcome.request_id, []).extend(outcome.token_ids)
            return result

        arm.engine.run_step = note  # type: ignore[method-assign]
    for turn in range(60):
        for arm in arms.values():
            arm.take_turn(3, 3.0 * turn, 0.5)
    alone = answers_of(engine_of(), list(itertools.islice(load.requests(speculation_of(OFF)), 4)))
    for name in NAMES:
        assert {number: told[name][number] for number in alone} == alone, name
        assert len(arms[name].turns) == 60
        # Up to the same point, but for the last step: three requests, of four tokens each.
        assert 177 <= arms[name].done.work(0.5) < 177 + 3 * 4 + 0.5 * (8 + 29 + 16), name
        assert sum(turn.work(0.5) for turn in arms[name].turns) == arms[name].done.work(0.5)
    assert set(arms[OFF].shapes) == {OFF}
    assert "1x3" in arms["block:1x3"].shapes
    assert arms["block:1x3"].num_passes < sum(turn.num_tokens for turn in arms["block:1x3"].turns)


@pytest.mark.slow
def test_steps_count_what_is_read_of_prompts() -> None:
    """All tokens but the last, which the answer follows, in chunks too; nothing that is drafted."""
    load = Load([tuple(prompt) for prompt in tiny.prompts(101, [9, 70, 17])], 12, 1.0)
    target = tiny.llama(1)
    engine = tiny.build(target, tiny.perturbed(tiny.llama(1), 2, 0.02), num_blocks=320, budget=48)
    for name, arm in arms_of(engine, load).items():
        requests = list(itertools.islice(arm.requests, 3))
        arm.answers(requests)
        assert sum(turn.num_read for turn in arm.turns) == 8 + 69 + 16, name
        assert sum(turn.num_tokens for turn in arm.turns) == sum(request.limits.max_tokens for request in requests)
        assert sum(turn.num_read > 0 for turn in arm.turns) > 1, name


def test_a_ratio_is_of_rates_and_its_interval_of_parts() -> None:
    """Turns of double the rate, on a machine whose speed drifts by a half for both."""
    speeds = [100] * 40 + [50] * 40
    other = works([Turn(1.0, speed) for speed in speeds], 0.0)
    one = works([Turn(2.0, 4 * speed) for speed in speeds], 0.0)
    assert ratio(one, other) == pytest.approx({"ratio": 2.0, "low": 2.0, "high": 2.0})
    drawn = random.Random(0)
    found = ratio(works([Turn(2.0, round(4 * speed * drawn.uniform(0.9, 1.1))) for speed in speeds], 0.0), other)
    assert 1.9 < found["low"] < found["ratio"] < found["high"] < 2.1


def test_turns_without_a_step_leave_fewer_parts() -> None:
    """One step in three turns, as prompts of a large model may take.

    No part is empty, and no bound lacks a value.
    """
    other = works([Turn(3.0, 0, 300), Turn(), Turn()] * 3, 0.1)
    one = works([Turn(2.0, 0, 300), Turn(), Turn()] * 3, 0.1)
    assert ratio(one, other) == pytest.approx({"ratio": 1.5, "low": 1.5, "high": 1.5})


def test_prompts_count_for_what_plain_decoding_takes() -> None:
    """An arm that gives tokens in half the time gains 4/3 where half of the time is prompts.

    Steps take 20 ms a token and 0.5 ms for a token of a prompt. An arm that has read one prompt
    more when time is up is not slower for it.
    """
    steps = [Turn(0.1, 0, 200), Turn(0.1, 5), Turn(0.045, 2, 10), Turn(0.05, 1, 60)]
    assert price(steps) == pytest.approx(0.025)
    off = [Turn(0.5, 0, 1000), Turn(0.5, 25)] * 40
    fast = [Turn(0.5, 0, 1000), Turn(0.25, 25)] * 40
    assert ratio(works(fast, 0.025), works(off, 0.025))["ratio"] == pytest.approx(4 / 3)
    begun = [*off, Turn(0.5, 0, 1000)]
    assert ratio(works(begun, 0.025), works(off, 0.025))["ratio"] == pytest.approx(1.0)
    assert ratio(works(begun, 0.0), works(off, 0.0))["ratio"] < 0.99


def test_what_prompts_take_may_not_be_seen() -> None:
    assert price([Turn(0.1, 5), Turn(0.1, 5)]) == 0.0
    assert price([Turn(0.1, 5, 10), Turn(0.2, 10, 20)]) == 0.0
    assert price([Turn(0.1, 5, 0), Turn(0.05, 5, 10)]) == 0.0


def test_the_best_fixed_shape_is_chosen_in_the_other_half() -> None:
    """Two shapes as good as adaptive, each lucky in one half.

    The luckier shape of each half would be 1.2 times as fast.
    """
    halves = {OFF: (50, 50), ADAPTIVE: (100, 100), "block:1x1": (120, 80), "block:1x3": (80, 120)}
    arms = {}
    for name, (first, second) in halves.items():
        arms[name] = Arm(engine_of(), iter(()), shapes={OFF: 1.0}, num_passes=1)
        arms[name].turns = [Turn(1.0, first)] * 20 + [Turn(1.0, second)] * 20
    found = compared(arms, 0.0)["adaptive_to_best_fixed"]
    assert found["arm"] == "block:1x3 / block:1x1"
    assert found["ratio"] == pytest.approx(100 / 80)
    assert found["after_the_fact"] == pytest.approx(1.0)


@pytest.mark.slow
def test_a_chart_is_drawn(tmp_path: Path) -> None:
    def arm(ratio: float) -> dict[str, object]:
        return {"tokens_per_second": 100 * ratio, "ratio_to_off": {"ratio": ratio, "low": ratio, "high": ratio}}

    rates = {OFF: 1.0, AGAIN: 1.0, "block:1x1": 1.3, "block:1x3": 1.5, "bv_race:2x5": 1.75, "bv_race:4x5": 1.25}
    arms = {name: arm(ratio) for name, ratio in rates.items()} | {ADAPTIVE: arm(2.0)}
    prompts = ("dialogues", "prose")
    result = {
        "cells": [{"prompts": name, "concurrency": number, "arms": arms} for name in prompts for number in (1, 4)]
    }
    chart(result, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_greedy_answers_of_a_wrong_engine_are_found_out() -> None:
    load = Load([tuple(prompt) for prompt in tiny.prompts(101, [9, 30, 17])], 12, 1.0)
    arms = arms_of(engine_of(), load)
    assert same_greedy_answers(arms, load, 3) == dict.fromkeys(NAMES[1:], True)
    arms["block:1x3"] = arms_of(tiny.build(tiny.llama(3), tiny.llama(2), num_blocks=320), load)["block:1x3"]
    assert same_greedy_answers(arms, load, 3) == dict.fromkeys(NAMES[1:], True) | {"block:1x3": False}


@pytest.mark.slow
def test_on_a_device_plain_decoding_alone_answers_greedily() -> None:
    """Other arms take time there, and in 16 bits their answers may differ."""
    load, engine = Load([tuple(prompt) for prompt in tiny.prompts(101, [9, 17])], 4, 1.0), engine_of()

    def on_device() -> dict[str, Arm]:
        arms = arms_of(engine, load)
        for arm in arms.values():
            arm.engine.works_meanwhile = True
        return {name: arms[name] for name in (OFF, "block:1x3")}

    found = measure(on_device, load, 1, Durations(0.1, 0.02, 0.01), tqdm(total=1, disable=True))
    assert found["greedy_answers_equal_off"] == {}
    assert found["arms"]["block:1x3"]["tokens_per_second"] > 0


def test_a_load_that_an_arms_blocks_do_not_hold_is_refused() -> None:
    """Texts of 60 + 18 tokens and 20 nodes take 13 blocks of 8; each of five arms has 64.

    A tree may be larger.
    """
    load = Load([tuple(range(60)), (1, 2)], 12, 1.0)
    facts = engine_of().facts
    check_room(facts, NAMES, load, 4)
    with pytest.raises(ConfigError, match="5 requests of up to 78 tokens need 65 cache blocks and an arm has 64"):
        check_room(facts, NAMES, load, 5)
    with pytest.raises(ConfigError, match="4 requests of up to 78 tokens need 72"):
        check_room(facts, [*NAMES[1:], "traversal:2.2.2.2.2"], load, 4)
    with pytest.raises(ConfigError, match="texts of up to 138 tokens, and the models take 128"):
        check_room(facts, NAMES, Load([tuple(range(120))], 12, 1.0), 1)


@pytest.mark.slow
def test_the_arms_command_writes_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = write_pair(tmp_path)
    words = ["arms", "--target", str(pair.target), "--draft", str(pair.draft), "--seconds", "0.2", "--tokens", "4"]
    words += ["--turn", "0.01", "--warm-up", "0.02"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in ("Once upon a time", "Please")))
    words += ["--concurrency", "1,2", "--prompts", str(prompts), "--arms", "adaptive,again,block:1x2"]
    words += ["--output", str(tmp_path / "not" / "there" / "arms.json")]
    assert main(words) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert [(cell["prompts"], cell["concurrency"]) for cell in result["cells"]] == [("prompts", 1), ("prompts", 2)]
    for cell in result["cells"]:
        assert list(cell["arms"]) == [OFF, ADAPTIVE, AGAIN, "block:1x2"]
        assert all(arm["tokens_per_second"] > 0 for arm in cell["arms"].values())
        # On a busy machine an arm may only get steps with prompts, from which nothing can be
        # learned.
        assert all(arm["reported_speedup"] is None or arm["reported_speedup"] > 0 for arm in cell["arms"].values())
        assert set(cell["adaptive_to_best_fixed"]["arm"].split(" / ")) <= {OFF, "block:1x2"}
        assert set(cell["greedy_answers_equal_off"]) == {ADAPTIVE, AGAIN, "block:1x2"}
    assert markdown(result) in printed.err
    assert json.loads((tmp_path / "not" / "there" / "arms.json").read_text()) == result


def test_unknown_arms_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arms", "--arms", "adaptive,magic:1x3"]) == 2
    assert "magic" in capsys.readouterr().err


def test_too_little_time_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arms", "--seconds", "0.3"]) == 2
    assert "--seconds must be at least 2" in capsys.readouterr().err
