"""Medians, and the paired bootstrap interval of a ratio."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_RESAMPLES = 4000


@dataclass(frozen=True)
class Ratio:
    """Median of paired ratios, with its 95 % interval."""

    median: float
    low: float
    high: float


def ratio_of_sums_interval(
    numerators: Sequence[float], denominators: Sequence[float], seed: int = 0
) -> tuple[float, float]:
    """95 % bootstrap interval of sum(numerators) / sum(denominators); the pairs are resampled."""
    generator = random.Random(seed)
    pairs = list(zip(numerators, denominators, strict=True))
    ratios = []
    for _ in range(_RESAMPLES):
        drawn = generator.choices(pairs, k=len(pairs))
        ratios.append(sum(above for above, _ in drawn) / sum(below for _, below in drawn))
    ratios.sort()
    return ratios[int(0.025 * _RESAMPLES)], ratios[int(0.975 * _RESAMPLES) - 1]


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float], seed: int = 0) -> Ratio:
    """Ratio of two series measured in pairs; the pairs are resampled."""
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    generator = random.Random(seed)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    return Ratio(statistics.median(ratios), medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES) - 1])
