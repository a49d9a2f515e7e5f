"""The served engine's acceptance of a new head, on texts that were not trained on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from analysis.loading import load_pair
from analysis.pair import answers_of
from engine.request import Speculation
from engine.scheduling.outcome import Outcome
from loadtest.environment import environment

TEMPERATURES = (1.0, 0.0)
RULE = "block"
_CONCURRENCY = 16


def served_acceptance(
    target: str,
    head: str,
    device: str,
    threads: int,
    prompts: Sequence[tuple[int, ...]],
    draft_length: int,
    tokens: int,
) -> dict[str, Any]:
    """Answer prompts with one drafted chain and without, at temperatures 1 and 0."""
    pair = argparse.Namespace(target=target, draft=head, dtype="auto", device=device, threads=threads)
    engine = load_pair(pair, _CONCURRENCY, 1, draft_length)
    room = engine.facts.max_model_len - tokens - draft_length - 1
    kept = [prompt[-room:] for prompt in prompts]
    speculation = Speculation(rule=RULE, num_drafts=1, draft_length=draft_length)
    found: dict[str, Any] = {"rule": RULE, "draft_length": draft_length, "prompts": len(kept), "answer_tokens": tokens}
    for temperature in TEMPERATURES:
        answers = answers_of(engine, kept, speculation, temperature, tokens)
        found[f"temperature {temperature:g}"] = acceptance([step for answer in answers for _, step in answer.steps])
    plain = answers_of(engine, kept, Speculation(), 0.0, tokens)
    equal = [one.tokens == other.tokens for one, other in zip(answers, plain, strict=True)]
    found["greedy_answers_equal_plain"] = sum(equal) / len(equal)
    return found | {"environment": environment()}


def acceptance(steps: Sequence[Outcome]) -> dict[str, Any]:
    """Acceptance by depth, given that the depths above were accepted, and tokens of a pass.

    The first token of an answer is not drafted: a head reads the target's states, and there are none yet.
    """
    drafted = [step for step in steps if step.draft_length]
    longest = max((step.draft_length for step in drafted), default=0)
    by_depth = []
    for depth in range(longest):
        reached = [step for step in drafted if step.draft_length > depth and step.num_accepted >= depth]
        accepted = sum(step.num_accepted > depth for step in reached)
        by_depth.append(round(accepted / len(reached), 4) if reached else None)
    emitted = sum(len(step.token_ids) for step in drafted)
    return {
        "acceptance_by_depth": by_depth,
        "accepted_per_pass": round(sum(step.num_accepted for step in drafted) / max(1, len(drafted)), 4),
        "tokens_per_pass": round(emitted / max(1, len(drafted)), 4),
        "passes": len(drafted),
    }


def show(found: dict[str, Any]) -> str:
    """A table for people."""
    lines = [f"acceptance, measured by the engine on {found['prompts']} prompts that were not trained on:"]
    for temperature in TEMPERATURES:
        one = found[f"temperature {temperature:g}"]
        depths = " ".join("-" if value is None else f"{value:.2f}" for value in one["acceptance_by_depth"])
        lines.append(f"  temperature {temperature:g}: by depth {depths}; {one['tokens_per_pass']:.2f} tokens a pass")
    equal = found["greedy_answers_equal_plain"]
    lines.append(f"  greedy answers equal to plain decoding's: {100 * equal:.0f} %")
    return "\n".join(lines)
