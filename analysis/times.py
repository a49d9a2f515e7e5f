"""`analyze times`: duration of every rule on this machine, on synthetic distributions.

Distributions are softmax rows of random logits; the draft's are the target's with noise.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from engine.kernels.protocol import ChainNoise, Chains, ProbsTable
from engine.noise import Purpose, uniform
from engine.speculation.drafting import children
from engine.speculation.verification import RULES
from engine.start.choosing import choose
from loadtest.arguments import integers
from loadtest.results import table


def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Return milliseconds per verification by rule, chains and vocabulary."""
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
    return {
        "requests": options.requests,
        "draft_length": options.draft_length,
        "threads": options.threads,
        "repeats": options.repeats,
        "cells": results,
    }


def markdown(result: dict[str, Any]) -> str:
    """Return a table with a row per rule, chains and vocabulary."""
    rows = [
        [cell["rule"], cell["num_drafts"], cell["vocabulary"], f"{cell['milliseconds']:.2f}"]
        for cell in result["cells"]
    ]
    return table(["rule", "drafts", "vocabulary", "ms per step"], rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-drafts", type=integers, default=[1, 2, 4], help="chains, e.g. 1,2,4")
    parser.add_argument("--vocabulary", type=integers, default=[4096, 32000, 152000], help="sizes, e.g. 4096,152000")
    parser.add_argument("--draft-length", type=int, default=5, help="tokens in a chain (default 5)")
    parser.add_argument("--requests", type=int, default=1, help="requests verified together (default 1)")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs; the median is printed (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")


def synthetic_chains(
    num_requests: int, num_chains: int, length: int, vocab_size: int, method: str, seed: int = 0
) -> tuple[Chains, ProbsTable, ChainNoise]:
    """Return synthetic chains, target distributions and noise of one step."""
    numbers, kernels = partial(_numbers, seed), choose(torch.device("cpu"))
    total = num_requests * num_chains
    shape = (num_requests * (length + 1), vocab_size)
    logits_NV, noise_NV = (torch.special.ndtri(numbers(Purpose.SCORE, i, shape)).float() for i in range(2))
    logits_NV = 3 * logits_NV
    noisy_NV = logits_NV + 0.7 * noise_NV
    target_NV, draft_NV = logits_NV.softmax(-1), noisy_NV.softmax(-1)
    # All chains of a request share one row per depth; the time does not depend on it.
    request_C = torch.arange(num_requests).repeat_interleave(num_chains)
    row_CX = request_C.unsqueeze(1) * (length + 1) + torch.arange(length + 1)
    draws = numbers(Purpose.DRAFT, 0, (length, num_requests, num_chains))
    rows_NL = torch.arange(num_requests).unsqueeze(1) * (length + 1) + torch.arange(length)
    tokens = [
        children(kernels, method if depth == 0 else "iid", draft_NV[rows_NL[:, depth]], draws[depth]).reshape(total)
        for depth in range(length)
    ]
    chains = Chains(
        torch.stack(tokens, 1),
        torch.full((total,), length),
        request_C,
        ProbsTable(draft_NV, row_CX[:, :length], kernels),
        (num_requests, num_chains),
    )
    noise = ChainNoise(
        numbers(Purpose.ACCEPT, 0, (total, length)),
        numbers(Purpose.RESIDUAL, 0, (total,)),
        numbers(Purpose.SCORE, 2, (total,)),
        numbers(Purpose.CHOSEN_ACCEPT, 0, (total, length)),
        numbers(Purpose.CHOSEN_RESIDUAL, 0, (total,)),
    )
    return chains, ProbsTable(target_NV, row_CX, kernels), noise


def _numbers(seed: int, purpose: Purpose, position: int, shape: tuple[int, ...]) -> Tensor:
    """Return uniform numbers of any shape."""
    return torch.from_numpy(uniform(seed, position, purpose, 0, np.arange(prod(shape)))).reshape(shape)


@torch.inference_mode()
def rule_seconds(rule: str, num_requests: int, num_chains: int, length: int, vocab_size: int, repeats: int) -> float:
    """Return the median duration of one verification of `num_requests` requests."""
    known = RULES[rule]
    inputs = synthetic_chains(num_requests, num_chains, length, vocab_size, known.draft_methods[0])
    return statistics.median(durations_s(lambda: known.verify(*inputs), repeats))


def durations_s(run: Callable[[], object], repeats: int) -> list[float]:
    """Return the durations of several runs, after one that is not measured."""
    run()
    taken_s = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        taken_s.append(time.perf_counter() - began)
    return taken_s
