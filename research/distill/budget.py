"""Budget of a run.

Measured speeds, the texts and epochs that fit some hours, and the estimate of the time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

_MOST_EPOCHS = 4


@dataclass(frozen=True)
class Speeds:
    """Measured speeds, in tokens a second, and seconds of what happens once."""

    sampling: float
    states: float
    training: float
    """Tokens of texts in training steps."""
    report_s: float
    """Seconds of the report."""
    checkpoint_s: float
    """Seconds of a checkpoint with its validation."""


@dataclass(frozen=True)
class Amount:
    """Number of tokens of all texts, and the times that each is trained on."""

    num_tokens: int
    epochs: int


@dataclass(frozen=True)
class Present:
    """Numbers of tokens that need no further work."""

    given: int = 0
    """Tokens of whole texts that are given, which take turns with sampled ones."""
    sampled: int = 0
    """Tokens of texts that were sampled before."""
    states: int = 0
    """Tokens whose states were computed before."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of the parts of a run."""

    sampling_s: float
    states_s: float
    training_s: float
    report_s: float

    @property
    def total_s(self) -> float:
        """Seconds of all parts."""
        return self.sampling_s + self.states_s + self.training_s + self.report_s

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name.removesuffix('_s')} {seconds / 60:.1f} min" for name, seconds in asdict(self).items() if seconds > 1
        )
        return f"estimate: {self.total_s / 60:.1f} min ({parts})"


def estimate(amount: Amount, speeds: Speeds, present: Present, num_checkpoints: int) -> Estimate:
    """Return the seconds that texts, states, training and the report will take."""
    num_tokens = amount.num_tokens
    num_sampled = num_tokens - min(present.given, num_tokens // 2)
    return Estimate(
        max(0, num_sampled - present.sampled) / speeds.sampling,
        max(0, num_tokens - present.states) / speeds.states,
        amount.epochs * num_tokens / speeds.training + num_checkpoints * speeds.checkpoint_s,
        speeds.report_s,
    )


def fitting(seconds: float, speeds: Speeds, present: Present, num_checkpoints: int) -> Amount:
    """Return the texts and epochs that take this long.

    There are as many epochs as a new token costs steps of training, so that at least half of the
    time is training.
    """
    ratio = (1 / speeds.sampling + 1 / speeds.states) * speeds.training
    epochs = max(1, min(_MOST_EPOCHS, round(ratio)))
    few, many = 0, int(seconds * speeds.training) + 1
    while many - few > 1:
        middle = (few + many) // 2
        taken_s = estimate(Amount(middle, epochs), speeds, present, num_checkpoints).total_s
        few, many = (middle, many) if taken_s <= seconds else (few, middle)
    return Amount(few, epochs)


def to_dict(speeds: Speeds, estimated: Estimate) -> dict[str, Any]:
    """Return speeds and estimate as they are reported.

    The speed of a part that is not needed is left out.
    """
    rounded = {name: round(value, 1) for name, value in asdict(speeds).items() if isfinite(value)}
    return {"speeds": rounded, "estimate": {name: round(value) for name, value in asdict(estimated).items()}}
