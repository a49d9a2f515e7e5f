"""Analysis of a pair with a head: probabilities, and exactness of answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.request import Speculation
from engine.start.distribution_check import check_distribution, check_power, make_prompt, short_check
from research.analysis.__main__ import main
from research.analysis.draft_logits import draft_logits
from research.analysis.pair import laws_along
from research.demo.bench_pair import write_tokenizer
from tests.engine import test_output_distribution as output_distribution
from tests.engine import tiny
from tests.heads import folders, oracles
from tests.wrong import wrong_rule

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


@pytest.mark.slow
def test_the_self_check_passes_with_a_head_and_finds_a_wrong_rule(tmp_path: Path) -> None:
    target = folders.target(spread=0.2)
    head = folders.load(folders.write_eagle(tmp_path / "head", draft_vocabulary=97, scale=0.3), target)
    engine = tiny.build(target, head, max_over_acceptance=0.5)
    lines: list[str] = []
    short_check(engine, RACE, lines.append)
    assert "passed" in lines[-1]
    prompt = make_prompt(engine, seed=1)
    assert check_power(engine, prompt, 2000, 1.0).rejected
    with wrong_rule("bv_race", output_distribution.always_longest):
        assert check_distribution(engine, "wrong", RACE, prompt, 2000, 1.0).rejected


@pytest.mark.slow
def test_the_self_check_finds_a_rule_that_needs_more_than_a_head_meets(tmp_path: Path) -> None:
    """Requests with these rules are refused; the check does not ask."""
    target = folders.target(vocabulary=4)
    with torch.no_grad():
        target.model.lm_head.weight.mul_(0.3)
    written = folders.write_eagle(tmp_path / "head", vocabulary=4, draft_vocabulary=4, kind="peagle", scale=0.5)
    engine = tiny.build(target, folders.load(written, target), max_num_seqs=128)
    chain = Speculation(rule="greedy_block", num_drafts=1, draft_length=3)
    prompt = (1, 3, 0, 2, 2)
    assert check_distribution(engine, "greedy_block", chain, prompt, 3000, 1.0).rejected
    assert not check_distribution(engine, "two tokens", chain, prompt, 2000, 1.0, max_tokens=2).rejected
    right = Speculation(rule="block", num_drafts=1, draft_length=3)
    assert not check_distribution(engine, "block", right, prompt, 2000, 1.0).rejected


@pytest.mark.slow
def test_a_pair_with_a_head_is_analysed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One-token drafts are accepted as along the target's texts."""
    target, head, prompts = (tmp_path / name for name in ("target", "head", "prompts.jsonl"))
    folders.target(spread=0.2).model.save_pretrained(target)
    write_tokenizer(target, 97)
    folders.write_eagle(head, draft_vocabulary=41, scale=0.3)
    texts = [" ".join(f"w{(5 * number + 3 * place) % 97}" for place in range(9)) for number in range(12)]
    prompts.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    words = ["pair", "--target", str(target), "--draft", str(head), "--device", "cpu", "--prompts", str(prompts)]
    words += ["--tokens", "60", "--positions", "720", "--shapes", "token:1x1,bv_race:2x2", "--concurrency", "1"]
    assert main([*words, "--output", str(tmp_path / "out")]) == 0
    single, several = json.loads(capsys.readouterr().out)["cells"]
    assert single["low"] < 1 + single["nodes_per_pass"] * single["acceptance"] < single["high"]
    assert 0.2 < single["acceptance"] < 0.9
    assert single["acceptance"] < several["acceptance"]
    assert single["expected_tokens_per_pass"] is several["expected_tokens_per_pass"] is None
