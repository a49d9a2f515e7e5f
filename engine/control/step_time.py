"""Duration of a step's two parts: one regression over the sizes of its work, fitted at start and
updated by every step.

rest  = machine * shape * sum of (rate * size)     the target's pass, verification, K/V moves
draft = machine * sum of (rate * size)             drawing the drafts

The time outside both parts is predicted by `host_time.py`; `step_s` is the sum of all three.

Sizes are numbers of tokens, rows and passes. A pass grows with its rows piecewise linearly.
Calibration fits the rates (non-negative least squares). From then on an extended Kalman filter
corrects them. Its state is the logarithms of factors, at first 0: a factor on each calibrated rate,
the machine's factor and a factor for each shape. The points of calibration pass through the filter
too, which reduces the variance of the rates that they determine. The machine's factor drifts, so
that steps of a single shape show how fast steps of all other shapes are now; the rest of the state
returns slowly to the calibrated values. A plain step is the same model without nodes: choices and
reports use the same numbers.
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
# The standard deviations from here to `_COLD_STD` are of logarithms.
_MACHINE_STD = 0.1
"""Initial standard deviation of the machine's factor."""
_MACHINE_DRIFT = 0.03
"""Increase of its uncertainty per second (in quadrature)."""
_RATE_STD = 0.3
"""A rate before calibration."""
_SHAPE_STD = 0.07
"""Factor by which served steps of a shape differ from calibrated steps."""
_POINT_STD = 0.03
"""Noise of a calibrated step."""
_STEP_STD = 0.15
"""Noise of a served step; it is larger because errors of consecutive steps are correlated."""
_COLD_STD = 1.0
"""Noise of a served step after drafting began or stopped, while the processor's caches still hold
other weights. On processors with 480 MB of cache such plain steps took up to 9 % longer.
"""
_COLD_STEPS = (4, 32)
"""Fewest and most plain steps that count as cold after a stop of drafting. After a start of
drafting only the fewest steps are cold.
"""
_COLD_S = 0.2
"""Seconds of plain steps that count as cold, within these limits."""
_MUCH_FASTER = 0.75
"""A cold step that takes less than this share of the prediction has full weight."""
_SHORT_TEXT = 256
"""Tokens of a text beyond which each token may cost more: on a CPU 6 microseconds, not 2.7."""
_BEND_WEIGHT = 0.1
"""Weight of a change of slope between two knots in the fit; the points' errors have weight 1."""
_LEAST_SHARE = 0.01
"""Share of the shortest measured step that every step takes, whatever the fit says."""
_FORGET_S = 1800.0
"""Seconds after which about a third of the served steps' influence remains."""
_MOST_SHAPES = 16
_LONGEST_PAUSE_S = 60.0


Point = tuple[StepWork, float, float]
"""A measured step: its work, the seconds of drafting, and the seconds of the rest."""
Passes = tuple[int, ...]
"""Rows of each pass of the draft model."""


def _ramps(rows: float) -> Numbers:
    """Return [knots] the share of each interval between knots that a pass of this many rows covers.
    The last share may exceed 1.
    """
    shares = (rows - _KNOTS[:-1]) / np.diff(_KNOTS)
    shares[:-1] = shares[:-1].clip(max=1.0)
    return shares.clip(min=0.0)


_NUM_RAMPS = len(_KNOTS) - 1
# Places of the terms: first the terms of the rest, then the terms of drafting. `sizes_of` fills in
# the terms of texts. `_DRAFT_RAMPS` counts from the first term of drafting.
_TEXTS = _NUM_RAMPS + 8
_NUM_REST = _TEXTS + 5
_READ = _NUM_REST + 1
_DRAFT_RAMPS = 5
_DRAFT_TEXTS = _NUM_REST + _DRAFT_RAMPS + _NUM_RAMPS
NUM_TERMS = _DRAFT_TEXTS + 2
# Places in the state: the machine's factor, the rates of the terms, and the shapes' factors.
_MACHINE = 0
_RATES = slice(1, 1 + NUM_TERMS)
_SHAPES = slice(1 + NUM_TERMS, None)
_ALL_BUT_MACHINE = slice(1, None)


def _is_shared(passes: Passes) -> bool:
    """Whether the draft model computes several texts in a pass."""
    return bool(passes) and passes[0] > 1


@lru_cache(maxsize=4096)
def _sizes_without_texts(
    rows: int, nodes: int, num_drafting: int, passes: Passes, prompt: int, read: int, is_eager: bool
) -> Numbers:
    sizes = np.zeros(NUM_TERMS)
    sizes[0] = 1.0
    sizes[1 : 1 + _NUM_RAMPS] = _ramps(rows + nodes + prompt)
    counts = (rows, rows > 1, bool(nodes), num_drafting, nodes, bool(prompt), is_eager)
    sizes[1 + _NUM_RAMPS : _TEXTS] = counts
    if not passes and not read:
        return sizes
    draft_sizes = sizes[_NUM_REST:_DRAFT_TEXTS]
    draft_sizes[0] = 1.0
    num_passes = len(passes)
    num_eager_passes = max(1, num_passes) * is_eager
    draft_counts = (read, num_passes, num_passes * _is_shared(passes), num_eager_passes)
    draft_sizes[1:_DRAFT_RAMPS] = draft_counts
    for num_rows in passes:
        draft_sizes[_DRAFT_RAMPS:] += _ramps(num_rows)
    return sizes


def sizes_of(work: StepWork, window: int, is_eager: bool) -> Numbers:
    """Return [terms] the sizes by which the rates are multiplied.

    window: tokens that the draft model sees; 0 is all. is_eager: see `StepTimes`.
    """
    sizes = _sizes_without_texts(
        work.rows, work.nodes, work.num_drafting, work.passes, work.prompt, work.read, is_eager
    ).copy()
    length = work.text / max(1, work.rows)
    seen = min(length, window) if window else length
    # The first pass has a row for each request that draws drafts; text drafts need no pass.
    num_drawing = work.passes[0] if work.passes else 0
    drafted_from = len(work.passes) * num_drawing * seen
    sizes[_TEXTS:_NUM_REST] = (
        work.text,
        work.text * (work.rows > 1),  # attention to a lone text uses a separate kernel
        work.rows * max(0.0, length - _SHORT_TEXT),
        work.nodes * length,
        work.prompt_text,
    )
    sizes[_DRAFT_TEXTS:] = (drafted_from, drafted_from * _is_shared(work.passes))
    return sizes


def _by_part(work: StepWork, draft_s: float, rest_s: float) -> tuple[float, float]:
    """Return (seconds of drafting, of the rest); a step without drafting has only a rest."""
    if work.passes or work.read:
        return draft_s, rest_s
    return 0.0, draft_s + rest_s


def _fitted(sizes: Numbers, seconds: Numbers, ramps: slice, rows: Numbers) -> Numbers:
    """Return [terms] non-negative rates for sizes [points, terms] and seconds [points].

    If points do not determine the growth of a pass with its rows, the slope changes as little as
    possible between the knots. rows: of the points' passes, [points].
    """
    from scipy.optimize import nnls  # the import is slow, and not needed if rates are given

    order = np.argsort(rows)
    usual_s = np.interp(_KNOTS[1:-1], rows[order], np.maximum.accumulate(seconds[order]))
    slopes = _BEND_WEIGHT * _KNOTS[1:-1, None] / usual_s[:, None] / np.diff(_KNOTS)
    bends = np.zeros((_NUM_RAMPS - 1, sizes.shape[1]))
    ramp_bends = bends[:, ramps]
    before = np.arange(_NUM_RAMPS - 1)
    ramp_bends[before, before] = -slopes[before, before]
    ramp_bends[before, before + 1] = slopes[before, before + 1]
    system = np.concatenate([sizes / seconds[:, None], bends])
    wanted = np.concatenate([np.ones(len(seconds)), np.zeros(len(bends))])
    scale = np.maximum(abs(system).max(0), 1e-300)  # sizes differ by many orders of magnitude
    rates, _ = nnls(system / scale, wanted)
    result: Numbers = rates / scale
    return result


class StepTimes:
    """Predicts the duration of steps, and learns from completed steps."""

    def __init__(
        self,
        points: Sequence[Point],
        window: int = 0,
        rates: Sequence[float] = (),
        is_eager: Callable[[StepWork], bool] = lambda _: False,
    ) -> None:
        """points: measurements of calibration. window: tokens that the draft model sees; 0 is all.
        rates: fitted to these points before. is_eager: predicts whether the operations of such a
        step are launched one by one, although other steps are recorded.
        """
        self.points = points
        self.host = HostTime()
        self._window = window
        self._is_eager = is_eager
        # Places of the shapes' factors in the state.
        self._slots = {PLAIN: _SHAPES.start, MIXED: _SHAPES.start + 1}
        self._started: float | None = None
        self._unaged_s = 0.0  # seconds whose forgetting is pending
        self._last_shape: Shape | None = None
        self._num_since = 0  # steps since drafting began or stopped
        self.rates = np.array(rates) if len(rates) else self._fit(points)
        """[terms] seconds per unit of each size, as calibrated."""
        self._rates_now: Numbers | None = None  # cached `_current_rates` until the state changes
        num_states = _SHAPES.start + _MOST_SHAPES
        self._state = np.zeros(num_states)
        self._variance = np.zeros((num_states, num_states))
        np.fill_diagonal(self._variance[_RATES, _RATES], _RATE_STD**2)
        for work, draft_s, rest_s in points:
            self._learn(work, draft_s, rest_s, _POINT_STD)
        # Served steps differ from calibrated steps, by shape.
        np.fill_diagonal(self._variance[_SHAPES, _SHAPES], _SHAPE_STD**2)
        # Calibration does not measure mixed steps, such as steps with text drafts.
        mixed = self._slots[MIXED]
        self._variance[mixed, mixed] = _RATE_STD**2
        self._fitted = self._state.copy()
        self._fitted_variance = self._variance.copy()
        self._variance[_MACHINE, _MACHINE] = _MACHINE_STD**2

    def _fit(self, points: Sequence[Point]) -> Numbers:
        """Return [terms] rates for the points."""
        works = [work for work, _, _ in points]
        sizes = np.array([self._sizes_of(work) for work in works])
        drafts_s, rests_s = np.array([_by_part(*point) for point in points]).T
        rates = np.zeros(NUM_TERMS)
        rows = np.array([work.rows + work.nodes + work.prompt for work in works])
        ramps = slice(1, 1 + _NUM_RAMPS)
        rates[:_NUM_REST] = _fitted(sizes[:, :_NUM_REST], rests_s, ramps, rows)
        rates[0] = max(rates[0], _LEAST_SHARE * rests_s.min())
        has_passes = np.array([bool(work.passes) for work in works])
        if not has_passes.any():
            return rates
        rows = np.array([max(work.passes) for work in works if work.passes])
        ramps = slice(_DRAFT_RAMPS, _DRAFT_RAMPS + _NUM_RAMPS)
        draft_sizes = sizes[has_passes, _NUM_REST:]
        rates[_NUM_REST:] = _fitted(draft_sizes, drafts_s[has_passes], ramps, rows)
        return rates

    def _sizes_of(self, work: StepWork) -> Numbers:
        return sizes_of(work, self._window, self.is_eager(work))

    # -- predicting -------------------------------------------------------------------------------

    def is_eager(self, work: StepWork) -> bool:
        """Whether such a step is launched eagerly, although other steps are recorded."""
        return self._is_eager(work) if work.is_eager is None else work.is_eager

    def rest_s(self, work: StepWork) -> float:
        """Return the seconds of a step without its drafting and its host time."""
        seconds = self._sizes_of(work)[:_NUM_REST] @ self._current_rates()[:_NUM_REST]
        return float(seconds) * math.exp(self._state[self._slot(work.shape)])

    def read_s(self, tokens: int) -> float:
        """Return the seconds that this many more tokens add to a pass of the draft model."""
        return tokens * float(self._current_rates()[_READ])

    def step_s(self, works: Sequence[StepWork]) -> Numbers:
        """Return [steps] seconds of whole steps, including the time between two of them."""
        drafts_s, rests_s, _ = self._seconds(works)
        hosts_s = [self.host.usual_s(work) for work in works]
        return drafts_s + rests_s + hosts_s

    @staticmethod
    def num_cold(step_s: float) -> int:
        """Return how many plain steps of this duration count as cold after drafting has stopped."""
        fewest, most = _COLD_STEPS
        return min(most, max(fewest, math.ceil(_COLD_S / step_s)))

    def log_covariance(self, works: Sequence[StepWork]) -> Numbers:
        """Return [steps, steps] the covariance of the logarithms of the steps' durations."""
        drafts_s, rests_s, terms_s = self._seconds(works)
        slopes = np.zeros((len(works), len(self._state)))
        slopes[:, _MACHINE] = drafts_s + rests_s
        slopes[:, _RATES] = terms_s
        slots = [self._slot(work.shape) for work in works]
        slopes[np.arange(len(works)), slots] = rests_s
        slopes /= slopes[:, :1]
        covariance: Numbers = slopes @ self._variance @ slopes.T
        return covariance

    def _seconds(self, works: Sequence[StepWork]) -> tuple[Numbers, Numbers, Numbers]:
        """Return seconds of drafting [steps], of the rest [steps], and by term [steps, terms]."""
        sizes = np.array([self._sizes_of(work) for work in works])
        terms_s = sizes * self._current_rates()
        slots = [self._slot(work.shape) for work in works]
        terms_s[:, :_NUM_REST] *= np.exp(self._state[slots])[:, None]
        drafts_s = terms_s[:, _NUM_REST:].sum(1)
        rests_s = terms_s[:, :_NUM_REST].sum(1)
        return drafts_s, rests_s, terms_s

    def _current_rates(self) -> Numbers:
        """Return [terms] the present rates of the machine."""
        if self._rates_now is None:
            self._rates_now = self.rates * np.exp(self._state[_MACHINE] + self._state[_RATES])
        return self._rates_now

    def _slot(self, shape: Shape) -> int:
        """Return the place of a shape's factor in the state. Once all places are taken, further
        shapes share the place of mixed steps.
        """
        if shape not in self._slots and len(self._slots) < _MOST_SHAPES:
            self._slots[shape] = _SHAPES.start + len(self._slots)
        return self._slots.get(shape, self._slots[MIXED])

    # -- learning ---------------------------------------------------------------------------------

    def scale(self, factor: float) -> None:
        """Record that the machine takes `factor` times as long as at calibration."""
        self._state[_MACHINE] = math.log(factor)
        self._rates_now = None

    def widen(self, factor: float) -> None:
        """Record that each rate may have changed by up to this factor since calibration."""
        places = np.arange(_RATES.start, _RATES.stop)
        for variance in (self._variance, self._fitted_variance):
            variance[places, places] += math.log(factor) ** 2

    def observe(
        self,
        work: StepWork,
        draft_s: float,
        rest_s: float,
        started: float,
        host_s: float | None = None,
    ) -> None:
        """Record a step. started: its start on a clock of seconds. host_s: as in `HostTime`; None
        if the step did not follow another step at once.

        The first step of another shape is ignored, because something may have to warm up.
        """
        if self._started is not None:
            self._pass_time(min(max(0.0, started - self._started), _LONGEST_PAUSE_S))
        self._started = started
        is_first = work.shape != self._last_shape
        is_switch = is_first and PLAIN in (work.shape, self._last_shape)
        self._num_since = 0 if is_switch else self._num_since + 1
        self._last_shape = work.shape
        if is_first:
            return
        cold_s = self._cold_s(work)
        if host_s is not None and cold_s is None:
            self.host.observe(work, host_s)
        # A fast cold step is informative, because nothing makes a cold step fast.
        is_uncertain = cold_s is not None and draft_s + rest_s >= _MUCH_FASTER * cold_s
        self._learn(work, draft_s, rest_s, _COLD_STD if is_uncertain else _STEP_STD)

    def _cold_s(self, work: StepWork) -> float | None:
        """Return the predicted seconds of a step with cold caches; None if the caches are warm."""
        fewest, most = _COLD_STEPS
        num_cold = most if work.shape == PLAIN else fewest
        if self._num_since >= num_cold:
            return None
        drafts_s, rests_s, _ = self._seconds([work])
        predicted_s = float(drafts_s[0] + rests_s[0])
        is_cold = work.shape != PLAIN or self._num_since < self.num_cold(predicted_s)
        return predicted_s if is_cold else None

    def _pass_time(self, seconds: float) -> None:
        """Let the machine's factor drift, and the rest of the state return towards calibration."""
        self._variance[_MACHINE, _MACHINE] += _MACHINE_DRIFT**2 * seconds
        self._unaged_s += seconds
        if self._unaged_s < 1.0:
            return
        keep = math.exp(-self._unaged_s / _FORGET_S)
        self._unaged_s = 0.0
        state = self._state[_ALL_BUT_MACHINE]
        state += (1 - keep) * (self._fitted[_ALL_BUT_MACHINE] - state)
        variance = self._variance[_ALL_BUT_MACHINE, _ALL_BUT_MACHINE]
        variance *= keep**2
        variance += (1 - keep**2) * self._fitted_variance[_ALL_BUT_MACHINE, _ALL_BUT_MACHINE]
        self._variance[_MACHINE, _ALL_BUT_MACHINE] *= keep
        self._variance[_ALL_BUT_MACHINE, _MACHINE] *= keep
        self._rates_now = None

    def _learn(self, work: StepWork, draft_s: float, rest_s: float, std: float) -> None:
        """Compare both parts with the prediction from before the step."""
        draft_s, rest_s = _by_part(work, draft_s, rest_s)
        slot = self._slot(work.shape)
        terms_s = self._sizes_of(work) * self._current_rates()
        predicted_s = float(terms_s[:_NUM_REST].sum())
        predicted_draft_s = float(terms_s[_NUM_REST:].sum())
        ratio = rest_s / (math.exp(self._state[slot]) * predicted_s)
        slopes = np.zeros(len(self._state))
        slopes[_MACHINE] = 1.0
        slopes[slot] = 1.0
        slopes[_RATES][:_NUM_REST] = terms_s[:_NUM_REST] / predicted_s
        self._update(slopes, ratio, std)
        if draft_s > 0 and predicted_draft_s > 0:
            slopes = np.zeros(len(self._state))
            slopes[_MACHINE] = 1.0
            slopes[_RATES][_NUM_REST:] = terms_s[_NUM_REST:] / predicted_draft_s
            self._update(slopes, draft_s / predicted_draft_s, std)

    def _update(self, slopes: Numbers, ratio: float, std: float) -> None:
        """Apply an observation: a part of a step took `ratio` times the prediction."""
        covariance = self._variance @ slopes
        error_variance = float(slopes @ covariance) + std**2
        # Another process may have caused a slow step, so a slow step moves the state by at most one
        # standard deviation. Nothing makes a step fast, so a fast step may move it further.
        state_std = math.sqrt(max(error_variance - std**2, 1e-12))
        most = min(1.0, error_variance / state_std)
        error = min(most, max(-0.5, ratio - 1.0))
        self._state += covariance * (error / error_variance)
        covariance *= 1 / math.sqrt(error_variance)
        self._variance -= covariance[:, None] * covariance  # exactly symmetric
        self._rates_now = None
