"""Metrics in Prometheus' text form: what was served, from where, how fast, and what the cache and its tiers hold."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
REUSED = ("exact", "shifted")


class Metrics:
    """What the endpoint counts itself; what the cache counts is added when metrics are asked for."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "irminsul_http_requests", "Chat completions by how they ended", ["outcome"], registry=self.registry
        )
        self.completion_tokens = Counter("irminsul_completion_tokens", "Tokens generated", registry=self.registry)
        self.first_token = Histogram(
            "irminsul_first_token_seconds", "Request in line to first token", buckets=SECONDS, registry=self.registry
        )
        self.duration = Histogram(
            "irminsul_request_seconds", "Request in line to its end", buckets=SECONDS, registry=self.registry
        )

    def text(self, snapshot: Mapping[str, Mapping[str, float]]) -> bytes:
        """The page that Prometheus reads."""
        cache = CollectorRegistry()
        cache.register(_Snapshot(snapshot))
        return generate_latest(self.registry) + generate_latest(cache)


class _Snapshot(Collector):
    """Counts and levels of the cache as metrics."""

    def __init__(self, snapshot: Mapping[str, Mapping[str, float]]):
        self.snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Prompt tokens by bin, cache counters, levels of the pool, and the store's counts."""
        counters = dict(self.snapshot["counters"])
        tokens = CounterMetricFamily("irminsul_prompt_tokens", "Tokens of prompts by bin", labels=["bin"])
        for name in list(counters):
            if name in REUSED or name.startswith("miss_"):
                tokens.add_metric([name.removeprefix("miss_")], counters.pop(name))
        yield tokens
        for name, value in counters.items():
            yield CounterMetricFamily(f"irminsul_cache_{name}", f"Cache: {name.replace('_', ' ')}", value=value)
        for name, value in self.snapshot["cache"].items():
            yield GaugeMetricFamily(f"irminsul_cache_{name}", f"Cache now: {name.replace('_', ' ')}", value=value)
        for name, value in self.snapshot["requests"].items():
            yield GaugeMetricFamily(f"irminsul_requests_{name}", f"Requests now {name}", value=value)
        for name, value in self.snapshot["store"].items():
            yield CounterMetricFamily(f"irminsul_store_{name}", f"Disk tier: {name.replace('_', ' ')}", value=value)
