"""The served engine's acceptance of a new head, on texts that were not trained on."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.loading import load_pair
from analysis.pair import answers_of
from distill.dialogues import ChatTokens, read_records
from engine.request import Speculation
from engine.scheduling.outcome import Outcome
from loadtest.environment import environment
from loadtest.results import table

TEMPERATURES = (1.0, 0.8, 0.0)
NUM_TOKENS = 48
"""Tokens of an answer."""
RULE = "block"
_CONCURRENCY = 16

Prompts = Sequence[tuple[int, ...]]


def read_report_prompts(file: Path, target: str, length: int) -> dict[str, Prompts]:
    """Return the last tokens of the prompts of a file, by their `task` if lines have one; raise ConfigError."""
    chat = ChatTokens(target, ())
    found: dict[str, list[tuple[int, ...]]] = {}
    for record, dialogue in read_records(file):
        messages = dialogue.messages
        token_ids = chat.of_messages(messages, begins_answer=True) if messages else chat.of_text(dialogue.text)
        found.setdefault(str(record.get("task", file.name)), []).append(tuple(token_ids[-length:]))
    return dict(found)


def served_acceptance(
    pair: argparse.Namespace, prompts: Mapping[str, Prompts], draft_length: int, tokens: int
) -> dict[str, Any]:
    """Answer prompts of tasks with one drafted chain and without, at some temperatures. pair: as of `load_pair`."""
    engine = load_pair(pair, _CONCURRENCY, 1, draft_length)
    room = engine.facts.max_model_len - tokens - draft_length - 1
    speculation = Speculation(rule=RULE, num_drafts=1, draft_length=draft_length)
    num_prompts = sum(map(len, prompts.values()))
    found: dict[str, Any] = {
        "rule": RULE,
        "draft_length": draft_length,
        "prompts": num_prompts,
        "answer_tokens": tokens,
    }
    by_task: dict[str, dict[str, Any]] = {}
    equal: list[bool] = []
    for temperature in TEMPERATURES:
        steps: list[Outcome] = []
        for task, of_task in prompts.items():
            kept = [prompt[-room:] for prompt in of_task]
            answers = answers_of(engine, kept, speculation, temperature, tokens)
            of_answers = [step for answer in answers for _, step in answer.steps]
            by_task.setdefault(task, {})[_key(temperature)] = acceptance(of_answers)
            steps += of_answers
            if temperature == 0:
                plain = answers_of(engine, kept, Speculation(), temperature, tokens)
                equal += [one.tokens == other.tokens for one, other in zip(answers, plain, strict=True)]
        found[_key(temperature)] = acceptance(steps)
    found["greedy_answers_equal_plain"] = sum(equal) / len(equal)
    if len(by_task) > 1:
        found["tasks"] = by_task
    return found | {"environment": environment()}


def _key(temperature: float) -> str:
    return f"temperature {temperature:g}"


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
        one = found[_key(temperature)]
        depths = " ".join("-" if value is None else f"{value:.2f}" for value in one["acceptance_by_depth"])
        lines.append(f"  temperature {temperature:g}: by depth {depths}; {one['tokens_per_pass']:.2f} tokens a pass")
    for task, of_task in found.get("tasks", {}).items():
        values = ", ".join(f"{of_task[_key(one)]['tokens_per_pass']:.2f}" for one in TEMPERATURES)
        lines.append(f"  {task}: {values} tokens a pass at these temperatures")
    equal = found["greedy_answers_equal_plain"]
    lines.append(f"  greedy answers equal to plain decoding's: {100 * equal:.0f} %")
    return "\n".join(lines)


def markdown(found: dict[str, Any]) -> str:
    """Return the table of acceptance by task and temperature, for a model card."""
    rows = []
    for task, of_task in (*found.get("tasks", {}).items(), ("all", found)):
        for temperature in TEMPERATURES:
            one = of_task[_key(temperature)]
            depths = ["-" if value is None else f"{value:.2f}" for value in one["acceptance_by_depth"]]
            rows.append([task, f"{temperature:g}", *depths, f"{one['tokens_per_pass']:.2f}"])
    depths = [f"depth {depth + 1}" for depth in range(found["draft_length"])]
    return table(["task", "temperature", *depths, "tokens a pass"], rows)
