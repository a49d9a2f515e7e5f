"""Facts, steps and counts of an engine as the daemon receives them, made by hand."""

from __future__ import annotations

from typing import Any

from engine.api import PHASES, EngineFacts, Outcome, StepStats
from engine.speculation.conditions import DRAFTER_FACTS, drafters_of
from engine.speculation.rule_facts import RULE_FACTS
from server.serving.statistics import SpeculationCount

LENGTH, CHAINS = 4, 3


def facts(drafter: str = "", **known: Any) -> EngineFacts:
    """Return a small engine's facts; drafter: draft model or head; `known` are others."""
    usual: dict[str, Any] = {"device": "cpu", "dtype": "float32", "architecture": "llama"}
    usual["drafters"] = drafters_of(DRAFTER_FACTS[drafter] if drafter else None)
    usual |= {"vocab_size": 1000, "max_model_len": 100, "num_blocks": 10, "block_size": 16, "eos_token_ids": []}
    return EngineFacts(**usual | {"max_copied_tokens": 32, "rules": dict(RULE_FACTS), "memory_plan": {}} | known)


def stats(wall_s: float = 0.01, plain_s: float | None = None, draft_s: float = 0.0, prompt_s: float = 0.0) -> StepStats:
    """A step's measurements."""
    phases_s = dict.fromkeys(PHASES, 0.0) | {"draft": draft_s}
    return StepStats(
        wall_s=wall_s,
        plain_s=plain_s,
        usual_plain_s=plain_s or 0.0,
        prompt_s=prompt_s,
        phases_s=phases_s,
        num_running=1,
        num_waiting=0,
        num_blocks_used=1,
        num_states_used=3,
        num_cache_queries=0,
        num_cache_hits=0,
        num_state_hits=2,
        num_state_evictions=1,
        num_preemptions=0,
        num_steps=1,
    )


def outcome(num_tokens: int, num_accepted: int, draft_length: int = LENGTH) -> Outcome:
    """A step that emitted tokens, the first `num_accepted` of them drafted."""
    return Outcome(
        request_id="one",
        token_ids=list(range(num_tokens)),
        finish_reason=None,
        draft_length=draft_length,
        num_chains=CHAINS if draft_length else 0,
        rule="bv_race",
        num_nodes=CHAINS * draft_length,
        num_accepted=num_accepted,
        num_cached=0,
        text_draft_counts=[],
        num_predicted=0,
        queue_s=0.5,
    )


def counted_pass(num_tokens: int, speedup: float | None = None) -> SpeculationCount:
    """Count one speculative pass of an answer."""
    counted = SpeculationCount("bv_race", LENGTH)
    plain_s = None if speedup is None else 0.01 * speedup / num_tokens
    counted.add_step(outcome(num_tokens, num_tokens - 1), stats(0.01, plain_s))
    return counted
