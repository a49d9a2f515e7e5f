"""Statistics of drafts and answers: acceptance of drafted tokens, and lengths of answers."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
_BELIEF, _BELIEF_WEIGHT, _BELIEF_STD, _GROWTH = 0.7, 6.0, 0.15, 0.25
"""Before any observation: acceptance of a token of one chain; the weight of this prior in observations; standard
deviation of the logarithm of a step's tokens; exponent of K by which acceptance grows (`with_chains`)."""
_KEEP = 0.998
"""Factor of the observations' weight after each step."""
SUREST = 0.995
"""Upper bound of the acceptance estimates."""
_ANSWER, _KEEP_ANSWERS = 128.0, 0.95
"""Tokens of an answer before any has ended; factor of the answers' weight after each further one."""


def with_chains(acceptance: float, num_drafts: int) -> float:
    """Return the acceptance of a token by K chains, from that of one."""
    return 1.0 - float((1.0 - acceptance) ** (num_drafts**_GROWTH))


class Acceptance:
    """Acceptance of drafted tokens, by number of chains and position in the chain, given the tokens before; and the
    lengths of prompts and answers.
    """

    def __init__(self, longest: int) -> None:
        self._counts: dict[int, Numbers] = {}
        """[2, longest] accepted and tried tokens of each position, by number of chains."""
        self._longest = longest
        self._new: dict[tuple[int, int, int], int] = {}
        self._known: dict[int, tuple[Numbers, list[float]]] = {}
        self._answers = np.array([0.0, _ANSWER, 1.0])
        """Faded sums over ended answers: prompt tokens that a draft model must read, answer tokens, and answers."""

    @property
    def usual_answer(self) -> float:
        """Return the mean tokens of an answer."""
        return float(self._answers[1] / self._answers[2])

    @property
    def prompt_share(self) -> float:
        """Return the mean prompt tokens for each token of an answer."""
        return float(self._answers[0] / self._answers[1])

    def note_answer(self, num_prompt: int, num_emitted: int) -> None:
        """Record the end of an answer: the number of its prompt's tokens that a draft model must read, and its own
        tokens.
        """
        self._answers = _KEEP_ANSWERS * self._answers + np.array([num_prompt, num_emitted, 1.0])

    def fade(self, num_steps: int = 1) -> None:
        """Apply the observations of the last steps, and reduce the weight of older observations."""
        for counts in self._counts.values():
            counts *= _KEEP**num_steps
        for (num_drafts, num_tried, num_taken), count in self._new.items():
            taken, tried = self._counts.setdefault(num_drafts, np.zeros((2, self._longest)))
            taken[:num_taken] += count
            tried[:num_tried] += count
        self._new.clear()
        self._known.clear()

    def observe(self, num_drafts: int, num_tried: int, num_taken: int) -> None:
        """Record that of `num_tried` positions the first `num_taken` were accepted; applied by the next `fade`."""
        seen = (num_drafts, num_tried, num_taken)
        self._new[seen] = self._new.get(seen, 0) + 1

    def expected(self, num_drafts: int, num_tried: int) -> float:
        """Return the sum of the acceptances of the first `num_tried` positions, each given those before.

        A chain of which exactly these positions were tried is expected to have this number of accepted tokens.
        """
        return self._estimates(num_drafts)[1][num_tried]

    def log_std(self, num_drafts: int) -> float:
        """Return the standard deviation of the logarithm of a step's tokens with this number of chains."""
        tried = float(self._counts[num_drafts][1].sum()) if num_drafts in self._counts else 0.0
        # Drafts that are seldom accepted add little, whatever their acceptance is.
        share = min(1.0, float(self.by_position(num_drafts)[0]) / _BELIEF)
        return share * _BELIEF_STD * math.sqrt(_BELIEF_WEIGHT / (_BELIEF_WEIGHT + tried))

    def by_position(self, num_drafts: int) -> Numbers:
        """Return [longest] the acceptance of each position, given the positions before; with few observations, from
        other numbers of chains and the prior.
        """
        return self._estimates(num_drafts)[0]

    def _estimates(self, num_drafts: int) -> tuple[Numbers, list[float]]:
        """Return (the acceptance of each position, sums of the first 0, 1, ... of them)."""
        if num_drafts not in self._known:
            belief = with_chains(self._of_one_chain(), num_drafts)
            by_position = np.full(self._longest, min(SUREST, belief))
            if num_drafts in self._counts:
                for position, (taken, tried) in enumerate(self._counts[num_drafts].T.tolist()):
                    # A rarely reached position is estimated like the one before it, because easy texts stay easy for a
                    # while.
                    belief = min(SUREST, (taken + _BELIEF_WEIGHT * belief) / (tried + _BELIEF_WEIGHT))
                    by_position[position] = belief
            self._known[num_drafts] = by_position, [0.0, *by_position.cumsum().tolist()]
        return self._known[num_drafts]

    def _of_one_chain(self) -> float:
        total, weight = _BELIEF * _BELIEF_WEIGHT, _BELIEF_WEIGHT
        for num_drafts, counts in self._counts.items():
            taken, count = counts.sum(1).tolist()
            if count > 0:
                mean = min(SUREST, taken / count)
                total += count * (1.0 - (1.0 - mean) ** (num_drafts**-_GROWTH))
                weight += count
        return total / weight
