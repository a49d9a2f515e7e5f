"""`analyze papers` on a tiny pair: every section, the page, and the numbers behind it."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import ConfigError
from engine.request import Speculation
from research.analysis.pair import answers_of
from research.analysis.papers import blocks, cases, lengths, optimal, races, run, theoretical
from research.analysis.papers.grid import TASKS, BlocksGrid, Grids, OptimalGrid, RacesGrid, TheoreticalGrid
from tests.engine import tiny
from tests.oracles import bounds
from tests.server.tiny_models import TinyModels, write_pair
from tests.wrong import instead


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return write_pair(tmp_path_factory.mktemp("pair"))


SMALL = Grids(
    OptimalGrid(temperatures=(0.4, 1.0), drafts=(2, 3), vocabularies=(500,)),
    BlocksGrid(("alpaca",), temperatures=(1.0,), lengths=(8,), chains=(3,), checked=60),
    TheoreticalGrid(epsilons=(0.2,), batches=(1, 2), lookaheads=(4,), runs=500),
    RacesGrid(
        temperatures=(1.0,),
        shapes=("block:1x4", "bv_race:2x2"),
        block_shapes=(("block:1x4", "block"), ("bv_race:2x2", "block"), ("block:1x12", "block")),
        second_pair=("tiny", "tiny", 256, 0.65, 128),
    ),
)
"""The fewest cells that a page can show."""


@pytest.mark.slow
def test_the_command_writes_all_and_goes_on_where_it_was(models: TinyModels, tmp_path: Path) -> None:
    def files(*words: str) -> list[str]:
        found: list[str] = run.analyze(run_options(models, "--output", str(tmp_path), *words), SMALL)["files"]
        return found

    first = tmp_path / "papers-optimal.json"
    assert files("--only", "optimal", "--only", "theoretical") == [
        str(first),
        str(tmp_path / "papers-theoretical.json"),
    ]
    written = first.stat().st_mtime_ns
    assert files() == [str(tmp_path / f"papers-{name}.json") for name in run.SECTIONS]
    assert first.stat().st_mtime_ns == written
    page = (tmp_path / "papers.md").read_text()
    for title in ("Towards Optimal", "SpecTr-GBV", "A Theoretical Perspective", "Beyond"):
        assert title in page
    for name in run.SECTIONS:
        assert (tmp_path / f"papers-{name}.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="other settings"):
        files("--tokens", "7")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["optimal", "theoretical"])
def test_progress_is_reported_once_for_each_piece(name: str, models: TinyModels) -> None:
    options, reported = run_options(models), list[str]()
    section = run.SECTIONS[name]
    section.measure(run.served_pair(options), SMALL, options, reported.append)
    assert len(reported) == section.pieces(SMALL)


def run_options(models: TinyModels, *words: str) -> argparse.Namespace:

    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    sizes = ["--prompts-per-task", "2", "--tokens", "6", "--positions", "4"]
    return parser.parse_args(["--target", str(models.target), "--draft", str(models.draft), *sizes, *words])


def test_findings_say_no_where_the_numbers_do() -> None:
    """Each finding is computed: with rows that contradict it, it does not hold."""

    def row(
        temperature: float, iid: float, without: float, greedy: float, off: float = 0.0, missed: float = 0.02
    ) -> dict[str, Any]:
        best = {"iid": iid, "without_replacement": without, "greedy": greedy}
        accepted = {f"{rule}/{method}": best[method] - missed for rule, method in optimal.RULES}
        accepted |= {"greedy/greedy": greedy - off, "weighted_race/iid": iid - off}
        return {"temperature": temperature, "drafts": 3, "alpha_star": best, "acceptance": accepted}

    as_told = [row(0.2, 0.9, 0.92, 0.95), row(0.9, 0.8, 0.83, 0.83), row(1.4, 0.85, 0.88, 0.80)]
    held = [one["holds"] for one in optimal.findings(as_told)]
    # The fourth is what the weighted race disproves.
    assert held == [True, True, True, False, True, True]
    for missed in (0.07, -0.02):
        against = [
            row(0.2, 0.9, 0.88, 0.80, 0.01),
            row(0.9, 0.95, 0.94, 0.96, 0.01, missed),
            row(1.4, 0.97, 0.96, 0.98, 0.01),
        ]
        held = [one["holds"] for one in optimal.findings(against)]
        assert held == [False, False, False, True, False, False]


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_rejections_of_a_markov_chain_are_those_of_all_its_texts(batch: int) -> None:
    """Merged states give what the enumeration of all prefixes gives.

    And the algorithm's runs agree with both.
    """
    p, q = (laws[:4, :3, :3] for laws in theoretical.markov_chain(3))
    p, q = (laws / laws.sum(-1, keepdims=True) for laws in (p, q))

    def below(prefix: tuple[int, ...]) -> tuple[Any, Any]:
        last = prefix[-1] if prefix else 0
        return p[len(prefix), last], q[len(prefix), last]

    def below_state(state: tuple[int, ...]) -> tuple[Any, Any]:
        position, last = state or (0, 0)
        return p[position, last], q[position, last]

    every = bounds.expected_rejections(below, 4, batch)
    merged = bounds.expected_rejections(below_state, 4, batch, theoretical.merged)
    assert merged == pytest.approx(every, abs=1e-12)
    runs = theoretical.simulate(p, q, batch, 40_000, seed=1)
    assert abs(runs.mean() - every) < 4.5 * runs.std() / 200


def test_rejections_are_counted_as_the_steps_went() -> None:
    """Drafts that are the target's own are never rejected, others as often as they differ."""
    target = tiny.llama(1)
    for draft, rejects in ((target, False), (tiny.llama(9), True)):
        pair = cases.ServedPair(tiny.build(target, draft), "", "tiny", 1, 20)
        speculation = Speculation(rule="token", num_drafts=1, draft_length=4)
        [answer] = answers_of(pair.engine, [(5, 6, 7)], speculation, 1.0, 20, ignore_eos=True)
        verified, rejections = theoretical.verified_and_rejected(answer)
        assert len(answer.tokens) == len(verified) == 20
        assert (rejections > 0) == rejects
        # Between two bonus tokens lie four accepted ones; a rejection is verified, and its token
        # counts.
        runs = [len(list(group)) for value, group in itertools.groupby(verified) if value]
        assert rejects or runs == [4, 4, 4, 4]


@pytest.mark.slow
def test_closed_forms_are_those_of_the_steps_that_were_served() -> None:
    """Every rule's accepted tokens lie where its own closed form has them.

    With laws that differ, so that no other form has the same.
    """
    pair = cases.ServedPair(tiny.build(tiny.llama(1), tiny.llama(9)), "", "tiny", 1, 24)
    prompts = [tuple(range(5 + i, 9 + i)) for i in range(15)]

    def compared() -> dict[str, dict[str, Any]]:
        rows = lengths.compare(pair, prompts, 3, lambda _: None)
        return {row["rule"]: row for row in rows}

    rows = compared()
    for rule, row in rows.items():
        assert row["low"] - 0.08 < 1, row
        assert row["high"] + 0.08 > 1 or rule == "spectr_gbv", row
    assert rows["token"]["steps"] > 60
    assert rows["greedy_block"]["steps"] == 15 * 3
    with instead(bounds, "expected_block_length", lambda right, p, q, _, *rest: right(p, q, 1, *rest)):
        assert compared()["bv_race"]["low"] > 1


def test_the_front_lies_on_the_line_for_opt_alone() -> None:
    random = np.random.default_rng(0)
    laws = [(random.dirichlet(np.ones(30)), random.dirichlet(np.ones(30))) for _ in range(6)]
    rows = theoretical.front(laws, (0.1, 0.2, 0.4, 0.8))
    assert rows[0]["opt"] == pytest.approx(0, abs=1e-12)
    assert rows[0]["rejection"] == pytest.approx(np.mean([1 - np.minimum(p, q).sum() for p, q in laws]))
    for row in rows:
        assert row["opt"] == pytest.approx(row["line"], abs=1e-12)
        assert row["uno"] > row["opt"] + 1e-4 or row["rejection"] < 1e-9


def test_fewer_tokens_with_more_chains_are_told() -> None:
    usual = {"temperature": 1.0, "rule": "kseq", "length": 4}
    rows = [usual | {"chains": 2, "low": 3.0, "high": 3.2}, usual | {"chains": 4, "low": 2.8, "high": 3.1}]
    assert blocks.falls(rows) == []
    rows.append(usual | {"chains": 8, "low": 2.5, "high": 2.9})
    assert blocks.falls(rows) == ["kseq 2 to 8 x4"]


def test_recorded_laws_are_laws(models: TinyModels) -> None:
    pair = run.served_pair(run_options(models))
    texts = cases.texts_of(pair, pair.prompts("mgsm"), 1.0)
    laws, hotter = (cases.recorded_distributions(pair, texts, temperature, 5) for temperature in (0.7, 1.4))
    assert len(laws) == len(hotter) == 5
    # The same positions: with twice the temperature a law is the square root of the other, normed.
    for cold, hot in zip(laws, hotter, strict=True):
        for one, other in zip(cold, hot, strict=True):
            np.testing.assert_allclose(np.sqrt(one) / np.sqrt(one).sum(), other, rtol=1e-4)
    for p, q in [*laws, *cases.synthetic_laws(100, 2)]:
        assert p.sum() == pytest.approx(1)
        assert q.sum() == pytest.approx(1)
        assert 0 < np.minimum(p, q).sum() < 1


def test_recorded_lengths_of_equal_and_of_different_models() -> None:
    """A draft that is the target is always kept.

    Of others the weighted race keeps most of a single token.
    """
    prompts, grid = [(5, 6, 7), (8, 9)], RacesGrid()
    for draft, is_equal in ((tiny.llama(1), True), (tiny.llama(9), False)):
        pair = cases.ServedPair(tiny.build(tiny.llama(1), draft), "", "tiny", 1, 16)
        rows = races.recorded(pair, grid, prompts, 8, lambda _: None)
        assert len(rows) == len(grid.temperatures) * (len(grid.block_shapes) + len(races.TOKEN_SHAPES))
        for temperature in grid.temperatures:
            found = {
                f"{row['rule']}:{row['size']}": row["tokens_per_pass"]
                for row in rows
                if row["temperature"] == temperature
            }
            if is_equal:
                expected = {text: 1 + int(text.rpartition("x")[2]) for text, _ in grid.block_shapes}
                # nss draws its token apart from the drafts.
                kept = expected | dict.fromkeys(races.TOKEN_SHAPES, 2) | {"nss:12x1": found["nss:12x1"]}
                assert found == pytest.approx(kept, abs=1e-3)
            else:
                assert found["token:1x12"] < found["block:1x12"] < found["greedy_block:1x12"] < 13
                assert found["weighted_race:12x1"] == max(found[text] for text in races.TOKEN_SHAPES) < 2


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_prompts(task: str, models: TinyModels) -> None:
    pair = cases.ServedPair(None, str(models.target), "", 32, 8)  # type: ignore[arg-type]
    prompts = pair.prompts(task)
    assert len(prompts) == 32
    assert len(set(prompts)) > 25
    assert all(0 < len(prompt) <= 128 for prompt in prompts)
    assert torch.tensor(prompts[0]).min() >= 0
