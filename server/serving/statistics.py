"""Counts of speculation and times of one answer, after every cut."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

from engine.api import MODEL, Outcome, StepStats, Timing
from server.wire.answers import DrafterMetrics, Metrics, SpeculativeDecoding

_MS_DECIMALS = 2
_RATIO_DECIMALS = 2
_SHARE_DECIMALS = 3
_RATE_DECIMALS = 1
"""Decimals of an answer's figures; more would be noise."""
_MERGED_ALONE = ("rule", "num_spec_tokens")
"""Fields of a count that a sum takes from its own request."""


def _ratio(numerator: float, denominator: float) -> float | None:
    """Return a ratio; None if the denominator is 0."""
    return numerator / denominator if denominator else None


def _rounded(value: float | None, decimals: int) -> float | None:
    return None if value is None else round(value, decimals)


def answer_part(outcome: Outcome, num_taken: int) -> Outcome:
    """Return the part of a step's outcome that belongs to the answer: its first `num_taken` tokens.

    Answers and the daemon's metrics count the same part, so that their sums agree.
    """
    if num_taken == len(outcome.token_ids) and not outcome.text_draft_counts:
        return outcome
    num_accepted = min(outcome.num_accepted, num_taken)
    num_left = num_accepted
    text_draft_counts = []
    for counts in outcome.text_draft_counts:
        num_from_text = min(num_left, counts.num_accepted)
        num_left -= num_from_text
        text_draft_counts.append(msgspec.structs.replace(counts, num_accepted=num_from_text))
    return msgspec.structs.replace(
        outcome,
        token_ids=outcome.token_ids[:num_taken],
        num_accepted=num_accepted,
        text_draft_counts=text_draft_counts,
    )


def drafters_of(outcome: Outcome) -> list[str]:
    """Return the name of the drafter of each reported chain; chains of text drafters come last."""
    if not outcome.drafts:
        return []
    from_text = [counts.name for counts in outcome.text_draft_counts]
    num_sampled = len(outcome.drafts) - len(from_text)
    return [MODEL] * num_sampled + from_text


@dataclass
class SpeculationCount:
    """Counts of the steps of one or more choices; steps without drafts count as passes alone."""

    rule: str
    num_spec_tokens: int
    accepted_per_step: Counter[int] = field(default_factory=Counter)
    num_chains: int = 0
    num_nodes: int = 0
    num_emitted: int = 0
    """Tokens of the speculative steps."""
    num_tokens: int = 0
    num_passes: int = 0
    """Target passes in which a choice received tokens."""
    num_resting: int = 0
    """Passes in which the controller chose plain decoding because it is as fast."""
    timing: Timing = field(default_factory=Timing)
    wall_s: float = 0.0
    draft_s: float = 0.0
    bias: float = 0.0
    gaps: list[float] = field(default_factory=list)
    text_draft_counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Counts by text drafter: `chains`, `nodes`, `accepted`."""

    def add_step(self, outcome: Outcome, stats: StepStats) -> None:
        """Count a step whose tokens all belong to the answer (`answer_part`)."""
        num_taken = len(outcome.token_ids)
        self.wall_s += stats.wall_s
        self.draft_s += stats.phases_s["draft"]
        self.num_tokens += num_taken
        self.num_passes += bool(num_taken)
        self.num_resting += bool(num_taken) and outcome.rests
        self.timing.add(stats, outcome)
        if outcome.draft_length:
            self.accepted_per_step[outcome.num_accepted] += 1
            self.num_chains += outcome.num_chains
            self.num_nodes += outcome.num_nodes
            # Text drafts may be longer than the sampled chains.
            self.num_spec_tokens = max(self.num_spec_tokens, outcome.draft_length)
            self.num_emitted += num_taken
            self.bias += outcome.bias
            for counts in outcome.text_draft_counts:
                self.text_draft_counts[counts.name, "chains"] += counts.num_chains
                self.text_draft_counts[counts.name, "nodes"] += counts.num_nodes
                self.text_draft_counts[counts.name, "accepted"] += counts.num_accepted
        if outcome.gap is not None:
            self.gaps.append(outcome.gap)

    def merge(self, other: SpeculationCount) -> None:
        """Add all counts of another choice."""
        for field_ in fields(self):
            if field_.name not in _MERGED_ALONE:
                total = getattr(self, field_.name) + getattr(other, field_.name)
                setattr(self, field_.name, total)

    @property
    def num_steps(self) -> int:
        """Number of speculative steps."""
        return self.accepted_per_step.total()

    @property
    def num_accepted(self) -> int:
        """Number of drafted tokens in the answer."""
        return sum(length * count for length, count in self.accepted_per_step.items())

    @property
    def acceptance_length(self) -> float | None:
        """Return the mean tokens of a speculative step, with the bonus token."""
        return _ratio(self.num_emitted, self.num_steps)

    @property
    def tokens_per_pass(self) -> float | None:
        """Return the mean tokens of a target pass, also plain ones; None before the first."""
        return _ratio(self.num_tokens, self.num_passes)

    @property
    def speedup(self) -> float | None:
        """Return the time of plain decoding over the measured time (`Timing`).

        None if nothing was drafted, or if plain decoding was not measured for most of the tokens.
        """
        if not self.num_steps or 2 * self.timing.num_tokens < self.num_tokens:
            return None
        return self.timing.speedup

    def report(self) -> SpeculativeDecoding | None:
        """Return the answer's `speculative_decoding`; None if it did not speculate."""
        if not self.num_steps:
            return None
        lengths = range(self.num_spec_tokens + 1)
        return SpeculativeDecoding(
            mean_acceptance_length=_rounded(self.acceptance_length, _RATIO_DECIMALS),
            draft_acceptance_rate=_rounded(_ratio(self.num_accepted, self.num_nodes), _SHARE_DECIMALS),
            acceptance_histogram=[self.accepted_per_step[length] for length in lengths],
            tokens_per_pass=_rounded(self.tokens_per_pass, _RATIO_DECIMALS),
            num_passes=self.num_passes,
            num_spec_steps=self.num_steps,
            num_accepted_draft_tokens=self.num_accepted,
            num_draft_tokens=self.num_nodes,
            num_spec_tokens=self.num_spec_tokens,
            speedup=_rounded(self.speedup, _RATIO_DECIMALS),
            draft_time_share=_rounded(_ratio(self.draft_s, self.wall_s), _SHARE_DECIMALS),
            rule=self.rule,
            optimal_acceptance_gap=_rounded(_ratio(sum(self.gaps), len(self.gaps)), _SHARE_DECIMALS),
            bias_bound=float(f"{self.bias:.3g}"),
            drafters=self._drafters(),
        )

    def vllm_report(self) -> dict[str, Any] | None:
        """Return the report as vLLM's choices have it: the histogram has no zeros."""
        report = self.report()
        if report is None:
            return None
        histogram = {str(length): number for length, number in enumerate(report.acceptance_histogram) if number}
        return msgspec.structs.asdict(report) | {"acceptance_histogram": histogram}

    def _drafters(self) -> dict[str, DrafterMetrics]:
        """Return each drafter's contribution; the model has what text drafters do not have."""
        counts = self.text_draft_counts
        names = dict.fromkeys(name for name, _ in counts)
        drafters = {
            name: DrafterMetrics(counts[name, "chains"], counts[name, "nodes"], counts[name, "accepted"])
            for name in names
        }
        num_chains = self.num_chains - sum(drafter.num_drafts for drafter in drafters.values())
        num_nodes = self.num_nodes - sum(drafter.num_draft_tokens for drafter in drafters.values())
        num_accepted = self.num_accepted - sum(drafter.num_accepted_tokens for drafter in drafters.values())
        if num_chains > 0:
            drafters[MODEL] = DrafterMetrics(num_chains, num_nodes, num_accepted)
        return drafters


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, _MS_DECIMALS)


class Clock:
    """Times of one HTTP call."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.queue_s: float | None = None
        self.num_tokens = 0

    def add(self, outcome: Outcome, num_taken: int) -> float | None:
        """Note a step's tokens; return the seconds per token since the last step, or None."""
        now = time.perf_counter()
        gap = None
        if self.first_token is None:
            self.first_token = now
            self.queue_s = outcome.queue_s
        elif self.last_token is not None and num_taken:
            gap = (now - self.last_token) / num_taken
        self.last_token = now
        self.num_tokens += num_taken
        return gap

    @property
    def ttft_s(self) -> float | None:
        """Time from arrival to the first token."""
        if self.first_token is None:
            return None
        return self.first_token - self.started

    def times_s(self) -> dict[str, float | None]:
        """Return the durations for `ServerMetrics.finish`; empty before the first token.

        The time per token is None for an answer of one token.
        """
        if self.first_token is None or self.last_token is None or self.queue_s is None:
            return {}
        return {
            "e2e": self.last_token - self.started,
            "queue": self.queue_s,
            "prefill": max(0.0, self.first_token - self.started - self.queue_s),
            "decode": self.last_token - self.first_token,
            "tpot": self._time_per_token_s(),
        }

    def _time_per_token_s(self) -> float | None:
        """Return the mean time between two tokens; None before the second token."""
        num_gaps = self.num_tokens - 1
        if self.first_token is None or self.last_token is None or num_gaps <= 0:
            return None
        return (self.last_token - self.first_token) / num_gaps

    def report(self, counted: SpeculationCount) -> Metrics:
        """Return the answer's `metrics`."""
        end = self.last_token
        if end is None:
            end = time.perf_counter()
        generation_s = end - self.started
        return Metrics(
            time_to_first_token_ms=_milliseconds(self.ttft_s),
            generation_time_ms=round(1000 * generation_s, _MS_DECIMALS),
            queue_time_ms=_milliseconds(self.queue_s),
            mean_itl_ms=_milliseconds(self._time_per_token_s()),
            tokens_per_second=_rounded(_ratio(self.num_tokens, generation_s), _RATE_DECIMALS),
            speculative_decoding=counted.report(),
            num_resting_passes=counted.num_resting or msgspec.UNSET,
        )


@dataclass(frozen=True)
class GenerationState:
    """Counts, times and settings of one HTTP call, for observers; it holds no text."""

    reasons: list[str | None]
    """Finish reason of each choice; None while it runs."""
    num_choices: int
    """Choices of each prompt."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_answer_tokens: int
    temperature: float
    top_p: float
    max_tokens: int
    clock: Clock
    speculation: SpeculationCount
    """Sum over the choices."""
