"""The model of a device does its sums right, agrees with what the embedded pair gives, and says
that it is a model.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import ConfigError
from research.analysis.__main__ import main
from research.analysis.device_model import DEVICES, ModelPair, beside_measured, model_of, tokens_per_step
from research.demo.bench_pair import SIZES, build, successors

DEMO = Path(__file__).resolve().parents[3] / "server" / "demo"
PAIR = ModelPair(model_of("8b", 151_936), model_of("0.6b", 151_936), DEVICES["h200"], 0.75)


@pytest.mark.slow
def test_weights_are_those_of_the_models_that_are_made() -> None:
    tokens_VS, below_VS = successors(512, 1)
    made = build(SIZES["tiny"], 512, tokens_VS, below_VS, 64, 1)
    counted = sum(p.numel() for name, p in made.named_parameters() if p.dim() == 2 and "embed" not in name)
    assert model_of("tiny", 512).weights == counted
    assert model_of("8b", 151_936).weights == pytest.approx(7.6e9, rel=0.02)


def test_a_checkpoint_is_read_by_its_configuration() -> None:
    found = model_of(str(DEMO / "target"), 1)
    assert (found.hidden, found.layers, found.vocabulary) == (256, 24, 4096)
    assert found.token_bytes == 2 * 24 * 2 * 64 * 2
    with pytest.raises(ConfigError, match="neither a size"):
        model_of("nowhere", 1)


@pytest.mark.parametrize(("shape", "measured"), [((1, 3), 2.81), ((1, 5), 3.45), ((2, 5), 3.70), ((4, 5), 4.09)])
def test_tokens_are_about_those_of_the_embedded_pair(shape: tuple[int, int], measured: float) -> None:
    """`docs/results/arms-several-cpu.json`, dialogues, one request."""
    assert tokens_per_step(*shape, 0.75, 0.6) == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("missed", [0.0, 0.6, 0.9])
@pytest.mark.parametrize("acceptance", [0.3, 0.75, 0.95])
def test_a_single_draft_is_accepted_as_often_as_was_said(acceptance: float, missed: float) -> None:
    assert tokens_per_step(0, 0, acceptance, missed) == 1
    assert tokens_per_step(1, 1, acceptance, missed) == pytest.approx(1 + acceptance, abs=0.02)
    by_chains = [tokens_per_step(count, 4, acceptance, missed) for count in (1, 2, 8)]
    assert by_chains == sorted(by_chains)
    assert by_chains[-1] <= 1 + sum((1 - missed * (1 - acceptance)) ** depth for depth in range(1, 5)) + 0.02


def test_times_follow_bandwidth_operations_and_counts() -> None:
    target, device = PAIR.target, PAIR.device
    read_s = target.weights * 2 / device.bytes_per_s
    one, many = target.pass_s(device, 1, 0), target.pass_s(device, 4000, 0)
    assert read_s < one < 2 * read_s
    assert many > 2 * target.weights * 4000 / device.operations_per_s
    assert target.pass_s(device, 1, 100_000) - one == pytest.approx(100_000 * target.token_bytes / (0.85 * 4.8e12))
    assert PAIR.step_s(1, 6, 1, 300) - PAIR.step_s(1, 5, 1, 300) > PAIR.draft.weights * 2 / device.bytes_per_s
    assert PAIR.roofline(1, 300) < 1
    assert PAIR.most_requests(1000) > 3 * PAIR.most_requests(4000) > 0
    small = ModelPair(PAIR.target, PAIR.draft, DEVICES["rtx4090"], 0.75)
    assert small.most_requests(32_000) < PAIR.most_requests(32_000)


def test_the_model_fits_what_was_measured() -> None:
    """8B with 0.6B on an H100; several drafts against the best single chain, many requests against
    few.
    """
    pair = ModelPair(PAIR.target, PAIR.draft, DEVICES["h100"], 0.75)
    found = beside_measured(pair, Path(__file__).parents[3] / "docs/results/gpu/part-1-h100.json")
    assert len(found) == 8
    assert all(0.92 < one["ratio"] < 1.08 for one in found.values())
    assert 0.55 < pair.roofline(1, 300) < 0.65
    assert pair.speedup(4, 5, 1, 300) > 1.1 * max(pair.speedup(1, n, 1, 300) for n in (2, 3, 5))
    assert pair.speedup(8, 4, 64, 300) < 1 < pair.speedup(1, 3, 64, 300)


def test_it_is_told_how_far_it_was_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = {"off after 300": 2 * PAIR.step_s(0, 0, 1, 300), "bv_race:4x5 after 1000": PAIR.step_s(4, 5, 1, 1000)}
    file = tmp_path / "gpu-part-1.json"
    file.write_text(json.dumps({"sections": {"engine": {"found": {"step_s": measured}}}}))
    found = beside_measured(PAIR, file)
    assert {name: one["ratio"] for name, one in found.items()} == pytest.approx(
        {"off after 300": 2, "bv_race:4x5 after 1000": 1}
    )
    assert main(["plan", "--measured", str(file)]) == 0
    said = capsys.readouterr()
    assert "2.00 of the model's" in said.err
    assert "estimates of a model, not measurements" in said.err
    assert json.loads(said.out)["rows"][0]["speedup"]["4x5"] == pytest.approx(PAIR.speedup(4, 5, 1, 300))
    file.write_text("{}")
    assert main(["plan", "--measured", str(file)]) == 2


@pytest.mark.parametrize("wrong", [["--acceptance", "1"], ["--missed", "1"], ["--target", "nowhere"]])
def test_bad_input_is_refused(wrong: list[str]) -> None:
    assert main(["plan", *wrong]) == 2
