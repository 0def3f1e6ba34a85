"""The statistics at the end of a reply: OpenAI's `usage`, and Skim's report (`skim`)."""

from __future__ import annotations

from collections.abc import Sequence

from skim.engine.sequence import RequestMetrics
from skim.server.protocol.replies import PromptTokensDetails, SkimReport, Usage


def usage(each: Sequence[RequestMetrics]) -> Usage:
    prompt = sum(metrics.prompt_tokens for metrics in each)
    completion = sum(metrics.generated_tokens for metrics in each)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(m.cached_tokens for m in each)),
    )


def report(each: Sequence[RequestMetrics]) -> SkimReport:
    """Token counts summed over all prompts; times, scorer, fallback and follow-up of the slowest prompt."""
    slowest = max(each, key=lambda m: m.ttft_ms + m.decode_ms)
    prompt = sum(metrics.prompt_tokens for metrics in each)
    return SkimReport(
        prompt_tokens=prompt,
        kept_tokens=sum(metrics.kept_tokens for metrics in each),
        cached_tokens=sum(metrics.cached_tokens for metrics in each),
        generated_tokens=sum(metrics.generated_tokens for metrics in each),
        preemptions=sum(metrics.preemptions for metrics in each),
        queue_ms=round(slowest.queue_ms, 3),
        scoring_ms=round(slowest.scoring_ms, 3),
        prefill_ms=round(slowest.prefill_ms, 3),
        decode_ms=round(slowest.decode_ms, 3),
        scorer=slowest.scorer,
        fallback=slowest.fallback,
        follow_up=slowest.follow_up,
    )
