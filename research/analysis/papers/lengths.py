"""Closed forms of the expected accepted length.

They are compared with the tokens that the engine's steps accepted.

A step's expectation is taken along the text that the step and the following ones wrote. That text
has the target's distribution, so the mean of the closed form over steps is the mean of the accepted
lengths, at every number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.start.distribution_check import CheckedAnswer
from loadtest.statistics import ratio_of_sums
from research.analysis.load import SpeculationSetup
from research.analysis.pair import answers_of, laws_along, log_probs
from research.analysis.papers.cases import Progress, ServedPair
from tests.oracles import bounds
from tests.oracles.bounds import Verification

_CHAINS, _SEEDS = 4, 3
TIMES = 4
"""Repetitions of a task's prompts."""
CASES: tuple[tuple[str, int, Verification, bool], ...] = (
    ("token", 1, "token", False),
    ("block", 1, "block", False),
    ("bv_race", _CHAINS, "block", False),
    ("greedy_block", 1, "greedy", True),
    ("spectr_gbv", _CHAINS, "greedy", True),
)
"""(rule, chains, its closed form, whether that only holds in an answer's first block)."""


def compare(
    pair: ServedPair, prompts: Sequence[tuple[int, ...]], length: int, progress: Progress
) -> list[dict[str, Any]]:
    """Return accepted tokens and the sum of the closed form.

    Over the same steps of every rule with chains of a length.
    """
    rows = []
    for rule, chains, verification, is_first in CASES:
        shape = SpeculationSetup(rule, "iid", chains, length)
        counted, predicted, num_steps = [], [], 0
        every = list(prompts) * (_SEEDS if is_first else 1)
        num_tokens = length + 2 if is_first else max(pair.tokens, 2 * length)
        answers = answers_of(pair.engine, every, shape.speculation, 1.0, num_tokens, ignore_eos=True)
        for prompt, answer in zip(every, answers, strict=True):
            lengths = _lengths(pair, prompt, answer, shape, verification, is_first)
            counted.append(sum(accepted for accepted, _ in lengths))
            predicted.append(sum(expected for _, expected in lengths))
            num_steps += len(lengths)
        found = ratio_of_sums(counted, predicted)
        row = {"rule": rule, "chains": chains, "length": length, "first": is_first, "steps": num_steps}
        row |= {"accepted": sum(counted) / num_steps, "predicted": sum(predicted) / num_steps}
        rows.append(row | found._asdict())
        progress(f"closed form of {rule}")
    return rows


def _lengths(
    pair: ServedPair,
    prompt: tuple[int, ...],
    answer: CheckedAnswer,
    shape: SpeculationSetup,
    verification: Verification,
    is_first: bool,
) -> list[tuple[int, float]]:
    """Return (accepted, expected) tokens of the steps of one answer that a whole block follows."""
    length = shape.draft_length
    room = len(answer.tokens) - length
    steps = [(start, step) for start, step in answer.steps if step.draft_length == length and start <= room]
    laws = laws_along(pair.engine, prompt, answer.tokens, 1.0)
    log_p, log_q = (log_probs(rows, answer.tokens) for rows in laws)
    lengths = []
    for start, step in steps[:1] if is_first else steps:
        block = slice(start, start + length)
        expected = bounds.expected_block_length(log_p[None, block], log_q[None, block], shape.num_drafts, verification)
        lengths.append((step.num_accepted, float(expected[0])))
    return lengths
