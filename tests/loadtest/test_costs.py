"""The measurement of costly bodies: every field of every endpoint, and the table of what was
seen.
"""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from loadtest.cost_bodies import ENDPOINTS, KINDS, fields_of, limits, sweep
from loadtest.costs import markdown, measure_bodies, neighbour_of
from tests.server.daemon_process import Daemons
from tests.server.tiny_models import write_pair

SIZE = 20_000
DESCRIBED = {
    "paths": {
        path: {"post": {"requestBody": {"content": {"application/json": {"schema": {"properties": {"prompt": {}}}}}}}}
        for path in ENDPOINTS
    }
}


def test_every_field_gets_every_kind_of_value_at_full_size() -> None:
    bodies = list(sweep(DESCRIBED, "m", SIZE))
    assert len(bodies) == len(ENDPOINTS) * len(KINDS)
    assert all(SIZE / 2 < len(body.build()) <= SIZE for body in bodies)
    for body in bodies:
        if body.kind not in ("digits", "deep lists", "deep objects"):
            assert "prompt" in json.loads(body.build())


def test_bodies_at_their_limits_are_valid_json() -> None:
    assert {"logit_bias", "allowed_token_ids", "bad_words", "messages"} <= {body.field for body in limits("m", SIZE)}
    assert all(json.loads(body.build())["model"] == "m" for body in limits("m", SIZE))


@pytest.mark.slow
def test_bodies_are_measured_beside_a_stream(tmp_path: Path) -> None:
    pair, pool = write_pair(tmp_path), Daemons(tmp_path)
    words = ("--served-model-name", "costs", "--num-threads", "1", "--no-calibrate")
    daemon = pool.get(str(pair.target), *words)
    described = httpx.get(f"{daemon.url}/openapi.json").json()
    assert {"prompt", "stop", "logit_bias"} <= set(fields_of(described, "/v1/completions"))
    wanted = [body for body in sweep(described, "costs", SIZE) if body.field == "stop"][:8]
    with neighbour_of(daemon.url) as neighbour:
        found = measure_bodies(daemon.url, wanted, neighbour)
    pool.stop()
    assert found["num_bodies"] == len(wanted)
    assert 1 <= len(found["alone"]) <= 3, "the longest of each measure, one body may be all of them"
    assert {cost["kind"] for cost in found["alone"]} <= {body.kind for body in wanted}
    assert {status for cost in (*found["alone"], *found["together"]) for status in cost["statuses"]} <= {"400", "200"}
    assert found["together"][0]["at_once"] == 20
    assert all(cost["neighbour"]["longest_gap_ms"] > 0 for cost in found["together"])
    seen = found["together"][0]["neighbour"]
    result = {
        "limits": {"alone": [], "together": []},
        "bodies": found,
        "headers": {"1": {"answers": ["431"], "neighbour": seen}},
        "grammars": {"honest": {"status": "200", "answer_s": 0.5}, "neighbour": seen},
    }
    lines = markdown(result).splitlines()
    assert len(lines) == 2 + 1 + 1 + 1
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| `stop` |")


def test_the_table_is_that_of_the_measurement() -> None:
    """Made of the committed document by the tool's own function."""
    root = Path(__file__).parents[2]
    measured = json.loads((root / "docs" / "results" / "costs-cpu.json").read_text())
    table = (root / "SECURITY.md").read_text().split("<!-- costs:begin -->\n")[1].split("<!-- costs:end -->")[0]
    assert table.rstrip("\n") == markdown(measured)
