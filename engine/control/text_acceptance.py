"""Acceptance of text drafts by how far the two texts agree.

Not for choices between drafts (`text_choice.py`). The command line imports this module, so it needs
no further package.
"""

from __future__ import annotations

from engine.config import PREDICTION

_BOUNDS = (1, 2, 3, 4, 5, 7, 10, 14)
"""Least agreeing tokens of each class after the first."""
_USUAL = (0.2, 0.25, 0.5, 0.6, 0.7, 0.75, 0.8, 0.87, 0.94)
"""Acceptance by class at first: SmolLM2-135M-Instruct on the tasks of Spec-Bench."""
_USUAL_OF_PREDICTIONS = 0.9
_WEIGHT = 10.0
"""Weight of the usual acceptance, in observations."""
_KEEP = 0.998
"""Factor of the earlier observations' weight with each further observation."""
_SUREST = 0.97


def _class_by_bounds(num_agreeing: int) -> int:
    return sum(num_agreeing >= bound for bound in _BOUNDS)


_CLASSES = tuple(map(_class_by_bounds, range(_BOUNDS[-1] + 1)))


def _class(num_agreeing: int) -> int:
    return _CLASSES[min(num_agreeing, _BOUNDS[-1])]


def usual_acceptance(source: str, num_agreeing: int) -> float:
    """Return the acceptance of a text draft's next token before any observation.

    source: name of the drafter; num_agreeing: last tokens in which both texts agree.
    """
    usual = _USUAL[_class(num_agreeing)]
    if source == PREDICTION:
        return max(usual, _USUAL_OF_PREDICTIONS)
    return usual


class TextAcceptance:
    """Acceptance of text drafts, learned from the tokens that followed, drafted or not."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], list[float]] = {}
        """Faded numbers of right continuations and of all, by drafter and class."""

    def estimate(self, source: str, num_agreeing: int) -> float:
        """Return the acceptance of a text draft's next token. Arguments: `usual_acceptance`."""
        usual = usual_acceptance(source, num_agreeing)
        num_right, num_seen = self._seen.get((source, _class(num_agreeing)), (0.0, 0.0))
        return min(_SUREST, (num_right + _WEIGHT * usual) / (num_seen + _WEIGHT))

    def observe(self, source: str, num_agreeing: int, is_right: bool) -> None:
        """Record whether the token that followed was among the drafts of this kind."""
        seen = self._seen.setdefault((source, _class(num_agreeing)), [0.0, 0.0])
        seen[0] = _KEEP * seen[0] + is_right
        seen[1] = _KEEP * seen[1] + 1.0
