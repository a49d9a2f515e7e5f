"""Chooses how much each request drafts, by what it costs now and what has been accepted before; never slower.

A menu of shapes (K chains of L tokens), plain decoding among them. For a shape the expected tokens of a step come from
acceptance seen so far, by position, over all requests and for each request (shrunk to all); its duration from costs
measured at start, corrected by the steps themselves. A step gets the shape with the most tokens a second; a request
whose drafts are not worth their rows decodes plainly beside the others. To leave plain decoding, and to change a shape,
the gain must be clear.

Non-anticipating: a choice looks at sizes, times and tokens of the past, never at what is drafted or drawn next, so the
law of the output stays the target's. Now and then a few plain steps are made, and a few of a shape that may be as good,
to see what they take. Not for: requests that say their own shape, or whose seed must mean the same answer under any
load (`Speculation.adaptive`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import zip_longest
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from engine.plan import level_widths
from engine.scheduling.acceptance import Acceptance
from engine.scheduling.corrections import BESIDE, PLAIN, Corrections, Shape
from engine.scheduling.costs import StepCosts
from engine.scheduling.sequence import Sequence

Method = TypeVar("Method", bound=Callable[..., None])
Numbers = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Rated = tuple[float, Shape, Mask]
"""Tokens a second, the shape, and which of the adaptive requests would draft it."""
_MENU = ((1, 1), (1, 2), (1, 3), (1, 5), (1, 8), (2, 3), (2, 5), (3, 4), (4, 3), (4, 5), (8, 4))
_REQUEST_WEIGHT = 10.0
"""Tokens that it takes to believe how a request's drafts compare with all."""
_CLEAR_GAIN = 1.03
_HOLD = 0.7
"""A request stops drafting beside others only where its drafts are worth less than this share of what they take: how
good its drafts are is known roughly, and who has stopped must be caught up with."""
_CHOOSE_EVERY, _REST_EVERY = 8, 32
"""Steps between choices for the same requests, where they draft and where they do not."""
_FEW = 4
"""One in so many requests may be another one than it was chosen for."""
_EARLY = 64
"""Steps after each of which acceptances are learned at once: before, requests are measured against a guess."""
_PROBE_STEPS, _MOST_PROBE_STEPS, _FIRST_PROBE, _PROBE_EVERY = 3, 8, 16, 256
"""So many plain steps (more where some tell nothing) are made after so many drafting ones; at first soon, then after
twice as many each time."""
_DOUBTS, _RIVAL_EVERY = 1.5, 64
"""A shape that would have the best rate with steps shorter by so many standard deviations of what is known of them is
tried, for as many steps after so many."""
_BELIEVED_ANSWER, _KEEP_ANSWERS = 128.0, 0.95
"""Tokens of an answer before any has ended; and the share of what is known of answers that each new one leaves."""


def _takes_time(method: Method) -> Method:
    """`method`, with its duration added to what the controller has spent."""

    @wraps(method)
    def timed(self: Controller, *args: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        method(self, *args, **kwargs)
        self.spent_s += time.perf_counter() - began

    return cast(Method, timed)


@dataclass
class Choice:
    """What the next steps draft."""

    shape: Shape = PLAIN
    drafting: frozenset[int] = frozenset()
    """Sequences that draft; the other adaptive ones decode plainly."""
    of: tuple[frozenset[int], tuple[tuple[int, ...], ...]] = (frozenset(), ((-1,),))
    """Adaptive sequences, with those whose prompts were to end, and what the others draft, that it was made for."""
    age: int = 0
    kept: Shape = PLAIN
    """What has the advantage of being done when the next choice is made."""
    rival: tuple[Shape, frozenset[int]] = (PLAIN, frozenset())
    """A shape that may be as good, and who would draft it; plain for none."""
    rests: frozenset[int] = frozenset()
    """Sequences that decode plainly, as their drafts were not worth their rows or there was no room for any."""


@dataclass(frozen=True)
class _Load:
    """What a choice is made for."""

    num_adaptive: int
    others: tuple[tuple[int, ...], ...]
    reading_s: Numbers
    """[adaptive requests] what the draft model takes to catch up with each, by token that its answer may still get."""
    num_text: int
    """Tokens of all texts."""
    plain_s: float
    """A plain step of all, as measured at start."""

    @cached_property
    def num_rows(self) -> int:
        """How many the step has."""
        return self.num_adaptive + len(self.others)

    @cached_property
    def nodes_beside(self) -> tuple[int, ...]:
        """Nodes by depth of the others."""
        return added(level_widths(branching) for branching in self.others)

    @cached_property
    def num_drafting_beside(self) -> int:
        """How many of the others draft."""
        return sum(map(bool, self.others))


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
        self._corrections = Corrections()
        self.spent_s = 0.0
        """What its choices, and what they learn from, have taken since the start."""
        self._step = self._probe_end = self._plain_end = self._rival_end = 0
        self._faded = 0
        self._to_tell = 0
        self._rival_after = _RIVAL_EVERY
        self._probes_plain = False
        self._tried: dict[Shape, int] = {}
        self._probe_after = _FIRST_PROBE
        self._answers = np.array([0.0, _BELIEVED_ANSWER, 1.0])
        self._newcomers: set[int] = set()
        self._most_newcomers = 0
        self.reads = True
        """Whether the draft model reads along what is not yet drafted from: not while plain decoding is chosen."""

    @_takes_time
    def choose(
        self,
        adaptive: Many[Sequence],
        others: Many[tuple[int, ...]] = (),
        behind: Many[int] | None = None,
        text_beside: int = 0,
    ) -> None:
        """Decide for the requests that emit in the next step; before each step.

        others: what the requests beside them draft (`Row.branching`).
        behind: tokens that the draft model must catch up on, by adaptive request.
        text_beside: tokens of the others' texts.
        """
        self._step += 1
        if self._step <= _EARLY:
            self._take_in()
        asked = (frozenset(sequence.sequence_id for sequence in adaptive), tuple(others))
        self.choice.age += 1
        if self._probes(asked[0], any(others)):
            shape, drafting = (PLAIN, frozenset[int]()) if self._probes_plain else self.choice.rival
            kept, rival, rests = self.choice.kept, self.choice.rival, self.choice.rests
            self.choice = Choice(shape, drafting, asked, _CHOOSE_EVERY, kept, rival, rests)
        elif adaptive and (self._are_others(*asked) or self.choice.age >= self._choose_every):
            self._take_in()
            num_rows, num_text = len(adaptive) + len(others), text_beside + sum(len(one.tokens) for one in adaptive)
            plain_s = self.costs.plain.measured_s(num_rows, num_text / num_rows)
            reading_s = self._reading_s(adaptive, behind)
            self._choose(adaptive, _Load(len(adaptive), tuple(others), reading_s, num_text, plain_s))
            self.choice.of = asked
        num_drafting = len(self.choice.drafting)
        self._newcomers.clear()
        self._most_newcomers = max(1, num_drafting // _FEW if adaptive else num_drafting)

    @property
    def _choose_every(self) -> int:
        """Where nothing is drafted, nothing is learned of drafts."""
        return _CHOOSE_EVERY if self.choice.kept != PLAIN else _REST_EVERY

    def _are_others(self, adaptive: frozenset[int], others: tuple[tuple[int, ...], ...]) -> bool:
        """Whether the requests are not those it was chosen for: one in four may come or go until the next choice."""
        chosen_for, beside = self.choice.of
        return others != beside or len(adaptive ^ chosen_for) > min(len(adaptive), len(chosen_for)) // _FEW

    def _take_in(self) -> None:
        """What drafts have shown since the last time is known from now on."""
        self.acceptance.fade(self._step - self._faded)
        self._faded = self._step

    def _choose(self, adaptive: Many[Sequence], load: _Load) -> None:
        skill = np.array([sequence.skill for sequence in adaptive])
        room = np.array([sequence.num_remaining - 1 for sequence in adaptive])
        limits = [sequence.request.speculation for sequence in adaptive]
        most = max(limits, key=lambda one: (one.num_drafts, one.draft_length))
        kept = self.choice.kept if any(one.sequence_id in self.choice.of[0] for one in adaptive) else None
        tokens_beside = sum(self._tokens_of(branching) for branching in load.others)
        plain_s = self._step_s(load, 0, PLAIN)
        plain_rate = (len(adaptive) + tokens_beside) / plain_s
        # What is being done has the advantage: another shape must be clearly better.
        best, best_rate, best_mask = PLAIN, plain_rate * (1.0 if kept == PLAIN else 1 / _CLEAR_GAIN), skill < 0
        enough = np.array([1.0 if one.sequence_id in self.choice.rests else _HOLD for one in adaptive])
        rates: list[Rated] = []
        by_length: dict[int, Numbers] = {}
        for shape in menu(most.num_drafts, most.draft_length, self.longest):
            if shape[0] not in by_length:
                by_length[shape[0]] = self._expected(shape[0], skill, room)
            tokens = by_length[shape[0]][shape[1]]
            step_s = self._step_s(load, len(adaptive), shape)
            price_s = max(0.0, step_s - plain_s) / len(adaptive) + tokens * load.reading_s
            mask = tokens - 1 > enough * price_s * plain_rate
            emitted = float(tokens[mask].sum()) + len(adaptive) - int(mask.sum())
            # Where drafting is what is done, the texts of those that come must be read too.
            reading_s = max(float((tokens * load.reading_s)[mask].sum()), emitted * self._prompt_s())
            if not mask.all():
                step_s = self._step_s(load, int(mask.sum()), shape)
            rate = (emitted + tokens_beside) / (step_s + reading_s)
            rate *= 1.0 if shape == kept else 1 / _CLEAR_GAIN
            rates.append((rate, shape, mask))
            if rate > best_rate:
                best, best_rate, best_mask = shape, rate, mask
        drafting = _chosen(adaptive, best_mask)
        chosen = best if drafting else PLAIN
        others = [one for one in rates if one[1] != best and one[2].any()]
        rival, mask = self._rival(others, (best_rate, best), load.num_rows)
        tries = _chosen(adaptive, mask) if rival != PLAIN else frozenset[int]()
        rests = frozenset(one.sequence_id for one in adaptive) - drafting
        self.choice = Choice(chosen, drafting, kept=chosen, rival=(rival, tries), rests=rests)
        if room.any():  # or nothing can be drafted, which says nothing of the next prompt
            self.reads = chosen != PLAIN

    def _rival(self, rates: list[Rated], best: tuple[float, Shape], num_rows: int) -> tuple[Shape, Mask]:
        """Of the shapes that may be better, as little as is known of their steps, the one tried least recently."""
        tried = [
            (self._tried.get(shape, 0), -rate, shape, mask)
            for rate, shape, mask in rates
            if rate * math.exp(_DOUBTS * self._corrections.doubt(shape, best[1], num_rows)) > best[0]
        ]
        return min(tried, key=lambda one: one[:3])[2:] if tried else (PLAIN, np.zeros(0, bool))

    def _probes(self, adaptive: frozenset[int], beside_drafts: bool) -> bool:
        """Whether this step is made to see how long such steps take now: plain ones, by which it is judged that nothing
        is slower, or a rival's.

        Beside requests that draft in any case no step is plain.
        """
        rival, drafting = self.choice.rival
        if self._step == self._probe_end + 1 and not self._probes_plain and self._to_tell == _PROBE_STEPS:
            self._rival_after = _PROBE_EVERY  # where every step has a prompt, rivals tell nothing
        if self._step <= self._probe_end and self._to_tell:
            if not beside_drafts if self._probes_plain else drafting & adaptive:
                return True
            self._to_tell = 0  # whom it was begun with has gone
        if self.choice.shape == PLAIN or not adaptive:
            return False
        learned = self._corrections.learned_plain
        if not beside_drafts and self._step - max(self._plain_end, learned) > self._probe_after:
            # Where every step has prompts, probes tell nothing: they must not become many.
            most = _PROBE_EVERY if learned + _MOST_PROBE_STEPS > self._plain_end else _PROBE_EVERY // 2
            self._probe_after = min(most, 2 * self._probe_after)
            self._probes_plain = True
            self._probe_end = self._plain_end = self._begin_probe()
            return True
        if rival == PLAIN or not drafting & adaptive or self._step - self._rival_end <= self._rival_after:
            return False
        self._rival_after = _RIVAL_EVERY
        self._probes_plain = False
        self._tried[rival] = self._step
        self._probe_end = self._rival_end = self._begin_probe()
        return True

    def _begin_probe(self) -> int:
        """The last step it may have: those with prompts tell nothing, and others are made for them."""
        self._to_tell = _PROBE_STEPS
        return self._step + _MOST_PROBE_STEPS - 1

    def branching(self, sequence: Sequence) -> tuple[int, ...]:
        """What a sequence drafts in the step chosen for.

        One that has just come takes a place the first time it is asked for, and keeps it for the step.
        """
        num_drafts, length = self.choice.shape
        drafts = sequence.sequence_id in self.choice.drafting
        if length and sequence.sequence_id not in self.choice.of[0]:
            # Those that have just come draft like the others, but few of them beside what it was chosen for.
            if len(self._newcomers) < self._most_newcomers:
                self._newcomers.add(sequence.sequence_id)
            drafts = sequence.sequence_id in self._newcomers
        if not length or not drafts:
            return ()
        # What is chosen for all may be more than this one asked for.
        own = sequence.request.speculation
        num_drafts = min(num_drafts, own.num_drafts)
        return (num_drafts, *(1,) * (min(length, own.num_drafts * own.draft_length // num_drafts) - 1))

    @_takes_time
    def observe(self, sequence: Sequence, num_drafts: int, draft_length: int, num_accepted: int) -> None:
        """A row's drafts have been verified."""
        tried, taken = min(num_accepted + 1, draft_length), min(num_accepted, draft_length)
        self.acceptance.observe(num_drafts, tried, taken)
        sequence.note_drafts(taken, self.acceptance.expected(num_drafts, tried), _REQUEST_WEIGHT)

    def note_answer(self, num_prompt: int, num_emitted: int) -> None:
        """An answer has ended: how many tokens of its prompt a draft model must read, and how many it has itself."""
        self._answers = _KEEP_ANSWERS * self._answers + np.array([num_prompt, num_emitted, 1.0])

    def _prompt_s(self) -> float:
        """What an emitted token costs the draft model: where it drafts, and only there, it must read the prompts."""
        num_prompt, num_emitted, num_answers = self._answers.tolist()
        return self.costs.reading.at(num_prompt / num_answers) * float(num_answers / num_emitted)

    def _reading_s(self, adaptive: Many[Sequence], behind: Many[int] | None) -> Numbers:
        """[requests] what catching up costs for each token that the answer may still get."""
        usual = self._answers[1] / self._answers[2]
        left = np.array([max(1.0, min(sequence.num_remaining, usual)) for sequence in adaptive])
        result: Numbers = np.array([self.costs.reading.at(lag) for lag in behind or [0] * len(adaptive)]) / left
        return result

    @_takes_time
    def note_time(
        self, num_rows: int, num_drafting: int, nodes_by_depth: Many[int], seconds: float, num_text: int = 0
    ) -> None:
        """The step chosen for took this long, without prompts in it; sizes as in `StepCosts.step_s`."""
        self._to_tell = max(0, self._to_tell - 1)
        predicted = self.costs.step_s(num_rows, num_drafting, nodes_by_depth, num_text)
        self._corrections.note(self._step, _kind(self.choice.shape, num_drafting), num_rows, seconds, predicted)

    def _step_s(self, load: _Load, num_drafting: int, shape: Shape) -> float:
        """A step in which so many of the adaptive requests draft this shape."""
        num_drafting_in_all = num_drafting + load.num_drafting_beside
        nodes = (num_drafting * shape[0],) * shape[1]
        if load.num_drafting_beside:
            nodes = added((load.nodes_beside, nodes))
        drafts_s = self.costs.drafts_s(load.num_rows, num_drafting_in_all, nodes, load.num_text)
        factor = self._corrections.factor(_kind(shape, num_drafting_in_all), load.num_rows)
        return (load.plain_s + drafts_s) * factor

    def _tokens_of(self, branching: tuple[int, ...]) -> float:
        """Expected tokens of a step of a request with a shape of its own."""
        if not branching:
            return 1.0
        length = len(branching)
        return float(self._expected(branching[0], np.ones(1), np.array([length]))[length][0])

    def _expected(self, num_drafts: int, skill: Numbers, room: npt.NDArray[np.int64]) -> Numbers:
        """[longest + 1, requests] tokens of a step, by the length of the chains.

        room: drafted tokens that the answer has room for, [requests].
        """
        by_position = self.acceptance.by_position(num_drafts)[:, None]
        accepted = np.minimum(0.995, skill * by_position) * (np.arange(self.longest)[:, None] < room)
        expected = np.ones((self.longest + 1, len(skill)))
        expected[1:] += accepted.cumprod(axis=0).cumsum(axis=0)
        return expected


def _kind(shape: Shape, num_drafting: int) -> Shape:
    """Of a step in which so many draft, and adaptive requests this shape."""
    return PLAIN if not num_drafting else BESIDE if shape == PLAIN else shape


def _chosen(sequences: Many[Sequence], mask: Mask) -> frozenset[int]:
    """Ids of those that the mask holds."""
    return frozenset(one.sequence_id for one, drafts in zip(sequences, mask, strict=True) if drafts)


def added(nodes: Iterable[Many[int]]) -> tuple[int, ...]:
    """Nodes by depth of several requests together."""
    return tuple(sum(of_depth) for of_depth in zip_longest(*nodes, fillvalue=0))


def menu(num_drafts: int, draft_length: int, longest: int) -> list[Shape]:
    """The shapes that stay within a request's chains, and its nodes."""
    shapes = [(k, n) for k, n in _MENU if k <= num_drafts and n <= longest and k * n <= num_drafts * draft_length]
    own = (num_drafts, draft_length)
    return shapes if own in shapes else [*shapes, own]
