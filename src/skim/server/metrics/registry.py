"""One server's metrics: of its engine, its requests and its queue, as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from skim.config import MemoryConfig
from skim.engine.sequence import RequestMetrics
from skim.engine.stats import EngineStats
from skim.sampling.params import SamplingParams
from skim.server.capacity import Capacity
from skim.server.metrics.engine import LABELS, Buckets, EngineCollector
from skim.server.metrics.requests import (
    PARAMETER_HISTOGRAMS,
    REQUEST_COUNTERS,
    REQUEST_HISTOGRAMS,
    REQUEST_SECONDS,
    TOKEN_SECONDS,
)

SERVER_GAUGES: tuple[tuple[str, str, Callable[[Capacity], float]], ...] = (
    (
        "queued_prompt_tokens",
        "Prompt tokens of requests without a first token.",
        lambda c: c.tokens,
    ),
    (
        "queued_prompt_tokens_limit",
        "Limit of queued_prompt_tokens, for small and for large requests each.",
        lambda c: c.max_tokens,
    ),
)
"""Rows of (name, help text, value)."""


class Metrics:
    """One server's metrics, in their own registry."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", REQUEST_SECONDS
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "From one token to the next.", TOKEN_SECONDS
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first.",
            TOKEN_SECONDS,
        )
        self._histograms = [
            (self._histogram(name, text, buckets), value) for name, text, buckets, value in REQUEST_HISTOGRAMS
        ]
        self._parameters = [
            (self._histogram(name, text, buckets), value)
            for name, text, buckets, value in PARAMETER_HISTOGRAMS
        ]
        self._counters = [
            (Counter(f"skim:{name}", text, LABELS, registry=self.registry).labels(model_name), value)
            for name, text, value in REQUEST_COUNTERS
        ]
        self._success = Counter(
            "skim:request_success",
            "Completed replies, by finish reason; a request with n > 1 has n.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._failures = Counter(
            "skim:request_failures",
            "Requests that were refused, failed or aborted, by reason.",
            (*LABELS, "reason"),
            registry=self.registry,
        )

        self._task_seconds = Histogram(
            "skim:task_seconds",
            "Time of an embedding, a ranking or a plan, from its start: tasks that generate nothing.",
            (*LABELS, "task"),
            buckets=REQUEST_SECONDS,
            registry=self.registry,
        )
        self._task_tokens = Counter(
            "skim:task_tokens",
            "Prompt tokens of finished tasks.",
            (*LABELS, "task"),
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str, buckets: Buckets) -> Histogram:
        made = Histogram(f"skim:{name}", text, LABELS, buckets=buckets, registry=self.registry)
        return made.labels(self._model_name)

    def watch(self, stats: Callable[[], EngineStats], capacity: Capacity, memory: MemoryConfig) -> None:
        """Read the engine's `stats()` and the server's capacity at every scrape."""
        self.registry.register(EngineCollector(stats, self._model_name, memory))
        for name, text, value in SERVER_GAUGES:
            gauge = Gauge(f"skim:{name}", text, LABELS, registry=self.registry).labels(self._model_name)
            gauge.set_function(partial(value, capacity))

    def token(self, seconds: float, later: bool) -> None:
        """Record a token: `seconds` after the previous one if `later`, else after the request's arrival."""
        (self._inter_token if later else self._first_token).observe(seconds)

    def finished(self, metrics: RequestMetrics, params: SamplingParams, finish_reasons: list[str]) -> None:
        """Record a finished prompt, with one finish reason per sequence."""
        values = [(histogram, value(metrics)) for histogram, value in self._histograms]
        values += [(histogram, value(params)) for histogram, value in self._parameters]
        for histogram, observed in values:
            if observed is not None:
                histogram.observe(observed)
        later = metrics.generated_tokens / len(finish_reasons) - 1
        if later > 0:
            self._per_token.observe(metrics.decode_ms / 1e3 / later)
        for counter, increment in self._counters:
            counter.inc(increment(metrics))
        for reason in finish_reasons:
            self._success.labels(self._model_name, reason).inc()

    def task(self, kind: str, seconds: float, tokens: int) -> None:
        """Record a finished task: `embed`, `rank` or `plan`."""
        self._task_seconds.labels(self._model_name, kind).observe(seconds)
        self._task_tokens.labels(self._model_name, kind).inc(tokens)

    def failed(self, reason: str) -> None:
        self._failures.labels(self._model_name, reason).inc()

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self.registry)
