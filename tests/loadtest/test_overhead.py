"""The overhead of HTTP is measured on a running daemon."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest import overhead
from tests.server.tiny_models import write_pair


@pytest.mark.slow
def test_a_daemon_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYDRAFT_PROFILE_CACHE", "off")
    pair = write_pair(tmp_path)
    file = tmp_path / "not" / "there" / "overhead.json"
    words = ["--model", str(pair.target), "--draft-model", str(pair.draft), "--concurrency", "1,3", "--rounds", "2"]
    assert overhead.main([*words, "--max-tokens", "12", "--output", str(file)]) == 0
    result = json.loads(file.read_text())
    assert [cell["concurrency"] for cell in result["cells"]] == [1, 3]
    for cell in result["cells"]:
        for arm in ("off", "adaptive"):
            found = cell["arms"][arm]
            # More than its steps, which are inside it; a chunk holds the tokens of a step, and the
            # last one no text.
            assert found["time_over_steps"]["low"] > 1
            assert found["cpu_us_per_event"]["median"] >= 0
        assert 0.5 < cell["arms"]["off"]["tokens_per_event"]["median"] <= 1
    assert result["first_token"]["p50_ms"] > 0
    assert overhead.markdown(result) in capsys.readouterr().out


def test_figures_of_rounds_become_median_and_range() -> None:
    assert overhead.spreads([{"a": 1.0}, {"a": 3.0}, {"a": 2.0}]) == {"a": {"median": 2.0, "low": 1.0, "high": 3.0}}
