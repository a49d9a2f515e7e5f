"""Choose which text drafts a step verifies: the drafts that pay for their time.

Every node of a text tree has an estimated probability that the answer goes on with its path. If the
node is verified, it adds this probability to the expected tokens of the step, less the tokens that
the request's other drafts add anyway. The nodes of all requests are sorted by this gain, and the
step takes the number of nodes with the most expected tokens per second. The time of the step's
prompts does not count: prompts take it with any drafts, and in it many drafts would appear to cost
nothing.

Non-anticipating, as `controller.py` is. Not for requests whose drafts must not depend on the load
(`Speculation.adaptive`): their drafts are a function of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.control.step_time import StepTimes
from engine.control.step_work import StepWork
from engine.control.text_acceptance import TextAcceptance

Numbers = npt.NDArray[np.float64]
Candidate = tuple[float, int, int]
"""(gain, number of the option, number of the node in its tree)."""
NOTHING: Numbers = np.zeros(0)
"""[0] of a request without other drafts."""

_CLEAR_GAIN = 1.02
"""Ratio by which a step with text drafts must be better than one without."""
_PATIENCE = 8
"""Choices without a text draft after which the next choices are further apart: a choice takes about
50 microseconds for each request.
"""
_MOST_SELDOM = 8
"""Most steps between choices."""


class TextOption(NamedTuple):
    """Text tree of a request; nodes in order, parents before their children."""

    parents: Sequence[int]
    """-1 is the end of the text."""
    probabilities: Sequence[float]
    reached: Numbers
    """[depths] probability that the request's other drafts are accepted to each depth."""
    depths: Sequence[int]
    """From 0 on."""


class TextChoice:
    """Chooses the text drafts of every step, and learns how often they are right."""

    def __init__(self) -> None:
        self._acceptance = {is_greedy: TextAcceptance() for is_greedy in (False, True)}
        self._num_idle = 0
        """Choices of nothing in a row."""
        self._num_skipped = 0
        """Such steps since the last choice."""
        self._num_requests = 0
        """Requests of the last step in which any request weighed text drafts."""

    def acceptance(self, is_greedy: bool) -> TextAcceptance:
        """Return the acceptance of text drafts at temperature 0, or at others."""
        return self._acceptance[is_greedy]

    def is_due(self, num_requests: int) -> bool:
        """Whether a step with this many requests chooses; few steps do after many empty choices."""
        has_fewer = num_requests < self._num_requests
        self._num_requests = num_requests
        pause = min(_MOST_SELDOM, self._num_idle // _PATIENCE)
        if not has_fewer and self._num_skipped < pause:
            self._num_skipped += 1
            return False
        self._num_skipped = 0
        return True

    def choose(
        self, times: StepTimes, base: StepWork, num_tokens: float, options: Sequence[TextOption]
    ) -> list[list[int]]:
        """Return the numbers of the nodes to draft, by option.

        base: work of the step without text drafts; num_tokens: its expected tokens.
        """
        candidates = _by_gain(options)
        tokens = num_tokens + np.cumsum([0.0, *(gain for gain, _, _ in candidates)])
        rates = tokens / (times.step_s(base) + times.text_row_s() * np.arange(len(tokens)))
        rates[0] *= _CLEAR_GAIN
        best = int(rates.argmax())
        self._num_idle = 0 if best else self._num_idle + 1
        chosen: list[list[int]] = [[] for _ in options]
        for _, option, node in candidates[:best]:
            chosen[option].append(node)
        return chosen


def _by_gain(options: Sequence[TextOption]) -> list[Candidate]:
    """Return all nodes, the largest gain first; a parent comes before its children."""
    candidates = []
    for number, option in enumerate(options):
        gains: list[float] = []
        places = zip(option.parents, option.depths, option.probabilities, strict=True)
        for parent, depth, gain in places:
            if depth < len(option.reached):
                gain *= 1.0 - float(option.reached[depth])
            # Deep nodes are not in the shadow of short chains, but need their parents.
            if parent >= 0:
                gain = min(gain, gains[parent])
            gains.append(gain)
        candidates += [(gain, number, node) for node, gain in enumerate(gains)]
    # Equal gains stay in order, because sorting is stable.
    return sorted(candidates, key=lambda candidate: -candidate[0])
