"""Metrics of the engine, read from `EngineStats` at every scrape. Each is one row of a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from skim.config import MemoryConfig
from skim.engine.stats import EngineStats
from skim.prefill.plan import DenseReason
from skim.server.metrics.checkpoints import (
    CHECKPOINT_COUNTERS,
    CHECKPOINT_COUNTERS_BY_REASON,
    CHECKPOINT_GAUGES,
)
from skim.server.metrics.decode import DECODE_COUNTERS, DECODE_COUNTERS_BY_REASON
from skim.server.metrics.residency import residency_metrics

Buckets = tuple[float, ...]
_STEP_TOKENS: Buckets = (1, *(2**power for power in range(3, 15)))
LABELS = ("model_name",)

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
        "Bytes of the weights of target and drafter that are on the device now.",
        lambda s: sum(one.device_bytes for one in s.residency),
    ),
    *CHECKPOINT_GAUGES,
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

CACHE_CONFIG: tuple[tuple[str, Callable[[MemoryConfig, EngineStats], object]], ...] = (
    ("block_size", lambda _, s: s.pool.block_size),
    ("cache_dtype", lambda c, _: c.kv_cache_dtype),
    ("enable_prefix_caching", lambda c, _: c.enable_prefix_caching),
    ("gpu_memory_utilization", lambda c, _: c.gpu_memory_utilization),
    ("num_gpu_blocks", lambda _, s: s.pool.capacity),
)
"""Labels of `cache_config_info`. `num_gpu_blocks` is the capacity of the KV pool on any device."""


class EngineCollector(Collector):
    """Reads the engine's counters at every scrape."""

    def __init__(self, stats: Callable[[], EngineStats], model_name: str, memory: MemoryConfig) -> None:
        self._stats = stats
        self._labels = [model_name]
        self._memory = memory

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text, value in ENGINE_GAUGES:
            gauge = GaugeMetricFamily(f"skim:{name}", text, labels=LABELS)
            gauge.add_metric(self._labels, value(stats))
            yield gauge
        for name, text, count in ENGINE_COUNTERS:
            counter = CounterMetricFamily(f"skim:{name}", text, labels=LABELS)
            counter.add_metric(self._labels, count(stats))
            yield counter
        for name, text, counts in ENGINE_COUNTERS_BY_REASON:
            family = CounterMetricFamily(f"skim:{name}", text, labels=(*LABELS, "reason"))
            for reason, total in sorted(counts(stats).items()):
                family.add_metric([*self._labels, reason], total)
            yield family
        for name, text, buckets, sizes in ENGINE_HISTOGRAMS:
            histogram = HistogramMetricFamily(f"skim:{name}", text, labels=LABELS)
            histogram.add_metric(self._labels, *_cumulative(sizes(stats), buckets))
            yield histogram
        yield from residency_metrics(stats.residency, LABELS, self._labels)
        info = GaugeMetricFamily(
            "skim:cache_config_info",
            "Settings of the KV pool, as labels; the value is 1.",
            labels=(*LABELS, *(name for name, _ in CACHE_CONFIG)),
        )
        info.add_metric([*self._labels, *(str(value(self._memory, stats)) for _, value in CACHE_CONFIG)], 1)
        yield info


def _cumulative(counts: Mapping[int, int], buckets: Buckets) -> tuple[list[tuple[str, float]], float]:
    """For each bucket, the number of values up to its bound; and the sum of all values."""

    def within(bound: float) -> int:
        return sum(count for value, count in counts.items() if value <= bound)

    bounds = [(str(float(bound)), within(bound)) for bound in buckets]
    return [*bounds, ("+Inf", within(math.inf))], sum(value * count for value, count in counts.items())
