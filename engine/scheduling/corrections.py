"""How far steps are from what was predicted of them: of all plain ones, all drafting ones, and each shape by itself.

What was measured at start is a few runs of a few shapes, and can have met a busy machine; the steps that are served
tell, by and by. A shape not seen for long, or never, is as far off as all drafting ones; these, where there have been
none for long, as the plain ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Shape = tuple[int, int]
"""(chains, tokens in a chain)."""

PLAIN: Shape = (0, 0)
BESIDE: Shape = (0, 1)
"""Stands for whatever requests draft that the controller does not decide about."""
_MOST_WEIGHT, _FORGET = 20.0, 0.9
"""A time's correction stands for the last twenty steps at most; each step of the other kind makes it a tenth weaker."""
_PAUSE = 8
"""Steps without one of its kind after which what a correction has seen last is old."""
_RETRY, _RETRY_SHAPE = 0.999, 0.997
"""Share of what is known of drafting steps beyond plain ones, and of a shape beyond these, that each step leaves."""


@dataclass
class Correction:
    """Measured over predicted seconds of steps of one kind."""

    factor: float = 1.0
    learned: int = 0
    """The step that changed it last."""
    weight: float = 6.0
    """About how many recent steps it stands for; at first what was measured at start."""
    _noted: int = 0
    _recent: list[float] = field(default_factory=list)

    def note(self, step: int, measured_s: float, predicted_s: float) -> None:
        """Step number `step` was of this kind."""
        if step - self._noted > _PAUSE:
            # What was seen long ago says little of a machine that others use too.
            self.weight *= _FORGET ** (step - self._noted)
            self._recent.clear()
        self._noted = step
        num_new = 3.0 if len(self._recent) < 3 else 1.0
        self._recent = [*self._recent[-2:], min(3.0, max(0.3, measured_s / predicted_s))]
        if len(self._recent) < 3:
            return
        # Single steps are noisy: one that has met another process is not the middle one of three.
        self.weight = min(_MOST_WEIGHT, self.weight + num_new)
        self.factor += (sorted(self._recent)[1] - self.factor) * num_new / self.weight
        self.learned = step


class Corrections:
    """Measured over predicted seconds, by shape and number of requests (in powers of two)."""

    def __init__(self) -> None:
        self.plain, self.drafting = Correction(), Correction()
        self._own: dict[tuple[Shape, int], Correction] = {}

    def note(self, step: int, shape: Shape, num_rows: int, measured_s: float, predicted_s: float) -> None:
        """Step number `step` had so many requests and drafted this shape, or was plain."""
        key = (shape, num_rows.bit_length())
        if key not in self._own:
            # What is known of other shapes counts as a single step.
            self._own[key] = Correction(self.factor(step, shape, num_rows), weight=1.0)
        self._own[key].note(step, measured_s, predicted_s)
        (self.drafting if shape != PLAIN else self.plain).note(step, measured_s, predicted_s)

    def factor(self, step: int, shape: Shape, num_rows: int) -> float:
        """What to multiply a prediction with."""
        factor = self.plain.factor
        if shape != PLAIN:
            factor = _faded(self.drafting, factor, step, _RETRY)
        own = self._own.get((shape, num_rows.bit_length()))
        return _faded(own, factor, step, _RETRY_SHAPE) if own is not None and own.learned else factor

    def learned(self, shape: Shape, num_rows: int) -> int:
        """The step that told something of this shape last; 0 for none."""
        own = self._own.get((shape, num_rows.bit_length()))
        return own.learned if own is not None else 0


def _faded(correction: Correction, general: float, step: int, left: float) -> float:
    """What is left of a correction beyond a more general one: slow steps may have had another reason."""
    return general + (correction.factor - general) * float(left ** (step - correction.learned))
