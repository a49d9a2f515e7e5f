"""`analyze times`: how long every rule takes on this machine, on made-up laws."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from tqdm import tqdm

from engine.speculation.timing import rule_seconds
from engine.speculation.verification import RULES


def analyze_times(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds per verification by rule, chains and vocabulary; a table goes to standard error."""
    torch.set_num_threads(options.threads)
    cells = [
        (rule, chains, vocabulary)
        for rule in RULES
        for chains in options.num_drafts
        if chains <= (RULES[rule].max_drafts or chains)
        for vocabulary in options.vocabulary
        if vocabulary <= (RULES[rule].max_vocabulary or vocabulary)
    ]
    results = []
    for rule, chains, vocabulary in tqdm(cells, desc="rules", unit="cell"):
        seconds = rule_seconds(rule, options.requests, chains, options.draft_length, vocabulary, options.repeats)
        results.append({"rule": rule, "num_drafts": chains, "vocabulary": vocabulary, "milliseconds": 1000 * seconds})
    print("| rule | drafts | vocabulary | ms per step |\n| --- | --- | --- | --- |", file=sys.stderr)
    for cell in results:
        row = f"{cell['rule']} | {cell['num_drafts']} | {cell['vocabulary']} | {cell['milliseconds']:.2f}"
        print(f"| {row} |", file=sys.stderr)
    return {
        "requests": options.requests,
        "draft_length": options.draft_length,
        "threads": options.threads,
        "repeats": options.repeats,
        "cells": results,
    }
