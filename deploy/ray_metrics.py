"""Combines the metrics of all replicas on one page for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST
LABEL = "replica"


class _Merged(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def merged(pages: Mapping[str, str]) -> bytes:
    """Return one page; the label `replica` of every sample names its replica.

    pages: by name of the replica.
    """
    families: dict[str, Metric] = {}
    for replica, page in pages.items():
        for family in text_string_to_metric_families(page):
            empty = Metric(family.name, family.documentation, family.type)
            merged_family = families.setdefault(family.name, empty)
            for sample in family.samples:
                labels = {**sample.labels, LABEL: replica}
                merged_family.samples.append(sample._replace(labels=labels))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Merged(families.values()))
    return generate_latest(registry)
