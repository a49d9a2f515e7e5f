"""The daemon's metrics under vLLM's names, so that dashboards and benchmarks made for vLLM work unchanged."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

_RENAMED = {"kv_cache_usage_ratio": "kv_cache_usage_perc"}
_NAMES = frozenset(
    """
    num_requests_running num_requests_waiting kv_cache_usage_ratio prompt_tokens generation_tokens
    num_preemptions prefix_cache_queries prefix_cache_hits request_success time_to_first_token_seconds
    inter_token_latency_seconds request_prompt_tokens request_generation_tokens request_max_num_generation_tokens
    request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
    request_prefill_time_seconds request_decode_time_seconds spec_decode_num_drafts spec_decode_num_draft_tokens
    spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos
    """.split()
)


class VllmNames(Collector):
    """Collector of copies of the metrics that vLLM has, too."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._is_collecting = False

    def collect(self) -> Iterable[Metric]:
        """Return the copies. The registry calls all collectors, also this one: the inner call returns nothing."""
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
        copy.add_sample(sample.name.replace(family.name, new_name, 1), sample.labels, sample.value)
    return copy
