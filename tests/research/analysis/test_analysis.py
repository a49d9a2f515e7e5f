"""`analyze laws` prints what the golden vectors hold, and refuses bad input with the place of the
fault.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from engine.speculation.verification import RULES
from research.analysis.__main__ import main
from tests.speculation.exact import BLOCK_NAMES, GOLDEN

LAWS = GOLDEN["token"]
KEYS = {
    "nss": "nss_iid",
    "rrs": "rrs_iid",
    "rrs_without_replacement": "rrswor_swor",
    "kseq": "kseq_iid",
    "greedy": "greedy",
    "weighted_race": "weighted_race_iid",
    "bv_race": "score_race_iid",
    "token": "single",
    "block": "single",
    "greedy_block": "single",
    "ot_lp": "weighted_race_iid",
    "traversal": "rrswor_swor",
}
BLOCKS = GOLDEN["block"]


def test_long_json_is_not_printed_at_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for number, is_json in ((1, True), (20, False)):
        file = tmp_path / "laws.json"
        file.write_text(json.dumps([{"p": LAWS[0]["p"], "q": LAWS[0]["q"], "n": LAWS[0]["n"]}] * number))
        assert main(["laws", str(file)]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith("[") == is_json
        assert len(printed) < 2100


def test_every_golden_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "laws.json"
    file.write_text(json.dumps([{"p": case["p"], "q": case["q"], "n": case["n"]} for case in LAWS]))
    assert main(["laws", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    for case, entry in zip(LAWS, found, strict=True):
        assert set(entry["acceptance"]) == set(RULES)
        optimum = entry["alpha_star"]
        assert optimum["iid"] == pytest.approx(case["alpha_star"]["iid"], abs=1e-9)
        assert optimum["without_replacement"] == pytest.approx(case["alpha_star"]["swor"], abs=1e-9)
        assert optimum["greedy"] == pytest.approx(case["alpha_star"]["greedy"], abs=1e-9)
        for rule, key in KEYS.items():
            if key in case["accept"]:
                assert entry["acceptance"][rule] == pytest.approx(case["accept"][key], abs=1e-9), (rule, case["kind"])


@pytest.mark.slow
def test_every_golden_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "blocks.json"
    file.write_text(json.dumps([{name: case[name] for name in "VLK"} | {"rows": case["rows"]} for case in BLOCKS]))
    assert main(["blocks", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    for case, entry in zip(BLOCKS, found, strict=True):
        assert set(entry["E_tau"]) == set(entry["first_block_law"]) == set(RULES)
        for rule, key in BLOCK_NAMES.items():
            assert entry["E_tau"][rule] == pytest.approx(case["E_tau"][key], abs=1e-9), rule
            for outcome, probability in case["first_block_law"].get(key, {}).items():
                assert entry["first_block_law"][rule][outcome] == pytest.approx(probability, abs=1e-9), rule
        # The optimum at one position is at least as good as any rule that decides position by
        # position.
        assert entry["E_tau"]["ot_lp"] >= entry["E_tau"]["rrs"] - 1e-9


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"K": 0}, "'K' must be a positive integer"),
        ({"L": 9, "K": 9}, "too many to enumerate"),
        ({"rows": []}, "'rows' must map"),
        ({"rows": {}}, "row '': is missing"),
        ({"rows": {"": {"p": [1.0], "q": [1.0]}}}, "must have 2 entries"),
    ],
)
def test_bad_blocks_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict, fault: str) -> None:
    file = tmp_path / "blocks.json"
    file.write_text(json.dumps([{**BLOCKS[0], **change}]))
    assert main(["blocks", str(file)]) == 2
    assert fault in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{", "not valid JSON"),
        ("{}", "must hold a list"),
        ('[{"p": [1]}]', "entry 0: 'q'"),
        ('[{"p": [0.5, 0.4], "q": [0.5, 0.5]}]', "sums to 0.9"),
        ('[{"p": [1.0], "q": [0.5, 0.5]}]', "1 entries"),
        ('[{"p": [1.0], "q": [1.0], "n": 0}]', "positive integer"),
        ('[{"p": [NaN], "q": [1.0]}]', "finite"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, fault: str) -> None:
    file = tmp_path / "laws.json"
    file.write_text(content)
    assert main(["laws", str(file)]) == 2
    assert fault in capsys.readouterr().err
