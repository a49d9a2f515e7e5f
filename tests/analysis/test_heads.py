"""`polydraft analyze heads` measures drafting by number of chains."""

from __future__ import annotations

import argparse

from analysis import heads


def test_every_type_of_head_is_measured() -> None:
    parser = argparse.ArgumentParser()
    heads.add_arguments(parser)
    options = parser.parse_args(["--targets", "embedded", "--num-drafts", "1,2", "--repeats", "1", "--steps", "1"])
    result = heads.analyze_heads(options)
    assert [cell["kind"] for cell in result["cells"]] == list(heads.KINDS)
    for cell in result["cells"]:
        assert set(cell["shapes"]) == {"off", "1", "2"}
        assert cell["shapes"]["1"]["draft_over_one"] == 1.0
        assert all(0 < cell["shapes"][name]["share_of_step"] < 1 for name in ("1", "2"))
    assert heads.markdown(result).count("\n") == 1 + 2 * len(heads.KINDS)
