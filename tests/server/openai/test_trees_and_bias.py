"""Trees, over-acceptance and the gap to the optimum, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.grid import slow_fixture
from tests.server.completions import answer_of, check_counts, refusal_of
from tests.server.daemon_process import Daemon, Daemons

TREES = [
    ("traversal", None, [2, 2]),
    ("traversal", "iid", [1, 3, 1]),
    ("rrs_without_replacement", None, [3, 2]),
    ("weighted_race", None, [2, 1, 2]),
    ("greedy", None, [1, 1, 4]),
    ("nss", "spechub", [2, 2]),
    ("bv_race", None, [3, 1, 1]),
    ("spectr_gbv", None, [3, 1, 1]),
    ("block", None, [1, 1, 1, 1]),
]


@pytest.fixture
@slow_fixture
def lossy(daemons: Daemons, pair_arguments: list[str]) -> Daemon:
    """A daemon that allows over-acceptance, drafts a tree by itself, and observes every step."""
    flags = ["--max-over-acceptance", "0.5", "--spec-observed-share", "1", "--spec-rule", "traversal"]
    return daemons.get(*pair_arguments, "--no-calibrate", *flags, "--draft-tree", "2,2,1")


@pytest.fixture
def lossy_http(lossy: Daemon) -> Iterator[httpx.Client]:
    with lossy.client() as client:
        yield client


def counted(http: httpx.Client, **more: Any) -> dict[str, Any]:
    """`speculative_decoding` of a completion."""
    found: dict[str, Any] = answer_of(http, **more)["metrics"]["speculative_decoding"]
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(("rule", "method", "tree"), TREES)
def test_trees_are_served(
    http: httpx.Client, rule: str, method: str | None, tree: list[int], temperature: float
) -> None:
    """At temperature 0 the text is that of plain decoding."""
    speculation = {"rule": rule, "draft_method": method, "tree": tree}
    body = answer_of(http, speculation=speculation, temperature=temperature)
    found = body["metrics"]["speculative_decoding"]
    check_counts(found, 40)
    assert found["num_spec_tokens"] == len(tree)
    assert found["bias_bound"] == 0
    if temperature == 0:
        plain = answer_of(http, speculation={"enabled": False}, temperature=0)
        assert body["choices"] == plain["choices"]


@pytest.mark.parametrize(
    ("speculation", "param"),
    [
        ({"rule": "bv_race", "tree": [2, 2]}, "speculation.tree"),
        ({"rule": "spectr_gbv", "tree": [1, 2]}, "speculation.tree"),
        ({"rule": "nss", "tree": [2, 2], "num_drafts": 3}, "speculation.tree"),
        ({"rule": "nss", "tree": [2, 2], "draft_length": 3}, "speculation.tree"),
        ({"rule": "nss", "tree": [8, 8]}, "speculation.num_drafts"),
        ({"rule": "nss", "tree": []}, "speculation.tree"),
        ({"rule": "nss", "tree": [0]}, "speculation.tree.0"),
        ({"rule": "token", "tree": [2]}, "speculation.num_drafts"),
        ({"rule": "ot_lp"}, "speculation.rule"),
        ({"rule": "token", "over_acceptance": 0.1}, "speculation.over_acceptance"),
    ],
)
def test_trees_and_bias_that_cannot_be_served_are_refused(
    http: httpx.Client, speculation: dict[str, Any], param: str
) -> None:
    """Each refusal names its field."""
    assert refusal_of(http, speculation=speculation)["param"] == param


def test_over_acceptance_is_allowed_reported_and_capped(lossy_http: httpx.Client) -> None:
    """Only where the operator allows it; more of it accepts more and reports a larger bias."""
    found = [
        counted(lossy_http, speculation={"rule": "token", "over_acceptance": epsilon, "draft_length": 4})
        for epsilon in (0.0, 0.0001, 0.5)
    ]
    biases = [one["bias_bound"] for one in found]
    assert biases[0] == 0 < biases[1] < biases[2]
    assert found[2]["mean_acceptance_length"] > found[0]["mean_acceptance_length"]
    target = {"rule": "token", "over_acceptance": 0.0001, "over_acceptance_residual": "target"}
    assert counted(lossy_http, speculation=target)["bias_bound"] > 0
    for speculation in ({"rule": "token", "over_acceptance": 0.6}, {"rule": "bv_race", "over_acceptance": 0.1}):
        assert refusal_of(lossy_http, speculation=speculation)["param"] == "speculation.over_acceptance"


def test_the_gap_to_the_optimum_is_reported(lossy_http: httpx.Client) -> None:
    """On observed steps: none for an optimal rule, some for the others; and as a metric by rule."""
    gaps = {
        rule: counted(lossy_http, speculation={"rule": rule, "num_drafts": 2, "draft_length": 3})
        for rule in ("weighted_race", "kseq", "rrs", "nss")
    }
    assert gaps["weighted_race"]["optimal_acceptance_gap"] == pytest.approx(0, abs=1e-9)
    assert 0 < gaps["kseq"]["optimal_acceptance_gap"] < gaps["nss"]["optimal_acceptance_gap"]
    exposition = lossy_http.get("/metrics").text
    assert 'polydraft_spec_optimal_acceptance_gap_count{engine="0",model_name="tiny",rule="nss"}' in exposition


def test_a_request_that_names_no_shape_gets_the_servers_tree(lossy_http: httpx.Client) -> None:
    """One that names a shape gets chains of it."""
    own = counted(lossy_http)
    assert (own["rule"], own["num_spec_tokens"]) == ("traversal", 3)
    assert own["drafters"]["model"]["num_drafts"] == 4 * own["num_spec_steps"]
    shaped = counted(lossy_http, speculation={"num_drafts": 2, "draft_length": 5})
    assert (shaped["rule"], shaped["num_spec_tokens"]) == ("traversal", 5)
    other = counted(lossy_http, speculation={"rule": "bv_race"})
    assert (other["rule"], other["num_spec_tokens"]) == ("bv_race", 4)  # the call has a seed


@pytest.mark.slow  # start/test_distribution_check.py runs the check without a daemon
def test_a_daemon_can_check_itself_at_start(daemons: Daemons, pair_arguments: list[str]) -> None:
    """With --selfcheck the daemon reports what it has checked before it serves."""
    daemon = daemons.get(*pair_arguments, "--no-calibrate", "--selfcheck")
    assert daemon.log.index("self-check passed") < daemon.log.index("serving tiny")
