"""`polydraft analyze latents` runs every pass in every form."""

from __future__ import annotations

import json

import pytest

from research.analysis.__main__ import main
from research.analysis.latents import COMPILED, EXPANDED, TORCH


@pytest.mark.slow
def test_every_pass_is_measured_in_every_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["latents", "--contexts", "300", "--repeats", "2", "--threads", "1"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    # 4 layers of 20 heads of K and V of 256 numbers, or of one row of 576, in float32
    assert result["token_bytes"] == {EXPANDED: 4 * 20 * 512 * 4, TORCH: 4 * 576 * 4, COMPILED: 4 * 576 * 4}
    assert len(result["cells"]) == 4
    for cell in result["cells"]:
        assert {len(seconds) for seconds in cell["seconds"].values()} == {2}
        assert cell["pass"] in printed.err
