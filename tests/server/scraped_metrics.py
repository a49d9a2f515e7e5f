"""Reads a daemon's metrics, and compares them with its answers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from engine.api import DRAFTERS
from tests.server.daemon_process import wait_until


def samples_of(text: str) -> list[Sample]:
    """Every sample of an exposition, without those of build and cache facts."""
    families = list(text_string_to_metric_families(text))
    assert families
    assert len({family.name for family in families}) == len(families), "a family appears twice"
    return [sample for family in families for sample in family.samples if not sample.name.endswith("_info")]


NAMES = {
    "steps": "polydraft_spec_decode_num_drafts_total",
    "drafted": "polydraft_spec_decode_num_draft_tokens_total",
    "accepted": "polydraft_spec_decode_num_accepted_tokens_total",
    "tokens": "polydraft_generation_tokens_total",
    "prompts": "polydraft_prompt_tokens_total",
    "positions": "polydraft_spec_decode_num_accepted_tokens_per_pos_total",
    "shapes": "polydraft_spec_shape_steps_total",
    "trees": "polydraft_spec_tree_nodes_count",
    "nodes": "polydraft_spec_tree_nodes_sum",
    "vllm": "vllm:spec_decode_num_accepted_tokens_total",
}


def scraped(http: httpx.Client) -> Counter[str]:
    """The counters, once no request runs."""
    running = "polydraft_num_requests_running"
    samples = wait_until(
        lambda: (
            [s for s in found if s.value == s.value]
            if (found := samples_of(http.get("/metrics").text)) and not sum(s.value for s in found if s.name == running)
            else None
        ),
        "requests still run",
    )
    sums: Counter[str] = Counter()
    for name, metric in NAMES.items():
        sums[name] = int(sum(s.value for s in samples if s.name == metric))
    for drafter in DRAFTERS:
        for kind in ("drafts", "draft_tokens", "accepted_tokens"):
            metric = f"polydraft_spec_drafter_{kind}_total"
            sums[f"{drafter} {kind}"] = int(
                sum(s.value for s in samples if s.name == metric and s.labels.get("drafter") == drafter)
            )
    totals = http.get("/dashboard/state").json()["totals"]
    return sums + Counter({f"page {name}": round(totals[name]) for name in ("tokens", "passes", "spec_steps")})


def told(answer: dict[str, Any]) -> Counter[str]:
    """Return an answer's counts under the same names."""
    usage, counted = answer["usage"], answer["metrics"]["speculative_decoding"]
    if counted is None:  # nothing was drafted
        num_tokens, num_prompt = usage["completion_tokens"], usage["prompt_tokens"]
        return Counter(
            {"tokens": num_tokens, "page tokens": num_tokens, "prompts": num_prompt, "page passes": num_tokens}
        )
    sums = Counter(
        {
            "steps": counted["num_spec_steps"],
            "drafted": counted["num_draft_tokens"],
            "accepted": counted["num_accepted_draft_tokens"],
            "tokens": usage["completion_tokens"],
            "prompts": usage["prompt_tokens"],
            "positions": sum(length * count for length, count in enumerate(counted["acceptance_histogram"])),
            "trees": counted["num_spec_steps"],
            "nodes": counted["num_draft_tokens"],
            "vllm": counted["num_accepted_draft_tokens"],
            "page tokens": usage["completion_tokens"],
            "page spec_steps": counted["num_spec_steps"],
            "page passes": counted["num_passes"],
        }
    )
    for drafter, counts in counted["drafters"].items():
        sums[f"{drafter} drafts"] = counts["num_drafts"]
        sums[f"{drafter} draft_tokens"] = counts["num_draft_tokens"]
        sums[f"{drafter} accepted_tokens"] = counts["num_accepted_tokens"]
    return sums


def check(http: httpx.Client, before: Counter[str], answers: list[dict[str, Any]]) -> None:
    """Assert that the counters have grown by the sum over the answers."""
    grown = scraped(http)
    grown.subtract(before)
    shapes = grown.pop("shapes")
    assert shapes >= grown["steps"], "every speculative step has a shape"
    assert shapes == grown["page passes"] or grown["tokens"] == 0, "a step of an answer is a pass"
    assert +grown == sum((told(answer) for answer in answers), Counter[str]())
