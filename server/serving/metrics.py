"""The Prometheus registry of the HTTP process. Names and buckets: `docs/observability.md`.

Labels have a bounded number of values for any requests, and never contain a request id.
The children of metrics that change with every step are looked up once, so that a step
costs the HTTP process microseconds.
"""

from __future__ import annotations

import resource
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.metrics import Counter, Gauge, Histogram
from prometheus_client.registry import Collector

from engine.api import DRAFTERS, MODEL, PHASES, EngineFacts, Outcome, StepResults
from server.serving.statistics import SpeculationCount
from server.version import VERSION

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_LATENCY_S = (*_TTFT_S, 320, 640, 1280, 2560, 5120)
"""Buckets of times that grow with the length of an answer or of the queue."""
_ITL_S = (
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 1, 2.5,
)  # fmt: skip
# No length is below 1. Prometheus interpolates in the lowest bucket from 0, so an empty bucket
# precedes it.
_ACCEPTANCE = (0.999, 1, 1.25, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 12, 16)
_SPEEDUP = (0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5, 2, 2.5, 3, 4, 6)
_STEP_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_GAP = (-0.05, 0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)
_NODES = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128)
_LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_SHAPE_SIZES = ((4, "{}"), (8, "5-8"), (16, "9-16"), (2**31, "17+"))
"""Labels of numbers of chains and of depths, by the largest number that each stands for."""
_LAST_POSITION = 16
_ENDS = ("stop", "length", "tool_calls", "abort", "error")
_REJECTIONS = ("queue_full", "rate_limited", "loading", "draining", "engine_stopped")

_Child = TypeVar("_Child", Counter, Gauge, Histogram)


def size_label(size: int) -> str:
    """Return the label of a number of chains or of a depth."""
    return next(label.format(size) for most, label in _SHAPE_SIZES if size <= most)


def position_label(position: int) -> str:
    """Return the label of a position in a draft, counted from 0."""
    return str(position) if position < _LAST_POSITION else f"{_LAST_POSITION}+"


def num_reached(outcome: Outcome) -> int:
    """Return the number of positions at which a drafted token was verified.

    Positions after the end of an answer do not count. Chains shorter than the longest one
    count with its length.
    """
    was_cut = len(outcome.token_ids) <= outcome.num_accepted
    return outcome.num_accepted if was_cut else min(outcome.num_accepted + 1, outcome.draft_length)


class ServerMetrics:
    """All metrics of the daemon. Only its methods change them."""

    def __init__(self, model_name: str, compat: bool) -> None:
        """compat: whether the values also appear under vLLM's names."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._common = {"model_name": model_name, "engine": "0"}
        self._seen: Counts[str] = Counts()
        self._taken: list[Outcome] = []
        ProcessCollector(registry=self.registry)
        self._define_state()
        self._define_requests()
        self._define_speculation()
        if compat:
            self.registry.register(VllmNames(self.registry))

    def _add(self, kind: type[_Child], name: str, text: str, *labels: str, **options: Any) -> Callable[..., _Child]:
        """Define a metric with the model's name and the engine's number as first labels.

        Returns a function that takes the values of the other labels and looks up their child once.
        """
        metric = kind(f"polydraft_{name}", text, [*self._common, *labels], registry=self.registry, **options)
        return cache(partial(metric.labels, *self._common.values()))

    def _counter(self, name: str, text: str, *labels: str) -> Callable[..., Counter]:
        return self._add(Counter, name, text, *labels)

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._add(Gauge, name, text)()

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Callable[..., Histogram]:
        return self._add(Histogram, name, text, *labels, buckets=buckets)

    def _define_state(self) -> None:
        self._up = self._gauge("engine_up", "1 while the engine lives and its steps end; 0 where /health is 503.")
        self._running = self._gauge("num_requests_running", "Requests that hold cache blocks.")
        self._waiting = self._gauge("num_requests_waiting", "Requests in the queue.")
        self._usage = self._gauge("kv_cache_usage_ratio", "Share of cache blocks in use.")
        self._states = self._gauge("states_used", "States of recurrent layers: of running requests, and cached.")
        self._places = self._gauge("states_max", "Places for states; 0 without recurrent layers.")
        self._sleeping = self._gauge("engine_sleeping", "1 while an idle engine has no process (--sleep-idle-seconds).")
        self._sleeps = self._counter("engine_sleeps", "Times that an idle engine fell asleep.")()
        self._wakes = self._counter("engine_wakes", "Times that a request woke the engine.")()
        self._wake_seconds = self._counter("engine_wake_seconds", "Time that the engine took to wake.")()
        self._facts = {
            name: Gauge(f"polydraft_{name}", text, [*self._common, *labels], registry=self.registry)
            for name, text, labels in (
                ("build_info", "What is running.", ("version", "architecture", "device", "dtype")),
                ("cache_config_info", "The K/V cache.", ("num_blocks", "block_size")),
            )
        }
        self._totals = {
            name: self._counter(name, text)()
            for name, text in (
                ("num_preemptions", "Requests that lost their blocks and were recomputed."),
                ("prefix_cache_queries", "Tokens of admitted texts."),
                ("prefix_cache_hits", "Tokens of admitted texts whose K/V was there."),
                ("state_cache_hits", "Admitted texts that started from a cached state."),
                ("state_cache_evictions", "Cached states that were replaced by others."),
            )
        }
        self._step = self._histogram("step_seconds", "Duration of a step by phase.", _STEP_S, "phase")
        self._nodes = self._histogram("spec_tree_nodes", "Drafted nodes of a request's step.", _NODES)()

    def _define_requests(self) -> None:
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of started requests.")()
        self._answer_tokens = self._counter("generation_tokens", "Tokens of answers.")()
        self._success = self._counter("request_success", "Answers by reason of their end.", "finished_reason")
        self._rejections = self._counter("admission_rejections", "Requests not admitted.", "reason")
        self._errors = self._counter("request_errors", "Error answers by HTTP status.", "code")
        self._cut_bounds = self._counter("request_max_tokens_cut", "Calls whose context had less room than asked.")()
        self._itl = self._histogram("inter_token_latency_seconds", "Gap between steps over its tokens.", _ITL_S)()
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _LATENCY_S)()
        self._lengths = {
            name: self._histogram(f"request_{name}", text, _LENGTHS)()
            for name, text in (
                ("prompt_tokens", "Tokens of a prompt."),
                ("generation_tokens", "Tokens of an answer."),
                ("max_num_generation_tokens", "Tokens of the longest answer of a call."),
            )
        }
        self._times = {
            key: self._histogram(name, text, buckets)()
            for key, name, text, buckets in (
                ("e2e", "e2e_request_latency_seconds", "From arrival to the last token.", _LATENCY_S),
                ("queue", "request_queue_time_seconds", "Time in the queue.", _LATENCY_S),
                ("prefill", "request_prefill_time_seconds", "From admission to the first token.", _LATENCY_S),
                ("decode", "request_decode_time_seconds", "From the first to the last token.", _LATENCY_S),
                ("tpot", "request_time_per_output_token_seconds", "Mean time per token after the first.", _ITL_S),
            )
        }

    def _define_speculation(self) -> None:
        self._drafts = self._counter("spec_decode_num_drafts", "Speculative steps of requests.")()
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Drafted nodes verified.")()
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.")()
        self._accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafted tokens accepted, by position.", "position"
        )
        self._reached_at = self._counter(
            "spec_decode_num_reached_per_pos", "Steps that had a drafted token to accept at a position.", "position"
        )
        self._drafter_counts = [
            self._counter(f"spec_drafter_{kind}", f"The drafter's {kind.replace('_', ' ')}.", "drafter")
            for kind in ("drafts", "draft_tokens", "accepted_tokens")
        ]
        self._acceptance_length = self._histogram(
            "request_spec_acceptance_length",
            "Tokens per speculative step of an answer; plain passes do not count, nor answers without drafts.",
            _ACCEPTANCE,
        )()
        self._tokens_per_pass = self._histogram(
            "request_tokens_per_pass", "Tokens per target pass of an answer, plain passes included.", _ACCEPTANCE
        )()
        self._speedup = self._histogram(
            "request_spec_speedup_ratio", "Speed over plain decoding of an answer that had drafts.", _SPEEDUP
        )()
        self._spec_taken_s = self._counter(
            "request_spec_seconds", "Time of the timed steps of answers with a speedup."
        )()
        self._spec_plain_s = self._counter(
            "request_spec_plain_seconds", "Time that plain decoding would have taken in their place."
        )()
        self._gap = self._histogram(
            "spec_optimal_acceptance_gap", "Optimum acceptance minus the rule's, on observed steps.", _GAP, "rule"
        )
        self._shapes = self._counter(
            "spec_shape_steps", "Steps of requests by shape and rule; 0 chains: plain.", "num_drafts", "depth", "rule"
        )

    def watch_engine(self, pid: Callable[[], int]) -> None:
        """Publish the engine's CPU time, memory and files; pid: 0 while there is none."""
        self.registry.register(EngineProcesses(pid))

    def watch_batches(self, num_lines_left: Callable[[], int]) -> None:
        """Publish the number of lines of open batches without an answer."""
        self._gauge("batch_lines_left", "Lines of open batches without an answer.").set_function(num_lines_left)

    def ready(self, facts: EngineFacts) -> None:
        """Publish facts about the model of a new engine process, whose counts begin at 0."""
        self._seen.clear()
        self._publish_facts("build_info", VERSION, facts.architecture, facts.device, facts.dtype)
        self._publish_facts("cache_config_info", str(facts.num_blocks), str(facts.block_size))
        self._num_blocks = facts.num_blocks
        self._places.set(facts.num_states)
        # Rates need a series that exists before its first count.
        series: list[tuple[Callable[..., Any], Sequence[str]]] = [
            (self._step, PHASES),
            (self._success, _ENDS),
            (self._rejections, _REJECTIONS),
            *((counter, DRAFTERS) for counter in self._drafter_counts),
        ]
        for metric, values in series:
            for value in values:
                metric(value)

    def _publish_facts(self, name: str, *values: str) -> None:
        """Publish facts as the labels of a metric, in place of earlier facts."""
        self._facts[name].clear()
        self._facts[name].labels(*self._common.values(), *values).set(1)

    def fall_asleep(self) -> None:
        """Note that the engine process has ended because it was idle."""
        self._sleeping.set(1)
        self._sleeps.inc()

    def begin_waking(self) -> None:
        """Note that another engine process is started."""
        self._sleeping.set(0)

    def wake(self, duration_s: float) -> None:
        """Count an ended sleep; duration_s: from the first request to a serving engine."""
        self._wakes.inc()
        self._wake_seconds.inc(duration_s)

    def step(self, step: StepResults) -> None:
        """Take the engine's counts of a step."""
        stats = step.stats
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._usage.set(stats.num_blocks_used / self._num_blocks)
        self._states.set(stats.num_states_used)
        for name, count in (
            ("num_preemptions", stats.num_preemptions),
            ("prefix_cache_queries", stats.num_cache_queries),
            ("prefix_cache_hits", stats.num_cache_hits),
            ("state_cache_hits", stats.num_state_hits),
            ("state_cache_evictions", stats.num_state_evictions),
        ):
            if count != self._seen[name]:
                self._totals[name].inc(count - self._seen[name])
                self._seen[name] = count
        for phase, seconds in stats.phases_s.items():
            self._step(phase).observe(seconds)
        self._count_taken()

    def take(self, outcome: Outcome) -> None:
        """Count a step's tokens of an answer; outcome: the part that it has taken (`answer_part`).

        The counts of all answers are published together, at the next step or scrape.
        """
        self._taken.append(outcome)

    def _count_taken(self) -> None:
        if not self._taken:
            return
        taken, self._taken = self._taken, []
        self._count_shapes(taken)
        if drafted := [outcome for outcome in taken if outcome.draft_length]:
            self._count_drafted(drafted)

    def _count_shapes(self, outcomes: Iterable[Outcome]) -> None:
        for (num_chains, depth, rule), count in Counts(
            (outcome.num_chains, outcome.draft_length, outcome.rule) if outcome.draft_length else (0, 0, "off")
            for outcome in outcomes
        ).items():
            self._shapes(size_label(num_chains), size_label(depth), rule).inc(count)

    def _count_drafted(self, outcomes: Sequence[Outcome]) -> None:
        self._drafts.inc(len(outcomes))
        self._draft_tokens.inc(sum(outcome.num_nodes for outcome in outcomes))
        self._accepted.inc(sum(outcome.num_accepted for outcome in outcomes))
        for counter, depths in (
            (self._reached_at, Counts(map(num_reached, outcomes))),
            (self._accepted_at, Counts(outcome.num_accepted for outcome in outcomes)),
        ):
            for position in range(max(depths)):
                count = sum(times for depth, times in depths.items() if depth > position)
                counter(position_label(position)).inc(count)
        drawn = [outcome for outcome in outcomes if not outcome.text_draft_counts]
        drafters = Counts(
            {
                (MODEL, 0): sum(outcome.num_chains for outcome in drawn),
                (MODEL, 1): sum(outcome.num_nodes for outcome in drawn),
                (MODEL, 2): sum(outcome.num_accepted for outcome in drawn),
            }
        )
        for outcome in outcomes:
            self._nodes.observe(outcome.num_nodes)
            if outcome.gap is not None:
                self._gap(outcome.rule).observe(outcome.gap)
            if outcome.text_draft_counts:
                drafters.update(_drafter_counts(outcome))
        for (name, kind), count in drafters.items():
            self._drafter_counts[kind](name).inc(count)

    def start(self, prompt_lengths: Sequence[int]) -> None:
        """Count a call that has been admitted; prompt_lengths: number of tokens of each prompt."""
        self._prompt_tokens.inc(sum(prompt_lengths))
        for length in prompt_lengths:
            self._lengths["prompt_tokens"].observe(length)

    def cut_bound(self) -> None:
        """Count a call whose answer may be shorter than requested, for lack of context."""
        self._cut_bounds.inc()

    def tokens(self, num_tokens: int, gap_s: float | None, ttft_s: float | None) -> None:
        """Count tokens of an answer; `ttft_s` only with the first tokens."""
        self._answer_tokens.inc(num_tokens)
        if ttft_s is not None:
            self._ttft.observe(ttft_s)
        if gap_s is not None:
            for _ in range(num_tokens):
                self._itl.observe(gap_s)

    def finish(
        self,
        reason: str,
        num_tokens: int,
        times_s: dict[str, float | None],
        counted: SpeculationCount,
    ) -> None:
        """Count an ended answer; `times_s` has any of e2e, queue, prefill, decode, tpot."""
        self._success(reason).inc()
        self._lengths["generation_tokens"].observe(num_tokens)
        for name, seconds in times_s.items():
            if seconds is not None:
                self._times[name].observe(seconds)
        for histogram, ratio in (
            (self._tokens_per_pass, counted.tokens_per_pass),
            (self._acceptance_length, counted.acceptance_length),
            (self._speedup, counted.speedup),
        ):
            if ratio is not None:
                histogram.observe(ratio)
        if counted.speedup is not None:
            self._spec_taken_s.inc(counted.timing.wall_s)
            self._spec_plain_s.inc(counted.timing.wall_s * counted.speedup)

    def end_call(self, answer_lengths: Sequence[int]) -> None:
        """Count a call that has ended; answer_lengths: number of tokens of each answer."""
        self._lengths["max_num_generation_tokens"].observe(max(answer_lengths))

    def abort(self, num_answers: int, reason: str) -> None:
        """Count answers that ended early: `abort` by their client, `error` by the server."""
        if num_answers:
            self._success(reason).inc(num_answers)

    def error(self, status: int, rejection: str | None = None) -> None:
        """Count an error response to a POST; rejection: reason if it was not admitted."""
        self._errors(str(status)).inc()
        if rejection is not None:
            self._rejections(rejection).inc()

    def render(self, is_healthy: bool = True, num_held: int | None = None) -> bytes:
        """Return the metrics in Prometheus' text format.

        is_healthy: whether /health is 200. num_held: requests that wait for the engine to wake;
        None while it is awake.
        """
        self._count_taken()
        if num_held is not None:
            self._running.set(0)
            self._waiting.set(num_held)
            self._usage.set(0)
        self._up.set(is_healthy)
        return generate_latest(self.registry)


def _drafter_counts(outcome: Outcome) -> Counts[tuple[str, int]]:
    """Yield (0 to 2) drafts, drafted and accepted tokens of each drafter."""
    counts: dict[str, tuple[int, int, int]] = {}
    for part in outcome.text_draft_counts:
        chains, nodes, accepted = counts.get(part.name, (0, 0, 0))
        counts[part.name] = chains + part.num_chains, nodes + part.num_nodes, accepted + part.num_accepted
    total = (outcome.num_chains, outcome.num_nodes, outcome.num_accepted)
    drawn = tuple(whole - sum(parts) for whole, *parts in zip(total, *counts.values(), strict=True))
    if drawn[0]:
        counts[MODEL] = (drawn[0], drawn[1], drawn[2])
    return Counts({(name, kind): count for name, numbers in counts.items() for kind, count in enumerate(numbers)})


class EngineProcesses(ProcessCollector):
    """Collector of the engine processes: memory and files of one, CPU time of all."""

    def __init__(self, pid: Callable[[], int]) -> None:
        """pid: of the process that runs, 0 for none."""
        super().__init__(namespace="polydraft_engine", pid=pid, registry=None)
        self._other_s = _ended_children_s()

    def collect(self) -> Iterable[Metric]:
        """Return the metrics; while no process runs, only its CPU time so far and a memory of 0."""
        families = {family.name: family for family in super().collect()}
        cpu_name = "polydraft_engine_process_cpu_seconds"
        memory_name = "polydraft_engine_process_resident_memory_bytes"
        running_s = 0.0
        if cpu_name in families:
            running_s = families[cpu_name].samples[0].value
        ended_s = _ended_children_s() - self._other_s
        families[cpu_name] = CounterMetricFamily(cpu_name, "CPU time of engine processes.", value=running_s + ended_s)
        if memory_name not in families:
            families[memory_name] = GaugeMetricFamily(memory_name, "Resident memory size in bytes.", value=0)
        return families.values()


def _ended_children_s() -> float:
    """Return the CPU time of ended child processes, which were engines and theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


_RENAMED = {"kv_cache_usage_ratio": "kv_cache_usage_perc"}
_RENAMED_LABELS = {"num_blocks": "num_gpu_blocks"}
_NAMES = frozenset(
    """
    num_requests_running num_requests_waiting kv_cache_usage_ratio cache_config_info prompt_tokens generation_tokens
    num_preemptions prefix_cache_queries prefix_cache_hits request_success time_to_first_token_seconds
    inter_token_latency_seconds request_prompt_tokens request_generation_tokens request_max_num_generation_tokens
    request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
    request_prefill_time_seconds request_decode_time_seconds spec_decode_num_drafts spec_decode_num_draft_tokens
    spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos
    """.split()
)


class VllmNames(Collector):
    """Collector of metrics under vLLM's names, for dashboards and benchmarks made for it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._is_collecting = False

    def collect(self) -> Iterable[Metric]:
        """Return the copies; the registry's inner call of this collector returns nothing."""
        if self._is_collecting:
            return
        self._is_collecting = True
        try:
            families = list(self._registry.collect())
        finally:
            self._is_collecting = False
        for family in families:
            name = family.name.removeprefix("polydraft_")
            if name in _NAMES:
                yield _renamed(family, name)


def _renamed(family: Metric, name: str) -> Metric:
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    new_name = "vllm:" + _RENAMED.get(name, name)
    copy: Metric = kinds[family.type](new_name, family.documentation)
    for sample in family.samples:
        labels = {_RENAMED_LABELS.get(label, label): value for label, value in sample.labels.items()}
        copy.add_sample(sample.name.replace(family.name, new_name, 1), labels, sample.value)
    return copy
