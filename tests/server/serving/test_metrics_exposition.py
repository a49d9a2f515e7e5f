"""The Prometheus exposition: it parses, its names are ours or vLLM's, and both say the same."""

from __future__ import annotations

import math
import re
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from engine.api import StepResults
from server.serving.metrics import ServerMetrics, num_reached
from tests.server.daemon_process import MODEL
from tests.server.scraped_metrics import samples_of
from tests.server.step_results import counted_pass, facts, outcome, stats

FACTS = facts(vocab_size=10, num_blocks=8, block_size=4, num_states=6, eos_token_ids=[2], drafter="model", rules={})
VLLM_NAMES = {"polydraft_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc"}
LABELS = {"model_name", "engine"}
PROCESS = re.compile(r"(polydraft_engine_)?process_[a-z_]+")
OWN_LABELS = {"finished_reason", "reason", "code", "phase", "position", "drafter", "num_drafts", "depth", "rule", "le"}


def value_of(samples: list[Sample], name: str, **labels: str) -> float:
    """The value of one sample."""
    (value,) = [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]
    return value


def fill(metrics: ServerMetrics) -> None:
    """Two steps and the end of an answer."""
    metrics.ready(FACTS)
    metrics.start([5, 7])
    for num_tokens, accepted in ((3, 2), (1, 0)):
        metrics.take(outcome(num_tokens, accepted))
        metrics.step(StepResults([], stats(wall_s=0.02, draft_s=0.01)))
    metrics.tokens(3, None, 0.3)
    metrics.tokens(1, 0.02, None)
    metrics.finish(
        "stop", 4, {"e2e": 1.0, "queue": 0.1, "prefill": 0.2, "decode": 0.7, "tpot": None}, counted_pass(2, 1.4)
    )
    metrics.end_call([4])
    metrics.error(429, "queue_full")
    metrics.error(503, "draining")
    metrics.error(400)


@pytest.fixture
def filled() -> list[Sample]:
    """The samples of a registry with something in it."""
    metrics = ServerMetrics("tiny", compat=True)
    fill(metrics)
    return samples_of(metrics.render().decode())


def check_names(samples: list[Sample]) -> None:
    """Assert that names and labels are those that were agreed on."""
    for sample in samples:
        if PROCESS.fullmatch(sample.name):
            continue
        assert re.fullmatch(r"(polydraft_|vllm:)[a-z0-9_]+", sample.name), sample.name
        assert set(sample.labels) >= LABELS, sample
        assert set(sample.labels) <= LABELS | OWN_LABELS, sample
        assert not sample.name.endswith("_created")
        assert math.isfinite(sample.value)


def check_both_names(samples: list[Sample]) -> None:
    """Assert that vLLM's names have our values, and that the important ones exist."""
    ours = {
        (VLLM_NAMES.get(s.name, s.name.replace("polydraft_", "vllm:", 1)), tuple(sorted(s.labels.items()))): s.value
        for s in samples
        if s.name.startswith("polydraft_")
    }
    theirs = {(s.name, tuple(sorted(s.labels.items()))): s.value for s in samples if s.name.startswith("vllm:")}
    assert len(theirs) > 20
    for key, value in theirs.items():
        assert ours[key] == value, key
    names = {name for name, _ in theirs}
    for name in ("spec_decode_num_drafts_total", "kv_cache_usage_perc", "time_to_first_token_seconds_bucket"):
        assert f"vllm:{name}" in names


def test_names_and_labels_are_ours_or_vllms(filled: list[Sample]) -> None:
    """Every name begins with `polydraft_` or `vllm:`; labels are bounded, never a request id."""
    check_names(filled)


def test_both_names_have_the_same_values(filled: list[Sample]) -> None:
    """Values under vLLM's names equal our counts."""
    check_both_names(filled)


def test_the_endpoint_picker_of_the_gateway_api_finds_its_metrics() -> None:
    """The names are the defaults of its Inference Extension."""
    metrics = ServerMetrics("tiny", compat=True)
    fill(metrics)
    families = text_string_to_metric_families(metrics.render().decode())
    samples = {sample.name: sample for family in families for sample in family.samples}
    names = {f"vllm:{name}" for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")}
    assert names < samples.keys()
    cache = samples["vllm:cache_config_info"]
    assert cache.value == 1
    assert {"block_size": "4", "num_gpu_blocks": "8"}.items() < cache.labels.items()


def test_the_counts_are_those_of_the_steps(filled: list[Sample]) -> None:
    """Two speculative steps, one with two accepted tokens."""
    expected: dict[str, float] = {
        "polydraft_spec_decode_num_drafts_total": 2,
        "polydraft_spec_decode_num_draft_tokens_total": 24,
        "polydraft_spec_decode_num_accepted_tokens_total": 2,
        "polydraft_prompt_tokens_total": 12,
        "polydraft_generation_tokens_total": 4,
        "polydraft_num_requests_running": 1,
        "polydraft_kv_cache_usage_ratio": 1 / 8,
        "polydraft_states_used": 3,
        "polydraft_states_max": 6,
        "polydraft_state_cache_hits_total": 2,
        "polydraft_state_cache_evictions_total": 1,
        "polydraft_request_spec_speedup_ratio_sum": 1.4,
        "polydraft_request_spec_plain_seconds_total": 0.014,
        "polydraft_request_spec_seconds_total": 0.01,
        "polydraft_inter_token_latency_seconds_count": 1,
    }
    for name, value in expected.items():
        assert value_of(filled, name) == pytest.approx(value), name
    for position, accepted in (("0", 1), ("1", 1)):
        name = "polydraft_spec_decode_num_accepted_tokens_per_pos_total"
        assert value_of(filled, name, position=position) == accepted
    assert value_of(filled, "polydraft_spec_shape_steps_total", num_drafts="3", depth="4", rule="bv_race") == 2
    assert value_of(filled, "polydraft_request_prompt_tokens_sum") == 12
    assert value_of(filled, "polydraft_request_generation_tokens_sum") == 4
    assert value_of(filled, "polydraft_step_seconds_sum", phase="draft") == pytest.approx(0.02)
    assert value_of(filled, "polydraft_admission_rejections_total", reason="queue_full") == 1
    assert value_of(filled, "polydraft_admission_rejections_total", reason="draining") == 1
    assert value_of(filled, "polydraft_request_errors_total", code="400") == 1


@pytest.mark.parametrize(
    ("num_tokens", "num_accepted", "reached"),
    [(1, 0, 1), (3, 2, 3), (5, 4, 4), (2, 2, 2)],
    ids=["first refused", "third refused", "all accepted", "cut"],
)
def test_a_position_is_reached_by_steps_that_accepted_the_ones_before(
    num_tokens: int, num_accepted: int, reached: int
) -> None:
    """The share of a position is of the steps that came to it: four drafted tokens here."""
    assert num_reached(outcome(num_tokens, num_accepted)) == reached


def test_labels_stay_few_whatever_clients_ask_for() -> None:
    """Every shape up to 64 chains of 256 tokens: at most a few dozen series of each metric."""
    metrics = ServerMetrics("tiny", compat=False)
    metrics.ready(FACTS)
    for size in range(1, 257):
        wide = msgspec.structs.replace(
            outcome(size + 1, size), num_chains=min(size, 64), draft_length=size, num_nodes=size
        )
        metrics.take(wide)
    samples = samples_of(metrics.render().decode())
    for name, most in (
        ("polydraft_spec_shape_steps_total", 49),
        ("polydraft_spec_decode_num_accepted_tokens_per_pos_total", 17),
        ("polydraft_spec_decode_num_reached_per_pos_total", 17),
    ):
        assert len([sample for sample in samples if sample.name == name]) <= most
    assert sum(s.value for s in samples if s.name == "polydraft_spec_shape_steps_total") == 256


def test_a_plain_step_has_a_shape_of_its_own() -> None:
    """Dashboards compute the share of plain steps from it."""
    metrics = ServerMetrics("tiny", compat=False)
    metrics.ready(FACTS)
    plain = msgspec.structs.replace(outcome(1, 0), num_chains=0, draft_length=0, num_nodes=0)
    for one in (plain, outcome(3, 2)):
        metrics.take(one)
    samples = samples_of(metrics.render().decode())
    assert value_of(samples, "polydraft_spec_shape_steps_total", num_drafts="0", depth="0", rule="off") == 1
    assert value_of(samples, "polydraft_spec_decode_num_drafts_total") == 1


def test_other_names_can_be_left_out() -> None:
    """Without compatibility there are only our own names."""
    metrics = ServerMetrics("tiny", compat=False)
    fill(metrics)
    samples = samples_of(metrics.render().decode())
    check_names(samples)
    assert not any(sample.name.startswith("vllm:") for sample in samples)


def test_a_fresh_daemon_has_an_exposition() -> None:
    """Before the engine is ready there is already something to scrape."""
    check_names(samples_of(ServerMetrics("tiny", compat=True).render().decode()))


def test_no_acceptance_length_is_in_the_lowest_bucket() -> None:
    """Prometheus interpolates there from 0, and the least possible length is 1."""
    metrics = ServerMetrics("tiny", compat=False)
    metrics.finish("stop", 1, {}, counted_pass(1))
    samples = samples_of(metrics.render().decode())
    buckets = [s.value for s in samples if s.name == "polydraft_request_spec_acceptance_length_bucket"]
    assert buckets[:2] == [0, 1]


def test_a_served_exposition_agrees_with_the_answers(http: httpx.Client) -> None:
    """A real daemon's counters grow by what its answer says about itself."""

    def scrape() -> list[Sample]:
        response = http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        return samples_of(response.text)

    call: dict[str, Any] = {"model": MODEL, "prompt": [1, 5, 6], "max_tokens": 30, "ignore_eos": True}
    http.post("/v1/completions", json=call)
    before = scrape()
    body = http.post("/v1/completions", json=call).json()
    after = scrape()
    check_names(after)
    check_both_names(after)
    counted = body["metrics"]["speculative_decoding"]
    grown: dict[str, float] = {
        "polydraft_prompt_tokens_total": 3,
        "polydraft_generation_tokens_total": 30,
        "polydraft_spec_decode_num_drafts_total": counted["num_spec_steps"],
        "polydraft_spec_decode_num_draft_tokens_total": counted["num_draft_tokens"],
        "polydraft_spec_decode_num_accepted_tokens_total": counted["num_accepted_draft_tokens"],
        "polydraft_time_to_first_token_seconds_count": 1,
        "polydraft_e2e_request_latency_seconds_count": 1,
        "polydraft_request_spec_acceptance_length_count": 1,
        "polydraft_request_spec_acceptance_length_sum": counted["mean_acceptance_length"],
    }
    for name, value in grown.items():
        assert value_of(after, name) - value_of(before, name) == pytest.approx(value), name
    assert value_of(after, "polydraft_num_requests_running") == 0
    assert value_of(after, "polydraft_kv_cache_usage_ratio") == 0
