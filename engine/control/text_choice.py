"""Choose which text drafts a step verifies: the ones that pay for their time.

Every node of a text tree has an estimated probability that the answer goes on with its path. Verified, it adds this
much to the expected tokens of the step, less what the request's other drafts add anyway. The nodes of all requests are
sorted by this gain, and the step takes the number of them with the most expected tokens per second. The time of its
prompts does not count: they take it with any drafts, and in it many drafts would appear to cost nothing.

Non-anticipating, as `controller.py` is. Not for requests whose drafts must not depend on the load
(`Speculation.adaptive`): theirs are a function of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from engine.control.step_time import StepTimes
from engine.control.step_work import MIXED, StepWork
from engine.control.text_acceptance import TextAcceptance

Numbers = npt.NDArray[np.float64]
NOTHING: Numbers = np.zeros(0)
"""[0] of a request without other drafts."""

_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of nodes of a step that are compared."""
_CLEAR_GAIN = 1.02
"""Ratio by which a step with text drafts must be better than one without."""
_PATIENCE, _MOST_SELDOM = 8, 8
"""Choices without a text draft after which the next ones are further apart, and steps between them at most: a choice
takes about 50 microseconds for each request.
"""


class TextOption(NamedTuple):
    """Text tree of a request; nodes in order, parents before their children."""

    parents: Sequence[int]
    """-1 is the end of the text."""
    probabilities: Sequence[float]
    reached: Numbers
    """[depths] probability that the request's other drafts are accepted to this depth and beyond."""
    depths: Sequence[int]
    """From 0 on."""
    drafts_already: bool
    """Whether the request has other drafts in this step."""


class TextChoice:
    """Chooses the text drafts of every step, and learns how often they are right."""

    def __init__(self) -> None:
        self._acceptance = {is_greedy: TextAcceptance() for is_greedy in (False, True)}
        self._num_idle = self._num_skipped = self._num_requests = 0

    def acceptance(self, is_greedy: bool) -> TextAcceptance:
        """Return the acceptance of text drafts at temperature 0, or at others."""
        return self._acceptance[is_greedy]

    def is_due(self, num_requests: int) -> bool:
        """Whether a step with this many requests chooses; after many choices of nothing most steps do not."""
        fewer, self._num_requests = num_requests < self._num_requests, num_requests
        pause = min(_MOST_SELDOM, self._num_idle // _PATIENCE)
        if not fewer and self._num_skipped < pause:
            self._num_skipped += 1
            return False
        self._num_skipped = 0
        return True

    def choose(
        self, times: StepTimes, base: StepWork, num_tokens: float, options: Sequence[TextOption]
    ) -> list[list[int]]:
        """Return the numbers of the nodes to draft, by option.

        base: work of the step without text drafts; num_tokens: tokens that it is expected to emit.
        """
        order = _by_gain(options)
        counts = [count for count in _COUNTS if count < len(order)] + [len(order)] * bool(order)
        gains = np.cumsum([gain for gain, _, _ in order])
        works = [base, *(_with_nodes(base, order[:count], options) for count in counts)]
        tokens = num_tokens + np.array([0.0, *(gains[count - 1] for count in counts)])
        seconds = times.step_s([base.without_prompts, *works])
        prompts_s = seconds[1] - seconds[0]
        rates = tokens / (seconds[1:] - prompts_s)
        rates[0] *= _CLEAR_GAIN
        best = int(rates.argmax())
        self._num_idle = 0 if best else self._num_idle + 1
        chosen: list[list[int]] = [[] for _ in options]
        for _, option, node in order[: counts[best - 1] if best else 0]:
            chosen[option].append(node)
        return chosen


def _by_gain(options: Sequence[TextOption]) -> list[tuple[float, int, int]]:
    """Return (gain, option, node) of all nodes, the largest gain first; a parent comes before its children."""
    found = []
    for number, option in enumerate(options):
        gains: list[float] = []
        reached, deepest = option.reached, len(option.reached)
        for parent, depth, probability in zip(option.parents, option.depths, option.probabilities, strict=True):
            gain = probability * (1.0 - float(reached[depth])) if depth < deepest else probability
            # Deep nodes are not in the shadow of short chains, but need their parents.
            gains.append(gain if parent < 0 else min(gain, gains[parent]))
        found += [(gain, number, node) for node, gain in enumerate(gains)]
    return sorted(found, key=lambda one: (-one[0], one[1], one[2]))


def _with_nodes(base: StepWork, nodes: Sequence[tuple[float, int, int]], options: Sequence[TextOption]) -> StepWork:
    """Return the work of the step with these nodes."""
    drafting = {number for _, number, _ in nodes if not options[number].drafts_already}
    return replace(base, nodes=base.nodes + len(nodes), drafting=base.drafting + len(drafting), shape=MIXED)
