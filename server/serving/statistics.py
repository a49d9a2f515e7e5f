"""Counts of speculation and times of one answer, after every cut."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, fields

import msgspec

from engine.api import MODEL, Outcome, StepStats, Timing
from server.wire.answers import DrafterMetrics, Metrics, SpeculativeDecoding

_OF_MS, _OF_RATIOS, _OF_SHARES = 2, 2, 3
"""Decimals of an answer's figures; more would be noise."""


def _rounded(value: float | None, decimals: int) -> float | None:
    return None if value is None else round(value, decimals)


def answer_part(outcome: Outcome, num_taken: int) -> Outcome:
    """Return the part of a step's outcome that belongs to the answer: its first `num_taken` tokens.

    Answers and the daemon's metrics count the same part, so that their sums agree.
    """
    num_accepted = left = min(outcome.num_accepted, num_taken)
    if num_taken == len(outcome.token_ids) and not outcome.text_draft_counts:
        return outcome
    from_text = []
    for part in outcome.text_draft_counts:
        accepted = min(left, part.num_accepted)
        left -= accepted
        from_text.append(msgspec.structs.replace(part, num_accepted=accepted))
    tokens = outcome.token_ids[:num_taken]
    return msgspec.structs.replace(outcome, token_ids=tokens, num_accepted=num_accepted, text_draft_counts=from_text)


def drafters_of(outcome: Outcome) -> list[str]:
    """Return the name of the drafter of each reported chain; chains of text drafters come last."""
    from_text = [part.name for part in outcome.text_draft_counts] if outcome.drafts else []
    return [MODEL] * (len(outcome.drafts) - len(from_text)) + from_text


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
        self.timing.add(stats, outcome)
        if outcome.draft_length:
            self.accepted_per_step[outcome.num_accepted] += 1
            self.num_chains += outcome.num_chains
            self.num_nodes += outcome.num_nodes
            # Text drafts may be longer than the sampled chains.
            self.num_spec_tokens = max(self.num_spec_tokens, outcome.draft_length)
            self.num_emitted += num_taken
            self.bias += outcome.bias
            for part in outcome.text_draft_counts:
                counts = {"chains": part.num_chains, "nodes": part.num_nodes, "accepted": part.num_accepted}
                self.text_draft_counts.update({(part.name, what): count for what, count in counts.items()})
        if outcome.gap is not None:
            self.gaps.append(outcome.gap)

    def merge(self, other: SpeculationCount) -> None:
        """Add all counts of another choice."""
        for one in fields(self):
            if one.name not in ("rule", "num_spec_tokens"):
                setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

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
        """Mean number of tokens of a speculative step, with the bonus token; plain steps do not count."""
        return self.num_emitted / self.num_steps if self.num_steps else None

    @property
    def tokens_per_pass(self) -> float | None:
        """Mean number of tokens of a target pass, plain passes included; None before the first token."""
        return self.num_tokens / self.num_passes if self.num_passes else None

    @property
    def speedup(self) -> float | None:
        """Time of plain decoding for the same tokens and prompts, divided by the measured time (`Timing`).

        None if nothing was drafted or timed.
        """
        return self.timing.speedup if self.num_steps else None

    def report(self) -> SpeculativeDecoding | None:
        """Return the answer's `speculative_decoding`; None if it did not speculate."""
        if not self.num_steps:
            return None
        drafters = {
            name: DrafterMetrics(*(self.text_draft_counts[name, what] for what in ("chains", "nodes", "accepted")))
            for name in dict.fromkeys(name for name, _ in self.text_draft_counts)
        }
        if self.num_chains > sum(one.num_drafts for one in drafters.values()):
            drafters[MODEL] = DrafterMetrics(
                self.num_chains - sum(one.num_drafts for one in drafters.values()),
                self.num_nodes - sum(one.num_draft_tokens for one in drafters.values()),
                self.num_accepted - sum(one.num_accepted_tokens for one in drafters.values()),
            )
        return SpeculativeDecoding(
            mean_acceptance_length=_rounded(self.acceptance_length, _OF_RATIOS),
            draft_acceptance_rate=_rounded(self.num_accepted / self.num_nodes if self.num_nodes else None, _OF_SHARES),
            acceptance_histogram=[self.accepted_per_step[length] for length in range(self.num_spec_tokens + 1)],
            tokens_per_pass=_rounded(self.tokens_per_pass, _OF_RATIOS),
            num_passes=self.num_passes,
            num_spec_steps=self.num_steps,
            num_accepted_draft_tokens=self.num_accepted,
            num_draft_tokens=self.num_nodes,
            num_spec_tokens=self.num_spec_tokens,
            speedup=_rounded(self.speedup, _OF_RATIOS),
            draft_time_share=_rounded(self.draft_s / self.wall_s if self.wall_s else None, _OF_SHARES),
            rule=self.rule,
            optimal_acceptance_gap=_rounded(sum(self.gaps) / len(self.gaps) if self.gaps else None, _OF_SHARES),
            bias_bound=float(f"{self.bias:.3g}"),
            drafters=drafters,
        )


class Clock:
    """Times of one HTTP call."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.queue_s: float | None = None
        self.num_tokens = 0

    def add(self, outcome: Outcome, num_taken: int) -> float | None:
        """Note a step's tokens. Returns the seconds per token since the last ones, None for the first."""
        now = time.perf_counter()
        gap = None
        if self.first_token is None:
            self.first_token, self.queue_s = now, outcome.queue_s
        elif self.last_token is not None and num_taken:
            gap = (now - self.last_token) / num_taken
        self.last_token = now
        self.num_tokens += num_taken
        return gap

    @property
    def ttft_s(self) -> float | None:
        """Time from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.started

    def times_s(self) -> dict[str, float | None]:
        """Return the durations for the histograms of `ServerMetrics.finish`; None for those that do not exist."""
        first, last, queue_s = self.first_token, self.last_token, self.queue_s
        if first is None or last is None or queue_s is None:
            return {}
        gaps = self.num_tokens - 1
        return {
            "e2e": last - self.started,
            "queue": queue_s,
            "prefill": max(0.0, first - self.started - queue_s),
            "decode": last - first,
            "tpot": (last - first) / gaps if gaps > 0 else None,
        }

    def report(self, speculation: SpeculativeDecoding | None) -> Metrics:
        """Return the answer's `metrics`."""
        first, last = self.first_token, self.last_token
        end = last if last is not None else time.perf_counter()
        decode_s = None if first is None or last is None else last - first
        gaps = self.num_tokens - 1
        return Metrics(
            time_to_first_token_ms=_rounded(None if first is None else 1000 * (first - self.started), _OF_MS),
            generation_time_ms=round(1000 * (end - self.started), _OF_MS),
            queue_time_ms=_rounded(None if self.queue_s is None else 1000 * self.queue_s, _OF_MS),
            mean_itl_ms=_rounded(1000 * decode_s / gaps if decode_s is not None and gaps > 0 else None, _OF_MS),
            tokens_per_second=_rounded(self.num_tokens / (end - self.started) if end > self.started else None, 1),
            speculative_decoding=speculation,
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
