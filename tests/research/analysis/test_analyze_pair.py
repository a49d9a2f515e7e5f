"""`analyze pair` on a tiny pair: all cells, a resumed run, plots, recommendations, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from research.analysis import pair as analysis
from research.analysis.__main__ import main
from research.analysis.report import recommend
from tests.grid import grid
from tests.server.tiny_models import TinyModels, write_pair
from tests.wrong import calls_of, instead

SHAPES = [("block", "1x4", 4), ("traversal", "2.2", 6), ("greedy", "1.3", 4), ("rrs_without_replacement/iid", "3x2", 6)]
"""Rules, their shapes, and the most nodes of a pass."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return write_pair(tmp_path_factory.mktemp("pair"))


def arguments(models: TinyModels, folder: Path) -> list[str]:
    prompts = folder / "prompts.jsonl"
    lines = [{"prompt": "Once upon a time"}, {"text": "The old man said"}, {"prompt": "Please"}]
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    pair = ["--target", str(models.target), "--draft", str(models.draft), "--prompts", str(prompts)]
    grid = ["--rules", "block,bv_race,rrs_without_replacement,weighted_race,nss", "--num-drafts", "1,3"]
    size = ["--tokens", "16", "--positions", "12", "--concurrency", "1,2", "--temperature", "0.7,1"]
    return ["pair", *pair, *grid, *size, "--draft-length", "3", "--output", str(folder / "out")]


@pytest.mark.slow
def test_a_whole_analysis(models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = arguments(models, tmp_path)
    assert main(words) == 0
    printed = capsys.readouterr()
    cells = json.loads(printed.out)["cells"]
    # Temperatures x (one chain for block, two counts for the others)
    assert len(cells) == 2 * (1 + 4 * 2)
    for cell in cells:
        assert 0 <= cell["acceptance"] <= 1
        if cell["rule"] in ("block", "bv_race", "weighted_race"):
            assert cell["gap"] >= -1e-9
        assert cell["low"] <= cell["tokens_per_pass"] <= cell["high"]
        assert set(cell["speedup"]) == {"1", "2"}
        assert (cell["expected_tokens_per_pass"] is not None) == (cell["rule"] in ("block", "bv_race"))
    assert "recommended" in printed.err
    assert "single-draft acceptance" in printed.err
    for name in ("acceptance.png", "tokens_per_pass.png", "speedup.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")

    # The same command again measures nothing: every cell is there.
    with calls_of(analysis, "usual_s") as measured:
        assert main(words) == 0
    assert not measured
    assert json.loads(capsys.readouterr().out)["cells"] == cells

    # Other settings do not mix with it.
    assert main([*words, "--tokens", "8"]) == 2
    assert "other settings" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("shapes", grid([SHAPES[2:], SHAPES], [SHAPES[2:]]))
def test_the_named_shapes_and_trees_are_measured(
    models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str], shapes: list[tuple[str, str, int]]
) -> None:
    words = ",".join(f"{rule}:{size}" for rule, size, _ in shapes)
    assert main([*arguments(models, tmp_path), "--shapes", words, "--temperature", "1"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["size"] for cell in cells] == [size for _, size, _ in shapes]
    assert all(cell["nodes_per_pass"] <= most for cell, (*_, most) in zip(cells, shapes, strict=True))


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_an_interrupted_analysis_goes_on(models: TinyModels, tmp_path: Path) -> None:
    words = arguments(models, tmp_path)
    with instead(analysis, "_measure_times", interrupted), pytest.raises(KeyboardInterrupt):
        main(words)
    saved = json.loads((tmp_path / "out" / "pair.json").read_text())
    assert len(saved["runs"]) == 18
    assert not saved["times"]
    with calls_of(analysis, "answers_of") as answered:
        assert main(words) == 0
    assert not answered


def test_recommendations_say_off_where_nothing_pays() -> None:
    def cell(rule: str, slow: float) -> dict:
        shape = {"rule": rule, "draft_method": "iid", "size": "2x4"}
        return {**shape, "speedup": {"1": 1.5, "64": slow}}

    lines = recommend([cell("bv_race", 0.8), cell("traversal", 0.7)], [1, 64])
    assert lines[0] == "c = 1: --spec-rule bv_race --num-drafts 2 --draft-length 4 (expected 1.50x)"
    assert lines[1].startswith("c = 64: --spec-rule off (the best, bv_race, would give 0.80x)")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--rules", "nonsense"], "unknown rule 'nonsense'"),
        (["--prompts", "no/such/file"], "nor a file that can be read"),
        (["--shapes", "bv_race:2.2"], "bv_race/iid/2.2: rule 'bv_race' would be biased"),
        (["--shapes", "bv_race"], "must look like"),
        (["--shapes", "nonsense:1x1"], "unknown rule 'nonsense'"),
    ],
)
def test_bad_arguments_are_refused(
    models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], fault: str
) -> None:
    assert main([*arguments(models, tmp_path), *words]) == 2
    assert fault in capsys.readouterr().err
