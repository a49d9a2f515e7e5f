"""`analyze shapes` predicts tokens a pass of every shape from the distributions along the target's
own text.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from research.analysis import shapes
from research.analysis.__main__ import main
from tests.server.tiny_models import write_pair


def test_passes_over_a_text_of_certain_acceptance() -> None:
    """Nothing accepted: a pass for each token. Two tokens always accepted: a pass for three."""
    assert shapes.expected_passes(np.zeros((9, 2))) == 9
    assert shapes.expected_passes(np.ones((9, 2))) == 3
    assert shapes.expected_passes(np.tile([0.5, 0.0], (1000, 1))) == pytest.approx(1000 / 1.5, abs=1)


def test_a_greedy_path_is_accepted_while_its_ranks_are_drafted() -> None:
    ranks = shapes.windows_of(np.array([0.0, 1.0, 0.0, 2.0]), np.inf)
    accepted = shapes.accepted_by_match(ranks, (1, 2, 1, 3))
    assert accepted.sum(1).tolist() == [4, 0, 1, 0]
    assert shapes.accepted_by_match(ranks, (1, 1, 1, 1)).sum(1).tolist() == [1, 0, 1, 0]


def test_kinds_of_trees() -> None:
    kinds = [shapes.kind_of(fanout) for fanout in ((1, 1), (4, 1), (1, 1, 3, 1), (2, 1, 2))]
    assert kinds == list(shapes.KINDS)
    assert {shapes.kind_of(fanout) for fanout in shapes.all_shapes()} == set(shapes.KINDS)
    assert len(shapes.all_shapes()) == len(set(shapes.all_shapes()))


def test_the_price_of_rows_decides_between_one_chain_and_several() -> None:
    tokens = {(1, 1, 1): 2.4, (4, 1, 1): 3.0}
    cheap, dear = (shapes.best_of_kinds(tokens, price, 0.05) for price in (0.0, 0.1))
    assert cheap["from the root"][1] > cheap["one chain"][1]
    assert dear["from the root"][1] < dear["one chain"][1]


@pytest.mark.slow
def test_a_pair_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair, file = write_pair(tmp_path), tmp_path / "shapes.json"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "the cat"}) + "\n")
    words = ["--target", str(pair.target), "--draft", str(pair.draft), "--prompts", str(prompts), "--tokens", "16"]
    assert main(["shapes", *words, "--row-costs", "0.01", "--output", str(file)]) == 0
    result = json.loads(file.read_text())
    assert [cell["temperature"] for cell in result["cells"]] == [1.0, 0.0]
    for cell in result["cells"]:
        assert set(cell["best"]) == set(shapes.KINDS)
    assert all(1 <= one["tokens_per_pass"] <= len(one["shape"]) + 1 for one in result["shapes"])
    assert shapes.markdown(result) in capsys.readouterr().err
