"""`analyze drafters`: arms of several drafters of one target."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from engine.request import Speculation
from engine.start.measuring import measure_prices
from loadtest.arms import ADAPTIVE, OFF
from research.analysis.__main__ import main
from research.analysis.arms import speculation_of
from research.analysis.drafters import arms_of, markdown
from research.analysis.load import Load, add_load_arguments
from tests.engine import tiny
from tests.heads import folders
from tests.server.tiny_models import write_pair


@pytest.mark.slow
def test_each_drafter_has_its_own_arms_and_counts_its_drafts(tmp_path: Path) -> None:
    target = folders.target()
    head = folders.load(folders.write_eagle(tmp_path / "head", draft_vocabulary=97), target)
    small = tiny.perturbed(tiny.llama(31, vocabulary=97, layers=4), 2, 0.02)
    engines = {"small": tiny.build(target, small, num_blocks=240), "head": tiny.build(target, head, num_blocks=240)}
    load = Load([tuple(prompt) for prompt in tiny.prompts(97, [9, 12])], 12, 1.0)
    prices = measure_prices(engines["small"], speculation_of(ADAPTIVE))
    found = arms_of(engines, prices, ["block:1x3"], load)
    assert list(found) == [OFF, "small block:1x3", "head off", "head block:1x3"]
    for name, arm in found.items():
        for _ in range(20):
            arm.turns.append(arm.step(2))
        drafts = name.endswith("block:1x3")
        assert (arm.num_drafting > 0) == drafts
        assert arm.num_accepted <= 3 * arm.num_drafting
        assert 0 <= arm.draft_s < sum(turn.seconds for turn in arm.turns)
    drafted_by_small = found["small block:1x3"]
    # Every pass emits its accepted drafts and one token more.
    assert sum(turn.num_tokens for turn in drafted_by_small.turns) <= (
        drafted_by_small.num_accepted + drafted_by_small.num_passes
    )
    assert drafted_by_small.num_accepted > 0


def test_requests_of_all_arms_have_the_temperature_and_the_filters() -> None:
    parser = argparse.ArgumentParser()
    add_load_arguments(parser, num_tokens=6)
    options = parser.parse_args(["--temperature", "0.6", "--top-k", "20", "--top-p", "0.95"])
    sampling = next(Load.of([(1, 2)], options).requests(Speculation())).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.95)


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = write_pair(tmp_path)
    words = ["drafters", "--target", str(pair.target), "--drafter", f"small={pair.draft}", "--seconds", "0.2"]
    words += ["--turn", "0.01", "--warm-up", "0.02"]
    assert main([*words, "--concurrency", "1", "--tokens", "4", "--shapes", "block:1x2"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert list(result["cells"][0]["arms"]) == [OFF, "small block:1x2"]
    assert markdown(result) in printed.err


def test_a_drafter_without_a_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drafters", "--drafter", "small"]) == 2
    assert "NAME=FOLDER" in capsys.readouterr().err
