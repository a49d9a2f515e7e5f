"""The one Prometheus registry, in the HTTP process. Names and buckets: `docs/operations.md`.

With `compat`, the same values also appear under vLLM's names, so that ported dashboards and
`vllm bench serve` work. Never a request id as a label.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.metrics import Counter, Gauge, Histogram
from prometheus_client.registry import Collector

from engine.api import MODEL, PHASES, EngineFacts, Outcome, Step
from server.version import VERSION

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL_S = (
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 1, 2.5,
)  # fmt: skip
_ACCEPTANCE = (1, 1.25, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 12, 16)
_SPEEDUP = (0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5, 2, 2.5, 3, 4, 6)
_STEP_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_GAP = (-0.05, 0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)
_NODES = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128)

# Counters the engine and we name otherwise; everything else is only prefixed.
_VLLM_RENAMED = {"kv_cache_usage_ratio": "kv_cache_usage_perc"}
_VLLM_NAMES = frozenset(
    """
    num_requests_running num_requests_waiting kv_cache_usage_ratio prompt_tokens generation_tokens
    num_preemptions prefix_cache_queries prefix_cache_hits request_success time_to_first_token_seconds
    inter_token_latency_seconds
    request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
    request_prefill_time_seconds request_decode_time_seconds spec_decode_num_drafts spec_decode_num_draft_tokens
    spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos
    """.split()
)


class ServerMetrics:
    """Every counter of the daemon; the methods are the only places that change them."""

    def __init__(self, model_name: str, compat: bool) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._seen = {"preemptions": 0, "cache_queries": 0, "cache_hits": 0}
        self._define_state()
        self._define_requests()
        self._define_speculation()
        if compat:
            self.registry.register(_VllmNames(self.registry))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"polydraft_{name}", text, [*self._labels, *labels], registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"polydraft_{name}", text, [*self._labels], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"polydraft_{name}", text, [*self._labels, *labels], buckets=buckets, registry=self.registry)

    def _define_state(self) -> None:
        self._running = self._gauge("num_requests_running", "Requests that hold cache blocks.").labels(**self._labels)
        self._waiting = self._gauge("num_requests_waiting", "Requests in the queue.").labels(**self._labels)
        self._usage = self._gauge("kv_cache_usage_ratio", "Share of cache blocks in use.").labels(**self._labels)
        self._preemptions = self._counter("num_preemptions", "Requests that lost their blocks and were recomputed.")
        self._cache_queries = self._counter("prefix_cache_queries", "Tokens of admitted texts.")
        self._cache_hits = self._counter("prefix_cache_hits", "Tokens of admitted texts whose K/V was there.")
        self._step = self._histogram("step_seconds", "Duration of a step by phase.", _STEP_S, "phase")
        self._nodes = self._histogram("spec_tree_nodes", "Drafted nodes of a request's step.", _NODES)

    def _define_requests(self) -> None:
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of started requests.")
        self._answer_tokens = self._counter("generation_tokens", "Tokens of answers.")
        self._success = self._counter("request_success", "Answers by reason of their end.", "finished_reason")
        self._rejections = self._counter("admission_rejections", "Requests not admitted.", "reason")
        self._errors = self._counter("request_errors", "Error answers by HTTP status.", "code")
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _TTFT_S)
        self._itl = self._histogram("inter_token_latency_seconds", "Gap between steps over its tokens.", _ITL_S)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", _ITL_S
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", _TTFT_S)
        self._queue = self._histogram("request_queue_time_seconds", "Time in the queue.", _TTFT_S)
        self._prefill = self._histogram("request_prefill_time_seconds", "From admission to the first token.", _TTFT_S)
        self._decode = self._histogram("request_decode_time_seconds", "From the first to the last token.", _TTFT_S)

    def _define_speculation(self) -> None:
        self._drafts = self._counter("spec_decode_num_drafts", "Speculative steps of requests.")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Drafted nodes verified.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        self._accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafted tokens accepted, by position.", "position"
        )
        self._drafter_counts = {
            kind: self._counter(f"spec_drafter_{kind}", f"The drafter's {kind.replace('_', ' ')}.", "drafter")
            for kind in ("drafts", "draft_tokens", "accepted_tokens")
        }
        self._acceptance_length = self._histogram(
            "request_spec_acceptance_length", "Tokens per speculative step of an answer.", _ACCEPTANCE
        )
        self._speedup = self._histogram(
            "request_spec_speedup_ratio", "An answer's speed over plain decoding.", _SPEEDUP
        )
        self._gap = self._histogram(
            "spec_optimal_acceptance_gap", "Optimum acceptance minus the rule's, on observed steps.", _GAP, "rule"
        )
        self._shapes = self._counter(
            "spec_shape_steps", "Speculative steps by shape and rule.", "num_drafts", "depth", "rule"
        )

    def ready(self, facts: EngineFacts) -> None:
        """Publish what is served."""
        build = {"version": VERSION, "architecture": facts.architecture, "device": facts.device, "dtype": facts.dtype}
        cache = {"num_blocks": str(facts.num_blocks), "block_size": str(facts.block_size)}
        for name, text, labels in (
            ("build_info", "What is running.", build),
            ("cache_config_info", "The K/V cache.", cache),
        ):
            info = Gauge(f"polydraft_{name}", text, [*self._labels, *labels], registry=self.registry)
            info.labels(**self._labels, **labels).set(1)
        self._num_blocks = facts.num_blocks
        for phase in PHASES:
            self._step.labels(**self._labels, phase=phase)

    def step(self, step: Step) -> None:
        """Take the engine's own counts of a step."""
        stats, labels = step.stats, self._labels
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._usage.set(stats.num_blocks_used / self._num_blocks)
        for name, counter, count in (
            ("preemptions", self._preemptions, stats.num_preemptions),
            ("cache_queries", self._cache_queries, stats.num_cache_queries),
            ("cache_hits", self._cache_hits, stats.num_cache_hits),
        ):
            counter.labels(**labels).inc(count - self._seen[name])
            self._seen[name] = count
        for phase, seconds in stats.phases_s.items():
            self._step.labels(**labels, phase=phase).observe(seconds)
        for outcome in step.outcomes:
            if not outcome.draft_length:
                continue
            self._drafts.labels(**labels).inc()
            self._nodes.labels(**labels).observe(outcome.num_nodes)
            self._draft_tokens.labels(**labels).inc(outcome.num_nodes)
            self._accepted.labels(**labels).inc(outcome.num_accepted)
            for position in range(outcome.num_accepted):
                self._accepted_at.labels(**labels, position=str(position)).inc()
            shape = {"num_drafts": str(outcome.num_chains), "depth": str(outcome.draft_length), "rule": outcome.rule}
            self._shapes.labels(**labels, **shape).inc()
            if outcome.gap is not None:
                self._gap.labels(**labels, rule=outcome.rule).observe(outcome.gap)
            self._count_drafters(outcome)

    def _count_drafters(self, outcome: Outcome) -> None:
        counts = {part.name: (part.num_chains, part.num_nodes, part.num_accepted) for part in outcome.copied}
        total = (outcome.num_chains, outcome.num_nodes, outcome.num_accepted)
        drawn = tuple(whole - sum(parts) for whole, *parts in zip(total, *counts.values(), strict=True))
        if drawn[0]:
            counts[MODEL] = (drawn[0], drawn[1], drawn[2])
        for name, numbers in counts.items():
            for kind, number in zip(self._drafter_counts, numbers, strict=True):
                # After a cut inside a copied chain the rest of it counts nowhere.
                self._drafter_counts[kind].labels(**self._labels, drafter=name).inc(max(0, number))

    def start(self, num_prompt_tokens: int) -> None:
        """A call's requests have been admitted."""
        self._prompt_tokens.labels(**self._labels).inc(num_prompt_tokens)

    def tokens(self, num_tokens: int, gap_s: float | None, ttft_s: float | None) -> None:
        """Tokens of an answer have arrived; `ttft_s` with the first of them."""
        self._answer_tokens.labels(**self._labels).inc(num_tokens)
        if ttft_s is not None:
            self._ttft.labels(**self._labels).observe(ttft_s)
        if gap_s is not None:
            for _ in range(num_tokens):
                self._itl.labels(**self._labels).observe(gap_s)

    def finish(
        self,
        reason: str,
        times_s: dict[str, float | None],
        acceptance_length: float | None,
        speedup: float | None,
    ) -> None:
        """An answer has ended; `times_s` has any of e2e, queue, prefill, decode, tpot."""
        self._success.labels(**self._labels, finished_reason=reason).inc()
        histograms = {
            "e2e": self._e2e,
            "queue": self._queue,
            "prefill": self._prefill,
            "decode": self._decode,
            "tpot": self._tpot,
        }
        for name, seconds in times_s.items():
            if seconds is not None:
                histograms[name].labels(**self._labels).observe(seconds)
        if acceptance_length is not None:
            self._acceptance_length.labels(**self._labels).observe(acceptance_length)
        if speedup is not None:
            self._speedup.labels(**self._labels).observe(speedup)

    def abort(self, num_answers: int) -> None:
        """Answers ended early: their client left, or the engine or the daemon stopped."""
        if num_answers:
            self._success.labels(**self._labels, finished_reason="abort").inc(num_answers)

    def error(self, status: int) -> None:
        """An error answer to a POST was sent."""
        self._errors.labels(**self._labels, code=str(status)).inc()
        if status in (429, 503):
            reason = "queue_full" if status == 429 else "not_ready"
            self._rejections.labels(**self._labels, reason=reason).inc()

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)


class _VllmNames(Collector):
    """The same values under vLLM's names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._is_collecting = False

    def collect(self) -> Iterable[Metric]:
        """Copies of the families vLLM also has."""
        if self._is_collecting:
            return
        self._is_collecting = True
        try:
            families = list(self._registry.collect())
        finally:
            self._is_collecting = False
        for family in families:
            name = family.name.removeprefix("polydraft_")
            if name in _VLLM_NAMES:
                yield _renamed(family, name)


def _renamed(family: Metric, name: str) -> Metric:
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    new_name = "vllm:" + _VLLM_RENAMED.get(name, name)
    copy: Metric = kinds[family.type](new_name, family.documentation)
    for sample in family.samples:
        copy.add_sample(sample.name.replace(family.name, new_name, 1), sample.labels, sample.value)
    return copy
