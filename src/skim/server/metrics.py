"""Prometheus metrics, with vLLM's names under `skim:`.

Engine metrics are read from `EngineStats` at every scrape. Request metrics are observed when a request
finishes. Nearly all of them are one row of a table below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from skim.config import MemoryConfig
from skim.engine.sequence import RequestMetrics
from skim.engine.stats import EngineStats
from skim.prefill.plan import DenseReason
from skim.sampling.params import SamplingParams
from skim.server.capacity import Capacity
from skim.server.checkpoint_metrics import (
    CHECKPOINT_COUNTERS,
    CHECKPOINT_COUNTERS_BY_REASON,
    CHECKPOINT_GAUGES,
)
from skim.server.decode_metrics import DECODE_COUNTERS, DECODE_COUNTERS_BY_REASON

Buckets = tuple[float, ...]

# fmt: off
_REQUEST_SECONDS: Buckets = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
)
_TOKEN_SECONDS: Buckets = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1, 2.5, 5,
)
# fmt: on
_REQUEST_TOKENS: Buckets = (*(first * 10**zeros for zeros in range(6) for first in (1, 2, 5)), 10**6)
_STEP_TOKENS: Buckets = (1, *(2**power for power in range(3, 15)))
_COPIES: Buckets = (1, 2, 5, 10, 20)
_LABELS = ("model_name",)

ENGINE_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", "Sequences in progress.", lambda s: s.running),
    ("num_requests_waiting", "Sequences waiting to start.", lambda s: s.waiting),
    (
        "kv_cache_usage_perc",
        "Fraction of the KV pool used by requests in progress, 0 to 1.",
        lambda s: (s.pool.live - s.pool.evictable) / s.pool.capacity,
    ),
    ("kv_cache_blocks_cached", "KV blocks held only by the prefix cache.", lambda s: s.pool.evictable),
    (
        "kv_cache_blocks_in_use",
        "KV blocks used by requests in progress.",
        lambda s: s.pool.live - s.pool.evictable,
    ),
    ("kv_cache_blocks_total", "Capacity of the KV pool, in blocks.", lambda s: s.pool.capacity),
    (
        "engine_step_seconds",
        "Seconds since the present engine step began, 0 between steps: a step that hangs makes it grow.",
        lambda s: s.step_seconds,
    ),
    ("kv_cache_reserved_bytes", "Bytes allocated by the KV pool.", lambda s: s.pool.reserved_bytes),
    ("kv_cache_used_bytes", "Bytes of KV blocks in use or cached.", lambda s: s.pool.used_bytes),
    (
        "kv_cache_bytes_per_token",
        "Bytes of one token's keys and values, scales included.",
        lambda s: s.pool.token_bytes,
    ),
    (
        "weight_bytes",
        "Bytes of the weights of target and drafter in memory.",
        lambda s: sum(one.bytes for one in s.weights),
    ),
    *CHECKPOINT_GAUGES,
)
"""Rows of (name, help text, value)."""

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

ENGINE_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    (
        "num_preemptions",
        "Times a sequence lost its KV blocks and had to be recomputed.",
        lambda s: s.preemptions,
    ),
    ("generation_tokens", "Tokens generated.", lambda s: s.tokens_generated),
    ("computed_tokens", "Tokens that went through the model.", lambda s: s.tokens_computed),
    (
        "prompt_logprob_tokens",
        "Prompt tokens whose log-probabilities were computed.",
        lambda s: s.prompt_tokens_reported,
    ),
    ("engine_steps", "Engine steps: one forward each.", lambda s: s.steps),
    (
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.prefix.query_tokens,
    ),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.prefix.hit_tokens),
    (
        "prefix_cache_evicted_blocks",
        "KV blocks evicted from the prefix cache.",
        lambda s: s.prefix.evicted_blocks,
    ),
    (
        "kv_cache_ended_blocks",
        "KV blocks that sequences gave back behind sliding windows.",
        lambda s: s.pool.ended,
    ),
    ("sparse_prefill_activations", "Prompts that were skimmed.", lambda s: s.prefill.activations),
    ("sparse_prefill_blocks", "Prompt blocks in skimmed prompts.", lambda s: s.prefill.blocks_total),
    (
        "sparse_prefill_blocks_kept",
        "Prompt blocks that were read in skimmed prompts.",
        lambda s: s.prefill.blocks_kept,
    ),
    (
        "sparse_prefill_below_threshold",
        "Prompts read in full because they are too short to skim.",
        lambda s: s.prefill.below_threshold,
    ),
    (
        "sparse_prefill_mostly_cached",
        "Prompts read in full because the uncached part is too short to skim.",
        lambda s: s.prefill.mostly_cached,
    ),
    (
        "blocksparse_blocks",
        "Key blocks (128 slots) visible to block-sparse prefill.",
        lambda s: s.attention.visible,
    ),
    (
        "blocksparse_blocks_read",
        "Key blocks (128 slots) read by block-sparse prefill.",
        lambda s: s.attention.read,
    ),
    *DECODE_COUNTERS,
    *CHECKPOINT_COUNTERS,
)
"""Rows of (name, help text, value). Prometheus appends `_total` to the name."""

Counts = Mapping[str, int] | Mapping[DenseReason, int]
ENGINE_COUNTERS_BY_REASON: tuple[tuple[str, str, Callable[[EngineStats], Counts]], ...] = (
    (
        "prefix_cache_bypasses",
        "Requests that did not use the prefix cache, by reason.",
        lambda s: s.prefix.bypasses,
    ),
    (
        "graph_steps",
        "Engine steps run as a CUDA graph (`graph`), or by the reason that they were not.",
        lambda s: s.paths,
    ),
    (
        "sparse_prefill_fallbacks",
        "Prompts read in full because no plan could be made, by reason.",
        lambda s: s.prefill.fallbacks,
    ),
    (
        "sparse_prefill_follow_ups",
        "Follow-up questions on skimmed prompts, by method.",
        lambda s: s.prefill.follow_ups,
    ),
    (
        "blocksparse_chunks",
        "Chunks of block-sparse prompts, one per layer: `sparse`, or the reason for dense attention.",
        lambda s: s.attention.chunks,
    ),
    *DECODE_COUNTERS_BY_REASON,
    *CHECKPOINT_COUNTERS_BY_REASON,
)
"""Rows of (name, help text, count by reason). The reason becomes the label `reason`."""

ENGINE_HISTOGRAMS: tuple[tuple[str, str, Buckets, Callable[[EngineStats], Mapping[int, int]]], ...] = (
    ("iteration_tokens_total", "Tokens of an engine step.", _STEP_TOKENS, lambda s: s.step_sizes),
)
"""Rows of (name, help text, buckets, count by value)."""

REQUEST_HISTOGRAMS: tuple[tuple[str, str, Buckets, Callable[[RequestMetrics], float | None]], ...] = (
    (
        "e2e_request_latency_seconds",
        "From arrival to the last token.",
        _REQUEST_SECONDS,
        lambda m: (m.ttft_ms + m.decode_ms) / 1e3,
    ),
    (
        "request_queue_time_seconds",
        "Waiting time before the first step, scoring excluded.",
        _REQUEST_SECONDS,
        lambda m: m.queue_ms / 1e3,
    ),
    (
        "request_prefill_time_seconds",
        "From the first step to the first token.",
        _REQUEST_SECONDS,
        lambda m: m.prefill_ms / 1e3,
    ),
    (
        "request_inference_time_seconds",
        "From the first step to the last token.",
        _REQUEST_SECONDS,
        lambda m: (m.prefill_ms + m.decode_ms) / 1e3,
    ),
    (
        "request_scoring_time_seconds",
        "Time to score the blocks of a skimmed prompt.",
        _REQUEST_SECONDS,
        lambda m: m.scoring_ms / 1e3 if m.scorer is not None else None,
    ),
    (
        "request_decode_time_seconds",
        "From the first token to the last.",
        _REQUEST_SECONDS,
        lambda m: m.decode_ms / 1e3,
    ),
    (
        "request_prompt_tokens",
        "Prompt tokens of a request, skipped ones included.",
        _REQUEST_TOKENS,
        lambda m: m.prompt_tokens,
    ),
    (
        "request_generation_tokens",
        "Tokens generated for a request, by all of its n sequences.",
        _REQUEST_TOKENS,
        lambda m: m.generated_tokens,
    ),
)
"""Rows of (name, help text, buckets, value). A value of None is not observed."""

_MOST_TOKENS = 10**9  # a request may name a number that no float holds
PARAMETER_HISTOGRAMS: tuple[tuple[str, str, Buckets, Callable[[SamplingParams], float | None]], ...] = (
    ("request_params_n", "The request's `n`.", _COPIES, lambda p: p.n),
    (
        "request_params_max_tokens",
        "The request's `max_tokens`; requests without one are not counted.",
        _REQUEST_TOKENS,
        lambda p: None if p.max_tokens is None else min(p.max_tokens, _MOST_TOKENS),
    ),
)
"""Rows of (name, help text, buckets, value), as in `REQUEST_HISTOGRAMS`."""

CACHE_CONFIG: tuple[tuple[str, Callable[[MemoryConfig, EngineStats], object]], ...] = (
    ("block_size", lambda _, s: s.pool.block_size),
    ("cache_dtype", lambda c, _: c.kv_cache_dtype),
    ("enable_prefix_caching", lambda c, _: c.enable_prefix_caching),
    ("gpu_memory_utilization", lambda c, _: c.gpu_memory_utilization),
    ("num_gpu_blocks", lambda _, s: s.pool.capacity),
)
"""Labels of `cache_config_info`. `num_gpu_blocks` is the capacity of the KV pool on any device."""

REQUEST_COUNTERS: tuple[tuple[str, str, Callable[[RequestMetrics], int]], ...] = (
    ("prompt_tokens", "Prompt tokens of finished requests.", lambda m: m.prompt_tokens),
    ("prompt_tokens_kept", "Prompt tokens that were read, not skipped.", lambda m: m.kept_tokens),
    ("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", lambda m: m.cached_tokens),
)
"""Rows of (name, help text, increment). Prometheus appends `_total` to the name."""


class Metrics:
    """One server's metrics, in their own registry."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _REQUEST_SECONDS
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "From one token to the next.", _TOKEN_SECONDS
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first.",
            _TOKEN_SECONDS,
        )
        self._histograms = [
            (self._histogram(name, text, buckets), value) for name, text, buckets, value in REQUEST_HISTOGRAMS
        ]
        self._parameters = [
            (self._histogram(name, text, buckets), value)
            for name, text, buckets, value in PARAMETER_HISTOGRAMS
        ]
        self._counters = [
            (Counter(f"skim:{name}", text, _LABELS, registry=self.registry).labels(model_name), value)
            for name, text, value in REQUEST_COUNTERS
        ]
        self._success = Counter(
            "skim:request_success",
            "Completed replies, by finish reason; a request with n > 1 has n.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._failures = Counter(
            "skim:request_failures",
            "Requests that were refused, failed or aborted, by reason.",
            (*_LABELS, "reason"),
            registry=self.registry,
        )

        self._task_seconds = Histogram(
            "skim:task_seconds",
            "Time of an embedding, a ranking or a plan, from its start: tasks that generate nothing.",
            (*_LABELS, "task"),
            buckets=_REQUEST_SECONDS,
            registry=self.registry,
        )
        self._task_tokens = Counter(
            "skim:task_tokens",
            "Prompt tokens of finished tasks.",
            (*_LABELS, "task"),
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str, buckets: Buckets) -> Histogram:
        made = Histogram(f"skim:{name}", text, _LABELS, buckets=buckets, registry=self.registry)
        return made.labels(self._model_name)

    def watch(self, stats: Callable[[], EngineStats], capacity: Capacity, memory: MemoryConfig) -> None:
        """Read the engine's `stats()` and the server's capacity at every scrape."""
        self.registry.register(_EngineCollector(stats, self._model_name, memory))
        for name, text, value in SERVER_GAUGES:
            gauge = Gauge(f"skim:{name}", text, _LABELS, registry=self.registry).labels(self._model_name)
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


class _EngineCollector(Collector):
    """Reads the engine's counters at every scrape."""

    def __init__(self, stats: Callable[[], EngineStats], model_name: str, memory: MemoryConfig) -> None:
        self._stats = stats
        self._labels = [model_name]
        self._memory = memory

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text, value in ENGINE_GAUGES:
            gauge = GaugeMetricFamily(f"skim:{name}", text, labels=_LABELS)
            gauge.add_metric(self._labels, value(stats))
            yield gauge
        for name, text, count in ENGINE_COUNTERS:
            counter = CounterMetricFamily(f"skim:{name}", text, labels=_LABELS)
            counter.add_metric(self._labels, count(stats))
            yield counter
        for name, text, counts in ENGINE_COUNTERS_BY_REASON:
            family = CounterMetricFamily(f"skim:{name}", text, labels=(*_LABELS, "reason"))
            for reason, total in sorted(counts(stats).items()):
                family.add_metric([*self._labels, reason], total)
            yield family
        for name, text, buckets, sizes in ENGINE_HISTOGRAMS:
            histogram = HistogramMetricFamily(f"skim:{name}", text, labels=_LABELS)
            histogram.add_metric(self._labels, *_cumulative(sizes(stats), buckets))
            yield histogram
        info = GaugeMetricFamily(
            "skim:cache_config_info",
            "Settings of the KV pool, as labels; the value is 1.",
            labels=(*_LABELS, *(name for name, _ in CACHE_CONFIG)),
        )
        info.add_metric([*self._labels, *(str(value(self._memory, stats)) for _, value in CACHE_CONFIG)], 1)
        yield info


def _cumulative(counts: Mapping[int, int], buckets: Buckets) -> tuple[list[tuple[str, float]], float]:
    """For each bucket, the number of values up to its bound; and the sum of all values."""

    def within(bound: float) -> int:
        return sum(count for value, count in counts.items() if value <= bound)

    bounds = [(str(float(bound)), within(bound)) for bound in buckets]
    return [*bounds, ("+Inf", within(math.inf))], sum(value * count for value, count in counts.items())
