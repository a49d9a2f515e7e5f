"""Chooses how much each request drafts, by what it costs now and what has been accepted before; never slower.

A menu of shapes (K chains of L tokens), plain decoding among them. For a shape the expected tokens of a step come from
acceptance seen so far, by position, over all requests and for each request (shrunk to all); its duration from costs
measured at start, corrected by the steps themselves. A step gets the shape with the most tokens a second; a request
whose drafts are not worth their rows decodes plainly beside the others. To leave plain decoding, and to change a shape,
the gain must be clear.

Non-anticipating: a choice looks at sizes, times and tokens of the past, never at what is drafted or drawn next, so the
law of the output stays the target's. Now and then a few plain steps are made to see what they take. Not for: requests
that say their own shape, or whose seed must mean the same answer under any load (`Speculation.adaptive`).
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.scheduling.costs import StepCosts
from engine.scheduling.sequence import Sequence

Numbers = npt.NDArray[np.float64]
Shape = tuple[int, int]
"""(chains, tokens in a chain)."""

PLAIN: Shape = (0, 0)
_MENU = ((1, 2), (1, 3), (1, 5), (1, 8), (2, 3), (2, 5), (3, 4), (4, 3), (4, 5), (8, 4))
# What is believed before anything is seen: acceptance of one chain's token, and how it grows with K.
_BELIEF, _GROWTH = 0.7, 0.25
_BELIEF_WEIGHT, _REQUEST_WEIGHT = 6.0, 10.0
_KEEP = 0.998
"""Share of what is known that is kept from step to step; old observations fade."""
_CLEAR_GAIN = 1.03
_CHOOSE_EVERY = 8
_MOST_WEIGHT, _FORGET = 19.0, 0.9
"""A time's correction stands for the last twenty steps at most; each step of the other kind makes it a tenth weaker."""
_RETRY = 0.999
"""Share of what is known of drafting steps' times, beyond what is known of plain ones, that a plain step leaves."""
_PROBE_STEPS, _FIRST_PROBE, _PROBE_EVERY = 3, 16, 256
"""So many plain steps are made after so many drafting ones; at first soon, then after twice as many each time."""
_CATCH_UP_STEPS = 32
"""Steps over which it must pay that the draft model computes what it has missed."""


def with_chains(acceptance: float, num_drafts: int) -> float:
    """Acceptance of a token by K chains, from that of one."""
    return 1.0 - float((1.0 - acceptance) ** (num_drafts**_GROWTH))


class Acceptance:
    """How often drafted tokens are accepted, by number of chains and position in the chain, given those before."""

    def __init__(self, longest: int) -> None:
        self._taken: dict[int, Numbers] = {}
        self._tried: dict[int, Numbers] = {}
        self._longest = longest
        self._new: dict[tuple[int, int, int], int] = {}
        self._totals: dict[int, list[float]] = {}

    def fade(self) -> None:
        """A step has passed: take in what it has shown, and let what lies further back fade."""
        for counts in (*self._taken.values(), *self._tried.values()):
            counts *= _KEEP
        for (num_drafts, num_tried, num_taken), count in self._new.items():
            taken = self._taken.setdefault(num_drafts, np.zeros(self._longest))
            tried = self._tried.setdefault(num_drafts, np.zeros(self._longest))
            taken[:num_taken] += count
            tried[:num_tried] += count
        self._new.clear()
        self._totals.clear()

    def observe(self, num_drafts: int, num_tried: int, num_taken: int) -> None:
        """Of `num_tried` positions the first `num_taken` were accepted; known from the next step on."""
        seen = (num_drafts, num_tried, num_taken)
        self._new[seen] = self._new.get(seen, 0) + 1

    def expected(self, num_drafts: int, num_tried: int) -> float:
        """How many of the first `num_tried` positions are accepted, each given those before."""
        if num_drafts not in self._totals:
            self._totals[num_drafts] = [0.0, *self.by_position(num_drafts).cumsum().tolist()]
        return self._totals[num_drafts][num_tried]

    def by_position(self, num_drafts: int) -> Numbers:
        """[longest] estimates; where little was seen, what other numbers of chains and the belief say."""
        belief = with_chains(self._of_one_chain(), num_drafts)
        taken = self._taken.get(num_drafts, np.zeros(self._longest))
        tried = self._tried.get(num_drafts, np.zeros(self._longest))
        return np.minimum(0.995, (taken + _BELIEF_WEIGHT * belief) / (tried + _BELIEF_WEIGHT))

    def _of_one_chain(self) -> float:
        total, weight = _BELIEF * _BELIEF_WEIGHT, _BELIEF_WEIGHT
        for num_drafts, tried in self._tried.items():
            count = float(tried.sum())
            if count > 0:
                mean = min(0.995, float(self._taken[num_drafts].sum()) / count)
                total += count * (1.0 - (1.0 - mean) ** (num_drafts**-_GROWTH))
                weight += count
        return total / weight


@dataclass
class Choice:
    """What the next steps draft."""

    shape: Shape = PLAIN
    drafting: frozenset[int] = frozenset()
    """Sequences that draft; the other adaptive ones decode plainly."""
    of: tuple[frozenset[int], int, int] = (frozenset(), -1, 0)
    """Adaptive sequences, and requests and nodes of the others, that it was made for."""
    age: int = 0
    kept: Shape = PLAIN
    """What has the advantage of being done when the next choice is made."""


@dataclass
class _Correction:
    """Measured over predicted seconds of steps of one kind."""

    factor: float = 1.0
    _weight: float = 6.0
    """About how many recent steps it stands for; at first what was measured at start."""
    step: int = 0
    """The last of them."""

    def note(self, step: int, measured_s: float, predicted_s: float) -> None:
        """Step number `step` was of this kind."""
        # What was seen long ago says little of a machine that others use too: after a pause a few steps are believed.
        self._weight = min(_MOST_WEIGHT, self._weight * _FORGET ** (step - self.step - 1)) + 1.0
        self.step = step
        # Single steps are noisy: a slow one may have met another process.
        self.factor += (min(3.0, max(0.3, measured_s / predicted_s)) - self.factor) / max(3.0, self._weight)


@dataclass
class Controller:
    """The shape of every adaptive row."""

    costs: StepCosts
    longest: int
    """Most tokens of a chain."""
    acceptance: Acceptance = field(init=False)
    choice: Choice = field(default_factory=Choice)

    def __post_init__(self) -> None:
        self.acceptance = Acceptance(self.longest)
        self._corrections = {True: _Correction(), False: _Correction()}
        self._step = self._probed = 0
        self._probe_after = _FIRST_PROBE

    def choose(
        self, adaptive: Many[Sequence], num_others: int = 0, num_other_nodes: int = 0, num_behind: int = 0
    ) -> None:
        """Decide for the running requests; before each step.

        num_others: requests beside them, with so many nodes; num_behind: tokens the draft model must catch up on.
        """
        self.acceptance.fade()
        asked = (frozenset(sequence.sequence_id for sequence in adaptive), num_others, num_other_nodes)
        self.choice.age += 1
        if not adaptive or (asked == self.choice.of and self.choice.age < _CHOOSE_EVERY):
            return
        skill = np.array([sequence.skill for sequence in adaptive])
        limits = [sequence.request.speculation for sequence in adaptive]
        most = max(limits, key=lambda one: (one.num_drafts, one.draft_length))
        if self._probe_is_due(num_other_nodes):
            self.choice = Choice(PLAIN, frozenset(), asked, _CHOOSE_EVERY - _PROBE_STEPS, self.choice.shape)
            return
        kept = self.choice.kept if asked[0] & self.choice.of[0] else None
        num_rows = len(adaptive) + num_others
        plain_rate = num_rows / self._step_s(num_rows, 0, PLAIN, num_other_nodes)
        # What is being done has the advantage: another shape must be clearly better.
        catch_up_s = self.costs.catch_up_s(num_behind) / _CATCH_UP_STEPS
        best, best_rate, best_mask = PLAIN, plain_rate * (1.0 if kept == PLAIN else 1 / _CLEAR_GAIN), skill < 0
        for shape in menu(most.num_drafts, most.draft_length, self.longest):
            tokens = self._expected(shape, skill)
            extra_s = self._step_s(num_rows, len(adaptive), shape, num_other_nodes) - num_rows / plain_rate
            mask = tokens - 1 > max(0.0, extra_s) / len(adaptive) * plain_rate
            step_s = self._step_s(num_rows, int(mask.sum()), shape, num_other_nodes) + catch_up_s
            rate = (float(tokens[mask].sum()) + num_rows - int(mask.sum())) / step_s
            rate *= 1.0 if shape == kept else 1 / _CLEAR_GAIN
            if rate > best_rate:
                best, best_rate, best_mask = shape, rate, mask
        drafting = frozenset(one.sequence_id for one, drafts in zip(adaptive, best_mask, strict=True) if drafts)
        chosen = best if drafting else PLAIN
        self.choice = Choice(chosen, drafting, asked, kept=chosen)

    def _probe_is_due(self, num_other_nodes: int) -> bool:
        """Whether it is time to see how long plain steps take now: that nothing is slower is judged by that."""
        if self.choice.shape == PLAIN or num_other_nodes:
            return False
        if self._step - max(self._probed, self._corrections[False].step) < self._probe_after:
            return False
        self._probed, self._probe_after = self._step, min(_PROBE_EVERY, 2 * self._probe_after)
        return True

    def branching(self, sequence: Sequence) -> tuple[int, ...]:
        """What a sequence drafts next."""
        num_drafts, length = self.choice.shape
        # A request that has just come drafts like the others.
        is_new = sequence.sequence_id not in self.choice.of[0]
        if not length or not (is_new or sequence.sequence_id in self.choice.drafting):
            return ()
        return (min(num_drafts, sequence.request.speculation.num_drafts), *(1,) * (length - 1))

    def observe(self, sequence: Sequence, num_drafts: int, draft_length: int, num_accepted: int) -> None:
        """A row's drafts have been verified."""
        tried, taken = min(num_accepted + 1, draft_length), min(num_accepted, draft_length)
        self.acceptance.observe(num_drafts, tried, taken)
        sequence.note_drafts(taken, self.acceptance.expected(num_drafts, tried), _REQUEST_WEIGHT)

    def note_time(self, num_rows: int, num_drafting: int, shape: Shape, seconds: float) -> None:
        """A step without prompts took this long."""
        predicted = self.costs.step_s(num_rows, num_drafting, *shape)
        self._step += 1
        self._corrections[num_drafting > 0].note(self._step, seconds, predicted)

    def _step_s(self, num_rows: int, num_drafting: int, shape: Shape, num_other_nodes: int) -> float:
        factor = self._corrections[False].factor
        if num_drafting or num_other_nodes:
            drafting = self._corrections[True]
            # Slow steps may have had another reason: after long enough without any, drafting is tried again.
            factor += (drafting.factor - factor) * _RETRY ** (self._step - drafting.step)
        return self.costs.step_s(num_rows, num_drafting, *shape, num_other_nodes) * factor

    def _expected(self, shape: Shape, skill: Numbers) -> Numbers:
        """[requests] tokens of a step."""
        by_position = self.acceptance.by_position(shape[0])[: shape[1]]
        of_request = np.minimum(0.995, skill[:, None] * by_position)
        expected: Numbers = 1.0 + of_request.cumprod(axis=1).sum(axis=1)
        return expected


def menu(num_drafts: int, draft_length: int, longest: int) -> list[Shape]:
    """The shapes that stay within a request's chains, and its nodes."""
    shapes = [(k, n) for k, n in _MENU if k <= num_drafts and n <= longest and k * n <= num_drafts * draft_length]
    own = (num_drafts, draft_length)
    return shapes if own in shapes else [*shapes, own]
