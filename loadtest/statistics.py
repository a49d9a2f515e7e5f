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


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float], seed: int = 0) -> Ratio:
    """Ratio of two series measured in pairs; the pairs are resampled."""
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    generator = random.Random(seed)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    return Ratio(statistics.median(ratios), medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES) - 1])
