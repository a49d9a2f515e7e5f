"""Analysis of a pair with a head: its probabilities along a text, and the exactness of served answers."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from analysis.draft_logits import draft_logits
from analysis.pair import laws_along
from engine.request import Speculation
from engine.speculation.verification import RULES, Rule
from engine.step.law_check import check_law, check_power, make_prompt, short_check
from tests.engine import test_output_law as output_law
from tests.engine import tiny
from tests.heads import folders, oracles

RACE = Speculation(rule="bv_race", num_drafts=3, draft_length=2)


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_probabilities_along_a_text_are_those_of_the_first_drafted_token(tmp_path: Path, kind: str) -> None:
    target = folders.target()
    if kind == "eagle3":
        written = folders.write_eagle(tmp_path / "head")
        oracle: oracles.Eagle | oracles.Block = oracles.Eagle(written, target)
    else:
        written = folders.write_block(tmp_path / "head")
        oracle = oracles.Block(written, target)
    engine = tiny.build(target, folders.load(written, target))
    text = tiny.prompts(97, [30])[0]
    target_NV, draft_NV = laws_along(engine, tuple(text[:20]), text[20:], 1.0)
    assert target_NV.shape == draft_NV.shape == (10, 97)
    states = oracles.target_states(target, text, written.taps)
    found_NV = draft_logits(engine, text[:-1], 19)
    for number, index in enumerate(range(20, 30)):
        expected_V = oracle.logits(text[:index], states, ())
        assert oracles.largest_error([(found_NV[number], expected_V)]) < 1e-3
        assert torch.allclose(draft_NV[number], expected_V.softmax(-1), atol=1e-4)


def test_the_self_check_passes_with_a_head_and_finds_a_wrong_rule(tmp_path: Path) -> None:
    target = folders.target(spread=0.2)
    head = folders.load(folders.write_eagle(tmp_path / "head", draft_vocabulary=97, scale=0.3), target)
    engine = tiny.build(target, head, max_over_acceptance=0.5)
    lines: list[str] = []
    short_check(engine, RACE, lines.append)
    assert "passed" in lines[-1]
    prompt = make_prompt(engine, seed=1)
    assert check_power(engine, prompt, 2000, 1.0).rejected
    wrong = {**RULES, "bv_race": Rule("bv_race", output_law.always_longest, RULES["bv_race"].acceptance)}
    with patch("engine.step.parts.RULES", wrong), patch("engine.step.verify._are_plain", lambda *_: False):
        assert check_law(engine, "wrong", RACE, prompt, 4000, 1.0).rejected
