"""Prometheus metrics, with vLLM's names under `skim:`.

What the engine counts is read when somebody asks; what only a request knows is observed as it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from skim.engine.core import EngineStats
from skim.engine.sequence import RequestMetrics

_LONG = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1, 2.5, 5)
_LABELS = ("model_name",)


class Metrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"skim:{name}", text, _LABELS, buckets=buckets, registry=self.registry)
            return made.labels(model_name)

        self._first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _LONG
        )
        self._between = histogram("inter_token_latency_seconds", "From one token to the next.", _SHORT)
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time of the tokens after the first.", _SHORT
        )
        self._total = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _LONG)
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first step.", _LONG)
        self._prefill = histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _LONG
        )
        self._scoring = histogram("request_scoring_time_seconds", "Ranking the blocks of a prompt.", _LONG)
        self._decode = histogram("request_decode_time_seconds", "From the first token to the last.", _LONG)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._kept_tokens = self._counter("prompt_tokens_kept", "Prompt tokens that were read, not skipped.")
        self._cached_tokens = self._counter(
            "prompt_tokens_cached", "Prompt tokens that were found in the prefix cache."
        )
        self._success = Counter(
            "skim:request_success",
            "Replies that are complete, by how they ended; n to a request.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._failures = Counter(
            "skim:request_failures",
            "Requests that were refused, failed or given up, by why.",
            (*_LABELS, "reason"),
            registry=self.registry,
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"skim:{name}", text, _LABELS, registry=self.registry).labels(self._model_name)

    def watch(self, stats: Callable[[], EngineStats]) -> None:
        self.registry.register(_EngineCollector(stats, self._model_name))

    def token(self, seconds: float, later: bool) -> None:
        """A token arrived, this long after the one before it, or after the request did."""
        (self._between if later else self._first_token).observe(seconds)

    def finished(self, metrics: RequestMetrics, finish_reasons: list[str]) -> None:
        """A prompt and its continuations are done; each has a reason."""
        queue, prefill, decode = (
            ms / 1e3 for ms in (metrics.queue_ms, metrics.prefill_ms, metrics.decode_ms)
        )
        if metrics.scorer is not None:
            self._scoring.observe(metrics.scoring_ms / 1e3)
        self._queue.observe(queue)
        self._prefill.observe(prefill)
        self._decode.observe(decode)
        self._total.observe(metrics.ttft_ms / 1e3 + decode)
        later = metrics.generated_tokens / len(finish_reasons) - 1
        if later > 0:
            self._per_token.observe(decode / later)
        self._prompt_tokens.inc(metrics.prompt_tokens)
        self._kept_tokens.inc(metrics.kept_tokens)
        self._cached_tokens.inc(metrics.cached_tokens)
        for reason in finish_reasons:
            self._success.labels(self._model_name, reason).inc()

    def failed(self, reason: str) -> None:
        self._failures.labels(self._model_name, reason).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engine's own counts, as they are when they are asked for."""

    def __init__(self, stats: Callable[[], EngineStats], model_name: str) -> None:
        self._stats = stats
        self._labels = [model_name]

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        pool, prefix, prefill, blocks = stats.pool, stats.prefix, stats.prefill, stats.attention
        in_use = (pool.live - pool.cold) / pool.capacity
        for name, text, value in (
            ("num_requests_running", "Sequences in progress.", stats.running),
            ("num_requests_waiting", "Sequences waiting to start.", stats.waiting),
            ("kv_cache_usage_perc", "Share of the KV pool that requests in progress use; 1 is all.", in_use),
            ("kv_cache_blocks_cached", "Blocks that only the prefix cache keeps.", pool.cold),
            ("kv_cache_blocks_in_use", "Blocks that requests in progress use.", pool.live - pool.cold),
            ("kv_cache_blocks_total", "Blocks the pool may have.", pool.capacity),
            ("kv_cache_reserved_bytes", "Memory the pool has taken.", pool.reserved_bytes),
        ):
            gauge = GaugeMetricFamily(f"skim:{name}", text, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, text, value in (
            (
                "num_preemptions",
                "Sequences whose blocks were taken; they are computed again.",
                stats.preemptions,
            ),
            ("generation_tokens", "Tokens generated.", stats.tokens_generated),
            ("computed_tokens", "Tokens that went through the model.", stats.tokens_computed),
            ("engine_steps", "Forwards.", stats.steps),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", prefix.query_tokens),
            ("prefix_cache_hits", "Prompt tokens found there.", prefix.hit_tokens),
            ("prefix_cache_evicted_blocks", "Blocks given up to make room.", prefix.evicted_blocks),
            ("sparse_prefill_activations", "Prompts that were skimmed.", prefill.activations),
            ("sparse_prefill_blocks", "Blocks of the prompts that were skimmed.", prefill.blocks_total),
            ("sparse_prefill_blocks_kept", "Of these, the blocks that were read.", prefill.blocks_kept),
            ("sparse_prefill_below_threshold", "Prompts too short to skim.", prefill.below_threshold),
            ("sparse_prefill_mostly_cached", "Prompts with too little to read.", prefill.mostly_cached),
            ("blocksparse_blocks", "Blocks of keys that block-sparse prefill could see.", blocks.visible),
            ("blocksparse_blocks_read", "Of these, the blocks that were read.", blocks.read),
        ):
            counter = CounterMetricFamily(f"skim:{name}", text, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        for name, text, counts in (
            ("prefix_cache_bypasses", "Requests that were not looked up, by why.", prefix.bypasses),
            ("graph_steps", "Forwards as CUDA graphs, or by why they were not.", stats.paths),
            (
                "sparse_prefill_fallbacks",
                "Prompts read in full for want of a plan.",
                prefill.fallbacks,
            ),
            ("sparse_prefill_follow_ups", "Further questions, by how they were met.", prefill.follow_ups),
            (
                "blocksparse_chunks",
                "Chunks of block-sparse prompts times layers: sparse, or why all was read.",
                blocks.chunks,
            ),
        ):
            family = CounterMetricFamily(f"skim:{name}", text, labels=(*_LABELS, "reason"))
            for reason, count in sorted(counts.items()):
                family.add_metric([*self._labels, reason], count)
            yield family
