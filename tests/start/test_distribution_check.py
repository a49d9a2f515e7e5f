"""The self-check passes right rules, finds wrong ones, and says so with its exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import LoadError
from engine.request import Speculation
from engine.speculation.verification import RULES
from engine.start.distribution_check import check_distribution, check_power, make_prompt, run_to_end, short_check
from engine.step.engine import Engine
from research.analysis.__main__ import main
from tests.engine import tiny
from tests.engine.test_output_distribution import always_longest
from tests.wrong import wrong_rule


@pytest.fixture(scope="module")
def engine() -> Engine:
    target = tiny.llama(seed=31, vocabulary=40, layers=1, spread=0.4)
    return tiny.build(target, tiny.llama(seed=32, vocabulary=40, layers=1, spread=0.4))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A pair on disk that disagrees, as command line arguments."""
    words = []
    for name, seed in (("target", 31), ("draft", 32)):
        folder = tmp_path_factory.mktemp("pair") / name
        tiny.llama(seed=seed, vocabulary=40, layers=1, spread=0.4).model.save_pretrained(folder)
        words += [f"--{name}", str(folder)]
    return words


@pytest.fixture
def wrong_race() -> Iterator[None]:
    """The score race, chosen by length: it looks at the tokens it chooses between."""
    with wrong_rule("bv_race", always_longest):
        yield


RACE = Speculation(rule="bv_race", num_drafts=4, draft_length=2)


def test_checked_answers_are_those_of_served_requests() -> None:
    """A rule that changes later targets ignores the draft window, here too."""
    pair = [tiny.llama(seed=seed, vocabulary=40, layers=1, spread=0.4) for seed in (31, 32)]
    rule = Speculation(rule="greedy_block", num_drafts=1, draft_length=3)
    requests = [
        tiny.request(str(seed), [1, *range(3, 39)] * 2, rule, max_tokens=12, seed=seed, temperature=1.0)
        for seed in range(8)
    ]
    made = [tiny.build(*pair, draft_window=3) for _ in range(2)]
    checked = {name: answer.tokens for name, answer in run_to_end(made[0], requests).items()}
    assert checked == tiny.run(made[1], requests).tokens


@pytest.mark.sole("the check of distributions")
def test_a_right_rule_passes_and_a_biased_one_is_found(engine: Engine) -> None:
    prompt = make_prompt(engine, seed=1)
    check = check_distribution(engine, "bv_race", RACE, prompt, num_answers=1500, temperature=1.0)
    assert not check.rejected
    assert check.num_cells > 10
    assert check.detectable_bias < 0.15
    assert check_power(engine, prompt, num_answers=1500, temperature=1.0).rejected
    engine.scheduler.check_invariants()
    assert engine.scheduler.tables.target.num_used == 0


@pytest.mark.slow
def test_wrong_rule_fails_the_distribution_check(engine: Engine, wrong_race: None) -> None:
    prompt = make_prompt(engine, seed=1)
    assert check_distribution(engine, "wrong", RACE, prompt, num_answers=3000, temperature=1.0).rejected


@pytest.mark.slow
def test_the_check_at_start(engine: Engine) -> None:
    said: list[str] = []
    short_check(engine, RACE, said.append)
    assert "self-check passed" in said[-1]
    biased = Speculation(rule="token", num_drafts=1, draft_length=2, over_acceptance=0.5)
    with pytest.raises(LoadError, match="does not have the target's distribution"):
        short_check(engine, biased, said.append)


@pytest.mark.slow
def test_the_command_passes_right_rules(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selfcheck", *pair, "--answers", "300", "--rules", "block"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert {check["rule"] for check in found["checks"]} == {"block"}
    assert set(found["not_checked"]) == set(RULES) - {"block"}
    assert found["power"][0]["rejected"]
    assert "every rule passed" in printed.err


@pytest.mark.slow
def test_the_command_checks_every_rule(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selfcheck", *pair, "--answers", "300"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert {check["rule"] for check in found["checks"]} >= set(RULES) - {"ot_lp"}
    assert found["not_checked"] == ["ot_lp"]
    assert found["power"][0]["rejected"]
    assert "every rule passed" in printed.err


@pytest.mark.slow
def test_the_command_fails_on_a_wrong_rule(
    pair: list[str], wrong_race: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["selfcheck", *pair, "--answers", "2000", "--rules", "bv_race"]) == 1
    assert "FAILED: bv_race" in capsys.readouterr().err


def test_missing_models_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selfcheck", "--target", str(tmp_path / "none"), "--draft", str(tmp_path / "none")]) == 2
    assert main(["selfcheck", "--target", str(tmp_path)]) == 2
    assert "name both --target and --draft" in capsys.readouterr().err
