"""Metrics of requests, observed when one finishes. Each is one row of a table."""

from __future__ import annotations

from collections.abc import Callable

from skim.engine.sequence import RequestMetrics
from skim.sampling.params import SamplingParams
from skim.server.metrics.engine import Buckets

# fmt: off
REQUEST_SECONDS: Buckets = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
)
TOKEN_SECONDS: Buckets = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1, 2.5, 5,
)
# fmt: on
_REQUEST_TOKENS: Buckets = (*(first * 10**zeros for zeros in range(6) for first in (1, 2, 5)), 10**6)
_COPIES: Buckets = (1, 2, 5, 10, 20)

REQUEST_HISTOGRAMS: tuple[tuple[str, str, Buckets, Callable[[RequestMetrics], float | None]], ...] = (
    (
        "e2e_request_latency_seconds",
        "From arrival to the last token.",
        REQUEST_SECONDS,
        lambda m: (m.ttft_ms + m.decode_ms) / 1e3,
    ),
    (
        "request_queue_time_seconds",
        "Waiting time before the first step, scoring excluded.",
        REQUEST_SECONDS,
        lambda m: m.queue_ms / 1e3,
    ),
    (
        "request_prefill_time_seconds",
        "From the first step to the first token.",
        REQUEST_SECONDS,
        lambda m: m.prefill_ms / 1e3,
    ),
    (
        "request_inference_time_seconds",
        "From the first step to the last token.",
        REQUEST_SECONDS,
        lambda m: (m.prefill_ms + m.decode_ms) / 1e3,
    ),
    (
        "request_scoring_time_seconds",
        "Time to score the blocks of a skimmed prompt.",
        REQUEST_SECONDS,
        lambda m: m.scoring_ms / 1e3 if m.scorer is not None else None,
    ),
    (
        "request_decode_time_seconds",
        "From the first token to the last.",
        REQUEST_SECONDS,
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

REQUEST_COUNTERS: tuple[tuple[str, str, Callable[[RequestMetrics], int]], ...] = (
    ("prompt_tokens", "Prompt tokens of finished requests.", lambda m: m.prompt_tokens),
    ("prompt_tokens_kept", "Prompt tokens that were read, not skipped.", lambda m: m.kept_tokens),
    ("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", lambda m: m.cached_tokens),
)
"""Rows of (name, help text, increment). Prometheus appends `_total` to the name."""
