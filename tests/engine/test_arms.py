"""`analyze arms`: arms in turns on one pair of models, each with its own blocks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine.analysis import arms as module
from engine.analysis.__main__ import main
from engine.analysis.arms import (
    Arm,
    Load,
    check_room,
    compared,
    make_arms,
    same_greedy_answers,
    speculation_of,
)
from engine.analysis.turns import ADAPTIVE, AGAIN, OFF, markdown, ratio, reported_markdown
from engine.calibration import measure_costs, measure_plain
from engine.engine import Engine, StepResult
from engine.errors import ConfigError
from engine.request import Request
from tests.engine import tiny
from tests.server.tiny_models import write_pair

NAMES = [OFF, ADAPTIVE, AGAIN, "block:1x3", "bv_race:2.1"]


def engine_of(num_blocks: int = 320) -> Engine:
    target = tiny.llama(1)
    return tiny.build(target, tiny.perturbed(tiny.llama(1), 2, 0.02), num_blocks=num_blocks)


def answers_of(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    return {name: list(answer) for name, answer in tiny.run(engine, requests).tokens.items()}


def test_arms_do_not_touch_each_others_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs in between, an arm answers what it answers alone: greedy answers, so that all arms say the same."""
    monkeypatch.setattr(module, "_TURN_S", 1e-9)  # one step a turn
    load = Load([tuple(prompt) for prompt in tiny.prompts(101, [9, 30, 17])], 12, 0.0)
    engine = engine_of()
    costs = measure_costs(engine, speculation_of(ADAPTIVE), measure_plain(engine))
    arms = make_arms(engine, NAMES, costs, load)
    told: dict[str, dict[str, list[int]]] = {name: {} for name in NAMES}
    for name, arm in arms.items():
        step = arm.engine.run_step

        def note(name: str = name, step: Callable[[], StepResult] = step) -> StepResult:
            result = step()
            for outcome in result.outcomes:
                told[name].setdefault(outcome.request_id, []).extend(outcome.token_ids)
            return result

        arm.engine.run_step = note  # type: ignore[method-assign]
    for _ in range(60):
        for arm in arms.values():
            arm.take_turn(3)
    alone = answers_of(engine_of(), list(itertools.islice(load.requests(speculation_of(OFF)), 4)))
    for name in NAMES:
        assert {number: told[name][number] for number in alone} == alone, name
        assert len(arms[name].turns) == 60
    assert set(arms[OFF].shapes) == {OFF}
    assert "1x3" in arms["block:1x3"].shapes
    assert arms["block:1x3"].num_passes < sum(tokens for _, tokens in arms["block:1x3"].turns)


def test_a_ratio_is_of_rates_and_its_interval_of_parts() -> None:
    """Turns of double the rate, on a machine whose speed drifts by a half for both."""
    speed = np.repeat([1.0, 0.5], 40)
    other = np.stack([np.ones(80), 100 * speed], axis=1)
    one = np.stack([2 * np.ones(80), 400 * speed], axis=1)
    assert ratio(one, other) == pytest.approx({"ratio": 2.0, "low": 2.0, "high": 2.0})
    noisy = one * np.stack([np.ones(80), np.random.default_rng(0).uniform(0.9, 1.1, 80)], axis=1)
    found = ratio(noisy, other)
    assert 1.9 < found["low"] < found["ratio"] < found["high"] < 2.1


def test_the_best_fixed_shape_is_chosen_in_the_other_half() -> None:
    """Two shapes as good as adaptive, each lucky in one half: the luckier of each half would be 1.2 times as fast."""
    halves = {OFF: (50, 50), ADAPTIVE: (100, 100), "block:1x1": (120, 80), "block:1x3": (80, 120)}
    arms = {}
    for name, (first, second) in halves.items():
        arms[name] = Arm(engine_of(), iter(()), [(1.0, first)] * 20 + [(1.0, second)] * 20, {OFF: 1.0}, 1)
    found = compared(arms)["adaptive_to_best_fixed"]
    assert found["arm"] == "block:1x3 / block:1x1"
    assert found["ratio"] == pytest.approx(100 / 80)
    assert found["after_the_fact"] == pytest.approx(1.0)


def test_greedy_answers_of_a_wrong_engine_are_found_out() -> None:
    load = Load([tuple(prompt) for prompt in tiny.prompts(101, [9, 30, 17])], 12, 1.0)
    engine = engine_of()
    arms = make_arms(engine, NAMES, measure_costs(engine, speculation_of(ADAPTIVE), measure_plain(engine)), load)
    assert same_greedy_answers(arms, load, 3) == dict.fromkeys(NAMES[1:], True)
    arms["block:1x3"].engine.target = tiny.build(tiny.llama(3), tiny.llama(2), num_blocks=320).target
    assert same_greedy_answers(arms, load, 3) == dict.fromkeys(NAMES[1:], True) | {"block:1x3": False}


def test_a_load_that_an_arms_blocks_do_not_hold_is_refused() -> None:
    """Texts of 60 + 18 tokens and 20 nodes take 13 blocks of 8; each of five arms has 64. A tree may be larger."""
    load = Load([tuple(range(60)), (1, 2)], 12, 1.0)
    facts = engine_of().facts
    check_room(facts, NAMES, load, 4)
    with pytest.raises(ConfigError, match="5 requests of up to 78 tokens need 65 cache blocks and an arm has 64"):
        check_room(facts, NAMES, load, 5)
    with pytest.raises(ConfigError, match="4 requests of up to 78 tokens need 72"):
        check_room(facts, [*NAMES[1:], "traversal:2.2.2.2.2"], load, 4)
    with pytest.raises(ConfigError, match="texts of up to 138 tokens, and the models take 128"):
        check_room(facts, NAMES, Load([tuple(range(120))], 12, 1.0), 1)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TURN_S", 0.01)
    monkeypatch.setattr(module, "_WARM_UP_S", 0.02)
    pair = write_pair(tmp_path)
    words = ["arms", "--target", str(pair.target), "--draft", str(pair.draft), "--seconds", "0.2", "--tokens", "4"]
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
        assert all(arm["reported_speedup"] > 0 for arm in cell["arms"].values())
        assert set(cell["adaptive_to_best_fixed"]["arm"].split(" / ")) <= {OFF, "block:1x2"}
        assert set(cell["greedy_answers_equal_off"]) == {ADAPTIVE, AGAIN, "block:1x2"}
    assert markdown(result) in printed.err
    assert len(reported_markdown(result).splitlines()) == 4
    assert json.loads((tmp_path / "not" / "there" / "arms.json").read_text()) == result


def test_unknown_arms_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arms", "--arms", "adaptive,magic:1x3"]) == 2
    assert "magic" in capsys.readouterr().err


def test_too_little_time_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arms", "--seconds", "0.3"]) == 2
    assert "--seconds must be at least 2" in capsys.readouterr().err
