"""Duration of a step's two parts: one regression over the sizes of its work, fitted at start, updated by every step.

rest  = machine * shape * sum of (rate * size)     the target's pass, verification, K/V moves
draft = machine * sum of (rate * size)             drawing the drafts

The time outside both parts is predicted by `host_time.py`; `step_s` is the sum of all three.

Sizes are numbers of tokens, rows and passes; how a pass grows with its rows is piecewise linear. Calibration fits the
rates (non-negative least squares). From then on the logarithms of the rates, of the machine's factor and of a factor
for each shape are the state of an extended Kalman filter. The machine's factor drifts, so that steps of one shape tell
how fast all others are now; the rest of the state returns slowly to what calibration found. A plain step is the same
model without nodes: what is chosen and what is reported come from the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from engine.control.host_time import HostTime
from engine.control.step_work import MIXED, PLAIN, Shape, StepWork

Numbers = npt.NDArray[np.float64]
_KNOTS = 2.0 ** np.arange(11)
"""Rows of a pass between which its duration grows linearly."""
# Standard deviations of logarithms.
_MACHINE_STD, _MACHINE_DRIFT = 0.1, 0.03
"""Initial standard deviation of the machine's factor, and the increase of its uncertainty per second (in
quadrature).
"""
_RATE_STD, _SHAPE_STD = 0.3, 0.07
"""A rate before calibration, and the factor by which served steps of a shape differ from calibrated ones."""
_POINT_STD, _STEP_STD = 0.03, 0.15
"""Noise of a calibrated step, and of a served one. The errors of consecutive steps are correlated, so a single one
is less informative.
"""
_COLD_STEPS, _COLD_S, _COLD_STD = (4, 32), 0.2, 1.0
"""Number of steps after drafting began or stopped, and with plain steps time (within these limits), in which the
processor's caches hold other weights. On processors with 480 MB of cache plain steps took up to 9 % longer in that
time, so they have less weight.
"""
_MUCH_FASTER = 0.75
"""A cold step that takes less than this share of the prediction has full weight."""
_SHORT_TEXT = 256
"""Tokens of a text beyond which each further one may cost more: on a CPU 2.7 microseconds before, 6 after it."""
_BEND_WEIGHT = 0.1
"""Weight, in the fit, of a change of slope between two knots relative to the errors of the points."""
_LEAST_SHARE = 0.01  # of the shortest measured step, which any step takes: noise may leave nothing for a small one
_FORGET_S = 1800.0
"""Seconds after which about a third of the served steps' influence remains."""
_MOST_SHAPES = 16
_LONGEST_PAUSE_S = 60.0


Point = tuple[StepWork, float, float]
"""A measured step: its work, the seconds of drafting, and those of the rest."""


def _ramps(rows: float) -> Numbers:
    """Return [knots] how far a pass of this many rows is between each knot and the next; the last extends beyond 1."""
    shares = (rows - _KNOTS[:-1]) / np.diff(_KNOTS)
    shares[:-1] = shares[:-1].clip(max=1.0)
    return shares.clip(min=0.0)


_NUM_RAMPS = len(_KNOTS) - 1
# Places of the terms; those of texts are filled in by `sizes_of`.
_TEXTS = _NUM_RAMPS + 8
_NUM_REST = _TEXTS + 5
_DRAFT_RAMPS = 5
_DRAFT_TEXTS = _NUM_REST + _DRAFT_RAMPS + _NUM_RAMPS
NUM_TERMS = _DRAFT_TEXTS + 2


def _is_shared(passes: tuple[int, ...]) -> bool:
    """Whether the draft model computes several texts in a pass."""
    return bool(passes) and passes[0] > 1


@lru_cache(maxsize=4096)
def _sizes_without_texts(
    rows: int, nodes: int, drafting: int, passes: tuple[int, ...], prompt: int, read: int, is_eager: bool
) -> Numbers:
    sizes = np.zeros(NUM_TERMS)
    sizes[0] = 1.0
    sizes[1 : 1 + _NUM_RAMPS] = _ramps(rows + nodes + prompt)
    sizes[1 + _NUM_RAMPS : _TEXTS] = rows, rows > 1, bool(nodes), drafting, nodes, bool(prompt), is_eager
    if passes or read:
        of_passes = sizes[_NUM_REST:_DRAFT_TEXTS]
        of_passes[0] = 1.0
        eager_passes = max(1, len(passes)) * is_eager
        of_passes[1:_DRAFT_RAMPS] = read, len(passes), len(passes) * _is_shared(passes), eager_passes
        for rows_of_pass in passes:
            of_passes[_DRAFT_RAMPS:] += _ramps(rows_of_pass)
    return sizes


def sizes_of(work: StepWork, window: int, is_eager: bool) -> Numbers:
    """Return [terms] the sizes by which the rates are multiplied. window: tokens that the draft model sees; 0 is all;
    is_eager: see `StepTimes`.
    """
    sizes = _sizes_without_texts(
        work.rows, work.nodes, work.drafting, work.passes, work.prompt, work.read, is_eager
    ).copy()
    length = work.text / max(1, work.rows)
    seen = min(length, window) if window else length
    drafted_from = len(work.passes) * work.drafting * seen
    sizes[_TEXTS:_NUM_REST] = (
        work.text,
        work.text * (work.rows > 1),  # attention to a lone text uses a separate kernel
        work.rows * max(0.0, length - _SHORT_TEXT),
        work.nodes * length,
        work.prompt_text,
    )
    sizes[_DRAFT_TEXTS:] = drafted_from, drafted_from * _is_shared(work.passes)
    return sizes


def _by_part(work: StepWork, draft_s: float, rest_s: float) -> tuple[float, float]:
    """Return (seconds of drafting, of the rest); a step without drafting has only a rest."""
    return (draft_s, rest_s) if work.passes or work.read else (0.0, draft_s + rest_s)


def _fitted(sizes: Numbers, seconds: Numbers, ramps: slice, rows: Numbers) -> Numbers:
    """Return [terms] non-negative rates for sizes [points, terms] and seconds [points].

    If points do not determine the growth of a pass with its rows, the slope changes as little as possible between the
    knots. rows: of the points' passes, [points].
    """
    order = np.argsort(rows)
    usual_s = np.interp(_KNOTS[1:-1], rows[order], np.maximum.accumulate(seconds[order]))
    bends = np.zeros((_NUM_RAMPS - 1, sizes.shape[1]))
    slopes = _BEND_WEIGHT * _KNOTS[1:-1, None] / usual_s[:, None] / np.diff(_KNOTS)
    before = np.arange(_NUM_RAMPS - 1)
    of_ramps = bends[:, ramps]
    of_ramps[before, before], of_ramps[before, before + 1] = -slopes[before, before], slopes[before, before + 1]
    system = np.concatenate([sizes / seconds[:, None], bends])
    from scipy.optimize import nnls  # the import is slow, and not needed if rates are given

    scale = np.maximum(abs(system).max(0), 1e-300)  # sizes differ by many orders of magnitude
    rates, _ = nnls(system / scale, np.concatenate([np.ones(len(seconds)), np.zeros(len(bends))]))
    result: Numbers = rates / scale
    return result


class StepTimes:
    """Predicts the duration of steps, and learns from completed ones."""

    def __init__(
        self,
        points: Sequence[Point],
        window: int = 0,
        rates: Sequence[float] = (),
        is_eager: Callable[[StepWork], bool] = lambda _: False,
    ) -> None:
        """points: measurements of calibration; window: tokens that the draft model sees, 0 is all; rates: fitted to
        these points before; is_eager: predicts whether the operations of such a step are launched one by one, although
        other steps are recorded.
        """
        self.points = points
        self.host = HostTime()
        self._window = window
        self._is_eager = is_eager
        self._slots = {PLAIN: 1 + NUM_TERMS, MIXED: 2 + NUM_TERMS}  # indices of the shapes' factors in the state
        self._started: float | None = None
        self._unaged_s = 0.0  # seconds whose forgetting is pending
        self._last_shape: Shape | None = None
        self._num_since = 0  # steps since drafting began or stopped
        num_states = 1 + NUM_TERMS + _MOST_SHAPES
        self.rates = np.array(rates) if len(rates) else self._fit(points)  # [terms] seconds per unit of each size
        self._rates_now: Numbers | None = None  # cached result of `_current_rates` until the state changes
        self._state = np.zeros(num_states)
        self._variance = np.zeros((num_states, num_states))
        terms, slots = slice(1, 1 + NUM_TERMS), slice(1 + NUM_TERMS, None)
        np.fill_diagonal(self._variance[terms, terms], _RATE_STD**2)
        for work, draft_s, rest_s in points:
            self._learn(work, draft_s, rest_s, _POINT_STD)
        # Served steps differ from those of calibration, by shape.
        np.fill_diagonal(self._variance[slots, slots], _SHAPE_STD**2)
        # Calibration does not measure the mixed steps, such as those with text drafts.
        self._variance[self._slots[MIXED], self._slots[MIXED]] = _RATE_STD**2
        self._fitted, self._fitted_variance = self._state.copy(), self._variance.copy()
        self._variance[0, 0] = _MACHINE_STD**2

    def _fit(self, points: Sequence[Point]) -> Numbers:
        """Return [terms] rates for the points; the variance reflects what the points do not determine."""
        rates = np.zeros(NUM_TERMS)
        sizes = np.array([self._sizes_of(work) for work, _, _ in points])
        drafts_s, rests_s = np.array([_by_part(*point) for point in points]).T
        rest, draft = slice(0, _NUM_REST), slice(_NUM_REST, NUM_TERMS)
        rows = np.array([work.rows + work.nodes + work.prompt for work, _, _ in points])
        rates[rest] = _fitted(sizes[:, rest], rests_s, slice(1, 1 + _NUM_RAMPS), rows)
        rates[0] = max(rates[0], _LEAST_SHARE * rests_s.min())
        has_passes = np.array([bool(work.passes) for work, _, _ in points])
        if has_passes.any():
            rows = np.array([max(work.passes) for work, _, _ in points if work.passes])
            ramps = slice(_DRAFT_RAMPS, _DRAFT_RAMPS + _NUM_RAMPS)
            rates[draft] = _fitted(sizes[has_passes, draft], drafts_s[has_passes], ramps, rows)
        return rates

    def _sizes_of(self, work: StepWork) -> Numbers:
        return sizes_of(work, self._window, self.is_eager(work))

    # -- predicting ---------------------------------------------------------------------------------------------------

    def is_eager(self, work: StepWork) -> bool:
        """Whether the operations of such a step are launched one by one, although other steps are recorded."""
        return self._is_eager(work) if work.is_eager is None else work.is_eager

    def rest_s(self, work: StepWork) -> float:
        """Return the seconds of the rest of a step, whether it drafts or not: neither its drafting nor host time."""
        parts = self._sizes_of(work)[:_NUM_REST] @ self._current_rates()[:_NUM_REST]
        return float(parts) * math.exp(self._state[self._slot(work.shape)])

    def read_s(self, tokens: int) -> float:
        """Return the seconds that this many more tokens add to a pass of the draft model."""
        return tokens * float(self._current_rates()[_NUM_REST + 1])

    def step_s(self, works: Sequence[StepWork]) -> Numbers:
        """Return [steps] seconds of whole steps, including the time between two of them."""
        drafts_s, rests_s, _ = self._seconds(works)
        return drafts_s + rests_s + [self.host.usual_s(work) for work in works]

    @staticmethod
    def num_cold(step_s: float) -> int:
        """Return how many steps of this duration have less weight after drafting has stopped."""
        fewest, most = _COLD_STEPS
        return min(most, max(fewest, math.ceil(_COLD_S / step_s)))

    def log_covariance(self, works: Sequence[StepWork]) -> Numbers:
        """Return [steps, steps] the covariance of the logarithms of the steps' durations."""
        drafts_s, rests_s, parts = self._seconds(works)
        slopes = np.zeros((len(works), len(self._state)))
        slopes[:, 0] = drafts_s + rests_s
        slopes[:, 1 : 1 + NUM_TERMS] = parts
        slopes[np.arange(len(works)), [self._slot(work.shape) for work in works]] = rests_s
        slopes /= slopes[:, :1]
        covariance: Numbers = slopes @ self._variance @ slopes.T
        return covariance

    def _seconds(self, works: Sequence[StepWork]) -> tuple[Numbers, Numbers, Numbers]:
        """Return (seconds of drafting [steps], of the rest [steps], of each term [steps, terms])."""
        sizes = np.array([self._sizes_of(work) for work in works])
        parts = sizes * self._current_rates()
        parts[:, :_NUM_REST] *= np.exp(self._state[[self._slot(work.shape) for work in works]])[:, None]
        return parts[:, _NUM_REST:].sum(1), parts[:, :_NUM_REST].sum(1), parts

    def _current_rates(self) -> Numbers:
        """Return [terms] the present rates of the machine."""
        if self._rates_now is None:
            self._rates_now = self.rates * np.exp(self._state[0] + self._state[1 : 1 + NUM_TERMS])
        return self._rates_now

    def _slot(self, shape: Shape) -> int:
        """Return the index of a shape's factor; once all indices are taken, further shapes share that of mixed ones."""
        if shape not in self._slots and len(self._slots) < _MOST_SHAPES:
            self._slots[shape] = 1 + NUM_TERMS + len(self._slots)
        return self._slots.get(shape, self._slots[MIXED])

    # -- learning -----------------------------------------------------------------------------------------------------

    def scale(self, factor: float) -> None:
        """Record that the machine takes `factor` times as long as at calibration."""
        self._state[0] = self._fitted[0] = math.log(factor)
        self._rates_now = None

    def widen(self, factor: float) -> None:
        """Record that rates may have changed by up to this factor since they were measured, each in its own way."""
        terms = np.arange(1, 1 + NUM_TERMS)
        for variance in (self._variance, self._fitted_variance):
            variance[terms, terms] += math.log(factor) ** 2

    def observe(
        self, work: StepWork, draft_s: float, rest_s: float, started: float, host_s: float | None = None
    ) -> None:
        """Record a step. started: its start on a clock of seconds; host_s: as in `HostTime`, None if it did not
        follow another step at once.

        The first step of another shape is ignored, because something may have to warm up.
        """
        if self._started is not None:
            self._pass_time(min(max(0.0, started - self._started), _LONGEST_PAUSE_S))
        self._started = started
        before, self._last_shape = self._last_shape, work.shape
        is_first = work.shape != before
        self._num_since = 0 if is_first and PLAIN in (work.shape, before) else self._num_since + 1
        if is_first or not work.rows:
            return
        cold_s = self._cold_s(work)
        if host_s is not None and not cold_s:
            self.host.observe(work, host_s)
        # A fast cold step is informative, because nothing makes a cold step fast.
        tells_little = cold_s and draft_s + rest_s >= _MUCH_FASTER * cold_s
        self._learn(work, draft_s, rest_s, _COLD_STD if tells_little else _STEP_STD)

    def _cold_s(self, work: StepWork) -> float:
        """Return the predicted seconds of a step during which the processor's caches still held other weights; 0 if
        they no longer did.
        """
        fewest, most = _COLD_STEPS
        if self._num_since >= (most if work.shape == PLAIN else fewest):
            return 0.0
        drafts_s, rests_s, _ = self._seconds([work])
        predicted_s = float(drafts_s[0] + rests_s[0])
        is_cold = work.shape != PLAIN or self._num_since < self.num_cold(predicted_s)
        return predicted_s if is_cold else 0.0

    def _pass_time(self, seconds: float) -> None:
        """Let the machine's factor drift, and the rest of the state return towards calibration, in whole seconds."""
        self._variance[0, 0] += _MACHINE_DRIFT**2 * seconds
        self._unaged_s += seconds
        if self._unaged_s < 1.0:
            return
        keep, self._unaged_s = math.exp(-self._unaged_s / _FORGET_S), 0.0
        machine = self._variance[0, 0]
        self._state[1:] += (1 - keep) * (self._fitted[1:] - self._state[1:])
        self._variance[1:, 1:] *= keep**2
        self._variance[1:, 1:] += (1 - keep**2) * self._fitted_variance[1:, 1:]
        self._variance[0, 1:] *= keep
        self._variance[1:, 0] *= keep
        self._variance[0, 0] = machine
        self._rates_now = None

    def _learn(self, work: StepWork, draft_s: float, rest_s: float, std: float) -> None:
        draft_s, rest_s = _by_part(work, draft_s, rest_s)
        slot = self._slot(work.shape)
        # Both parts are compared with the prediction from before the step.
        parts = self._sizes_of(work) * self._current_rates()
        shape = math.exp(self._state[slot])
        predicted_s, predicted_draft_s = float(parts[:_NUM_REST].sum()), float(parts[_NUM_REST:].sum())
        slopes = np.zeros(len(self._state))
        slopes[0] = slopes[slot] = 1.0
        slopes[1 : 1 + _NUM_REST] = parts[:_NUM_REST] / predicted_s
        self._update(slopes, rest_s / (shape * predicted_s), std)
        if draft_s > 0 and predicted_draft_s > 0:
            slopes = np.zeros(len(self._state))
            slopes[0] = 1.0
            slopes[1 + _NUM_REST : 1 + NUM_TERMS] = parts[_NUM_REST:] / predicted_draft_s
            self._update(slopes, draft_s / predicted_draft_s, std)

    def _update(self, slopes: Numbers, ratio: float, std: float) -> None:
        """Apply one observation: a part of a step took `ratio` times the prediction."""
        covariance = self._variance @ slopes
        known = float(slopes @ covariance) + std**2
        # Another process may have caused a slow step, so it moves the state by at most one standard deviation.
        most = min(1.0, known / math.sqrt(max(known - std**2, 1e-12)))
        self._state += covariance * (min(most, max(-0.5, ratio - 1.0)) / known)
        covariance *= 1 / math.sqrt(known)
        self._variance -= covariance[:, None] * covariance  # exactly symmetric
        self._rates_now = None
