"""How far steps are from what was predicted of them: how the machine is now, and how each shape compares.

What was measured at start is a few runs of a few shapes, and can have met a busy machine; the steps that are served
tell, by and by. Plain and drafting steps have a factor each, which follows the machine within some steps. Beyond it
each shape has one of its own, which says how it compares and is an average over long: single probes are too noisy. What
has not been seen for long, or never, is as far off as its kind; drafting steps, where there have been none for long,
as the plain ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Shape = tuple[int, int]
"""(chains, tokens in a chain)."""

PLAIN: Shape = (0, 0)
BESIDE: Shape = (0, 1)
"""Stands for whatever requests draft that the controller does not decide about."""
_KIND_WEIGHT, _MOST_WEIGHT, _FORGET = 6.0, 20.0, 0.9
"""For how many steps what was measured at start counts, how many a kind's correction stands for at most, and what a
step of the other kind leaves of that."""
_PAUSE = 8
"""Steps without one of its kind after which what a correction has seen last is old."""
_RETRY = 0.999
"""Share of what is known of drafting steps beyond plain ones, and of a shape beyond its kind, that each step leaves."""
_SHAPE_WEIGHT, _MOST_SHAPE_WEIGHT = 3.0, 120.0
"""The same of shapes."""
_SETTLED = 8.0
"""A shape is compared with a kind that stands for so many recent steps."""


@dataclass
class Correction:
    """Measured over predicted seconds of steps of one kind."""

    forget: float
    """What a step of another kind leaves of the weight."""
    weight: float
    """About how many recent steps it stands for; at first what was measured at start."""
    most_weight: float
    keeps: float = 1.0
    """What is left of it (beyond 1) from step to step."""
    factor: float = 1.0
    learned: int = 0
    """The step that changed it last."""
    _noted: int = 0
    _recent: list[float] = field(default_factory=list)

    def note(self, step: int, measured_s: float, predicted_s: float) -> None:
        """Step number `step` was of this kind."""
        if step - self._noted > _PAUSE:
            # What was seen long ago says little of a machine that others use too.
            self.weight *= self.forget ** (step - self._noted)
            self._recent.clear()
        self._noted = step
        num_new = 3.0 if len(self._recent) < 3 else 1.0
        self._recent = [*self._recent[-2:], min(3.0, max(0.3, measured_s / predicted_s))]
        if len(self._recent) < 3:
            return
        # Single steps are noisy: one that has met another process is not the middle one of three.
        self.weight = min(self.most_weight, self.weight + num_new)
        self.factor = self.at(step)
        self.factor += (sorted(self._recent)[1] - self.factor) * num_new / self.weight
        self.learned = step

    def at(self, step: int) -> float:
        """What is left of it by then."""
        return 1.0 + (self.factor - 1.0) * float(self.keeps ** (step - self.learned))

    def is_settled(self, step: int) -> bool:
        """Whether it says how such steps are now."""
        return self.weight >= _SETTLED and step - self._noted <= _PAUSE


class Corrections:
    """Measured over predicted seconds, by shape and about how many requests."""

    def __init__(self) -> None:
        self.plain, self.drafting = (Correction(_FORGET, _KIND_WEIGHT, _MOST_WEIGHT) for _ in range(2))
        self._own: dict[tuple[Shape, int], Correction] = {}

    def note(self, step: int, shape: Shape, num_rows: int, measured_s: float, predicted_s: float) -> None:
        """Step number `step` had so many requests and drafted this shape, or was plain."""
        key = (shape, _size(num_rows))
        if key not in self._own:
            self._own[key] = Correction(_RETRY, _SHAPE_WEIGHT, _MOST_SHAPE_WEIGHT, _RETRY)
        own, kind = self._own[key], self.plain if shape == PLAIN else self.drafting
        # The machine is seen through what is known of the shape; the shape through the machine, once that is known.
        is_settled, is_now = kind.is_settled(step), kind.factor
        kind.note(step, measured_s, predicted_s * own.at(step))
        if is_settled:
            own.note(step, measured_s, predicted_s * is_now)

    def factor(self, step: int, shape: Shape, num_rows: int) -> float:
        """What to multiply a prediction with."""
        factor = self.plain.factor
        if shape != PLAIN:
            # Slow steps may have had another reason: after long enough without any, drafting is tried again.
            factor += (self.drafting.factor - factor) * float(_RETRY ** (step - self.drafting.learned))
        return factor * self.compares(step, shape, num_rows)

    def compares(self, step: int, shape: Shape, num_rows: int) -> float:
        """The part of it that is the shape's own."""
        own = self._own.get((shape, _size(num_rows)))
        return own.at(step) if own is not None else 1.0


def _size(num_rows: int) -> int:
    """Numbers of requests that count as one: 1, 2, 3 to 5, 6 to 10, 11 to 21, ... with the powers of two inside."""
    return (num_rows * 3 // 2).bit_length()
