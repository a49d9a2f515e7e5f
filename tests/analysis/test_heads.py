"""`polydraft analyze heads` measures drafting by number of chains, `polydraft analyze prefixes` the prefix cache."""

from __future__ import annotations

import argparse

from analysis import heads, prefixes


def test_every_type_of_head_is_measured() -> None:
    parser = argparse.ArgumentParser()
    heads.add_arguments(parser)
    options = parser.parse_args(["--targets", "embedded", "--num-drafts", "1,2", "--repeats", "1"])
    result = heads.analyze(options)
    assert [cell["kind"] for cell in result["cells"]] == list(heads.KINDS)
    for cell in result["cells"]:
        assert set(cell["shapes"]) == {"off", "1", "2"}
        assert cell["shapes"]["1"]["draft_over_one"] == 1.0
        assert all(0 < cell["shapes"][name]["share_of_step"] < 1 for name in ("1", "2"))
    assert heads.markdown(result).count("\n") == 1 + len(heads.KINDS)


def test_the_table_has_a_row_per_head() -> None:
    def shape(draft_ms: float, over: float, share: float) -> dict[str, float]:
        return {"draft_ms": draft_ms, "draft_over_one": over, "share_of_step": share}

    shapes = {"off": {}, "1": shape(1.8869, 1.0, 0.4302), "4": shape(2.033, 1.0774, 0.225)}
    cell = {"target": "embedded", "kind": "dflash", "shapes": shapes}
    assert heads.markdown({"options": {"num_drafts": [1, 4]}, "cells": [cell]}).splitlines() == [
        "| target | head | 1 chain, ms | 4 chains |",
        "| --- | --- | --- | --- |",
        "| embedded | dflash | 1.9 (43%) | 1.08x (22%) |",
    ]


def test_requests_find_the_whole_blocks_of_beginnings_that_others_computed() -> None:
    """Two beginnings of two blocks and a half, six requests: all but the first two find two blocks."""
    parser = argparse.ArgumentParser()
    prefixes.add_arguments(parser)
    words = ["--kinds", "dflash", "--requests", "6", "--beginnings", "2", "--shared", "40", "--own", "5"]
    plain, head = prefixes.analyze(parser.parse_args(words))["cells"]
    assert (plain["cached_prompt_tokens"], plain["queries"]) == (4 * 32, 6 * 45)
    assert (head["cached_prompt_tokens"], head["queries"]) == (4 * 32, 6 * 45)
    assert plain["head_bytes_per_token"] == 0 < head["head_bytes_per_token"]
    assert plain["target_bytes_per_token"] < head["target_bytes_per_token"]
