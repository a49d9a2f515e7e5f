"""Counting what speculation did for an answer, and timing it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from server.serving.statistics import Clock, SpeculationCount, answer_part
from tests.server.step_results import CHAINS, LENGTH, outcome, stats

# Accepted tokens of a step, whether it drafted at all, and how many of its tokens stay in the
# answer.
STEPS = st.lists(
    st.tuples(st.integers(0, LENGTH), st.booleans()).flatmap(
        lambda step: st.tuples(st.just(step[0]), st.just(step[1]), st.integers(1, step[0] + 1 if step[1] else 1))
    ),
    max_size=20,
)


def count_of(steps: list[tuple[int, bool, int]]) -> SpeculationCount:
    """Count some steps."""
    counted = SpeculationCount("bv_race", LENGTH)
    for num_accepted, drafts, num_kept in steps:
        emitted = outcome(num_accepted + 1, num_accepted) if drafts else outcome(1, 0, draft_length=0)
        counted.add_step(answer_part(emitted, num_kept), stats())
    return counted


@pytest.mark.slow
@settings(deadline=None)
@given(steps=STEPS)
def test_the_counts_agree_with_each_other(steps: list[tuple[int, bool, int]]) -> None:
    """About the tokens that stayed in the answer."""
    report = count_of(steps).report()
    drafted = [(accepted, kept) for accepted, drafts, kept in steps if drafts]
    if not drafted:
        assert report is None
        return
    assert report is not None
    assert len(report.acceptance_histogram) == LENGTH + 1
    assert sum(report.acceptance_histogram) == report.num_spec_steps == len(drafted)
    weighted = sum(length * count for length, count in enumerate(report.acceptance_histogram))
    assert weighted == report.num_accepted_draft_tokens == sum(min(accepted, kept) for accepted, kept in drafted)
    assert report.num_draft_tokens == len(drafted) * LENGTH * CHAINS
    assert report.mean_acceptance_length == round(sum(kept for _, kept in drafted) / len(drafted), 2)
    assert report.drafters["model"].num_drafts == len(drafted) * CHAINS
    assert report.speedup is None
    as_in_vllm = count_of(steps).vllm_report()
    assert as_in_vllm is not None
    histogram = {str(length): number for length, number in enumerate(report.acceptance_histogram) if number}
    assert as_in_vllm == {**msgspec.structs.asdict(report), "acceptance_histogram": histogram}


@pytest.mark.slow
@settings(deadline=None)
@given(first=STEPS, second=STEPS)
def test_merging_is_counting_both(first: list[tuple[int, bool, int]], second: list[tuple[int, bool, int]]) -> None:
    """The sum of two choices is the count of all their steps."""
    merged = count_of(first)
    merged.merge(count_of(second))
    together = count_of(first + second)
    ours, theirs = merged.report(), together.report()
    if ours is None or theirs is None:
        assert ours is theirs
        return
    assert ours.acceptance_histogram == theirs.acceptance_histogram
    assert ours.num_draft_tokens == theirs.num_draft_tokens
    assert ours.mean_acceptance_length == theirs.mean_acceptance_length


def test_speedup_is_plain_time_over_time_taken() -> None:
    """Five tokens in steps of 10 ms, where plain decoding takes 8 ms a token."""
    counted = SpeculationCount("bv_race", LENGTH)
    counted.add_step(outcome(3, 2), stats(wall_s=0.010, plain_s=0.008))
    counted.add_step(outcome(2, 1), stats(wall_s=0.010, plain_s=0.008))
    counted.add_step(outcome(1, 0), stats(wall_s=0.500))
    assert counted.speedup == pytest.approx(5 * 0.008 / 0.020)


def test_prompts_are_read_by_plain_decoding_too() -> None:
    """Six tokens at 8 ms; the second step is 30 ms longer for another's prompt."""
    counted = SpeculationCount("bv_race", LENGTH)
    counted.add_step(outcome(3, 2), stats(wall_s=0.010, plain_s=0.008))
    counted.add_step(outcome(3, 2), stats(wall_s=0.040, plain_s=0.008, prompt_s=0.030))
    assert counted.speedup == pytest.approx((6 * 0.008 + 0.030) / 0.050)


# Tokens of a pass, seconds of the step, and the shares of it that a plain pass and a prompt would
# take.
PASSES = st.lists(
    st.tuples(
        st.integers(1, LENGTH + 1),
        st.floats(1e-4, 1.0),
        st.floats(0.0, 1.0),
        st.floats(0.0, 1.0),
        st.floats(1e-4, 1.0),
    ),
    min_size=1,
    max_size=20,
)


def counted_passes(passes: list[tuple[int, float, float, float, float]]) -> SpeculationCount:
    """Count passes with these times, of which plain and prompt are a part."""
    counted = SpeculationCount("bv_race", LENGTH)
    for num_tokens, wall_s, plain_share, prompt_share, usual_s in passes:
        prompt_s = prompt_share * wall_s
        plain_s = plain_share * (wall_s - prompt_s)
        timed = replace(stats(wall_s, plain_s, prompt_s=prompt_s), usual_plain_s=usual_s)
        counted.add_step(outcome(num_tokens, num_tokens - 1), timed)
    return counted


@settings(deadline=None)
@given(first=PASSES, second=PASSES)
def test_no_answer_gains_more_than_its_tokens_per_pass(first: Any, second: Any) -> None:
    """For any times of steps, for one answer and for several together."""
    counted, other = counted_passes(first), counted_passes(second)
    for _ in range(2):
        assert counted.speedup is not None
        assert counted.tokens_per_pass is not None
        assert counted.speedup <= counted.tokens_per_pass * (1 + 1e-9)
        counted.merge(other)
    without_accepted = counted_passes([(1, *times_s) for _, *times_s in first])
    assert without_accepted.speedup is not None
    assert without_accepted.speedup <= 1 + 1e-9


def test_a_slow_pass_with_many_tokens_gains_no_more_than_its_tokens() -> None:
    """The wrong variant counts a pass's delay once for each of its tokens."""
    counted = counted_passes([(1, 0.01, 1.0, 0.0, 0.01), (5, 0.1, 1.0, 0.0, 0.01)])
    assert counted.speedup == pytest.approx(3)
    assert (1 * 0.01 + 5 * 0.1) / 0.11 > 4


def test_tokens_per_pass_counts_the_plain_passes() -> None:
    """Seven drafting passes of nine tokens among seventeen plain ones."""
    report = count_of([*[(4, True, 5)] * 7, *[(0, False, 1)] * 17]).report()
    assert report is not None
    assert (report.mean_acceptance_length, report.num_spec_steps) == (5, 7)
    assert (report.tokens_per_pass, report.num_passes) == (round(52 / 24, 2), 24)


def test_the_share_of_drafting_is_over_all_steps() -> None:
    """Drafting time over step time."""
    counted = SpeculationCount("bv_race", LENGTH)
    counted.add_step(outcome(3, 2), stats(wall_s=0.010, draft_s=0.004))
    counted.add_step(outcome(1, 0), stats(wall_s=0.010, draft_s=0.002))
    report = counted.report()
    assert report is not None
    assert report.draft_time_share == pytest.approx(0.3)


def times(clock: Clock) -> dict[str, Any]:
    """The durations of a clock."""
    return clock.times_s()


def test_a_clock_times_the_parts_of_an_answer() -> None:
    """Queue, prefill and decode add up to the whole; gaps are per token."""
    clock = Clock()
    assert times(clock) == {}
    clock.started -= 2.0
    assert clock.add(outcome(1, 0), 1) is None
    gap = clock.add(outcome(4, 3), 4)
    assert gap is not None
    assert gap >= 0
    parts = times(clock)
    assert parts["queue"] == 0.5
    assert parts["queue"] + parts["prefill"] + parts["decode"] == pytest.approx(parts["e2e"])
    assert parts["tpot"] == pytest.approx(parts["decode"] / 4)
    report = clock.report(SpeculationCount("off", 0))
    assert report.time_to_first_token_ms is not None
    assert 2000 <= report.time_to_first_token_ms <= report.generation_time_ms
    assert report.queue_time_ms == 500
