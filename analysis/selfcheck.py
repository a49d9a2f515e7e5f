"""`analyze selfcheck`: the exactness test of every rule on a pair's own distributions."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from analysis.loading import load_pair, names_of
from engine.request import Speculation
from engine.speculation.verification import RULES
from engine.step.law_check import SIGNIFICANCE, Check, check_law, check_power, is_blind, make_prompt


def settings_of(num_drafts: int, draft_length: int, vocab_size: int) -> dict[str, Speculation]:
    """Return the settings to check: every rule that the vocabulary allows, and a tree for one that supports trees."""
    found = {}
    for name, rule in RULES.items():
        if vocab_size > (rule.max_vocabulary or vocab_size):
            continue
        most = 2 if rule.draft_methods[0] == "spechub" else rule.max_drafts or num_drafts
        found[name] = Speculation(rule=name, num_drafts=min(num_drafts, most), draft_length=draft_length)
    found["traversal, tree"] = Speculation(rule="traversal", num_drafts=4, draft_length=2, tree=(2, 2))
    found["greedy, tree"] = Speculation(rule="greedy", num_drafts=4, draft_length=2, tree=(2, 2))
    return found


def selfcheck(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Return (results, whether every rule passed and the biased one was detected); a table goes to standard error."""
    engine = load_pair(options, options.concurrency, max(4, options.num_drafts), max(2, options.draft_length))
    settings = settings_of(options.num_drafts, options.draft_length, engine.facts.vocab_size)
    if options.rules:
        settings = {name: one for name, one in settings.items() if one.rule in options.rules.split(",")}
    prompts = [make_prompt(engine, seed) for seed in range(1, options.prompts + 1)]
    checks: list[Check] = []
    cells = [(name, one, prompt) for name, one in settings.items() for prompt in prompts]
    for name, one, prompt in tqdm(cells, desc="rules", unit="check"):
        checks.append(check_law(engine, name, one, prompt, options.answers, options.temperature))
    powers = [check_power(engine, prompt, options.answers, options.temperature) for prompt in prompts]
    titles = ["rule", "p-value", "cells", "answers", "tokens per step", "bias it would find"]
    print(f"| {' | '.join(titles)} |\n| {' | '.join('---' for _ in titles)} |", file=sys.stderr)
    for check in (*checks, *powers):
        row = f"| {check.name} | {check.p_value:.3g} | {check.num_cells} | {check.num_answers} "
        print(f"{row}| {check.tokens_per_step:.2f} | {check.detectable_bias:.3f} |", file=sys.stderr)
    for power in powers:
        found = "detected, as it must be" if power.rejected else "not detected: the two models agree too well"
        print(f"over-acceptance, a rule with a bias of {power.reported_bias:.3f}: {found}", file=sys.stderr)
    failed = [check.name for check in checks if check.rejected]
    blind = [number for number, power in enumerate(powers) if is_blind(power)]
    skipped = [name for name in RULES if name not in {one.rule for one in settings.values()}]
    verdict = "every rule passed" if not failed else f"FAILED: {', '.join(failed)}"
    print(f"{verdict} (significance {SIGNIFICANCE}); not checked: {', '.join(skipped) or 'none'}", file=sys.stderr)
    if blind:
        print(f"FAILED: the test missed a biased rule on {len(blind)} prompts", file=sys.stderr)
    result = {
        "target": Path(names_of(options)[0]).name,
        "significance": SIGNIFICANCE,
        "temperature": options.temperature,
        "checks": [_record(check) for check in checks],
        "power": [_record(power) for power in powers],
        "not_checked": skipped,
    }
    return result, not failed and not blind


def _record(check: Check) -> dict[str, Any]:
    return {
        "rule": check.name,
        "p_value": check.p_value,
        "cells": check.num_cells,
        "answers": check.num_answers,
        "tokens_per_step": check.tokens_per_step,
        "detectable_bias": check.detectable_bias,
        "reported_bias": check.reported_bias,
        "rejected": check.rejected,
    }
