"""The served engine's acceptance of a new head, on texts that were not trained on."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.request import Speculation
from engine.scheduling.outcome import Outcome
from loadtest.environment import environment
from loadtest.results import table
from research.analysis.loading import load_pair
from research.analysis.pair import answers_of
from research.distill.dialogues import ChatTokens, FileDialogue, read_records

TEMPERATURES = (1.0, 0.8, 0.0)
NUM_TOKENS = 48
"""Tokens of an answer."""
RULE = "block"
_CONCURRENCY = 16

Prompts = Sequence[tuple[int, ...]]


def read_report_prompts(file: Path, target: str, length: int) -> dict[str, Prompts]:
    """Return the last tokens of the prompts of a file, by their `task` if lines have one.

    Raise ConfigError.
    """
    chat = ChatTokens(target, ())
    prompts_by_task: dict[str, list[tuple[int, ...]]] = {}
    for record, dialogue in read_records(file):
        token_ids = _prompt_tokens(chat, dialogue)
        task = str(record.get("task", file.name))
        prompts_by_task.setdefault(task, []).append(tuple(token_ids[-length:]))
    return dict(prompts_by_task)


def _prompt_tokens(chat: ChatTokens, dialogue: FileDialogue) -> list[int]:
    if not dialogue.messages:
        return chat.text_tokens(dialogue.text)
    return chat.message_tokens(dialogue.messages, begins_answer=True)


def served_acceptance(
    pair: argparse.Namespace, prompts: Mapping[str, Prompts], draft_length: int, tokens: int
) -> dict[str, Any]:
    """Answer prompts of tasks with one drafted chain and without, at some temperatures.

    pair: as of `load_pair`.
    """
    engine = load_pair(pair, _CONCURRENCY, 1, draft_length)
    room = engine.facts.max_model_len - tokens - draft_length - 1
    speculation = Speculation(rule=RULE, num_drafts=1, draft_length=draft_length)
    num_prompts = sum(map(len, prompts.values()))
    results: dict[str, Any] = {
        "rule": RULE,
        "draft_length": draft_length,
        "prompts": num_prompts,
        "answer_tokens": tokens,
    }
    by_task: dict[str, dict[str, Any]] = {}
    equal: list[bool] = []
    for temperature in TEMPERATURES:
        steps: list[Outcome] = []
        for task, task_prompts in prompts.items():
            kept = [prompt[-room:] for prompt in task_prompts]
            answers = answers_of(engine, kept, speculation, temperature, tokens)
            task_steps = [step for answer in answers for _, step in answer.steps]
            by_task.setdefault(task, {})[_key(temperature)] = acceptance(task_steps)
            steps += task_steps
            if temperature == 0:
                plain = answers_of(engine, kept, Speculation(), temperature, tokens)
                equal += [one.tokens == other.tokens for one, other in zip(answers, plain, strict=True)]
        results[_key(temperature)] = acceptance(steps)
    results["greedy_answers_equal_plain"] = sum(equal) / len(equal)
    if len(by_task) > 1:
        results["tasks"] = by_task
    return results | {"environment": environment()}


def _key(temperature: float) -> str:
    return f"temperature {temperature:g}"


def acceptance(steps: Sequence[Outcome]) -> dict[str, Any]:
    """Acceptance by depth, given that the depths above were accepted, and tokens of a pass.

    The first token of an answer is not drafted: a head reads the target's states, and there are
    none yet.
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


def _shown_depths(measured: dict[str, Any]) -> list[str]:
    """Return the acceptance at each depth as text."""
    values = measured["acceptance_by_depth"]
    return ["-" if value is None else f"{value:.2f}" for value in values]


def show(report: dict[str, Any]) -> str:
    """A table for people."""
    num_prompts = report["prompts"]
    lines = [
        f"acceptance, measured by the engine on {num_prompts} prompts that were not trained on:",
    ]
    for temperature in TEMPERATURES:
        measured = report[_key(temperature)]
        depths = " ".join(_shown_depths(measured))
        tokens = f"{measured['tokens_per_pass']:.2f} tokens a pass"
        lines.append(f"  temperature {temperature:g}: by depth {depths}; {tokens}")
    for task, task_report in report.get("tasks", {}).items():
        measured_tasks = [task_report[_key(temperature)] for temperature in TEMPERATURES]
        values = ", ".join(f"{measured['tokens_per_pass']:.2f}" for measured in measured_tasks)
        lines.append(f"  {task}: {values} tokens a pass at these temperatures")
    equal = report["greedy_answers_equal_plain"]
    lines.append(f"  greedy answers equal to plain decoding's: {100 * equal:.0f} %")
    return "\n".join(lines)


def markdown(report: dict[str, Any]) -> str:
    """Return the table of acceptance by task and temperature, for a model card."""
    rows = []
    for task, measured_by_key in (*report.get("tasks", {}).items(), ("all", report)):
        for temperature in TEMPERATURES:
            measured = measured_by_key[_key(temperature)]
            tokens = f"{measured['tokens_per_pass']:.2f}"
            rows.append([task, f"{temperature:g}", *_shown_depths(measured), tokens])
    depths = [f"depth {depth + 1}" for depth in range(report["draft_length"])]
    return table(["task", "temperature", *depths, "tokens a pass"], rows)
