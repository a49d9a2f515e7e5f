"""Choose the drafts of each adaptive request: the shape with the most expected tokens per second, or plain decoding.

The menu has shapes (K chains of L tokens) and plain decoding. The tokens of a step are predicted from the acceptance so
far, by position over all requests and by request; its duration from the model of step times, which `step/telemetry.py`
updates after every step. A request whose drafts are not worth their time decodes plainly, in the same step as the
others.

A few steps are trials, if the model of step times is uncertain: plain ones, needed to report the speedup, and steps of
the shape that is best in a sample of the possible step times.

Non-anticipating: a choice depends on sizes, times and tokens of the past, never on tokens that are drafted or drawn
next, so the output keeps the target's distribution. Not for requests that fix their shape, or whose seed must give the
same answer under any load (`Speculation.adaptive`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from engine.control.acceptance import SUREST, Acceptance
from engine.control.step_time import StepTimes
from engine.control.step_work import MIXED, PLAIN, Shape, StepWork, draft_passes
from engine.fanout import Fanout, level_widths
from engine.needs import needs_of_drafts
from engine.request import Request

Numbers = npt.NDArray[np.float64]

_MENU = ((1, 1), (1, 2), (1, 3), (1, 5), (1, 8), (2, 3), (2, 5), (3, 4), (4, 3), (4, 5), (8, 4))
_CLEAR_GAIN = 1.03
"""Ratio by which another shape must be better than the current one."""
_HOLD = 0.7
"""A request stops drafting if its drafts are worth less than this share of their time. It is below 1 because the
worth is an estimate, and because the draft model must catch up on a request that has stopped.
"""
_CHOOSE_EVERY, _SELDOM_S = 8, 0.2
"""Usual number of steps between choices for the same requests. While plain decoding stays the best the number doubles,
up to the steps that take this many seconds: a choice takes half as long as a plain step of a small model, and plain
steps show nothing about drafts.
"""
_FEW = 4
"""The controller chooses again if more than one in this many requests has arrived or left."""
_TRIAL_STEPS, _PLAIN_TRIAL_STEPS, _TRIAL_SHARE = 4, 8, 1 / 32
"""Steps of a trial; steps of a plain trial after the first ones, which are less informative (`StepTimes.num_cold`);
largest share of all steps for trials. Early the share is larger: the square root of the number of steps for samples,
twice that for plain decoding after its first trial.
"""
_PLAIN_STD = 0.03
"""Plain steps are tried until the ratio of their duration to that of the shape in use is known to this accuracy."""


class Drafting(Protocol):
    """Facts of a sequence on which choices depend (`engine.scheduling.sequence`)."""

    sequence_id: int
    request: Request
    tokens: list[int]

    @property
    def acceptance_ratio(self) -> float: ...
    @property
    def num_remaining(self) -> int: ...
    def note_drafts(self, num_taken: int, expected: float) -> None: ...


class ShapeChoice(NamedTuple):
    """Drafts of the next steps."""

    shape: Shape = PLAIN
    drafting: frozenset[int] = frozenset()
    """Sequences that draft; the other adaptive ones decode plainly."""


class _Load(NamedTuple):
    """Inputs of a choice."""

    adaptive: Sequence[Drafting]
    others: tuple[Fanout, ...]
    """Drafts of the other requests."""
    text: int
    """Tokens of all texts."""
    catch_up_s: Numbers
    """[adaptive] time of the draft model to catch up with each, per remaining token of its answer."""
    is_eager: bool
    """Whether such steps are never recorded, whatever is drafted."""
    draws_eagerly: bool
    """Whether those in which the adaptive requests draft are not."""

    def work(self, num_drafting: int, shape: Shape) -> StepWork:
        """Return the work of a step in which `num_drafting` of the adaptive requests draft this shape."""
        drafting = [fanout for fanout in self.others if fanout]
        other_shapes = tuple([level_widths(fanout) for fanout in drafting])
        passes = draft_passes(other_shapes)
        if num_drafting:
            own = (num_drafting, *(num_drafting * shape[0],) * (shape[1] - 1))
            passes = tuple(map(sum, zip_longest(passes, own, fillvalue=0)))
        return StepWork(
            rows=len(self.adaptive) + len(self.others),
            text=self.text,
            nodes=sum(map(sum, other_shapes)) + num_drafting * shape[0] * shape[1],
            drafting=len(other_shapes) + num_drafting,
            passes=passes,
            shape=MIXED if other_shapes else shape if num_drafting else PLAIN,
            is_eager=self.is_eager or (self.draws_eagerly and num_drafting > 0) or None,
        )


@dataclass(frozen=True)
class _Options:
    """The shapes to choose from, plain decoding first."""

    shapes: list[Shape]
    works: list[StepWork]
    rates: Numbers
    """[shapes] tokens per second."""
    tokens: Numbers
    """[shapes] tokens of a step."""
    drafting: npt.NDArray[np.bool_]
    """[shapes, adaptive] requests that would draft."""


class Controller:
    """Chooses the shape of every adaptive row."""

    def __init__(self, times: StepTimes, longest: int) -> None:
        """longest: most tokens of a chain."""
        self.times = times
        self.acceptance = Acceptance(longest)
        self.choice = ShapeChoice()
        self.reads = True
        """Whether the draft model also computes texts from which nothing is drafted yet; False while all requests
        decode plainly.
        """
        self.spent_s = 0.0
        """Time spent on choices since the start."""
        self._longest = longest
        self._random = np.random.default_rng(0)
        self._step = self._learned = self._next = self._num_tried = self._num_plain_tried = 0
        self._interval = _CHOOSE_EVERY
        self._trial: Shape | None = None
        """Shape of the present trial."""
        self._samples = False
        """Whether the planned step is one of a trial of a drafting shape."""
        self._in_use = PLAIN
        """Shape that was chosen as the best; a trial may replace it."""
        self._chosen_for: tuple[frozenset[int], tuple[Fanout, ...]] = (frozenset(), ())
        self._not_drafting: frozenset[int] = frozenset()
        """Adaptive requests that do not draft at present."""
        self._drafting_now: tuple[_Options, int] | None = None
        """Options of the last choice, and the number of the chosen one; None if it is plain decoding."""

    # -- choosing -----------------------------------------------------------------------------------------------------

    def choose(
        self,
        adaptive: Sequence[Drafting],
        others: Sequence[Fanout] = (),
        lags: Sequence[int] | None = None,
        other_text: int = 0,
        is_eager: bool = False,
    ) -> None:
        """Choose for the adaptive requests that emit in the next step, if a choice is due or the requests have changed;
        otherwise the last choice stays. Called before each step.

        others: drafts of each of the other requests in the step (`Row.fanout`). lags: tokens that the draft model
        must catch up on, by adaptive request. other_text: tokens of the other requests' texts. is_eager: whether the
        step is not recorded, whatever the adaptive requests draft.
        """
        began = time.perf_counter()
        self._step += 1
        ids, other_shapes = frozenset(one.sequence_id for one in adaptive), tuple(others)
        if adaptive and (self._step >= self._next or self._has_changed(ids, other_shapes)):
            self.acceptance.fade(self._step - self._learned)
            self._learned = self._step
            text = other_text + sum(len(one.tokens) for one in adaptive)
            draws_eagerly = any(needs_of_drafts(one.request.speculation, (1,)) for one in adaptive)
            catch_up_s = self._catch_up_s(adaptive, lags)
            self._choose(_Load(adaptive, other_shapes, text, catch_up_s, is_eager, draws_eagerly), ids)
            self._chosen_for = ids, other_shapes
        self._samples = bool(adaptive) and self._trial not in (None, PLAIN)
        self._num_tried += self._samples
        self._num_plain_tried += bool(adaptive) and self._trial == PLAIN
        self.spent_s += time.perf_counter() - began

    def _has_changed(self, ids: frozenset[int], others: tuple[Fanout, ...]) -> bool:
        """Whether the requests differ from those of the last choice."""
        chosen_for, earlier_others = self._chosen_for
        if (
            self._trial == PLAIN
        ):  # it continues until the caches are warm; requests that arrive meanwhile decode plainly, too
            return others != earlier_others or len(ids) > 2 * len(chosen_for)
        few = min(len(ids), len(chosen_for)) // _FEW
        if self._trial is None and self._in_use == PLAIN:  # which requests they are matters to drafts only
            return others != earlier_others or abs(len(ids) - len(chosen_for)) > few
        return others != earlier_others or len(ids ^ chosen_for) > few

    def _choose(self, load: _Load, ids: frozenset[int]) -> None:
        options = self._options(load)
        handicap = np.full(len(options.shapes), 1 / _CLEAR_GAIN)
        if ids & self._chosen_for[0] and self._in_use in options.shapes:
            handicap[options.shapes.index(self._in_use)] = 1.0
        best = int((options.rates * handicap).argmax())
        stays_plain = not best and self._in_use == PLAIN
        seldom = int(_SELDOM_S / float(self.times.step_s(options.works[:1])[0]))
        self._interval = max(_CHOOSE_EVERY, min(2 * self._interval, seldom)) if stays_plain else _CHOOSE_EVERY
        self.choice, self._in_use = _choice(load.adaptive, options, best), options.shapes[best]
        self._not_drafting = ids - self.choice.drafting
        if any(one.num_remaining > 1 for one in load.adaptive):  # else no request has room for a draft
            self.reads = self.choice.shape != PLAIN
        self._next = self._step + self._interval
        tried, num_steps = self._next_trial(options, best)
        self._trial = options.shapes[tried] if num_steps else None
        if num_steps:
            self.choice, self._next = _choice(load.adaptive, options, tried), self._step + num_steps
        self._drafting_now = (options, tried) if tried else None

    def _next_trial(self, options: _Options, best: int) -> tuple[int, int]:
        """Return (a shape to try because its duration is uncertain, number of steps); 0 steps: no trial now.

        Plain steps, needed to report the speedup, have half of the budget while they are uncertain; samples have the
        rest (Thompson sampling).
        """
        early, share = math.sqrt(self._step), self._step * _TRIAL_SHARE
        room = max(early, share - min(self._num_plain_tried, share / 2)) - self._num_tried
        room_for_plain = max(early * (2 if self._num_plain_tried else 1), share / 2) - self._num_plain_tried
        if max(room, room_for_plain) < _TRIAL_STEPS:
            return best, 0
        covariance = self.times.log_covariance(options.works)
        doubt = covariance[0, 0] + covariance[best, best] - 2 * covariance[0, best]
        if best and doubt > _PLAIN_STD**2 and not options.works[0].drafting:
            num_steps = _PLAIN_TRIAL_STEPS
            if self._num_plain_tried:  # the first trial only detects plain steps that are much faster than measured
                num_steps += self.times.num_cold(float(self.times.step_s(options.works[:1])[0]))
            if num_steps <= room_for_plain:
                return 0, num_steps
            room = max(early, share / 2) - self._num_tried
        found = self._sampled(options, covariance, best) if room >= _TRIAL_STEPS else best
        return found, _TRIAL_STEPS if found != best else 0

    def _sampled(self, options: _Options, covariance: Numbers, best: int) -> int:
        """Return the shape that is the best in a sample of the possible durations and worths of drafts."""
        variances, directions = np.linalg.eigh(covariance)
        logs = directions @ (np.sqrt(variances.clip(min=0.0)) * self._random.standard_normal(len(variances)))
        # The worth of drafts with this number of chains is uncertain too, equally for all their lengths.
        by_chains = {k: self.acceptance.log_std(k) * self._random.standard_normal() for k, _ in options.shapes if k}
        logs += [by_chains.get(k, 0.0) for k, _ in options.shapes]
        rates = options.rates * np.exp(logs)
        if best:  # plain decoding has separate trials
            rates[0] = 0.0
        return int(rates.argmax())

    def _options(self, load: _Load) -> _Options:
        """Return the predicted rates of every shape of the menu for these requests."""
        limits = [one.request.speculation for one in load.adaptive]
        most = max(limits, key=lambda one: (one.num_drafts, one.draft_length))
        shapes = [PLAIN, *menu(most.num_drafts, most.draft_length, self._longest)]
        acceptance_ratio = np.array([one.acceptance_ratio for one in load.adaptive])
        room = np.array([one.num_remaining - 1 for one in load.adaptive])
        by_chains = {k: self._expected(k, acceptance_ratio, room) for k in {k for k, _ in shapes} if k}
        tokens = np.array([by_chains[k][length] if k else np.ones(len(acceptance_ratio)) for k, length in shapes])
        other_tokens = sum(self._tokens_of(fanout) for fanout in load.others)
        num_adaptive = len(load.adaptive)

        works = [load.work(num_adaptive if shape != PLAIN else 0, shape) for shape in shapes]
        seconds = self.times.step_s(works)
        plain_rate = (num_adaptive + other_tokens) / seconds[0]
        price_s = (seconds - seconds[0]).clip(min=0.0)[:, None] / num_adaptive + tokens * load.catch_up_s
        least_gain = np.array([1.0 if one.sequence_id in self._not_drafting else _HOLD for one in load.adaptive])
        drafting = tokens - 1 > least_gain * price_s * plain_rate
        drafting[~drafting.any(1)] = True  # a shape that is worth its time for nobody may still be tried, with all
        drafting[0] = False
        num_drafting = drafting.sum(1)
        if (num_drafting[1:] < num_adaptive).any():
            works = [load.work(int(count), shape) for count, shape in zip(num_drafting, shapes, strict=True)]
            seconds = self.times.step_s(works)

        emitted = np.where(drafting, tokens, 1.0).sum(1)
        # A drafting shape also pays for the draft model's reading, of lagging texts or of prompts to come.
        prompt_s = self.times.read_s(1) * self.acceptance.prompt_share
        reading_s = np.maximum((tokens * load.catch_up_s * drafting).sum(1), emitted * prompt_s)
        rates = (emitted + other_tokens) / (seconds + np.where(num_drafting > 0, reading_s, 0.0))
        return _Options(shapes, works, rates, emitted + other_tokens, drafting)

    def drafts_with_prompt(self, prompt: int) -> bool:
        """Whether the chosen drafts are worth their time in a step that also reads this many tokens of prompts.

        If steps without a prompt are recorded, this one launches the draft model's passes one by one. The tokens that
        the drafts add may then take longer here than in those. Otherwise a prompt changes nothing. A step
        of a trial that does not draft shows nothing about the drafts, so it returns to the budget.
        """
        if not prompt or self._drafting_now is None:
            return True
        options, number = self._drafting_now
        reading = [replace(options.works[one], prompt=prompt, read=prompt) for one in (0, number)]
        if self.times.is_eager(options.works[number]) or not self.times.is_eager(reading[1]):
            return True
        plain_s, drafting_s = self.times.step_s(reading)
        gain = options.tokens[number] - options.tokens[0]
        drafts = bool(gain > options.rates[number] * (drafting_s - plain_s))
        self._num_tried -= self._samples and not drafts
        return drafts

    def fanout(self, sequence: Drafting) -> Fanout:
        """Return the drafts of a sequence in the planned step; one that has arrived since the choice drafts like the
        others.
        """
        num_drafts, length = self.choice.shape
        drafts = sequence.sequence_id in self.choice.drafting or sequence.sequence_id not in self._chosen_for[0]
        if not length or not drafts:
            return ()
        # The common choice may exceed this request's limits.
        own = sequence.request.speculation
        num_drafts = min(num_drafts, own.num_drafts)
        return (num_drafts, *(1,) * (min(length, own.num_drafts * own.draft_length // num_drafts) - 1))

    # -- what is expected ---------------------------------------------------------------------------------------------

    def _expected(self, num_drafts: int, acceptance_ratio: Numbers, room: npt.NDArray[np.int64]) -> Numbers:
        """Return [longest + 1, requests] tokens of a step, by the length of the chains.

        room: drafted tokens that still fit the answer, [requests].
        """
        by_position = self.acceptance.by_position(num_drafts)[:, None]
        accepted = np.minimum(SUREST, acceptance_ratio * by_position) * (np.arange(self._longest)[:, None] < room)
        expected = np.ones((self._longest + 1, len(acceptance_ratio)))
        expected[1:] += accepted.cumprod(axis=0).cumsum(axis=0)
        return expected

    def reached(self, sequence: Drafting, fanout: Fanout) -> Numbers:
        """Return [depths] the probability that these drafts of a sequence are accepted to each depth and beyond."""
        by_position = self.acceptance.by_position(fanout[0])[: len(fanout)]
        result: Numbers = np.minimum(SUREST, sequence.acceptance_ratio * by_position).cumprod()
        return result

    def _tokens_of(self, fanout: Fanout) -> float:
        """Return the expected tokens per step of a request that is not adaptive."""
        if not fanout:
            return 1.0
        length = len(fanout)
        return float(self._expected(fanout[0], np.ones(1), np.array([length]))[length][0])

    def _catch_up_s(self, adaptive: Sequence[Drafting], lags: Sequence[int] | None) -> Numbers:
        """Return [adaptive] the cost of catching up per token that the answer may still get."""
        left = [max(1.0, min(one.num_remaining, self.acceptance.usual_answer)) for one in adaptive]
        result: Numbers = np.array([self.times.read_s(lag) for lag in lags or [0] * len(adaptive)]) / np.array(left)
        return result

    # -- learning -----------------------------------------------------------------------------------------------------

    def observe(self, sequence: Drafting, num_drafts: int, draft_length: int, num_accepted: int) -> None:
        """Record the verification of a row's drafts."""
        tried, taken = min(num_accepted + 1, draft_length), min(num_accepted, draft_length)
        self.acceptance.observe(num_drafts, tried, taken)
        sequence.note_drafts(taken, self.acceptance.expected(num_drafts, tried))


def _choice(adaptive: Sequence[Drafting], options: _Options, number: int) -> ShapeChoice:
    drafting = zip(adaptive, options.drafting[number], strict=True)
    return ShapeChoice(options.shapes[number], frozenset(one.sequence_id for one, drafts in drafting if drafts))


def menu(num_drafts: int, draft_length: int, longest: int) -> list[Shape]:
    """Return the shapes within a request's limits of chains and nodes."""
    shapes = [(k, n) for k, n in _MENU if k <= num_drafts and n <= longest and k * n <= num_drafts * draft_length]
    own = (num_drafts, draft_length)
    return shapes if own in shapes else [*shapes, own]
