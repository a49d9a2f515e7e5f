"""Choose one shape for all adaptive requests of a step, and which of them draft it: the shape with
the most expected tokens per second, or plain decoding.

The menu has shapes (K chains of L tokens) and plain decoding. The tokens of a step are predicted
from the acceptance so far, by position over all requests and by request. Its duration is predicted
by the model of step times, which `step/telemetry.py` updates after every step. A request whose
drafts are not worth their time decodes plainly, in the same step as the requests that draft.

A few steps are trials. Some are plain steps, which are needed to report the speedup, while their
time is uncertain. The other trials have the shape that is best in a sample of the possible step
times and acceptances.

Non-anticipating: a choice depends on sizes, times and tokens of the past, never on tokens that are
drafted or drawn next, so the output keeps the target's distribution. Not for requests that fix
their shape, or whose seed must give the same answer under any load (`Speculation.adaptive`).
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
from engine.control.step_work import PLAIN, Shape, StepWork, draft_passes, shape_of_step
from engine.fanout import Fanout, level_widths
from engine.needs import needs_of_drafts
from engine.request import Request

Numbers = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

_MENU = ((1, 1), (1, 2), (1, 3), (1, 5), (1, 8), (2, 3), (2, 5), (3, 4), (4, 3), (4, 5), (8, 4))
_CLEAR_GAIN = 1.03
"""Ratio by which another shape must be better than the current shape."""
_LEAST_GAIN_TO_STAY = 0.7
"""A request stops drafting if its drafts are worth less than this share of their time. A new
request begins to draft by the same share. The share is below 1 because the worth is an estimate,
and because the draft model must catch up on a request that has stopped.
"""
_CHOOSE_EVERY = 8
"""Usual number of steps between choices for the same requests."""
_SELDOM_S = 0.2
"""Most seconds between choices. While plain decoding stays the best, the number of steps between
choices doubles up to this time: a choice takes half as long as a plain step of a small model, and
plain steps show nothing about drafts.
"""
_FEW = 4
"""The controller chooses again if more than one in this many requests has arrived or left."""
_TRIAL_STEPS = 4
"""Steps of a trial."""
_PLAIN_TRIAL_STEPS = 8
"""Informative steps of a plain trial. The cold steps before them (`StepTimes.num_cold`) come on
top, except in the first trial.
"""
_TRIAL_SHARE = 1 / 32
"""Share of all steps for trials in the long run. Early there are more trials: the square root of
the number of steps for samples, and twice that for plain decoding after its first trial.
"""
_PLAIN_STD = 0.03
"""Plain trials end once the ratio of plain steps to the shape in use is known to this accuracy."""


class AdaptiveSequence(Protocol):
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
    drafting_ids: frozenset[int] = frozenset()
    """Sequences that draft; the other adaptive sequences decode plainly."""


class _Load(NamedTuple):
    """Inputs of a choice, and the work of steps under this load."""

    adaptive: Sequence[AdaptiveSequence]
    others: tuple[Fanout, ...]
    """Drafts of the other requests."""
    text: int
    """Tokens of all texts."""
    catch_up_s: Numbers
    """[adaptive] time of the draft model to catch up, per remaining token of the answer."""
    is_eager: bool
    """Whether the step is launched eagerly, whatever the adaptive requests draft."""
    is_eager_if_drafting: bool
    """Whether steps in which adaptive requests draft are launched eagerly."""

    def work(self, num_drafting: int, shape: Shape) -> StepWork:
        """Return the work of a step in which `num_drafting` adaptive requests draft this shape."""
        num_drafts, length = shape
        other_drafts = [fanout for fanout in self.others if fanout]
        other_widths = tuple([level_widths(fanout) for fanout in other_drafts])
        passes = draft_passes(other_widths)
        fanouts = set(other_drafts)
        if num_drafting:
            fanouts.add((num_drafts, *(1,) * (length - 1)))
            adaptive_passes = (num_drafting, *(num_drafting * num_drafts,) * (length - 1))
            passes = tuple(map(sum, zip_longest(passes, adaptive_passes, fillvalue=0)))
        return StepWork(
            rows=len(self.adaptive) + len(self.others),
            text=self.text,
            nodes=sum(map(sum, other_widths)) + num_drafting * num_drafts * length,
            num_drafting=len(other_widths) + num_drafting,
            passes=passes,
            shape=shape_of_step(fanouts),
            is_eager=self._eagerness(num_drafting),
        )

    def _eagerness(self, num_drafting: int) -> bool | None:
        """Return `StepWork.is_eager`. None: the menu of recorded steps decides."""
        if self.is_eager or (self.is_eager_if_drafting and num_drafting):
            return True
        return None


@dataclass(frozen=True)
class _Options:
    """The shapes to choose from, plain decoding first."""

    shapes: list[Shape]
    works: list[StepWork]
    rates: Numbers
    """[shapes] tokens per second."""
    tokens: Numbers
    """[shapes] tokens of a step."""
    drafts: Bools
    """[shapes, adaptive] requests that would draft."""

    def choice(self, number: int, adaptive: Sequence[AdaptiveSequence]) -> ShapeChoice:
        """Return the choice of an option, by its number."""
        requests = zip(adaptive, self.drafts[number], strict=True)
        ids = frozenset(sequence.sequence_id for sequence, drafts in requests if drafts)
        return ShapeChoice(self.shapes[number], ids)


class Controller:
    """Chooses one shape for all adaptive requests, and which of them draft it."""

    def __init__(self, times: StepTimes, longest: int) -> None:
        """longest: most tokens of a chain."""
        self.times = times
        self.acceptance = Acceptance(longest)
        self.choice = ShapeChoice()
        self.reads = True
        """Whether the draft model also reads the texts of requests that do not draft, to stay
        current: whether the best shape drafts, whatever a trial does.
        """
        self.spent_s = 0.0
        """Time spent in `choose` since the start."""
        self._longest = longest
        self._random = np.random.default_rng(0)
        self._step = 0
        self._next_choice = 0
        """Step of the next choice if the requests stay the same."""
        self._interval = _CHOOSE_EVERY
        self._last_update = 0
        """Step at which the acceptance was last updated."""
        self._best_shape = PLAIN
        """Shape that was chosen as the best; a trial may replace it."""
        self._trial: Shape | None = None
        """Shape of the present trial."""
        self._is_sampling = False
        """Whether the planned step is part of a trial of a drafting shape."""
        self._num_tried = 0  # steps of such trials
        self._num_plain_tried = 0  # steps of plain trials
        self._chosen_ids: frozenset[int] = frozenset()
        """Adaptive requests of the last choice."""
        self._chosen_others: tuple[Fanout, ...] = ()
        """Drafts of the other requests at the last choice."""
        self._declined: frozenset[int] = frozenset()
        """Adaptive requests that do not draft in the best shape; a trial may replace it."""
        self._chosen_drafts: tuple[_Options, int] | None = None
        """Options of the last choice and the number of the chosen option; None if it is plain."""

    # -- choosing ---------------------------------------------------------------------------------

    def choose(
        self,
        adaptive: Sequence[AdaptiveSequence],
        others: Sequence[Fanout] = (),
        lags: Sequence[int] | None = None,
        other_text: int = 0,
        is_eager: bool = False,
    ) -> None:
        """Choose the drafts of the adaptive requests that emit in the next step. Called before each
        step. The last choice stays unless a choice is due or the requests have changed.

        others: drafts of each of the other requests in the step (`Row.fanout`). lags: tokens that
        the draft model must catch up on, by adaptive request. other_text: tokens of the other
        requests' texts. is_eager: whether the step is not recorded, whatever the adaptive requests
        draft.
        """
        began = time.perf_counter()
        self._step += 1
        ids = frozenset(sequence.sequence_id for sequence in adaptive)
        fanouts = tuple(others)
        if adaptive and (self._step >= self._next_choice or self._has_changed(ids, fanouts)):
            self.acceptance.apply(self._step - self._last_update)
            self._last_update = self._step
            text = other_text + sum(len(sequence.tokens) for sequence in adaptive)
            speculations = [sequence.request.speculation for sequence in adaptive]
            # No fanout of the menu needs more of a step than a single chain does.
            is_eager_if_drafting = any(needs_of_drafts(limits, (1,)) for limits in speculations)
            catch_up_s = self._catch_up_s(adaptive, lags)
            load = _Load(adaptive, fanouts, text, catch_up_s, is_eager, is_eager_if_drafting)
            self._choose(load, ids)
            self._chosen_ids = ids
            self._chosen_others = fanouts
        self._is_sampling = bool(adaptive) and self._trial not in (None, PLAIN)
        self._num_tried += self._is_sampling
        self._num_plain_tried += bool(adaptive) and self._trial == PLAIN
        self.spent_s += time.perf_counter() - began

    def _has_changed(self, ids: frozenset[int], others: tuple[Fanout, ...]) -> bool:
        """Whether the requests differ from the requests of the last choice. A change of the other
        requests' drafts ends plain trials, too.
        """
        if others != self._chosen_others:
            return True
        num_chosen = len(self._chosen_ids)
        # A plain trial continues until the caches are warm; adaptive requests that arrive meanwhile
        # decode plainly, too.
        if self._trial == PLAIN:
            return len(ids) > 2 * num_chosen
        most_changed = min(len(ids), num_chosen) // _FEW
        # Plain steps depend on the number of requests alone.
        if self._trial is None and self._best_shape == PLAIN:
            return abs(len(ids) - num_chosen) > most_changed
        return len(ids ^ self._chosen_ids) > most_changed

    def _choose(self, load: _Load, ids: frozenset[int]) -> None:
        options = self._options(load)
        best = self._best_option(options, ids)
        stays_plain = not best and self._best_shape == PLAIN
        self._interval = self._next_plain_interval(options) if stays_plain else _CHOOSE_EVERY
        self._best_shape = options.shapes[best]
        self.choice = options.choice(best, load.adaptive)
        self._declined = ids - self.choice.drafting_ids
        # A choice for answers that are ending says nothing about prompts.
        are_all_ending = all(sequence.num_remaining <= 1 for sequence in load.adaptive)
        if not are_all_ending:
            self.reads = self.choice.shape != PLAIN
        chosen = best
        trial = self._next_trial(options, best)
        if trial is None:
            self._trial = None
            self._next_choice = self._step + self._interval
        else:
            chosen, num_steps = trial
            self._trial = options.shapes[chosen]
            self.choice = options.choice(chosen, load.adaptive)
            self._next_choice = self._step + num_steps
        self._chosen_drafts = (options, chosen) if chosen else None

    def _best_option(self, options: _Options, ids: frozenset[int]) -> int:
        """Return the number of the best option. While a request of the last choice is left, another
        shape must be clearly better than the current shape.
        """
        handicap = np.full(len(options.shapes), 1 / _CLEAR_GAIN)
        if ids & self._chosen_ids and self._best_shape in options.shapes:
            handicap[options.shapes.index(self._best_shape)] = 1.0
        return int((options.rates * handicap).argmax())

    def _next_plain_interval(self, options: _Options) -> int:
        """Return the number of steps until the next choice while plain decoding stays the best."""
        plain_s = float(self.times.step_s(options.works[:1])[0])
        return max(_CHOOSE_EVERY, min(2 * self._interval, int(_SELDOM_S / plain_s)))

    def _next_trial(self, options: _Options, best: int) -> tuple[int, int] | None:
        """Return (number of the option to try, number of steps); None if there is no trial.

        Plain steps, needed to report the speedup, have half of the budget while their time is
        uncertain; samples have the rest (Thompson sampling).
        """
        most_steps = max(self._plain_room(), self._sample_room(is_plain_uncertain=False))
        if most_steps < _TRIAL_STEPS:
            return None
        covariance = self.times.log_covariance(options.works)
        # Variance of the logarithm of the ratio of plain steps to the best shape.
        doubt = covariance[0, 0] + covariance[best, best] - 2 * covariance[0, best]
        # Steps in which other requests draft show little about plain steps.
        can_be_plain = best and not options.works[0].num_drafting
        is_plain_uncertain = bool(can_be_plain and doubt > _PLAIN_STD**2)
        if is_plain_uncertain:
            num_steps = self._plain_trial_steps(options)
            if num_steps <= self._plain_room():
                return 0, num_steps
        if self._sample_room(is_plain_uncertain) < _TRIAL_STEPS:
            return None
        sampled = self._sampled(options, covariance, best)
        return None if sampled == best else (sampled, _TRIAL_STEPS)

    def _plain_trial_steps(self, options: _Options) -> int:
        """Return the number of steps of a plain trial."""
        # The first trial only detects plain steps that are much faster than measured.
        if not self._num_plain_tried:
            return _PLAIN_TRIAL_STEPS
        plain_s = float(self.times.step_s(options.works[:1])[0])
        return _PLAIN_TRIAL_STEPS + self.times.num_cold(plain_s)

    def _plain_room(self) -> float:
        """Return the number of steps left for plain trials. All steps add to it, also steps
        without adaptive requests.
        """
        early = math.sqrt(self._step) * (2 if self._num_plain_tried else 1)
        return max(early, self._step * _TRIAL_SHARE / 2) - self._num_plain_tried

    def _sample_room(self, is_plain_uncertain: bool) -> float:
        """Return the number of steps left for samples. Plain trials have half of the budget while
        plain steps are uncertain, otherwise only what they have taken of that half.
        """
        budget = self._step * _TRIAL_SHARE
        for_plain = budget / 2
        if not is_plain_uncertain:
            for_plain = min(self._num_plain_tried, for_plain)
        return max(math.sqrt(self._step), budget - for_plain) - self._num_tried

    def _sampled(self, options: _Options, covariance: Numbers, best: int) -> int:
        """Return the best option in a sample of the possible durations and worths of drafts."""
        variances, directions = np.linalg.eigh(covariance)
        stds = np.sqrt(variances.clip(min=0.0))
        # Logarithms of rates. Samples of durations and worths are symmetric, so no sign matters.
        logs = directions @ (stds * self._random.standard_normal(len(variances)))
        # The worth of a number of chains is uncertain too, equally for all lengths.
        worth_by_chains = {0: 0.0}
        for num_drafts, _ in options.shapes:
            if num_drafts:
                std = self.acceptance.log_std(num_drafts)
                worth_by_chains[num_drafts] = std * self._random.standard_normal()
        logs += [worth_by_chains[num_drafts] for num_drafts, _ in options.shapes]
        rates = options.rates * np.exp(logs)
        if best:  # plain decoding has separate trials
            rates[0] = 0.0
        return int(rates.argmax())

    def _options(self, load: _Load) -> _Options:
        """Return the predicted rates of every shape of the menu for these requests."""
        shapes = self._shapes(load.adaptive)
        num_adaptive = len(load.adaptive)
        tokens = self._tokens(load.adaptive, shapes)
        other_tokens = sum(self._tokens_of_other(fanout) for fanout in load.others)

        # At first every shape is drafted by all adaptive requests.
        works = [load.work(num_adaptive if shape != PLAIN else 0, shape) for shape in shapes]
        seconds = self.times.step_s(works)
        plain_rate = (num_adaptive + other_tokens) / seconds[0]
        drafts_s = (seconds - seconds[0]).clip(min=0.0)[:, None] / num_adaptive
        catch_up_s = tokens * load.catch_up_s
        prices_s = drafts_s + catch_up_s
        drafts = self._paying(load, tokens, prices_s, plain_rate)
        num_drafting = drafts.sum(1)
        if (num_drafting[1:] < num_adaptive).any():
            counts = zip(num_drafting, shapes, strict=True)
            works = [load.work(int(count), shape) for count, shape in counts]
            seconds = self.times.step_s(works)

        emitted = np.where(drafts, tokens, 1.0).sum(1)
        # Drafting also costs the draft model's reading. The lags of drafting requests and the
        # prompts of requests to come estimate the same cost, so the larger cost counts. The prompts
        # are charged to every token: while a shape drafts, the draft model reads all texts
        # (`reads`).
        prompt_s = self.times.read_s(1) * self.acceptance.prompt_share
        reading_s = np.maximum((catch_up_s * drafts).sum(1), emitted * prompt_s)
        all_tokens = emitted + other_tokens
        rates = all_tokens / (seconds + np.where(num_drafting > 0, reading_s, 0.0))
        return _Options(shapes, works, rates, all_tokens, drafts)

    def _shapes(self, adaptive: Sequence[AdaptiveSequence]) -> list[Shape]:
        """Return plain decoding and every shape within the limits of at least one request."""
        speculations = [sequence.request.speculation for sequence in adaptive]
        shapes = [PLAIN]
        limits = dict.fromkeys((limit.num_drafts, limit.draft_length) for limit in speculations)
        for num_drafts, length in limits:
            shapes += menu(num_drafts, length, self._longest)
        return list(dict.fromkeys(shapes))

    def _paying(self, load: _Load, tokens: Numbers, prices_s: Numbers, plain_rate: float) -> Bools:
        """Return [shapes, adaptive] the requests whose drafts are worth their time.

        tokens, prices_s: [shapes, adaptive] expected tokens, and seconds that the drafts take.
        Prices are equal shares of the step's extra time, and each request's time to catch up.
        plain_rate: tokens that plain decoding would emit in a second, for the whole batch.
        """
        has_declined = [sequence.sequence_id in self._declined for sequence in load.adaptive]
        least_gain = np.where(has_declined, 1.0, _LEAST_GAIN_TO_STAY)
        drafts: Bools = tokens - 1 > least_gain * prices_s * plain_rate
        # A shape that is worth its time for no request may still be tried, with all requests.
        drafts[~drafts.any(1)] = True
        drafts[0] = False
        return drafts

    def drafts_in_step(self, num_prompt: int) -> bool:
        """Whether the adaptive requests draw the chosen drafts in the planned step, which also
        reads `num_prompt` tokens of prompts.

        A step of a trial that does not draft returns to the budget, because it shows nothing about
        the drafts.
        """
        if not num_prompt or self._chosen_drafts is None:
            return True
        if self._drafts_pay(num_prompt, *self._chosen_drafts):
            return True
        self._num_tried -= self._is_sampling
        return False

    def _drafts_pay(self, prompt: int, options: _Options, number: int) -> bool:
        """Whether the drafts of an option are worth their time in a step that reads a prompt.

        If steps without a prompt are recorded, this step launches the draft model's passes eagerly.
        The tokens that the drafts add may then take longer here than in recorded steps. Otherwise a
        prompt changes nothing.
        """
        # The draft model reads the prompt in a step without drafts, too.
        plain_work = replace(options.works[0], prompt=prompt, read=prompt)
        drafting_work = replace(options.works[number], prompt=prompt, read=prompt)
        is_recorded_alone = not self.times.is_eager(options.works[number])
        prompt_prevents_recording = is_recorded_alone and self.times.is_eager(drafting_work)
        if not prompt_prevents_recording:
            return True
        plain_s, drafting_s = self.times.step_s([plain_work, drafting_work])
        gain = options.tokens[number] - options.tokens[0]
        return bool(gain > options.rates[number] * (drafting_s - plain_s))

    def fanout(self, sequence: AdaptiveSequence) -> Fanout:
        """Return a sequence's drafts in the planned step. A sequence that is new since the choice
        drafts the chosen shape, if that is not plain.
        """
        num_drafts, length = self.choice.shape
        sequence_id = sequence.sequence_id
        drafts = sequence_id in self.choice.drafting_ids or sequence_id not in self._chosen_ids
        if not length or not drafts:
            return ()
        # The common choice may exceed this request's limits.
        limits = sequence.request.speculation
        num_drafts = min(num_drafts, limits.num_drafts)
        most_nodes = limits.num_drafts * limits.draft_length
        length = min(length, most_nodes // num_drafts)
        return (num_drafts, *(1,) * (length - 1))

    # -- expected tokens and costs ----------------------------------------------------------------

    def _tokens(self, adaptive: Sequence[AdaptiveSequence], shapes: Sequence[Shape]) -> Numbers:
        """Return [shapes, adaptive] the expected tokens of each request in a step of each shape."""
        acceptance_ratio = np.array([sequence.acceptance_ratio for sequence in adaptive])
        room = np.array([sequence.num_remaining - 1 for sequence in adaptive])
        by_chains: dict[int, Numbers] = {0: np.ones((1, len(adaptive)))}
        for num_drafts, _ in shapes:
            if num_drafts not in by_chains:
                by_chains[num_drafts] = self._expected(num_drafts, acceptance_ratio, room)
        return np.array([by_chains[num_drafts][length] for num_drafts, length in shapes])

    def _tokens_of_other(self, fanout: Fanout) -> float:
        """Return the expected tokens per step of a request that is not adaptive. The chains of a
        tree are counted at its root.
        """
        if not fanout:
            return 1.0
        length = len(fanout)
        return float(self._expected(fanout[0], np.ones(1), np.array([length]))[length][0])

    def _expected(self, num_drafts: int, acceptance_ratio: Numbers, room: Ints) -> Numbers:
        """Return [longest + 1, requests] tokens of a step, by the length of the chains.

        room: drafted tokens that still fit the answer, [requests].
        """
        by_position = self.acceptance.by_position(num_drafts)[:, None]
        fits = np.arange(self._longest)[:, None] < room
        accepted = np.minimum(SUREST, acceptance_ratio * by_position) * fits
        expected = np.ones((self._longest + 1, len(acceptance_ratio)))
        expected[1:] += accepted.cumprod(axis=0).cumsum(axis=0)
        return expected

    def reached(self, sequence: AdaptiveSequence, fanout: Fanout) -> Numbers:
        """Return [depths] the probability that a sequence's drafts are accepted to each depth. The
        chains of a tree are counted at its root.
        """
        by_position = self.acceptance.by_position(fanout[0])[: len(fanout)]
        result: Numbers = np.minimum(SUREST, sequence.acceptance_ratio * by_position).cumprod()
        return result

    def _catch_up_s(self, adaptive: Sequence[AdaptiveSequence], lags: Sequence[int] | None) -> Numbers:
        """Return [adaptive] the cost of catching up per token that the answer may still get."""
        usual_answer = self.acceptance.usual_answer
        lags = lags or [0] * len(adaptive)
        reading_s = np.array([self.times.read_s(lag) for lag in lags])
        num_left = [max(1.0, min(sequence.num_remaining, usual_answer)) for sequence in adaptive]
        result: Numbers = reading_s / np.array(num_left)
        return result

    # -- learning ---------------------------------------------------------------------------------

    def observe(self, sequence: AdaptiveSequence, num_drafts: int, length: int, num_accepted: int) -> None:
        """Record the verification of a row's drafts. length: tokens of each chain."""
        num_tried = min(num_accepted + 1, length)
        num_taken = min(num_accepted, length)
        self.acceptance.observe(num_drafts, num_tried, num_taken)
        sequence.note_drafts(num_taken, self.acceptance.expected(num_drafts, num_tried))


def menu(num_drafts: int, draft_length: int, longest: int) -> list[Shape]:
    """Return the shapes within a request's limits of chains and nodes."""
    most_nodes = num_drafts * draft_length
    shapes = [
        (chains, length)
        for chains, length in _MENU
        if chains <= num_drafts and length <= longest and chains * length <= most_nodes
    ]
    largest = (num_drafts, draft_length)
    return shapes if largest in shapes else [*shapes, largest]
