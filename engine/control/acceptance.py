"""Statistics of drafts and answers: acceptance of drafted tokens, and lengths of answers."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
_BELIEF = 0.7
"""Acceptance of a token of one chain before any observation."""
_BELIEF_WEIGHT = 6.0
"""Weight of this prior, in observations."""
_BELIEF_STD = 0.15
"""Standard deviation of the logarithm of a step's tokens before any observation."""
_GROWTH = 0.25
"""Exponent of K by which acceptance grows (`with_chains`)."""
_KEEP = 0.998
"""Factor of the observations' weight after each step."""
SUREST = 0.995
"""Upper bound of the acceptance estimates."""
_ANSWER = 128.0
"""Tokens of an answer before any has ended."""
_KEEP_ANSWERS = 0.95
"""Factor of the earlier answers' weight after each further answer."""


def with_chains(acceptance: float, num_drafts: int) -> float:
    """Return the acceptance of a token by K chains, given the acceptance by a single chain."""
    return 1.0 - float((1.0 - acceptance) ** (num_drafts**_GROWTH))


class Acceptance:
    """Acceptance of drafted tokens, by number of chains and position in the chain.

    It holds given that the tokens before were accepted. Also the prompts that the draft model must
    read.
    """

    def __init__(self, longest: int) -> None:
        """longest: most tokens of a chain."""
        self._longest = longest
        self._counts: dict[int, Numbers] = {}
        """[2, longest] accepted and tried tokens of each position, by number of chains."""
        self._new: dict[tuple[int, int, int], int] = {}
        """Number of observations since the last `apply`, by the arguments of `observe`."""
        self._reached: dict[int, Numbers] = {}
        """Results of `reached` since the last `apply`."""
        self._answers = np.array([0.0, _ANSWER])
        """Faded sums over ended answers: prompt tokens that a draft model must read, and tokens."""

    @property
    def prompt_share(self) -> float:
        """Return the mean prompt tokens that a draft model must read, per token of an answer."""
        # Requests for a prompt alone add no tokens.
        return float(self._answers[0] / max(1.0, self._answers[1]))

    def note_answer(self, num_prompt: int, num_emitted: int) -> None:
        """Record the end of an answer. num_prompt: its tokens that a draft model must read."""
        self._answers = _KEEP_ANSWERS * self._answers + (num_prompt, num_emitted)

    def observe(self, num_drafts: int, num_tried: int, num_taken: int) -> None:
        """Record that the first `num_taken` of `num_tried` positions were accepted, for `apply`."""
        seen = (num_drafts, num_tried, num_taken)
        self._new[seen] = self._new.get(seen, 0) + 1

    def apply(self, num_steps: int) -> None:
        """Apply the observations of this number of steps; older ones lose weight."""
        for counts in self._counts.values():
            counts *= _KEEP**num_steps
        for (num_drafts, num_tried, num_taken), count in self._new.items():
            counts = self._counts.setdefault(num_drafts, np.zeros((2, self._longest)))
            counts[0, :num_taken] += count
            counts[1, :num_tried] += count
        self._new.clear()
        self._reached.clear()

    def log_std(self, num_drafts: int) -> float:
        """Return the standard deviation of the logarithm of a step's tokens with these chains."""
        counts = self._counts.get(num_drafts)
        num_tried = 0.0 if counts is None else float(counts[1].sum())
        # Drafts that are seldom accepted add little, whatever their acceptance is.
        share = min(1.0, float(self.reached(num_drafts)[0]) / _BELIEF)
        return share * _BELIEF_STD * math.sqrt(_BELIEF_WEIGHT / (_BELIEF_WEIGHT + num_tried))

    def reached(self, num_drafts: int) -> Numbers:
        """Return [longest] the probability that drafts are accepted to each position."""
        reached = self._reached.get(num_drafts)
        if reached is None:
            reached = self._reached[num_drafts] = self.by_position(num_drafts).cumprod()
        return reached

    def by_position(self, num_drafts: int) -> Numbers:
        """Return [longest] the acceptance of each position, given the positions before.

        With few observations it is estimated from other numbers of chains and the prior.
        """
        belief = with_chains(self._acceptance_of_single_chain(), num_drafts)
        by_position = np.full(self._longest, min(SUREST, belief))
        counts = self._counts.get(num_drafts)
        if counts is None:
            return by_position
        for position, (num_taken, num_tried) in enumerate(counts.T.tolist()):
            # A rarely reached position is estimated like the position before it, because easy texts
            # stay easy for a while.
            estimate = (num_taken + _BELIEF_WEIGHT * belief) / (num_tried + _BELIEF_WEIGHT)
            belief = min(SUREST, estimate)
            by_position[position] = belief
        return by_position

    def _acceptance_of_single_chain(self) -> float:
        """Return the acceptance of a single chain's token, from all numbers of chains."""
        total = _BELIEF * _BELIEF_WEIGHT
        weight = _BELIEF_WEIGHT
        for num_drafts, counts in self._counts.items():
            num_taken, num_tried = counts.sum(1).tolist()
            if num_tried > 0:
                mean = min(SUREST, num_taken / num_tried)
                total += num_tried * (1.0 - (1.0 - mean) ** (num_drafts**-_GROWTH))
                weight += num_tried
        return total / weight
